"""What became of each attempt of a run, and whether there is to be another one.

RUN/attempts/JOB.RESTART/
    head.json        address of Ray and of its dashboard
    nodes/NODE.json  what each node reports about itself: ``NodeReport``
    NODE.log         what each node's program and its Ray said
    driver.log       what ``gptoss rl`` said
    ray/NODE/        Ray's own logs, copied when the attempt ends
    outcome.json     how it ended: ``Outcome``
    decision.sh      the same for the batch script
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from rl_loop.run_directory import RunDirectory, atomic_write_text, read_json


class Result(StrEnum):
    """How an attempt ended."""

    FINISHED = "finished"
    INTERRUPTED = "interrupted"  # saved and left because its time was over or another job needed the nodes
    FAILED = "failed"
    BAD_NODES = "bad nodes"  # it never began: some nodes are not fit, or not there


@dataclass
class Outcome:
    """outcome.json"""

    result: Result
    error: str = ""
    """The first error: rank, host and exception, as far as they are known."""
    first_step: int = 0
    """Steps that the newest checkpoint held when the attempt began."""
    last_step: int = 0
    """The same when it ended."""
    exclude: list[str] = field(default_factory=list)
    """Nodes that the next attempt does without."""
    requeue: bool = False
    why: str = ""
    """Reason of the decision about another attempt."""
    ended: float = 0.0
    """Unix time."""

    @property
    def got_further(self) -> bool:
        return self.last_step > self.first_step


@dataclass(frozen=True)
class Attempt:
    """The directory of one attempt."""

    path: Path

    @property
    def head(self) -> Path:
        return self.path / "head.json"

    @property
    def nodes(self) -> Path:
        return self.path / "nodes"

    @property
    def driver_log(self) -> Path:
        return self.path / "driver.log"

    @property
    def outcome(self) -> Path:
        return self.path / "outcome.json"

    def create(self) -> None:
        self.nodes.mkdir(parents=True, exist_ok=True)

    def write_head(self, **values: str) -> None:
        atomic_write_text(self.head, json.dumps(values) + "\n")

    def report(self, node: str, **values: Any) -> None:
        """Tell the head node about ``node``."""
        atomic_write_text(self.nodes / f"{node}.json", json.dumps(values) + "\n")

    def reports(self) -> dict[str, dict[str, Any]]:
        return {path.stem: read_json(path) for path in self.nodes.glob("*.json")}

    def write_outcome(self, outcome: Outcome) -> None:
        code = 0 if outcome.result is Result.FINISHED else 1
        decision = f"REQUEUE={int(outcome.requeue)}\nEXCLUDE={','.join(outcome.exclude)}\nCODE={code}\n"
        atomic_write_text(self.path / "decision.sh", decision)
        atomic_write_text(self.outcome, json.dumps(asdict(outcome)) + "\n")


def earlier_outcomes(attempt: Attempt) -> list[Outcome]:
    """Of the attempts of the same job that came to an end of their own, oldest first. What another submission of the
    run met with does not count: its user may have mended it."""
    job = attempt.path.name.partition(".")[0]
    found = [Outcome(**read_json(path)) for path in attempt.path.parent.glob(f"{job}.*/outcome.json")]
    return sorted(found, key=lambda outcome: outcome.ended)


def saved_steps(run: RunDirectory) -> int:
    """Steps that the newest checkpoint holds; 0 without one."""
    pointer = run.checkpoints / "latest"
    return int(pointer.read_text().rpartition("_")[2]) if pointer.exists() else 0


def decide(outcome: Outcome, earlier: list[Outcome], retries: int) -> Outcome:
    """Fill in whether the run starts again, and why."""
    outcome.ended = time.time()
    before = earlier[-1] if earlier else None
    failures = sum(past.result is Result.FAILED for past in earlier)
    if outcome.result is Result.FINISHED:
        outcome.why = "the run is complete"
    elif outcome.result is Result.BAD_NODES:
        outcome.requeue = not any(past.result is Result.BAD_NODES for past in earlier)
        outcome.why = "the next attempt does without them" if outcome.requeue else "nodes were already replaced once"
    elif not outcome.got_further and before is not None and not before.got_further:
        outcome.why = f"two attempts in a row came no further than step {outcome.last_step}"
    elif outcome.result is Result.FAILED and failures >= retries:
        outcome.why = f"failed {failures + 1} times, cluster.retries is {retries}"
    else:
        outcome.requeue = True
        outcome.why = f"the next attempt goes on from step {outcome.last_step}"
    return outcome


EXCEPTION = re.compile(r"^(?:[A-Za-z_][\w.]*\.)?([A-Z]\w*(?:Error|Exception|Died|Interrupt|Exit)(?:\(\w+\))?): (.*)$")


def first_error(log: str) -> str:
    """The exception that ended the driver, from its log; empty if it names none.

    The last traceback is that of the exception which was not caught; within it, a remote one is quoted last.
    """
    error, where = "", ""
    for line in log.splitlines():
        if line.startswith("Traceback ("):
            error = where = ""
        elif line.startswith("gptoss: "):
            error, where = line.removeprefix("gptoss: "), ""
        elif match := EXCEPTION.match(line):
            error = line if match[1] != "RankDied" else match[2]
        elif line.startswith("first on trainer rank"):
            where = f" ({line})"
    return error + where
