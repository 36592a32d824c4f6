"""File of results and its table.

The file has a JSON line for every fault, test run and kill of a whole run, written immediately.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass
class Injection:
    """One fault and its outcome."""

    kind: str
    step: int
    """Number of steps that were recorded before the fault."""
    seed: int = 0
    run: str = ""
    """Name of the run, as in RunResult."""
    detail: str = ""
    """Description of the affected object."""
    outcome: str = ""
    """"recovered", "ended" (and resumed), "hung" or "not injected"."""
    message: str = ""
    """Message of the run about the fault."""
    seconds: float = 0.0
    """Seconds until the run had recovered or ended."""
    limit: float = 0.0
    """Time limit in seconds, which depends on the machine's load."""
    failure: str = ""
    """Reason why the fault counts as failed; empty if it does not."""


@dataclass
class RunResult:
    """Result of a run after all of its faults."""

    name: str
    seed: int = 0
    attempts: int = 0
    steps: int = 0
    """Number of recorded steps, each with the loss of the undisturbed run."""
    episodes: int = 0
    """Number of episodes in the training."""
    failure: str = ""


@dataclass
class WholeRunKill:
    """One kill of a whole run."""

    run: str
    step: int
    """Number of steps that were recorded before the kill."""
    seed: int = 0
    after: float = 0.0
    """Seconds after the start of the attempt."""
    processes: int = 0
    """Number of killed processes."""


@dataclass
class Results:
    """Contents of files of results."""

    injections: list[Injection] = field(default_factory=list)
    runs: list[RunResult] = field(default_factory=list)
    kills: list[WholeRunKill] = field(default_factory=list)

    def examined(self) -> set[tuple[int, str]]:
        """Return seed and name of the runs whose records were examined.

        If the test is killed, the faults of its current run count as not done.
        """
        return {(run.seed, run.name) for run in self.runs}

    def counted(self) -> list[Injection]:
        """Return the injected faults of examined runs. Failed faults always count."""
        examined = self.examined()
        return [
            fault
            for fault in self.injections
            if fault.outcome != "not injected"
            and (fault.failure or (fault.seed, fault.run) in examined)
        ]

    @property
    def failures(self) -> list[str]:
        """Return descriptions of all failures."""
        faults = [f"{fault.kind}: {fault.failure}" for fault in self.injections if fault.failure]
        runs = [f"{run.name}: {run.failure}" for run in self.runs if run.failure]
        return faults + runs


Record = Injection | RunResult | WholeRunKill
TYPES = {"fault": Injection, "run": RunResult, "kill": WholeRunKill}


def append(path: Path | None, record: Record) -> None:
    """Append a line to the file of results, unless ``file`` is None."""
    if path is None:
        return
    name = next(name for name, kind in TYPES.items() if isinstance(record, kind))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps({"record": name, **asdict(record)}) + "\n")


def read(paths: Sequence[Path]) -> Results:
    """Read files of results. Missing files count as empty."""
    results = Results()
    for path in paths:
        if not path.exists():
            continue
        for line in path.read_text().splitlines():
            values = json.loads(line)
            record = TYPES[values.pop("record")](**values)
            if isinstance(record, Injection):
                results.injections.append(record)
            elif isinstance(record, RunResult):
                results.runs.append(record)
            else:
                results.kills.append(record)
    return results


def table(results: Results) -> str:
    """Return a Markdown table with a row for each kind, and a summary of the runs."""
    lines = [
        "| kind | injected | recovered | ended, named, resumed | median, s | longest, s | failed |",
        "|---|---|---|---|---|---|---|",
    ]
    counted = results.counted()
    for kind in sorted({fault.kind for fault in counted}):
        lines.append(_row(kind, [fault for fault in counted if fault.kind == kind]))
    lines.append(_row("**all**", counted))

    seeds = sorted({fault.seed for fault in counted} | {kill.seed for kill in results.kills})
    late = sum(fault.seconds > 60 for fault in counted)
    examined = results.examined()
    unexamined = sum((f.seed, f.run) not in examined for f in results.injections)
    lines += [
        "",
        f"seeds {', '.join(map(str, seeds))}; {len(results.runs)} runs in "
        f"{sum(run.attempts for run in results.runs)} attempts, "
        f"{sum(run.steps for run in results.runs)} steps compared, "
        f"{sum(run.episodes for run in results.runs)} episodes counted; "
        f"{late} faults took more than 60 s; {len(results.kills)} kills of a whole run; "
        f"{unexamined} faults of runs that were not examined",
    ]
    lines += [f"- FAILED: {failure}" for failure in results.failures]
    return "\n".join(lines)


def _row(kind: str, faults: Sequence[Injection]) -> str:
    outcomes = Counter(fault.outcome for fault in faults)
    seconds = sorted(fault.seconds for fault in faults) or [0.0]
    failed = sum(bool(fault.failure) for fault in faults)
    return (
        f"| {kind} | {len(faults)} | {outcomes['recovered']} | {outcomes['ended']} "
        f"| {seconds[len(seconds) // 2]:.1f} | {seconds[-1]:.1f} | {failed} |"
    )
