"""Filtering, sorting and paging of the recorded episodes' table."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from megatron_gptoss.user_error import UserError
from rl_loop.tracking.episode_reader import EpisodeReader
from rl_loop.tracking.episode_table import SUMMARY_COLUMNS

MAX_PAGE_ROWS = 500
"""Maximum number of rows per page."""

SEARCH_SECONDS = 0.4
"""Time limit of one text search, in seconds. The page repeats the request until all is searched."""

SORTABLE = tuple(
    field.name
    for field in SUMMARY_COLUMNS
    # A map has no order, and the two texts have no useful order.
    if field.name not in ("reward_parts", "format_error", "invalid_reason")
)


MAX_NUMBER = 2**63 - 1
"""Largest 64-bit integer, because Arrow compares columns with 64-bit numbers."""


class QueryError(UserError):
    """A filter is invalid. The message names it."""


@dataclass(frozen=True)
class EpisodeQuery:
    """Filters, order and page of the requested rows. None and "" do not filter."""

    split: str = ""
    step_from: int | None = None
    step_to: int | None = None
    group: int | None = None
    task: str = ""
    """Part of the task's id, case-insensitive."""
    reward_from: float | None = None
    reward_to: float | None = None
    finish: str = ""
    """Finish reason, or "invalid"."""
    tools: str = ""
    """"errors" (with failed calls), "calls" (with calls) or "none" (without calls)."""
    text: str = ""
    """Text that occurs in a message, case-insensitive."""
    sort: str = "id"
    descending: bool = True
    offset: int = 0
    limit: int = 50

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> "EpisodeQuery":
        """Parse the parameters of a request.

        Raises:
            QueryError: naming an unknown or invalid parameter.
        """
        known = cls.__dataclass_fields__
        unknown = sorted(set(given) - set(known))
        if unknown:
            raise QueryError(f"unknown filter {unknown[0]!r}. Filters: {', '.join(known)}")

        values: dict[str, Any] = {}
        for name, text in given.items():
            # Forms of the page send empty fields.
            if text == "":
                continue
            values[name] = _parse(name, text, known[name].type)
        query = cls(**values)
        if query.sort not in SORTABLE:
            raise QueryError(f"sort: {query.sort!r} is not one of {', '.join(SORTABLE)}")
        if query.tools not in ("", "errors", "calls", "none"):
            raise QueryError(f"tools: {query.tools!r} is not one of errors, calls, none")
        if query.offset < 0 or not 1 <= query.limit <= MAX_PAGE_ROWS:
            raise QueryError(f"offset must be at least 0, and limit from 1 to {MAX_PAGE_ROWS}")
        return query


def _parse(name: str, text: str, kind: Any) -> Any:
    """Parse a parameter of a request by the type of its field.

    Args:
        name: parameter, for errors.
        text: its value in the request.
        kind: type of the field in EpisodeQuery.

    Raises:
        QueryError: if the value is invalid.
    """
    # An optional field has the type "int | None", whose parts are its arguments.
    kinds = (kind, *get_args(kind))
    if int in kinds or float in kinds:
        return _parse_number(name, text, is_integer=int in kinds)

    if kind is bool:
        if text not in ("true", "false"):
            raise QueryError(f"{name}: {text!r} is neither true nor false")
        return text == "true"
    return text


def _parse_number(name: str, text: str, *, is_integer: bool) -> int | float:
    """Parse a 64-bit integer or a finite number."""
    number: int | float
    try:
        if is_integer:
            number = int(text)
            is_valid = -MAX_NUMBER <= number <= MAX_NUMBER
        else:
            number = float(text)
            is_valid = bool(np.isfinite(number))
        if is_valid:
            return number
    except ValueError:
        pass

    # A request may contain any text, so quote only its beginning.
    shown = text if len(text) < 40 else f"{text[:40]}..."
    raise QueryError(f"{name}: {shown!r} is not a number that fits in 64 bits")


@dataclass(frozen=True)
class EpisodePage:
    """One page of the table."""

    rows: list[dict[str, Any]]
    """Rows with the columns of SUMMARY_COLUMNS."""
    total: int
    """Number of matching episodes among those searched."""
    recorded: int
    """Number of episodes in the run."""
    searched: int
    """Number of episodes whose text was searched. If less than ``recorded``, repeat the request."""
    damaged: list[str]
    """Unreadable files that are left out, with the reason."""
    splits: list[str]
    """Splits that filters can select."""
    finish_reasons: list[str]
    """Finish reasons that filters can select."""

    def to_json(self) -> dict[str, Any]:
        # A shallow copy: asdict would copy every row.
        return dict(vars(self))


