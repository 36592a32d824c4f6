"""Reads conversations of data sets and clients for ChatML.

A message is a dictionary as in OpenAI's chat format:

    role        "system" or "developer", "user", "assistant", "tool"
    content     text, or a list of parts {"type": "text", "text": ...}
    tool_calls  functions that the assistant calls: [{"function": {"name", "arguments"}}]
    name, tool_call_id
                of a tool output; only clients' outputs are matched by them, and neither is rendered

In ChatML, outputs belong to calls by their order. Keys that only Harmony supports (thinking,
channels, recipients) are errors.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rl_loop.chat.open_calls import (
    Numbered,
    OpenCall,
    UnmatchedToolOutputError,
    in_call_order,
    match_outputs,
    parse_calls,
)
from rl_loop.chat.tools import FUNCTIONS, NAME
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
class RenderedCall:
    """Call of a function."""

    name: str
    arguments: str
    """Arguments as JSON, in the form of the prompt."""


@dataclass(frozen=True)
class ChatMessage:
    """Message that is ready for rendering."""

    role: Role
    text: str
    calls: tuple[RenderedCall, ...] = ()


def chat_messages(messages: Sequence[dict[str, Any]]) -> list[ChatMessage]:
    """Read the conversation of a prompt.

    Raises:
        ValueError: if a message cannot be rendered, or if the last one is the assistant's. The
            error names the message.
    """
    read = [chat_message(number, message) for number, message in enumerate(messages)]
    _check_end(read)
    return read


def client_messages(
    messages: Sequence[dict[str, Any]], open_calls: list[OpenCall], first_number: int = 0
) -> list[ChatMessage]:
    """Read a client's conversation or its continuation. Sort tool outputs by their calls.

    Args:
        messages: messages whose tool outputs name their calls by ``tool_call_id`` or ``name``.
        open_calls: open calls of the turn before ``messages``. Emptied, because all must be
            answered.
        first_number: number of earlier messages, for errors.

    Raises:
        ValueError: as in ``chat_messages``. Also if a message other than its output follows a call,
            or if a tool output has no call.
    """
    read: list[ChatMessage] = []
    calls = list(open_calls)
    outputs: list[Numbered] = []

    for number, message in enumerate(messages, start=first_number):
        chat = chat_message(number, message)
        if chat.role == "tool":
            outputs.append((number, message))
            continue
        try:
            read += _outputs_in_order(calls, outputs)
        except MissingToolOutputError as error:
            raise ValueError(f"{describe_message(number, message)}: {error}") from None
        read.append(chat)
        # Outputs must follow their turn directly, because ChatML matches them by position.
        calls, outputs = parse_calls(message) if chat.role == "assistant" else [], []
    read += _outputs_in_order(calls, outputs)
    # None is open, because ``_outputs_in_order`` requires an output for every call.
    open_calls.clear()
    _check_end(read)
    return read


class MissingToolOutputError(ValueError):
    """Call without a tool output although the conversation continues."""


def _outputs_in_order(calls: Sequence[OpenCall], outputs: Sequence[Numbered]) -> list[ChatMessage]:
    """Return the outputs of all calls of a turn in the order of the calls. Raises ValueError."""
    try:
        matches = match_outputs(calls, [message for _, message in outputs])
    except UnmatchedToolOutputError as error:
        raise ValueError(f"{describe_message(*outputs[error.index])}: {error}") from None
    for call in calls:
        if call not in matches:
            named = "" if call.call_id is None else f" ({call.call_id})"
            raise MissingToolOutputError(
                f"the call of {call.recipient}{named} has no tool output, but ChatML matches "
                "outputs to calls by their order. Add the output"
            )
    return [chat_message(*output) for output, _ in in_call_order(calls, outputs)]


def _check_end(messages: Sequence[ChatMessage]) -> None:
    """Raise ValueError if the next turn is not the assistant's."""
    if messages and messages[-1].role == "assistant":
        raise ValueError(
            "the prompt ends with an assistant message, but the assistant's turn comes "
            "next. End it with a message of the user or a tool"
        )


def chat_message(number: int, message: Any) -> ChatMessage:
    """Read one message.

    Args:
        number: index of the message, from 0.
        message: message in the module's format.

    Raises:
        ValueError: if it cannot be rendered. The error names the message.
    """
    try:
        return _chat_message(message)
    except ValueError as error:
        raise ValueError(f"{describe_message(number, message)}: {error}") from None


def _chat_message(message: Any) -> ChatMessage:
    """Read one message. Raises ValueError if it cannot be rendered."""
    if not isinstance(message, dict):
        raise ValueError(f"a message must be an object, not {type(message).__name__}")
    role = message.get("role")
    if role not in ALLOWED_KEYS:
        raise ValueError(f"the role must be one of {', '.join(ALLOWED_KEYS)}")

    # Data sets write null, "" and [] for missing values.
    present = {key for key, value in message.items() if value not in (None, "", [], {})}
    if unknown := sorted(present - ALLOWED_KEYS[role] - {"role"}):
        known = ", ".join(sorted(ALLOWED_KEYS[role]))
        raise ValueError(f"{unknown[0]!r} cannot be rendered in ChatML. Known keys: {known}")

    # As for Harmony prompts, our input accepts "developer" and "system" as one role.
    role_of_chatml: Role = "system" if role == "developer" else role
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise ValueError(f"tool_calls must be a list, not {type(calls).__name__}")
    # A turn that only calls functions may have null as its content.
    if not calls and not isinstance(message.get("content"), str | list):
        raise ValueError(f"'content' must be text, not {type(message.get('content')).__name__}")
    return ChatMessage(role_of_chatml, content_text(message), tuple(map(_call, calls)))


def _call(tool_call: Any) -> RenderedCall:
    """Read one item of ``tool_calls``. Raises ValueError if it is malformed."""
    function = None
    if isinstance(tool_call, dict):
        function = tool_call.get("function") or tool_call
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(
            'a tool call must have the form {"function": {"name": ..., "arguments": ...}}'
        )

    name = function["name"].removeprefix(FUNCTIONS)
    if not NAME.fullmatch(name):
        raise ValueError(
            f"{name!r} is not a valid name of a function. Use letters, digits and any of _ . -"
        )

    # OpenAI's format has a JSON string. Data sets often have the object itself.
    arguments = function.get("arguments")
    if arguments is None:
        arguments = {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            raise ValueError(f"the arguments of {function['name']} are not JSON") from None
    # Parsed and written again, so that prompts have the spacing of Qwen2.5's template.
    return RenderedCall(name, json.dumps(arguments, ensure_ascii=False))
