"""Errors of tool calls, and parsing of a call's recipient and arguments."""

import json
import math
from typing import Any

from rl_loop.chat.tools import FUNCTIONS


class ToolError(Exception):
    """Failed tool call by a mistake of the agent. The agent reads the message."""


class UnknownToolError(Exception):
    """Call of a tool that does not exist: a format error, which ends the episode."""


def parse_recipient(recipient: str) -> str:
    """Return the function's name in a recipient. Raises UnknownToolError if it is not a function."""
    if not recipient.startswith(FUNCTIONS):
        raise UnknownToolError
    return recipient.removeprefix(FUNCTIONS)


MAX_ARGUMENT_DEPTH = 64
"""Limit of nested levels in a call's JSON. Libraries that read or write JSON have limits, too."""


def parse_arguments(text: str) -> dict[str, Any]:
    """Parse the JSON object with the arguments of a function.

    Raises:
        ToolError: if the text is not a JSON object. NaN, infinite numbers and unpaired surrogates,
            which Python accepts, are errors, too: servers would fail on them.

    Example:
        >>> parse_arguments('{"number": 5}')
        {'number': 5}
    """
    try:
        # Python's parser accepts NaN and Infinity, and turns 1e999 into infinity.
        arguments = json.loads(text, parse_constant=_reject_constant, parse_float=_finite)
        # Unpaired surrogates cannot be encoded, so they fail here and not in a server.
        json.dumps(arguments, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ToolError(f"the arguments are not JSON: {error}") from None

    if not isinstance(arguments, dict):
        raise ToolError("the arguments must be a JSON object")
    if _is_deeper(arguments, MAX_ARGUMENT_DEPTH):
        raise ToolError(f"the arguments have more than {MAX_ARGUMENT_DEPTH} levels")
    return arguments


def _reject_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number of JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is too large a number")
    return number


def _is_deeper(value: Any, levels: int) -> bool:
    """Return True if JSON has more than ``levels`` levels of objects and lists."""
    # Level by level, because a recursive function could exceed Python's limit of nested calls.
    level = [value]
    for _ in range(levels):
        children: list[Any] = []
        for parent in level:
            if isinstance(parent, dict):
                children += parent.values()
            elif isinstance(parent, list):
                children += parent
        level = children
    return any(isinstance(child, dict | list) for child in level)
