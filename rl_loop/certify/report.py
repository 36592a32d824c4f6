"""Result of ``gptoss certify`` as data, text and JSON."""

import json
import math
import textwrap
from dataclasses import asdict, dataclass, field
from enum import StrEnum

TEXT_COLUMNS = 96
"""Width of the text for a terminal."""


class CheckOutcome(StrEnum):
    """Outcome of a check."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    """The implementation does not support an operation that the check needs."""
    NOT_VISIBLE = "not visible"
    """Neither passed nor failed: these weights and this precision do not show the fault."""


@dataclass(frozen=True)
class DiagnosedFault:
    """Fault of an implementation."""

    name: str
    source: str = ""
    """Earlier occurrences of the fault."""


@dataclass(frozen=True)
class FaultVisibility:
    """Visibility of one known fault in one check, in nats per token or as a relative error."""

    fault: str
    source: str
    visible: float
    """Deviation of an implementation with the fault, at the tokens or tensors where it is largest."""
    deviation: float
    """Deviation of this implementation at the same tokens or tensors."""
    limit: float
    """Largest deviation that the precision can explain."""
    is_visible: bool


@dataclass(frozen=True)
class CheckResult:
    """Result of one check."""

    name: str
    title: str
    """Subject of the check in a few words."""
    status: CheckOutcome
    summary: str
    """Result in one sentence."""
    causes: tuple[DiagnosedFault, ...] = ()
    visibilities: tuple[FaultVisibility, ...] = ()
    table: tuple[tuple[str, ...], ...] = ()
    """Table of numbers. The first row is the header."""
    seconds: float = 0.0
    """Processor time of this process."""


@dataclass(frozen=True)
class CertifyReport:
    """Results of one implementation's checks."""

    implementation: str
    weights: str
    precision: str
    model: str
    """Architecture in one line."""
    date: str
    results: list[CheckResult] = field(default_factory=list)

    @property
    def has_passed(self) -> bool:
        """True if no check failed and at least one passed."""
        statuses = [result.status for result in self.results]
        # If every check is skipped, none has failed, but the implementation is not certified.
        return CheckOutcome.FAILED not in statuses and CheckOutcome.PASSED in statuses

    @property
    def causes(self) -> list[DiagnosedFault]:
        """All faults that were found, without duplicates."""
        # Several checks can report the same fault. The dict keeps the order in which it was found.
        causes: dict[str, DiagnosedFault] = {}
        for result in self.results:
            for cause in result.causes:
                causes.setdefault(cause.name, cause)
        return list(causes.values())

    @property
    def verdict(self) -> str:
        """Result in one sentence."""
        counts = [
            f"{sum(result.status is status for result in self.results)} {status.value}"
            for status in CheckOutcome
        ]
        if self.has_passed:
            return f"computes GPT-OSS: {', '.join(counts)}"
        return f"is not certified: {', '.join(counts)}"

    def to_json(self) -> str:
        """Return all results as JSON."""
        content = asdict(self) | {
            "passed": self.has_passed,
            "verdict": self.verdict,
            "causes": [asdict(cause) for cause in self.causes],
        }
        # json.dumps writes NaN and Infinity by default, which parsers of JSON reject.
        return json.dumps(_without_nan(content), indent=1)

    def to_text(self) -> str:
        """Return the text for a terminal."""
        lines = [
            f"{self.implementation} {self.verdict}",
            f"{self.model}; {self.precision}; {self.weights}; {self.date}",
            "",
        ]
        for result in self.results:
            # NOT VISIBLE has 11 columns. With 2 blanks this gives the indent of ``_indent``.
            lines.append(f"{result.status.value.upper():11}  {result.name}: {result.title}")
            lines += _indent(result.summary)
            for cause in result.causes:
                lines += _indent(f"cause: {cause.name}")
                if cause.source:
                    lines += _indent(f"seen before: {cause.source}")
        return "\n".join(lines)


def _indent(text: str) -> list[str]:
    indent = " " * 13
    return textwrap.wrap(text, TEXT_COLUMNS, initial_indent=indent, subsequent_indent=indent)


def _without_nan(value: object) -> object:
    """Replace infinite and NaN numbers by None, because JSON has no such numbers."""
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
