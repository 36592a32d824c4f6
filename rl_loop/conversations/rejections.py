"""Report of rejected conversations, with line and reason, and counts by kind of reason."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rl_loop.conversations.blocks import RejectedRow
from rl_loop.conversations.errors import DataError
from rl_loop.conversations.rows import Rows

SHOWN_AT_ONCE = 5
"""Rejected conversations to show to the user. The file has all of them."""
SHOWN_KINDS = 5
"""Maximum kinds of reasons in a summary."""
ENOUGH_TO_JUDGE = 100
"""Minimum number of conversations for judging the rejected share before all are read."""

# Order matters: quotations and names are replaced before the numbers within them.
VARIABLE_PARTS = (
    (re.compile(r"'[^']*'|\"[^\"]*\""), "'...'"),
    (re.compile(r"functions\.[\w.-]+"), "functions..."),
    (re.compile(r"\([^()]*: [^()]*\)"), "(...)"),
    (re.compile(r"\d+"), "N"),
)
"""Patterns of text that varies among reasons of one kind, with placeholders."""


class RejectionReport:
    """Collects rejections. Each is counted once, even if its block is read again."""

    def __init__(
        self,
        write: Callable[[Sequence[dict[str, Any]]], None],
        show: Callable[[str], None],
        earlier: Iterable[dict[str, Any]] = (),
    ) -> None:
        """Create a report.

        Args:
            write: function that appends records to the file.
            show: function that shows a line to the user.
            earlier: records that are already in the file.
        """
        self._write = write
        self._show = show
        self._known: set[tuple[str, int, str]] = set()
        self.kinds: Counter[str] = Counter()
        """Number of rejections by kind of reason."""
        for record in earlier:
            self._count(record)

    def add(self, name: str, rows: Rows, rejections: Sequence[RejectedRow]) -> None:
        """Report the rejections of a source."""
        records = []
        for rejection in rejections:
            record = {
                "source": name,
                "file": rows.location,
                rows.unit: rejection.row,
                "reason": rejection.reason,
            }
            if self._count(record):
                records.append(record)
                self._show_first(describe_rejection(rows, rejection))
        if records:
            self._write(records)

    def summary(self) -> str | None:
        """Return the number of rejections and the reasons. None if there are none."""
        if not self.kinds:
            return None
        return f"{self.kinds.total()} rejected: {describe_kinds(self.kinds)}"

    def _count(self, record: dict[str, Any]) -> bool:
        """Count a record. Returns True if it is new."""
        # JSON lines have a line, rows of other files a row.
        row = record["line"] if "line" in record else record["row"]
        key = (record["file"], row, record["reason"])
        if key in self._known:
            return False
        self._known.add(key)
        self.kinds[generalize_reason(record["reason"])] += 1
        return True

    def _show_first(self, description: str) -> None:
        shown = len(self._known)
        if shown <= SHOWN_AT_ONCE:
            self._show(f"rejected: {description}")
        if shown == SHOWN_AT_ONCE:
            self._show("rejected: further ones are in rejected.jsonl of the run's directory")


def check_rejected_share(
    location: str, *, seen: int, rejected: int, kinds: "Counter[str]", limit: float
) -> None:
    """Raise DataError if more than ``limit`` of a file's conversations are rejected."""
    if rejected > limit * seen:
        raise DataError(
            f"{location}: {rejected} of {seen} conversations are rejected, more than "
            f"data.max_rejected_fraction ({limit}) allows: {describe_kinds(kinds)}"
        )


def describe_rejection(rows: Rows, rejection: RejectedRow) -> str:
    """Return the file, the line and the reason."""
    return f"{rows.location}, {rows.unit} {rejection.row}: {rejection.reason}"


def describe_kinds(kinds: "Counter[str]") -> str:
    """List the most frequent kinds of reasons."""
    listed = [f"{count} x {kind}" for kind, count in kinds.most_common(SHOWN_KINDS)]
    if len(kinds) > SHOWN_KINDS:
        listed.append("...")
    return "; ".join(listed)


def generalize_reason(reason: str) -> str:
    """Return a reason with placeholders for its variable parts."""
    for pattern, replacement in VARIABLE_PARTS:
        reason = pattern.sub(replacement, reason)
    return reason
