"""Renaming of data columns to the names that the reader expects."""

from collections.abc import Mapping
from typing import Any


def rename_columns(record: Any, columns: Mapping[str, str]) -> Any:
    """Return a row with the expected column names. Other columns are left out.

    Args:
        record: a row. Values other than a dict are returned unchanged, and the reader refuses them.
        columns: {expected name: name in the row}. If empty, the row is returned unchanged.

    Raises:
        ValueError: the row lacks a column. A null value counts as present.
    """
    if not columns or not isinstance(record, dict):
        return record

    # A null value is allowed, because the column exists.
    missing = [column for column in columns.values() if column not in record]
    if missing:
        keys = ", ".join(map(str, record)) or "no columns"
        raise ValueError(f"`columns` refers to {', '.join(missing)}, but the row has {keys}")
    return {known: record[column] for known, column in columns.items()}
