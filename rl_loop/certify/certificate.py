"""What a certificate says, as data, text and JSON."""

import json
import math
import textwrap
from dataclasses import asdict, dataclass, field
from enum import StrEnum

WIDTH = 96
"""Columns of the text."""


class Status(StrEnum):
    """The outcome of a check."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    """The subject does not offer what the check needs."""
    NOT_VISIBLE = "not visible"
    """Neither passed nor failed: with these weights in this precision the fault would not show."""


@dataclass(frozen=True)
class Cause:
    """A fault that a subject has."""

    name: str
    source: str = ""
    """Where the same was seen before."""


@dataclass(frozen=True)
class Sight:
    """How one check sees one known fault. In nats per token; gradients: relative."""

    fault: str
    source: str
    visible: float
    """By how much a subject with the fault would deviate, where it deviates most."""
    deviation: float
    """By how much this subject deviates there."""
    limit: float
    """What precision explains."""
    is_visible: bool


@dataclass(frozen=True)
class CheckResult:
    """The outcome of one check."""

    name: str
    title: str
    """What is checked, in a few words."""
    status: Status
    summary: str
    """One sentence."""
    causes: tuple[Cause, ...] = ()
    sights: tuple[Sight, ...] = ()
    table: tuple[tuple[str, ...], ...] = ()
    """Rows of figures, the first one the header."""
    seconds: float = 0.0
    """Of processor time of this process."""


@dataclass(frozen=True)
class Certificate:
    """All checks of one subject."""

    subject: str
    weights: str
    precision: str
    model: str
    """The architecture in a line."""
    date: str
    results: list[CheckResult] = field(default_factory=list)

    @property
    def has_passed(self) -> bool:
        """Whether no check failed and at least one passed."""
        statuses = [result.status for result in self.results]
        return Status.FAILED not in statuses and Status.PASSED in statuses

    @property
    def causes(self) -> list[Cause]:
        """Every fault that was found, once."""
        causes: dict[str, Cause] = {}
        for result in self.results:
            for cause in result.causes:
                causes.setdefault(cause.name, cause)
        return list(causes.values())

    @property
    def verdict(self) -> str:
        """One sentence."""
        counts = [
            f"{sum(result.status is status for result in self.results)} {status.value}"
            for status in Status
        ]
        if self.has_passed:
            return f"computes GPT-OSS: {', '.join(counts)}"
        return f"is not certified: {', '.join(counts)}"

    def to_json(self) -> str:
        """Return everything as JSON."""
        content = asdict(self) | {
            "passed": self.has_passed,
            "verdict": self.verdict,
            "causes": [asdict(cause) for cause in self.causes],
        }
        return json.dumps(_without_nan(content), indent=1)

    def to_text(self) -> str:
        """Return what a terminal shows."""
        lines = [
            f"{self.subject} {self.verdict}",
            f"{self.model}; {self.precision}; {self.weights}; {self.date}",
            "",
        ]
        for result in self.results:
            lines.append(f"{result.status.value.upper():11}  {result.name}: {result.title}")
            lines += _indented(result.summary)
            for cause in result.causes:
                lines += _indented(f"cause: {cause.name}")
                if cause.source:
                    lines += _indented(f"seen before: {cause.source}")
        return "\n".join(lines)


def _indented(text: str) -> list[str]:
    indent = " " * 13
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent)


def _without_nan(value: object) -> object:
    """Replace numbers that JSON does not have by null."""
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
