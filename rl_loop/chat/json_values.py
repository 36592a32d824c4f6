"""Equality of JSON by value, independent of spelling, order of keys and type of numbers."""

import json
import math
from decimal import Decimal
from typing import Any

MAX_TEXT_CHARACTERS = 65_536
"""Maximum characters of JSON that is compared by value."""
MAX_INTEGER_BITS = 8192
"""Maximum bits of an integer that is compared by its decimal digits."""


def canonical_json(text: str) -> Any:
    """Return equal values for all spellings of a JSON value. Other text is returned unchanged.

    Empty arguments are an empty object. Very long text is returned unchanged.
    """
    # Parsing would take too long.
    if len(text) > MAX_TEXT_CHARACTERS:
        return text
    # Some clients send an empty text instead of an empty object.
    if not text.strip():
        return canonical_value({})
    try:
        return canonical_value(
            # Digits instead of int: Python refuses integers of more than 4,300 digits. Not strict,
            # because policies write line breaks within texts.
            json.loads(
                text, parse_int=_integer, parse_float=_float, parse_constant=_constant, strict=False
            )
        )
    # Malformed arguments of a policy are compared as text.
    except (ValueError, RecursionError):
        return text


def canonical_value(value: Any) -> Any:
    """Return a value whose ``json.dumps`` is the same for all equal values.

    Raises:
        RecursionError: if the value is nested too deeply.
    """
    match value:
        # Tags distinguish a number from the text with its digits, and an object from a list of
        # pairs.
        case JsonNumber():
            return ["number", value.digits]

        # Before int, because bool is a subclass of int, but true is not 1.
        case bool() | None | str():
            return value
        case int():
            # Python does not convert integers with thousands of digits.
            is_short = value.bit_length() < MAX_INTEGER_BITS
            return ["number", _integer(str(value)).digits if is_short else hex(value)]
        case float():
            return ["number", _float(repr(value)).digits]

        case dict():
            # Keys of Python objects can have any type. JSON's are text.
            members = {str(key): canonical_value(member) for key, member in value.items()}
            return ["object", dict(sorted(members.items()))]
        case list() | tuple():
            return ["array", [canonical_value(member) for member in value]]
    raise ValueError(f"{type(value).__name__} is not a JSON type")


class JsonNumber:
    """Number of JSON."""

    def __init__(self, digits: str) -> None:
        """Create a number from its sign, significant digits and exponent, in a unique form."""
        self.digits = digits


def _integer(literal: str) -> JsonNumber:
    """Parse an integer exactly, with any number of digits."""
    digits = literal.lstrip("-").lstrip("0")
    significant = digits.rstrip("0")
    if not significant:
        return JsonNumber("0")
    sign = "-" if literal.startswith("-") else ""
    return JsonNumber(f"{sign}{significant}e{len(digits) - len(significant)}")


def _float(literal: str) -> JsonNumber:
    """Parse a number with a point or an exponent."""
    # Programs parse it as a float, and write the shortest digits of the float.
    value = float(literal)
    if not math.isfinite(value):
        return JsonNumber(literal.lower())
    # repr writes the shortest digits that read back as the same float.
    sign, digits, exponent = Decimal(repr(value)).as_tuple()
    assert isinstance(exponent, int)  # it is finite
    integer = _integer("".join(map(str, digits)))
    if integer.digits == "0":
        return integer
    significant, _, zeros = integer.digits.partition("e")
    return JsonNumber(f"{'-' if sign else ''}{significant}e{exponent + int(zeros)}")


def _constant(literal: str) -> JsonNumber:
    """Parse NaN or an infinity, which Python's JSON accepts."""
    return JsonNumber(literal)
