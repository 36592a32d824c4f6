"""Reads records of files as conversations.

The formats are ``messages`` of OpenAI and Hugging Face, ShareGPT, and Harmony's own JSON. Unknown
keys of a record, such as ids or scores, are ignored. Unknown keys of a message are errors, because
content that cannot be rendered would be lost silently.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from openai_harmony import DeveloperContent, Message, ReasoningEffort, Role, SystemContent
from pydantic import ValidationError

from rl_loop.chat.open_calls import Numbered, UnmatchedToolOutputError, in_call_order, parse_calls
from rl_loop.chat.tools import check_names
from rl_loop.conversations.config import Format
from rl_loop.conversations.conversation import BUILTIN_NAMESPACES, Conversation, make_conversation
from rl_loop.conversations.errors import ConversationError
from rl_loop.harmony.codec import Tool
from rl_loop.harmony.conversation import describe_message
from rl_loop.harmony.json_schema import harmony_schema

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
        raise ConversationError(f"a conversation is a JSON object, not {_kind(record)}")
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
    return "harmony" if any(map(_is_harmonys, messages)) else "messages"


def _is_harmonys(message: Any) -> bool:
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
        for number, message in enumerate(_read_list(record, "messages"))
    ]
    return messages, read_tools(record.get("tools"))


def _plain_message(number: int, message: Any) -> dict[str, Any]:
    """Return a message with the keys that the codec knows."""
    name = describe_message(number, message)
    if not isinstance(message, dict):
        raise ConversationError(f"{name}: a message is a JSON object, not {_kind(message)}")
    if message.get("function_call") or message.get("role") == "function":
        raise ConversationError(
            f"{name}: give function calls in 'tool_calls', and answers with the role 'tool'"
        )

    plain = {key: value for key, value in message.items() if key not in THOUGHTS}
    # A file may have several of these keys, with all but one null.
    thoughts = [message[key] for key in THOUGHTS if message.get(key)]
    # Taking one of them would lose the others silently.
    if len(thoughts) > 1:
        given = ", ".join(key for key in THOUGHTS if message.get(key))
        raise ConversationError(f"{name}: {given} have the same meaning. Give one of them")
    if thoughts:
        plain["thinking"] = thoughts[0]
    if plain.get("tool_calls"):
        plain["tool_calls"] = [
            _tool_call(name, call) for call in _read_list(plain, "tool_calls", name)
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
            f"{name}: the arguments of {function['name']} are {_kind(arguments)}, not an object"
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
            f"{name}: the arguments of {function} are {_kind(value)}, not an object"
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
    for number, message in enumerate(_read_list(record, "conversations")):
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


# ---- Harmony


def read_harmony(record: dict[str, Any]) -> Conversation:
    """Read the messages of openai-harmony's ``Conversation.to_json``.

    System and developer messages at the beginning are rendered unchanged.
    """
    messages = _read_list(record, "messages")
    system: Message | None = None
    developer_messages: list[Message] = []
    functions: set[str] = set()
    namespaces = set(BUILTIN_NAMESPACES)
    described = False

    rest: list[Numbered] = []
    for number, message in enumerate(messages):
        flat = _without_author(number, message)
        content = _rich_content(number, flat)
        if content is None:
            rest.append((number, flat))
            continue
        if rest or (isinstance(content, SystemContent) and number > 0):
            raise ConversationError(
                f"{describe_message(number, flat)}: system and developer content must come "
                "first. Later messages can have text only"
            )

        # The system message declares built-in tools, which may then be called.
        if isinstance(content, SystemContent):
            system = Message.from_role_and_content(Role.SYSTEM, content)
            namespaces |= set(content.tools or {})
            continue
        developer_messages.append(Message.from_role_and_content(Role.DEVELOPER, content))
        # If tools are described, only these functions may be called.
        for namespace in (content.tools or {}).values():
            described = True
            namespaces.add(namespace.name)
            functions |= {tool.name for tool in namespace.tools if namespace.name == "functions"}

    return make_conversation(
        rest,
        developer_messages=developer_messages,
        callable_functions=frozenset(functions) if described else None,
        namespaces=frozenset(namespaces),
        system=system,
    )


def _without_author(number: int, message: Any) -> dict[str, Any]:
    """Return a message with role and name at the top level. Harmony may have them in ``author``."""
    if not isinstance(message, dict):
        name = describe_message(number, message)
        raise ConversationError(f"{name}: a message is a JSON object, not {_kind(message)}")
    author = message.get("author")
    if author is None:
        return message
    if not isinstance(author, dict):
        raise ConversationError(f"message {number}: 'author' is {_kind(author)}, not an object")
    return {key: value for key, value in message.items() if key != "author"} | author


def _rich_content(number: int, message: dict[str, Any]) -> SystemContent | DeveloperContent | None:
    """Return the content of a system or developer message. None for a message of text."""
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    kinds = [part.get("type") for part in parts if isinstance(part, dict)]
    name = describe_message(number, message)

    reader: type[SystemContent] | type[DeveloperContent]
    if "system_content" in kinds:
        reader, expected = SystemContent, "system"
    elif "developer_content" in kinds:
        reader, expected = DeveloperContent, "developer"
    elif message.get("role") == "system":
        raise ConversationError(
            f"{name}: in Harmony's format, role 'system' needs content of type "
            "'system_content'. Give instructions the role 'developer'"
        )
    else:
        return None

    if message.get("role") != expected or len(parts) != 1:
        raise ConversationError(
            f"{name}: {kinds[0]!r} must be the only content of a message of role {expected!r}"
        )
    fields = {key: value for key, value in parts[0].items() if key != "type"}
    # pydantic would drop unknown keys, and their content would be lost.
    unknown = sorted(set(fields) - set(reader.model_fields))
    if unknown:
        raise ConversationError(f"{name}: {kinds[0]} has no key {unknown[0]!r}")
    try:
        content = reader.model_validate(fields)
    except ValidationError as error:
        mistake = error.errors()[0]
        place = ".".join(map(str, mistake["loc"]))
        raise ConversationError(f"{name}: {kinds[0]}.{place}: {mistake['msg']}") from None
    for namespace in (content.tools or {}).values():
        for tool in namespace.tools:
            tool.parameters = harmony_schema(tool.parameters)
    return content


# ---- tools


def read_tools(value: Any) -> list[Tool]:
    """Read descriptions of functions: OpenAI's form, a JSON schema's form, or either as text."""
    # Parquet files may store tools as JSON text, because their schemas differ from row to row.
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ConversationError(f"'tools' is text that is not JSON: {error}") from None
    if not value:
        return []
    if not isinstance(value, list):
        raise ConversationError(f"'tools' is {_kind(value)}, not a list")

    tools = [_tool(number, described) for number, described in enumerate(value)]
    try:
        check_names(tools)
    except ValueError as error:
        raise ConversationError(str(error)) from None
    return tools


def _tool(number: int, described: Any) -> Tool:
    name = f"tool {number}"
    if not isinstance(described, dict):
        raise ConversationError(f"{name}: a tool is a JSON object, not {_kind(described)}")
    kind = described.get("type")
    if kind not in (None, "function"):
        raise ConversationError(f"{name}: its type is {kind!r}. Only functions can be described")

    # OpenAI puts the description into ``function``. Other files have its keys at the top level.
    function = described.get("function", described)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ConversationError(f"{name}: it has no name")
    description = function.get("description") or ""
    parameters = function.get("parameters") or None
    if not isinstance(description, str) or not isinstance(parameters, dict | None):
        raise ConversationError(
            f"{name} ({function['name']}): its description must be text and its parameters a JSON schema"
        )
    try:
        return Tool(function["name"], description, parameters)
    except ValueError as error:
        raise ConversationError(f"{name}: {error}") from None


def _names(tools: Sequence[Tool]) -> frozenset[str] | None:
    """Return the callable functions. None if no tools are given: instructions may describe them."""
    return frozenset(tool.name for tool in tools) if tools else None


# ---- helpers


def _read_list(record: Mapping[str, Any], key: str, name: str = "") -> list[Any]:
    value = record.get(key)
    if not isinstance(value, list) or not value:
        where = f"{name}: " if name else ""
        raise ConversationError(
            f"{where}{key!r} must be a list of at least one message, not {_kind(value)}"
        )
    return value


def _reasoning_effort(value: Any) -> ReasoningEffort | None:
    if value is None:
        return None
    efforts = {effort.value.lower(): effort for effort in ReasoningEffort}
    if not isinstance(value, str) or value.lower() not in efforts:
        raise ConversationError(
            f"reasoning_effort is {value!r}. It must be one of {', '.join(efforts)}"
        )
    return efforts[value.lower()]


def _kind(value: Any) -> str:
    """Return the JSON name of a value's type."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    names = {int: "a number", float: "a number", str: "text", dict: "an object"}
    return names.get(type(value), type(value).__name__)


READERS: dict[Format, Callable[[dict[str, Any]], Conversation]] = {
    "messages": read_messages,
    "sharegpt": read_sharegpt,
    "harmony": read_harmony,
}
