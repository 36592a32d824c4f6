"""Reads records of files as conversations.

The formats are ``messages`` of OpenAI and Hugging Face, ShareGPT, and Harmony's own JSON, which
``harmony_records`` reads. Unknown
keys of a record, such as ids or scores, are ignored. Unknown keys of a message are errors, because
content that cannot be rendered would be lost silently.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from openai_harmony import ReasoningEffort

from rl_loop.chat.open_calls import Numbered, UnmatchedToolOutputError, in_call_order, parse_calls
from rl_loop.conversations.config import Format
from rl_loop.conversations.conversation import Conversation, make_conversation
from rl_loop.conversations.errors import ConversationError
from rl_loop.conversations.harmony_records import read_harmony
from rl_loop.conversations.record_values import json_type, read_list
from rl_loop.conversations.tool_descriptions import read_tools
from rl_loop.harmony.codec import Tool
from rl_loop.harmony.conversation import describe_message

THOUGHTS = ("thinking", "reasoning_content", "reasoning")
"""Keys of the analysis before a message, in data sets and servers' responses."""

EARLIER_CALLS = ("functions", "function_call")
"""OpenAI's keys before ``tools`` was introduced."""

SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "function_call": "call",
    "tool_call": "call",
    "observation": "tool",
    "tool": "tool",
    "function_response": "tool",
    "tool_response": "tool",
}
"""Roles by values of ``from``. "call" is an assistant message whose ``value`` is JSON."""

SHAREGPT_KEYS = {"from", "value", "weight"}


def read_conversation(record: Any, record_format: Format) -> Conversation:
    """Read one record. Raises ConversationError naming the message and the reason."""
    return READERS[resolve_format(record, record_format)](record)


def resolve_format(record: Any, record_format: Format) -> Format:
    """Return the format of a record: ``record_format``, or the detected format if it is "auto".

    Raises:
        ConversationError: if the record is not a conversation.
    """
    if not isinstance(record, dict):
        raise ConversationError(f"a conversation is a JSON object, not {json_type(record)}")
    return detect_format(record) if record_format == "auto" else record_format


def detect_format(record: Mapping[str, Any]) -> Format:
    """Detect the format of a record by its keys. Raises ConversationError if it has none."""
    if isinstance(record.get("conversations"), list):
        return "sharegpt"

    messages = record.get("messages")
    if not isinstance(messages, list):
        keys = ", ".join(map(str, record)) or "no keys"
        raise ConversationError(
            f"it has neither a list 'messages' nor a list 'conversations', but {keys}"
        )
    # One message in Harmony's form is enough, because the others may look like plain ones.
    return "harmony" if any(map(_is_harmony_message, messages)) else "messages"


def _is_harmony_message(message: Any) -> bool:
    """Return True if a message can only be Harmony's."""
    if not isinstance(message, dict):
        # The reader reports messages of other types with their number.
        return False
    content = message.get("content")
    first = content[0] if isinstance(content, list) and content else None
    # Only Harmony's JSON has these types, a channel, or an author as an object.
    kind = first.get("type") if isinstance(first, dict) else None
    return (
        kind in ("system_content", "developer_content")
        or message.get("channel") is not None
        or isinstance(message.get("author"), dict)
    )


# ---- OpenAI and Hugging Face


def read_messages(record: dict[str, Any]) -> Conversation:
    """Read ``messages``, ``tools`` and ``reasoning_effort``."""
    messages, tools = plain_messages(record)
    return make_conversation(
        one_call_per_turn(messages),
        tools=tools,
        callable_functions=_names(tools),
        reasoning_effort=_reasoning_effort(record.get("reasoning_effort")),
    )


def plain_messages(record: dict[str, Any]) -> tuple[list[Numbered], list[Tool]]:
    """Return a record's messages, with the keys that codecs know, and its tools."""
    # Files with a fixed schema have unused keys that are null or empty.
    for key in EARLIER_CALLS:
        if record.get(key):
            raise ConversationError(f"{key!r} is a deprecated key. Describe functions in 'tools'")

    messages = [
        (number, _plain_message(number, message))
        for number, message in enumerate(read_list(record, "messages"))
    ]
    return messages, read_tools(record.get("tools"))