def run_query(reader: EpisodeReader, query: EpisodeQuery) -> EpisodePage:
    """Return the requested page.

    Args:
        reader: episodes of a run. New episodes are read first.
        query: filters, order and page.
    """
    reader.refresh()
    table = reader.summary_table
    matches = _matches(table, query)

    searched = table.num_rows
    if query.text:
        search = reader.search(query.text, SEARCH_SECONDS)
        searched = search.searched
        # The text is in other files than the table, so the search returns ids.
        matches &= np.isin(table.column("id").to_numpy(), search.ids)

    rows = np.flatnonzero(matches)
    rows = _sorted(table, rows, query)
    # Take the page first, because converting rows to Python is slow.
    shown = table.take(_to_arrow(rows[query.offset : query.offset + query.limit]))
    return EpisodePage(
        rows=shown.to_pylist(maps_as_pydicts="strict"),
        total=len(rows),
        recorded=table.num_rows,
        searched=searched,
        damaged=reader.damages,
        splits=_choices(table, "split"),
        finish_reasons=_choices(table, "finish_reason"),
    )


def _to_arrow(numbers: np.ndarray) -> pa.Array:
    """Return numbers as an int64 array of Arrow.

    Unlike ``pa.array``, it does not import pandas, which takes longer than the first page.
    """
    buffer = pa.py_buffer(np.ascontiguousarray(numbers, np.int64))
    return pa.Array.from_buffers(pa.int64(), len(numbers), [None, buffer])


def _choices(table: pa.Table, name: str) -> list[str]:
    return sorted(pc.unique(table.column(name).drop_null()).to_pylist())


def _matches(table: pa.Table, query: EpisodeQuery) -> np.ndarray:
    """Return a mask of the table rows that match all filters except the text, bool [rows]."""
    column = table.column
    conditions: list[pa.ChunkedArray] = []

    # origin of the episode
    if query.split:
        conditions.append(pc.equal(column("split"), query.split))
    if query.step_from is not None:
        conditions.append(pc.greater_equal(column("step"), query.step_from))
    if query.step_to is not None:
        conditions.append(pc.less_equal(column("step"), query.step_to))
    if query.group is not None:
        conditions.append(pc.equal(column("group"), query.group))
    if query.task:
        conditions.append(pc.match_substring(column("task_id"), query.task, ignore_case=True))

    # result of the episode
    if query.reward_from is not None:
        conditions.append(pc.greater_equal(column("reward"), query.reward_from))
    if query.reward_to is not None:
        conditions.append(pc.less_equal(column("reward"), query.reward_to))
    if query.finish == "invalid":
        # The column is null for valid episodes.
        conditions.append(pc.is_valid(column("invalid")))
    elif query.finish:
        conditions.append(pc.equal(column("finish_reason"), query.finish))

    if query.tools == "errors":
        conditions.append(pc.greater(column("tool_errors"), 0))
    elif query.tools == "calls":
        conditions.append(pc.greater(column("tool_calls"), 0))
    elif query.tools == "none":
        conditions.append(pc.equal(column("tool_calls"), 0))

    matches = np.ones(table.num_rows, dtype=np.bool_)
    for condition in conditions:
        # A comparison with null, such as the reward of an invalid episode, gives null: no match.
        matches &= condition.fill_null(False).to_numpy()
    return matches


def _sorted(table: pa.Table, rows: np.ndarray, query: EpisodeQuery) -> np.ndarray:
    """Sort row indices by a column. Rows without a value come last, equal rows newest first."""
    newest_first = rows[::-1]
    # Ids increase with time, so the rows are in this order already.
    if query.sort == "id":
        return newest_first if query.descending else rows

    direction = "descending" if query.descending else "ascending"
    column = table.column(query.sort).take(_to_arrow(newest_first))
    # The position as second key keeps equal rows newest first in both directions.
    keys = pa.table({"key": column, "place": _to_arrow(np.arange(len(newest_first)))})
    order = pc.sort_indices(
        keys, sort_keys=[("key", direction, "at_end"), ("place", "ascending", "at_end")]
    )
    return newest_first[np.from_dlpack(order)]
