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
    """One fault and what became of it."""

    kind: str
    step: int
    """Steps that were recorded before it."""
    seed: int = 0
    course: str = ""
    """Name of the course, as in CourseResult."""
    detail: str = ""
    """What was hit."""
    outcome: str = ""
    """"healed", "ended" (and resumed), "hung" or "not injected"."""
    said: str = ""
    """What the run said of it."""
    seconds: float = 0.0
    """Until it had healed or ended."""
    limit: float = 0.0
    """Seconds that it might take under the machine's load."""
    failure: str = ""
    """Why the fault counts as failed; empty if it does not."""


@dataclass
class CourseResult:
    """What a run and its records were like after all of its faults."""

    course: str
    seed: int = 0
    attempts: int = 0
    steps: int = 0
    """Recorded, each with the loss of the undisturbed run."""
    episodes: int = 0
    """Trained on."""
    failure: str = ""


@dataclass
class WholeRunKill:
    """One kill of a whole run."""

    course: str
    step: int
    """Steps that were recorded before it."""
    seed: int = 0
    after: float = 0.0
    """Seconds after the start of the attempt."""
    processes: int = 0
    """That were killed."""


@dataclass
class Results:
    """Everything that files of results hold."""

    injections: list[Injection] = field(default_factory=list)
    courses: list[CourseResult] = field(default_factory=list)
    kills: list[WholeRunKill] = field(default_factory=list)

    def examined(self) -> set[tuple[int, str]]:
        """Return seed and name of the courses whose records were examined. A campaign that is
        killed leaves faults without that; they count as not done."""
        return {(course.seed, course.course) for course in self.courses}

    def counted(self) -> list[Injection]:
        """Return the faults that were injected and whose courses were examined. Those that failed
        always count."""
        examined = self.examined()
        return [
            fault
            for fault in self.injections
            if fault.outcome != "not injected"
            and (fault.failure or (fault.seed, fault.course) in examined)
        ]

    @property
    def failures(self) -> list[str]:
        """List what failed, in words."""
        faults = [f"{fault.kind}: {fault.failure}" for fault in self.injections if fault.failure]
        courses = [
            f"{course.course}: {course.failure}" for course in self.courses if course.failure
        ]
        return faults + courses


Record = Injection | CourseResult | WholeRunKill
TYPES = {"fault": Injection, "course": CourseResult, "kill": WholeRunKill}


def append(path: Path | None, record: Record) -> None:
    """Add a line to the file of results, if there is to be one."""
    if path is None:
        return
    name = next(name for name, kind in TYPES.items() if isinstance(record, kind))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps({"record": name, **asdict(record)}) + "\n")


def read(paths: Sequence[Path]) -> Results:
    """Read files of results; those that do not exist yet hold nothing."""
    results = Results()
    for path in paths:
        if not path.exists():
            continue
        for line in path.read_text().splitlines():
            values = json.loads(line)
            record = TYPES[values.pop("record")](**values)
            if isinstance(record, Injection):
                results.injections.append(record)
            elif isinstance(record, CourseResult):
                results.courses.append(record)
            else:
                results.kills.append(record)
    return results


def table(results: Results) -> str:
    """Write a Markdown table of the faults, a row for each kind, and what the courses held."""
    lines = [
        "| kind | injected | healed | ended, named, resumed | median, s | longest, s | failed |",
        "|---|---|---|---|---|---|---|",
    ]
    counted = results.counted()
    for kind in sorted({fault.kind for fault in counted}):
        lines.append(_row(kind, [fault for fault in counted if fault.kind == kind]))
    lines.append(_row("**all**", counted))

    seeds = sorted({fault.seed for fault in counted} | {kill.seed for kill in results.kills})
    late = sum(fault.seconds > 60 for fault in counted)
    examined = results.examined()
    unexamined = sum((f.seed, f.course) not in examined for f in results.injections)
    lines += [
        "",
        f"seeds {', '.join(map(str, seeds))}; {len(results.courses)} courses in "
        f"{sum(course.attempts for course in results.courses)} attempts, "
        f"{sum(course.steps for course in results.courses)} steps compared, "
        f"{sum(course.episodes for course in results.courses)} episodes counted; "
        f"{late} faults took more than 60 s; {len(results.kills)} kills of a whole run; "
        f"{unexamined} faults of courses that were not examined",
    ]
    lines += [f"- FAILED: {failure}" for failure in results.failures]
    return "\n".join(lines)


def _row(kind: str, faults: Sequence[Injection]) -> str:
    outcomes = Counter(fault.outcome for fault in faults)
    seconds = sorted(fault.seconds for fault in faults) or [0.0]
    failed = sum(bool(fault.failure) for fault in faults)
    return (
        f"| {kind} | {len(faults)} | {outcomes['healed']} | {outcomes['ended']} "
        f"| {seconds[len(seconds) // 2]:.1f} | {seconds[-1]:.1f} | {failed} |"
    )
