"""Parses the text of a sampled turn into text and calls."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rl_loop.chat.codec import without_surrogates
from rl_loop.chat.messages import FormatError, ParsedMessage
from rl_loop.chat.tools import FUNCTIONS
from rl_loop.chatml.functions import PYTHON
from rl_loop.chatml.vocabulary import CALL_MARKUP, TOOL_CALL, TOOL_CALL_END


@dataclass(frozen=True)
class SampledCall:
    """Call in a sampled turn."""

    name: str
    arguments: Any
    """JSON value."""


@dataclass(frozen=True)
class ParsedTurn:
    """Text and calls of a sampled turn."""

    text: str
    """Text before the calls, or the whole turn if there are none."""
    calls: Sequence[SampledCall] = ()


def _sampled_call(parts: Sequence[str]) -> SampledCall | None:
    """Parse <tool_call>, JSON, </tool_call> and following text. None if it is not a call."""
    # Only spaces and line breaks may stand behind a call.
    if len(parts) != 4 or parts[0] != TOOL_CALL or parts[2] != TOOL_CALL_END or parts[3].strip():
        return None
    try:
        call = json.loads(parts[1])
    except (ValueError, RecursionError):
        return None
    # Arguments are not checked here, because the environment knows the function's schema.
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None

    return SampledCall(call["name"], call.get("arguments", {}))


def parse_turn(said: str) -> ParsedTurn | FormatError:
    """Parse the text of a turn, including the markup of its calls."""
    # The group of the pattern keeps the markup among the parts.
    text, *parts = CALL_MARKUP.split(said)
    if not parts:
        return ParsedTurn(text)

    # The parts are: begin, JSON, end, following text; begin again...
    calls: list[SampledCall] = []
    for start in range(0, len(parts), 4):
        call = _sampled_call(parts[start : start + 4])
        if call is None:
            return FormatError("tool_call")
        calls.append(call)

    # The line break before the first call belongs to the format.
    return ParsedTurn(text.removesuffix("\n"), calls)


def build_messages(
    turn: ParsedTurn, channel: str, calls: list[ParsedMessage]
) -> list[ParsedMessage]:
    """Return a turn's text and its ``calls``. Text before calls gets ``channel``."""
    # Without calls the text is the answer, even if it is empty.
    if not calls:
        return [ParsedMessage("final", None, None, turn.text)]
    if not turn.text:
        return calls
    return [ParsedMessage(channel, None, None, turn.text), *calls]


def environment_call(call: SampledCall) -> ParsedMessage:
    """Return a call for environments: a program of Python, or a function's arguments."""
    arguments = call.arguments
    is_program = isinstance(arguments, dict) and arguments.keys() == {"code"}
    if call.name == PYTHON and is_program and isinstance(arguments["code"], str):
        # JSON can contain a lone surrogate, but a program cannot.
        return ParsedMessage("analysis", PYTHON, "code", without_surrogates(arguments["code"]))
    return function_call(call)


def function_call(call: SampledCall) -> ParsedMessage:
    """Return a call of a function with its arguments as JSON."""
    text = json.dumps(call.arguments, ensure_ascii=False)
    return ParsedMessage(
        "commentary", f"{FUNCTIONS}{call.name}", "<|constrain|>json", without_surrogates(text)
    )