def _plain_message(number: int, message: Any) -> dict[str, Any]:
    """Return a message with the keys that the codec knows."""
    name = describe_message(number, message)
    if not isinstance(message, dict):
        raise ConversationError(f"{name}: a message is a JSON object, not {json_type(message)}")
    if message.get("function_call") or message.get("role") == "function":
        raise ConversationError(
            f"{name}: give function calls in 'tool_calls', and answers with the role 'tool'"
        )

    plain = {key: value for key, value in message.items() if key not in THOUGHTS}
    # A file may have several of these keys, with all but one null.
    analyses = [message[key] for key in THOUGHTS if message.get(key)]
    # Taking one of them would lose the others silently.
    if len(analyses) > 1:
        keys = ", ".join(key for key in THOUGHTS if message.get(key))
        raise ConversationError(f"{name}: {keys} have the same meaning. Give one of them")
    if analyses:
        plain["thinking"] = analyses[0]
    if plain.get("tool_calls"):
        plain["tool_calls"] = [
            _tool_call(name, call) for call in read_list(plain, "tool_calls", name)
        ]
    return plain


def _tool_call(name: str, call: Any) -> dict[str, Any]:
    """Return a call whose arguments are JSON. ``name`` describes its message in errors."""
    # Some files have name and arguments at the top level of a call.
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ConversationError(
            f'{name}: a tool call has the form {{"id": ..., "function": {{"name": ..., "arguments": ...}}}}'
        )
    kind = call.get("type")
    if kind not in (None, "function"):
        raise ConversationError(
            f"{name}: a tool call has type {kind!r}. Only functions can be called"
        )

    arguments = function.get("arguments")
    # Text stays as it is: rendering an object again could change its spacing.
    if isinstance(arguments, str):
        arguments = _checked_arguments(name, function["name"], arguments)
    elif not isinstance(arguments, dict | None):
        raise ConversationError(
            f"{name}: the arguments of {function['name']} are {json_type(arguments)}, not an object"
        )
    checked = {"name": function["name"], "arguments": arguments}
    return {"id": call.get("id"), "function": checked}


def _checked_arguments(name: str, function: str, arguments: str) -> str:
    """Return arguments unchanged if they are a JSON object. "" means no arguments."""
    if not arguments.strip():
        return "{}"
    try:
        value = json.loads(arguments)
    except ValueError as error:
        raise ConversationError(
            f"{name}: the arguments of {function} are not JSON: {error}"
        ) from None
    if not isinstance(value, dict):
        raise ConversationError(
            f"{name}: the arguments of {function} are {json_type(value)}, not an object"
        )
    return arguments


def one_call_per_turn(messages: Sequence[Numbered]) -> Iterator[Numbered]:
    """Split messages with several calls, so that each call precedes its output.

    GPT-OSS stops at <|call|> and continues after the output, so it never makes two calls at a time.
    """
    at = 0
    while at < len(messages):
        number, message = messages[at]
        at += 1
        # Other messages stay as they are.
        calls = message.get("tool_calls") or []
        if len(calls) < 2:
            yield number, message
            continue

        outputs: list[Numbered] = []
        # Outputs follow directly, before any other message.
        while at < len(messages) and messages[at][1].get("role") == "tool":
            outputs.append(messages[at])
            at += 1
        yield from _in_turns(number, message, calls, outputs)


def _in_turns(
    number: int, message: dict[str, Any], calls: list[Any], outputs: list[Numbered]
) -> Iterator[Numbered]:
    """Split a message with several calls into several messages, with the outputs in between."""
    if len(outputs) < len(calls):
        raise ConversationError(
            f"{describe_message(number, message)}: only {len(outputs)} of its {len(calls)} "
            "calls have a tool output. GPT-OSS waits for the output of each call"
        )

    # The weight applies to all calls of the message.
    kept = {key: message[key] for key in ("role", "weight") if key in message}
    ordered = outputs_in_call_order(message, outputs[: len(calls)])
    for i, (call, output) in enumerate(zip(calls, ordered, strict=True)):
        # The first message keeps the thoughts and the text.
        yield number, (message if i == 0 else kept) | {"tool_calls": [call]}
        yield output
    # The translator reports outputs that belong to no call.
    yield from outputs[len(calls) :]


