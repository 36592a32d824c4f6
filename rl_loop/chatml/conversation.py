"""Reads the messages of a conversation, as data sets and clients write them, for ChatML.

A message is a dictionary as in OpenAI's chat format:

    role        "system" or "developer", "user", "assistant", "tool"
    content     text, or a list of parts {"type": "text", "text": ...}
    tool_calls  functions that the assistant calls: [{"function": {"name", "arguments"}}]

``name`` and ``tool_call_id`` of a tool's answer are read over: ChatML says neither. What only Harmony
can say (thinking, channels, recipients) is refused.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rl_loop.harmony.conversation import content_text, describe_message

Role = Literal["system", "user", "assistant", "tool"]

ALLOWED_KEYS: dict[str, set[str]] = {
    "system": {"content"},
    "developer": {"content"},
    "user": {"content"},
    "assistant": {"content", "tool_calls"},
    "tool": {"content", "name", "tool_call_id"},
}


@dataclass(frozen=True)
class Call:
    """A call of a function."""

    name: str
    arguments: str
    """JSON, as the prompt shows it."""


@dataclass(frozen=True)
class ChatMessage:
    """A message, ready to be rendered."""

    role: Role
    text: str
    calls: tuple[Call, ...] = ()


def chat_messages(messages: Sequence[dict[str, Any]]) -> list[ChatMessage]:
    """Read the conversation of a prompt.

    Raises ValueError, naming the message and the reason, for what cannot be rendered, and if the
    assistant's turn is not what comes next.
    """
    read = [chat_message(number, message) for number, message in enumerate(messages)]
    if read and read[-1].role == "assistant":
        raise ValueError(
            "the prompt ends with a message of the assistant, whose turn comes next; "
            "end it with a message of the user or a tool"
        )
    return read


def chat_message(number: int, message: Any) -> ChatMessage:
    """Read one message. Raises ValueError, naming it and the reason, if it cannot be rendered.

    ``number``: of the message, from 0."""
    try:
        return _chat_message(message)
    except ValueError as error:
        raise ValueError(f"{describe_message(number, message)}: {error}") from None


def _chat_message(message: Any) -> ChatMessage:
    """Read one message. Raises ValueError."""
    if not isinstance(message, dict):
        raise ValueError(
            f"a message must be a mapping of keys to values, not {type(message).__name__}"
        )
    role = message.get("role")
    if role not in ALLOWED_KEYS:
        raise ValueError(f"the role must be one of {', '.join(ALLOWED_KEYS)}")

    # null, "" and [] say nothing, and data sets write them for what is not there.
    present = {key for key, value in message.items() if value not in (None, "", [], {})}
    if unknown := sorted(present - ALLOWED_KEYS[role] - {"role"}):
        known = ", ".join(sorted(ALLOWED_KEYS[role]))
        raise ValueError(f"{unknown[0]!r} cannot be rendered in ChatML; known: {known}")

    # As a chat's "system" message is Harmony's developer message.
    role_of_chatml: Role = "system" if role == "developer" else role
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise ValueError(f"tool_calls must be a list, not {type(calls).__name__}")
    if not calls and not isinstance(message.get("content"), str | list):
        raise ValueError(f"'content' must be text, not {type(message.get('content')).__name__}")
    return ChatMessage(role_of_chatml, content_text(message), tuple(map(_call, calls)))


def _call(tool_call: Any) -> Call:
    """Read one entry of ``tool_calls``. Raises ValueError."""
    function = None
    if isinstance(tool_call, dict):
        function = tool_call.get("function") or tool_call
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError('a tool call must be like {"function": {"name": ..., "arguments": ...}}')

    # OpenAI's format has them as a string of JSON, data sets often as the object itself.
    arguments = function.get("arguments")
    if arguments is None:
        arguments = {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            raise ValueError(f"the arguments of {function['name']} are no JSON") from None
    return Call(function["name"], json.dumps(arguments, ensure_ascii=False))
