"""Results of a run's attempts, and the decision about another attempt."""

import re
import time
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from rl_loop.tracking.run_directory import RunDirectory, atomic_write_text, read_json, write_json


class AttemptResult(StrEnum):
    """Result of an attempt."""

    FINISHED = "finished"
    """The training command exited without an error."""
    INTERRUPTED = "interrupted"
    """Training saved and stopped because of its time limit or a preemption."""
    FAILED = "failed"
    """The training command, or the program that runs it, exited with an error."""
    BAD_NODES = "bad nodes"
    """Training did not begin: some nodes are unfit or did not come up."""


@dataclass
class AttemptOutcome:
    """Content of outcome.json."""

    result: AttemptResult
    error: str = ""
    """The first error, with rank, host and exception if they are known."""
    first_step: int = 0
    """Steps in the newest checkpoint at the start of the attempt."""
    last_step: int = 0
    """Steps in the newest checkpoint at the end of the attempt."""
    exclude: list[str] = field(default_factory=list)
    """Nodes that the next attempt must not use."""
    requeue: bool = False
    """True if another attempt follows."""
    why: str = ""
    """Reason for ``requeue``."""
    ended: float = 0.0
    """End of the attempt, Unix time in seconds."""


class RunAttempt:
    """The directory of one attempt, RUN/attempts/JOB.RESTART. See docs/launching.md."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.head = path / "head.json"
        self.ray_token = path / "ray_token"
        self.nodes = path / "nodes"
        self.driver_log = path / "driver.log"
        self.bandwidth = path / "bandwidth.json"
        self.outcome = path / "outcome.json"

    def reports(self) -> dict[str, dict[str, Any]]:
        """Return the latest report of each node, by node name."""
        return {path.stem: read_json(path) for path in self.nodes.glob("*.json")}

    def write_outcome(self, outcome: AttemptOutcome) -> None:
        """Write outcome.json, and decision.sh for the batch script."""
        code = 0 if outcome.result is AttemptResult.FINISHED else 1
        # The batch script sources this file, because Slurm's commands are only certain to exist
        # there.
        decision = [
            f"REQUEUE={int(outcome.requeue)}",
            f"EXCLUDE={','.join(outcome.exclude)}",
            f"CODE={code}",
        ]
        atomic_write_text(self.path / "decision.sh", "\n".join(decision) + "\n")

        # Write it last, because the other nodes exit as soon as it exists.
        write_json(self.outcome, asdict(outcome))


def earlier_outcomes(attempt: RunAttempt) -> list[AttemptOutcome]:
    """Read the outcomes of the same job's earlier attempts, oldest first.

    Other submissions of the run do not count.
    """
    # Before another submission, the user may have fixed the cause.
    job = attempt.path.name.partition(".")[0]

    # Slurm keeps the number of a requeued job and counts its restarts: JOB.0, JOB.1, ...
    files = attempt.path.parent.glob(f"{job}.*/outcome.json")
    outcomes = [AttemptOutcome(**read_json(path)) for path in files]
    return sorted(outcomes, key=lambda outcome: outcome.ended)


def count_saved_steps(run: RunDirectory) -> int:
    """Return the number of steps in the newest checkpoint; 0 without a checkpoint."""
    # The pointer is written last, so it names a complete checkpoint.
    pointer = run.checkpoints / "latest"
    if not pointer.exists():
        return 0
    return int(pointer.read_text().rpartition("_")[2])


def decide_requeue(outcome: AttemptOutcome, earlier: list[AttemptOutcome], retries: int) -> None:
    """Set ``requeue``, ``why`` and ``ended`` of an outcome.

    Args:
        outcome: outcome of the attempt, modified in place.
        earlier: outcomes of earlier attempts, oldest first.
        retries: number of failures after which the run starts again.
    """
    outcome.ended = time.time()

    if outcome.result is AttemptResult.FINISHED:
        outcome.why = "the run is complete"
        return

    # If the replacements are unfit, too, the cause is not a single node.
    if outcome.result is AttemptResult.BAD_NODES:
        if any(past.result is AttemptResult.BAD_NODES for past in earlier):
            outcome.why = "nodes were already replaced once"
        else:
            outcome.requeue = True
            outcome.why = "the next attempt does not use them"
        return

    # Two attempts without progress: a third one would only waste the cluster's time.
    if earlier and not _made_progress(outcome) and not _made_progress(earlier[-1]):
        outcome.why = f"two attempts in a row did not get beyond step {outcome.last_step}"
        return

    # Interruptions do not count as failures: a preempted job may continue any number of times.
    failures = sum(past.result is AttemptResult.FAILED for past in earlier)
    if outcome.result is AttemptResult.FAILED and failures >= retries:
        outcome.why = f"failed {failures + 1} times, cluster.retries is {retries}"
        return

    outcome.requeue = True
    outcome.why = f"the next attempt continues from step {outcome.last_step}"


def _made_progress(outcome: AttemptOutcome) -> bool:
    return outcome.last_step > outcome.first_step


EXCEPTION = re.compile(
    r"^(?:[A-Za-z_][\w.]*\.)?([A-Z]\w*(?:Error|Exception|Died|Interrupt|Exit)(?:\(\w+\))?): (.*)$",
)
"""Last line of a traceback. Group 1: class without its module. Group 2: message."""


def first_error(log: str) -> str:
    """Return the exception that ended the driver, from its log; "" if the log has none.

    The last traceback is that of the uncaught exception. It ends with an actor's exception.
    """
    error = ""
    rank = ""
    for line in log.splitlines():
        if line.startswith("Traceback ("):
            # The earlier exception was handled, because this traceback follows it.
            error = ""
            rank = ""
        elif line.startswith("gptoss: "):
            # A one-line error of the command line, which the user can correct.
            error = line.removeprefix("gptoss: ")
            rank = ""
        elif match := EXCEPTION.match(line):
            # The message of RankDiedError is complete: it has the rank, its host and the reason.
            error = match[2] if match[1] == "RankDiedError" else line
        elif line.startswith("first on trainer rank"):
            rank = f" ({line})"
    return error + rank
