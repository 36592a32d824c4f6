"""Checked access to the fields of JSON requests."""

from collections.abc import Mapping
from typing import Any

from rl_loop.tinker.errors import bad_request


def read[T](body: Mapping[str, Any], name: str, kind: type[T], default: T | None = None) -> T:
    """Return a field of a type. Numbers without a fraction may stand for floats.

    Raises:
        ApiError: the field has another type, or is missing and has no default.
    """
    value = body.get(name)
    if value is None and default is not None:
        return default
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    # bool is a subclass of int.
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise bad_request(f"{name} must be of type {kind.__name__}")
    return value


def read_optional[T](body: Mapping[str, Any], name: str, kind: type[T]) -> T | None:
    """Return a field of a type, or None if it is missing. Raises ApiError."""
    return None if body.get(name) is None else read(body, name, kind)


def read_metadata(body: Mapping[str, Any]) -> dict[str, str] | None:
    """Return ``user_metadata`` with texts as values. Raises ApiError."""
    metadata = read_optional(body, "user_metadata", dict)
    return None if metadata is None else {str(key): str(value) for key, value in metadata.items()}