def outputs_in_call_order(message: dict[str, Any], outputs: Sequence[Numbered]) -> list[Numbered]:
    """Return the outputs of a message's calls in the order of the calls, one for each.

    Outputs without a call id belong to the remaining calls, in order.

    Raises:
        ConversationError: if an output names a call that the message does not make.
    """
    try:
        ordered = in_call_order(parse_calls(message), outputs, by_index=True)
    except UnmatchedToolOutputError as error:
        named = describe_message(*outputs[error.index])
        raise ConversationError(f"{named}: {error}") from None
    return [output for output, _ in ordered]


def _reasoning_effort(value: Any) -> ReasoningEffort | None:
    if value is None:
        return None
    efforts = {effort.value.lower(): effort for effort in ReasoningEffort}
    if not isinstance(value, str) or value.lower() not in efforts:
        raise ConversationError(
            f"reasoning_effort is {value!r}. It must be one of {', '.join(efforts)}"
        )
    return efforts[value.lower()]


def _names(tools: Sequence[Tool]) -> frozenset[str] | None:
    """Return the callable functions. None if no tools are given: instructions may describe them."""
    return frozenset(tool.name for tool in tools) if tools else None


# ---- ShareGPT


def read_sharegpt(record: dict[str, Any]) -> Conversation:
    """Read ``conversations`` of ``from`` and ``value``, ``system`` and ``tools``."""
    messages, tools = plain_sharegpt(record)
    return make_conversation(
        one_call_per_turn(messages), tools=tools, callable_functions=_names(tools)
    )


def plain_sharegpt(record: dict[str, Any]) -> tuple[list[Numbered], list[Tool]]:
    """Return the messages and tools of a ShareGPT record, like ``plain_messages``."""
    messages: list[Numbered] = []
    if record.get("system"):
        messages.append((0, {"role": "system", "content": record["system"]}))
    for number, message in enumerate(read_list(record, "conversations")):
        messages.append((number, _sharegpt_message(number, message)))
    return messages, read_tools(record.get("tools"))


def _sharegpt_message(number: int, message: Any) -> dict[str, Any]:
    # A message that is not an object has no sender, and is reported as such.
    sender = message.get("from") if isinstance(message, dict) else None
    role = SHAREGPT_ROLES.get(sender) if isinstance(sender, str) else None
    name = f"message {number} (from {sender!r})"
    if role is None:
        raise ConversationError(f"{name}: 'from' must be one of {', '.join(SHAREGPT_ROLES)}")
    # Files with a fixed schema have unused keys that are null.
    unknown = sorted(
        key for key in message if key not in SHAREGPT_KEYS and message[key] is not None
    )
    if unknown:
        raise ConversationError(f"{name}: {unknown[0]!r} cannot be rendered here")

    value = message.get("value")
    control = {"weight": message["weight"]} if message.get("weight") is not None else {}
    if role != "call":
        return {"role": role, "content": value, **control}

    # JSON text: one call or a list of calls.
    try:
        calls = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ConversationError(f"{name}: its value is not JSON: {error}") from None
    # A single call may be an object instead of a list.
    if not isinstance(calls, list):
        calls = [calls]
    if not calls:
        raise ConversationError(f"{name}: the list of calls is empty")
    tool_calls = [_tool_call(name, call) for call in calls]
    return {"role": "assistant", "tool_calls": tool_calls, **control}


READERS: dict[Format, Callable[[dict[str, Any]], Conversation]] = {
    "messages": read_messages,
    "sharegpt": read_sharegpt,
    "harmony": read_harmony,
}
