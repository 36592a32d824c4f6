"""How each attempt of a run ended, and whether another one follows."""

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
    """The training command ended by itself, without an error."""
    INTERRUPTED = "interrupted"
    """It saved and left because its time was over or another job needed the nodes."""
    FAILED = "failed"
    """The training command, or the program that runs it, ended with an error."""
    BAD_NODES = "bad nodes"
    """Training never began: some nodes are unfit or did not come up."""


@dataclass
class Outcome:
    """The contents of outcome.json."""

    result: Result
    error: str = ""
    """The first error, with rank, host and exception as far as they are known."""
    first_step: int = 0
    """Steps in the newest checkpoint when the attempt began."""
    last_step: int = 0
    """Steps in the newest checkpoint when the attempt ended."""
    exclude: list[str] = field(default_factory=list)
    """Nodes that the next attempt does without."""
    requeue: bool = False
    """Whether another attempt follows."""
    why: str = ""
    """The reason for ``requeue``."""
    ended: float = 0.0
    """Unix time."""


class Attempt:
    """The directory of one attempt, RUN/attempts/JOB.RESTART; see docs/launching.md."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.head = path / "head.json"
        self.ray_token = path / "ray_token"
        self.nodes = path / "nodes"
        self.driver_log = path / "driver.log"
        self.bandwidth = path / "bandwidth.json"
        self.outcome = path / "outcome.json"

    def reports(self) -> dict[str, dict[str, Any]]:
        """Return what each node last wrote about itself, by node name."""
        return {path.stem: read_json(path) for path in self.nodes.glob("*.json")}

    def write_outcome(self, outcome: Outcome) -> None:
        """Write outcome.json, and decision.sh for the batch script."""
        code = 0 if outcome.result is Result.FINISHED else 1
        decision = [
            f"REQUEUE={int(outcome.requeue)}",
            f"EXCLUDE={','.join(outcome.exclude)}",
            f"CODE={code}",
        ]
        atomic_write_text(self.path / "decision.sh", "\n".join(decision) + "\n")

        # Last, because the other nodes leave as soon as they see it.
        write_json(self.outcome, asdict(outcome))


def earlier_outcomes(attempt: Attempt) -> list[Outcome]:
    """Read the outcomes of earlier attempts of the same job, oldest first.

    Another submission of the run does not count: its user may have fixed what made it fail."""
    job = attempt.path.name.partition(".")[0]

    # Slurm keeps the number of a job that is requeued and counts its restarts: JOB.0, JOB.1, ...
    files = attempt.path.parent.glob(f"{job}.*/outcome.json")
    outcomes = [Outcome(**read_json(path)) for path in files]
    return sorted(outcomes, key=lambda outcome: outcome.ended)


def count_saved_steps(run: RunDirectory) -> int:
    """Return how many steps the newest checkpoint holds; 0 without a checkpoint."""
    # The pointer is written last: what it names is complete.
    pointer = run.checkpoints / "latest"
    if not pointer.exists():
        return 0
    return int(pointer.read_text().rpartition("_")[2])


def decide_requeue(outcome: Outcome, earlier: list[Outcome], retries: int) -> None:
    """Set whether the run starts again (``requeue``), why, and when the attempt ended."""
    outcome.ended = time.time()

    if outcome.result is Result.FINISHED:
        outcome.why = "the run is complete"
        return

    # If the replacements are bad as well, something else is wrong than single nodes.
    if outcome.result is Result.BAD_NODES:
        if any(past.result is Result.BAD_NODES for past in earlier):
            outcome.why = "nodes were already replaced once"
        else:
            outcome.requeue = True
            outcome.why = "the next attempt does without them"
        return

    # Without progress in two attempts, a third one would only use up the cluster.
    if earlier and not _made_progress(outcome) and not _made_progress(earlier[-1]):
        outcome.why = f"two attempts in a row came no further than step {outcome.last_step}"
        return

    # Interruptions are free: preempted jobs are to go on however often it happens.
    failures = sum(past.result is Result.FAILED for past in earlier)
    if outcome.result is Result.FAILED and failures >= retries:
        outcome.why = f"failed {failures + 1} times, cluster.retries is {retries}"
        return

    outcome.requeue = True
    outcome.why = f"the next attempt goes on from step {outcome.last_step}"


def _made_progress(outcome: Outcome) -> bool:
    return outcome.last_step > outcome.first_step


EXCEPTION = re.compile(
    r"^(?:[A-Za-z_][\w.]*\.)?([A-Z]\w*(?:Error|Exception|Died|Interrupt|Exit)(?:\(\w+\))?): (.*)$",
)
"""The last line of a traceback: group 1 is the class without its module, group 2 the message."""


def first_error(log: str) -> str:
    """Find the exception that ended the driver in its log; empty if the log names none.

    The last traceback is that of the uncaught exception; it quotes an actor's exception last."""
    error = ""
    rank = ""
    for line in log.splitlines():
        if line.startswith("Traceback ("):
            # An earlier exception was handled: this traceback came after it.
            error = ""
            rank = ""
        elif line.startswith("gptoss: "):
            # The command line's own sentence about an error that the user can mend.
            error = line.removeprefix("gptoss: ")
            rank = ""
        elif match := EXCEPTION.match(line):
            # The message of RankDied is complete by itself: it names the rank, its host and the
            # reason.
            error = match[2] if match[1] == "RankDied" else line
        elif line.startswith("first on trainer rank"):
            rank = f" ({line})"
    return error + rank
