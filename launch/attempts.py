"""What became of each attempt of a run, and whether there is to be another one."""

import re
import time
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from rl_loop.tracking.run_directory import RunDirectory, atomic_write_text, read_json, write_json


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
    error: str = ""  # the first error: rank, host and exception, as far as they are known
    first_step: int = 0  # steps that the newest checkpoint held when the attempt began
    last_step: int = 0  # the same when it ended
    exclude: list[str] = field(default_factory=list)  # nodes that the next attempt does without
    requeue: bool = False
    why: str = ""  # reason of the decision about another attempt
    ended: float = 0.0  # Unix time


class Attempt:
    """The directory of one attempt, RUN/attempts/JOB.RESTART; docs/launching.md lists what is in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.head = path / "head.json"  # addresses of Ray and of its dashboard
        self.nodes = path / "nodes"  # NODE.json: what each node reports about itself
        self.driver_log = path / "driver.log"
        self.outcome = path / "outcome.json"

    def reports(self) -> dict[str, dict[str, Any]]:
        return {path.stem: read_json(path) for path in self.nodes.glob("*.json")}

    def write_outcome(self, outcome: Outcome) -> None:
        """As outcome.json, and as decision.sh for the batch script."""
        code = 0 if outcome.result is Result.FINISHED else 1
        decision = f"REQUEUE={int(outcome.requeue)}\nEXCLUDE={','.join(outcome.exclude)}\nCODE={code}\n"
        atomic_write_text(self.path / "decision.sh", decision)
        write_json(self.outcome, asdict(outcome))


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


def decide(outcome: Outcome, earlier: list[Outcome], retries: int) -> None:
    """Fill in whether the run starts again, and why."""
    outcome.ended = time.time()
    failures = sum(past.result is Result.FAILED for past in earlier)
    if outcome.result is Result.FINISHED:
        outcome.why = "the run is complete"
    elif outcome.result is Result.BAD_NODES:
        outcome.requeue = not any(past.result is Result.BAD_NODES for past in earlier)
        outcome.why = "the next attempt does without them" if outcome.requeue else "nodes were already replaced once"
    elif earlier and all(ended.last_step <= ended.first_step for ended in (outcome, earlier[-1])):
        outcome.why = f"two attempts in a row came no further than step {outcome.last_step}"
    elif outcome.result is Result.FAILED and failures >= retries:
        outcome.why = f"failed {failures + 1} times, cluster.retries is {retries}"
    else:
        outcome.requeue = True
        outcome.why = f"the next attempt goes on from step {outcome.last_step}"


EXCEPTION = re.compile(r"^(?:[A-Za-z_][\w.]*\.)?([A-Z]\w*(?:Error|Exception|Died|Interrupt|Exit)(?:\(\w+\))?): (.*)$")


def first_error(log: str) -> str:
    """The exception that ended the driver, from its log; empty if it names none. The last traceback is that of the
    exception which was not caught; within it, a remote one is quoted last."""
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
