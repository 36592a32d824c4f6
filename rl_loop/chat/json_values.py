"""Equality of JSON by value: spelling, order of keys and the type of numbers do not count."""

import json
import math
from decimal import Decimal
from typing import Any

LONGEST_TEXT = 65_536
"""Characters of JSON that is compared by its value."""
LONGEST_INTEGER = 8192
"""Bits of an integer that is compared by its decimal digits."""


def canonical_json(text: str) -> Any:
    """Return the same value of JSON for all spellings of one value; other text as it is.

    Arguments that are empty are an empty object, as clients send them. Very long text is compared as
    it is: it would take too long to parse.
    """
    if len(text) > LONGEST_TEXT:
        return text
    if not text.strip():
        return canonical_value({})
    try:
        return canonical_value(
            json.loads(
                text, parse_int=_integer, parse_float=_float, parse_constant=_constant, strict=False
            )
        )
    except (ValueError, RecursionError):
        return text


def canonical_value(value: Any) -> Any:
    """Return a value that ``json.dumps`` writes alike for all equal values.

    Raises RecursionError for a value that is nested too deeply.
    """
    match value:
        case Number():
            return ["number", value.digits]
        case bool() | None | str():
            return value
        case int():
            # Python refuses to write thousands of digits.
            is_short = value.bit_length() < LONGEST_INTEGER
            return ["number", _integer(str(value)).digits if is_short else hex(value)]
        case float():
            return ["number", _float(repr(value)).digits]
        case dict():
            # Keys of Python objects may be anything; those of JSON are text.
            members = {str(key): canonical_value(member) for key, member in value.items()}
            return ["object", dict(sorted(members.items()))]
        case list() | tuple():
            return ["array", [canonical_value(member) for member in value]]
    raise ValueError(f"{type(value).__name__} is no value of JSON")


class Number:
    """A number of JSON."""

    def __init__(self, digits: str) -> None:
        """``digits``: sign, significant digits and exponent, the same for equal numbers."""
        self.digits = digits


def _integer(literal: str) -> Number:
    """Read an integer exactly, however many digits it has."""
    digits = literal.lstrip("-").lstrip("0")
    significant = digits.rstrip("0")
    if not significant:
        return Number("0")
    sign = "-" if literal.startswith("-") else ""
    return Number(f"{sign}{significant}e{len(digits) - len(significant)}")


def _float(literal: str) -> Number:
    """Read a number with a point or an exponent.

    Programs read it as a float, and write the shortest digits of the float.
    """
    value = float(literal)
    if not math.isfinite(value):
        return Number(literal.lower())
    sign, digits, exponent = Decimal(repr(value)).as_tuple()
    assert isinstance(exponent, int)  # it is finite
    whole = _integer("".join(map(str, digits)))
    if whole.digits == "0":
        return whole
    significant, _, zeros = whole.digits.partition("e")
    return Number(f"{'-' if sign else ''}{significant}e{exponent + int(zeros)}")


def _constant(literal: str) -> Number:
    """Read NaN or an infinity, which Python's JSON has."""
    return Number(literal)
