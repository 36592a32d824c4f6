"""Columns of data that have other names than the reader knows."""

from collections.abc import Mapping
from typing import Any


def with_known_names(record: Any, columns: Mapping[str, str]) -> Any:
    """Return a row under the names that its reader knows; other columns are left out.

    Args:
        record: a row; what is no mapping is returned as it is, for its reader to refuse.
        columns: the row's name for each known one; empty if the names are known already.

    Raises:
        ValueError: the row has no such column. One that is null counts as being there.
    """
    if not columns or not isinstance(record, dict):
        return record

    missing = [column for column in columns.values() if column not in record]
    if missing:
        keys = ", ".join(map(str, record)) or "no columns"
        raise ValueError(f"`columns` names {', '.join(missing)}, and the row has {keys}")
    return {known: record[column] for known, column in columns.items()}
