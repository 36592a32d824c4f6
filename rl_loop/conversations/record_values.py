"""Checks of JSON values in records, with the errors of conversations."""

from collections.abc import Mapping
from typing import Any

from rl_loop.conversations.errors import ConversationError


def read_list(record: Mapping[str, Any], key: str, name: str = "") -> list[Any]:
    """Return a list with at least one item.

    Args:
        record: JSON object.
        key: key of the list.
        name: description of the object in errors. Empty for a whole record.

    Raises:
        ConversationError: if the value is not such a list.
    """
    value = record.get(key)
    if not isinstance(value, list) or not value:
        where = f"{name}: " if name else ""
        raise ConversationError(
            f"{where}{key!r} must be a list of at least one message, not {json_type(value)}"
        )
    return value


def json_type(value: Any) -> str:
    """Return the JSON name of a value's type."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    names = {int: "a number", float: "a number", str: "text", dict: "an object"}
    return names.get(type(value), type(value).__name__)
