"""Writes messages and tools as pieces: texts, and markup that becomes one token."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rl_loop.chatml.conversation import ChatMessage
from rl_loop.chatml.vocabulary import CALL_MARKUP, IM_END, IM_START, TOOL_CALL, TOOL_CALL_END

TOOLS_BEGIN = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>"""
TOOLS_END = """
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""
"""Qwen2.5's text about tools."""


@dataclass(frozen=True)
class Markup:
    """Name of a token that is not text."""

    name: str


Piece = str | Markup
"""Text, or a token that is not text."""

GENERATION_PROMPT: list[Piece] = [Markup(IM_START), "assistant\n"]
"""The generation prompt of Qwen2.5's template: the header of the assistant's turn."""


def system_pieces(system: str | None, functions: Sequence[dict[str, Any]]) -> list[Piece]:
    """Return the system message with a description of tools. Empty if there is neither."""
    if system is None and not functions:
        return []
    pieces: list[Piece] = [Markup(IM_START), "system\n", system or ""]
    if functions:
        if system is not None:
            pieces.append("\n\n")
        # The text of transformers' tojson filter: characters are not escaped, and keys keep their
        # order.
        described = "".join(
            f"\n{json.dumps(function, ensure_ascii=False)}" for function in functions
        )
        # The template's text contains tokens of calls, but descriptions are plain text.
        pieces += [TOOLS_BEGIN, described, *_with_markup(TOOLS_END)]
    return [*pieces, Markup(IM_END), "\n"]


def conversation_pieces(messages: Sequence[ChatMessage]) -> list[Piece]:
    """Render consecutive messages."""
    # Padded at both ends, so that every message has a neighbor on each side.
    is_tool = [False, *(message.role == "tool" for message in messages), False]
    pieces: list[Piece] = []
    for number, message in enumerate(messages):
        pieces += _message_pieces(message, is_tool[number], is_tool[number + 2])
    return pieces


def _message_pieces(message: ChatMessage, follows_tool: bool, more_outputs: bool) -> list[Piece]:
    """Render a message. Consecutive tool outputs become one message of the user.

    Args:
        message: message to render.
        follows_tool: True if the previous message is a tool output.
        more_outputs: True if the next message is a tool output.
    """
    if message.role == "tool":
        # Only the first output opens a message, and only the last one closes it.
        pieces: list[Piece] = [] if follows_tool else [Markup(IM_START), "user"]
        pieces.append(f"\n<tool_response>\n{message.text}\n</tool_response>")
        return pieces if more_outputs else [*pieces, Markup(IM_END), "\n"]

    body: list[Piece] = [message.text]
    if message.role == "assistant":
        body = turn_pieces(message)
    return [Markup(IM_START), f"{message.role}\n", *body, Markup(IM_END), "\n"]


def turn_pieces(message: ChatMessage) -> list[Piece]:
    """Render the text and calls of an assistant's turn, without header and end."""
    pieces: list[Piece] = [message.text] if message.text else []
    # Every call begins on its own line, but an empty text has no line.
    for number, call in enumerate(message.calls):
        if message.text or number > 0:
            pieces.append("\n")
        pieces += [
            Markup(TOOL_CALL),
            f'\n{{"name": "{call.name}", "arguments": {call.arguments}}}\n',
            Markup(TOOL_CALL_END),
        ]
    return pieces


def _with_markup(text: str) -> list[Piece]:
    """Split the template's text into text and tokens of calls."""
    return [
        Markup(part) if CALL_MARKUP.fullmatch(part) else part for part in CALL_MARKUP.split(text)
    ]
