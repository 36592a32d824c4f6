"""The report of what was refused: every conversation with its line and the reason, and how many
there are of each kind."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rl_loop.conversations.blocks import Refusal
from rl_loop.conversations.errors import DataError
from rl_loop.conversations.rows import Rows

SHOWN_AT_ONCE = 5
"""Refused conversations that the user sees while they are found; all others are in the file."""
SHOWN_KINDS = 5
"""Kinds of reasons in a summary."""
ENOUGH_TO_JUDGE = 100
"""Conversations of which the refused share says something before all were seen."""

VARIABLE_PARTS = (
    (re.compile(r"'[^']*'|\"[^\"]*\""), "'...'"),
    (re.compile(r"functions\.[\w.-]+"), "functions..."),
    (re.compile(r"\([^()]*: [^()]*\)"), "(...)"),
    (re.compile(r"\d+"), "N"),
)
"""What differs between reasons of one kind."""


class RefusalReport:
    """Collects refusals, each once, however often its block is read."""

    def __init__(
        self,
        write: Callable[[Sequence[dict[str, Any]]], None],
        show: Callable[[str], None],
        earlier: Iterable[dict[str, Any]] = (),
    ) -> None:
        """``write`` takes records for the file, ``show`` a line for the user; ``earlier`` are the
        records that the file has already."""
        self._write = write
        self._show = show
        self._known: set[tuple[str, int, str]] = set()
        self.kinds: Counter[str] = Counter()
        """How many there are of each kind of reason."""
        for record in earlier:
            self._count(record)

    def add(self, name: str, rows: Rows, refusals: Sequence[Refusal]) -> None:
        """Report what was refused of a source."""
        records = []
        for refusal in refusals:
            record = {
                "source": name,
                "file": rows.place,
                rows.unit: refusal.row,
                "reason": refusal.reason,
            }
            if self._count(record):
                records.append(record)
                self._show_first(describe_refusal(rows, refusal))
        if records:
            self._write(records)

    def summary(self) -> str | None:
        """Say how many were refused and why; None if none was."""
        if not self.kinds:
            return None
        return f"{self.kinds.total()} refused: {describe_kinds(self.kinds)}"

    def _count(self, record: dict[str, Any]) -> bool:
        """Count a record. Returns whether it is new."""
        row = record["line"] if "line" in record else record["row"]
        key = (record["file"], row, record["reason"])
        if key in self._known:
            return False
        self._known.add(key)
        self.kinds[kind_of(record["reason"])] += 1
        return True

    def _show_first(self, description: str) -> None:
        shown = len(self._known)
        if shown <= SHOWN_AT_ONCE:
            self._show(f"refused: {description}")
        if shown == SHOWN_AT_ONCE:
            self._show("refused: further ones are in refused.jsonl of the run's directory")


def check_refused_share(
    place: str, *, seen: int, refused: int, kinds: "Counter[str]", limit: float
) -> None:
    """Raise DataError if more than ``limit`` of the conversations of a file are refused."""
    if refused > limit * seen:
        raise DataError(
            f"{place}: {refused} of {seen} conversations are refused, more than "
            f"data.max_refused_share ({limit}) allows: {describe_kinds(kinds)}"
        )


def describe_refusal(rows: Rows, refusal: Refusal) -> str:
    """Name the file, the line and the reason."""
    return f"{rows.place}, {rows.unit} {refusal.row}: {refusal.reason}"


def describe_kinds(kinds: "Counter[str]") -> str:
    """List the most frequent kinds of reasons."""
    listed = [f"{count} x {kind}" for kind, count in kinds.most_common(SHOWN_KINDS)]
    if len(kinds) > SHOWN_KINDS:
        listed.append("...")
    return "; ".join(listed)


def kind_of(reason: str) -> str:
    """Return a reason without what differs from one conversation to the next."""
    for pattern, replacement in VARIABLE_PARTS:
        reason = pattern.sub(replacement, reason)
    return reason
