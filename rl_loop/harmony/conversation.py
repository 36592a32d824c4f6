"""Converts conversations of data sets and clients to messages of Harmony.

A message is a dictionary in OpenAI's chat format, with further keys for Harmony:

    role          "system" or "developer", "user", "assistant", "tool"
    content       text, or a list of parts {"type": "text", "text": ...}
    name          of a user, or of the called tool for a tool output
    tool_call_id  id of a tool output's call
    thinking      analysis before an assistant's message
    tool_calls    functions that the assistant calls: [{"id", "function": {"name", "arguments"}}]
    channel       of an assistant's message or a tool output: "analysis", "commentary" or "final"
    recipient     called tool of an assistant's message, such as "python" or "functions.search"
    content_type  of an assistant's message, such as "code" or "<|constrain|>json"

Missing values, and null as in Parquet, get the format's defaults (github.com/openai/harmony,
docs/format.md).
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from openai_harmony import Author, DeveloperContent, Message, Role, TextContent

from rl_loop.chat.open_calls import Numbered, OpenCall, UnmatchedToolOutputError, in_call_order
from rl_loop.chat.tools import FUNCTIONS

CHANNELS = ("analysis", "commentary", "final")
CONSTRAIN = "<|constrain|>"

ALLOWED_KEYS = {
    "system": {"content"},
    "developer": {"content"},
    "user": {"content", "name"},
    "assistant": {"content", "thinking", "tool_calls", "channel", "recipient", "content_type"},
    "tool": {"content", "name", "tool_call_id", "channel", "recipient"},
}

# Words that a header can contain. It is read by splitting at spaces, and "<" begins a special
# token.
HEADER_WORD = re.compile(r"[^\s<>|]+")
CONTENT_TYPE = re.compile(r"(<\|constrain\|> ?)?[^\s<>|]+")


class MessageTranslator:
    """Converts the messages of a conversation to Harmony, one at a time.

    A tool output belongs to an earlier call, so the order matters.
    """

    def __init__(self, open_calls: list[OpenCall] | None = None) -> None:
        """Create a translator. ``open_calls`` of earlier messages are changed in place."""
        self.open_calls: list[OpenCall] = [] if open_calls is None else open_calls
        """Calls without a tool output, oldest first."""

    def translate(self, number: int, message: Any) -> list[Message]:
        """Convert a message to one message of Harmony, or to several with thoughts or calls.

        Args:
            number: index of the message, for errors.
            message: message in the module's format.

        Raises:
            ValueError: if it cannot be converted. The error names the message.
        """
        if isinstance(message, dict) and message.get("role") == "tool":
            return self.translate_outputs([(number, message)])
        # Later outputs belong to calls that are not skipped, if they name none.
        for call in self.open_calls:
            call.is_skipped = True
        try:
            return _to_harmony(message, self.open_calls)
        except ValueError as error:
            raise ValueError(f"{describe_message(number, message)}: {error}") from None

    def translate_outputs(self, outputs: Sequence[Numbered]) -> list[Message]:
        """Convert consecutive tool outputs, in the order of their calls.

        Raises:
            ValueError: if one cannot be converted. The error names the message.
        """
        # Before the matching, so that the error names the malformed message.
        for number, message in outputs:
            try:
                _check_keys(message)
                _header_word(message, "name")
            except ValueError as error:
                raise ValueError(f"{describe_message(number, message)}: {error}") from None
        try:
            ordered = in_call_order(self.open_calls, outputs)
        except UnmatchedToolOutputError as error:
            raise ValueError(f"{describe_message(*outputs[error.index])}: {error}") from None

        rendered: list[Message] = []
        for (number, message), call in ordered:
            self.open_calls.remove(call)
            try:
                rendered.append(_tool_output(message, call))
            except ValueError as error:
                raise ValueError(f"{describe_message(number, message)}: {error}") from None
        return rendered


def describe_message(number: int, message: Any) -> str:
    """Return a message's description for errors."""
    role = None
    if isinstance(message, dict):
        role = message.get("role")
    return f"message {number} (role {role!r})"


def prompt_messages(
    messages: Sequence[dict[str, Any]],
    open_calls: list[OpenCall] | None = None,
    first_number: int = 0,
) -> list[Message]:
    """Convert the conversation of a prompt to messages of Harmony, with the analysis of all turns.

    A chat's "system" message is Harmony's developer message. A tool output belongs to the open
    call of its ``tool_call_id`` or its ``name``, or to the only open call. The call's recipient
    becomes its name. Consecutive outputs are sorted by the order of their calls.

    Args:
        messages: messages in the module's format.
        open_calls: open calls of earlier messages. On return it has the calls that are open then.
        first_number: number of earlier messages, for errors.

    Raises:
        ValueError: if a message cannot be rendered, or if the last one is the assistant's. The
            error names the message.
    """
    translator = MessageTranslator(open_calls)
    rendered: list[Message] = []
    outputs: list[Numbered] = []
    for number, message in enumerate(messages, start=first_number):
        if isinstance(message, dict) and message.get("role") == "tool":
            outputs.append((number, message))
            continue
        rendered += translator.translate_outputs(outputs)
        outputs.clear()
        rendered += translator.translate(number, message)
    rendered += translator.translate_outputs(outputs)

    if messages and messages[-1]["role"] == "assistant":
        raise ValueError(
            "the prompt ends with an assistant message, but the assistant's turn comes "
            "next. End it with a message of the user, the developer or a tool"
        )
    return rendered


def without_finished_analysis(messages: Sequence[Message]) -> list[Message]:
    """Leave out the analysis before earlier answers, as the format specifies.

    Analysis since the last message on ``final`` stays, because reasoning continues over tool calls.
    Calls on the analysis channel, and their outputs (Python's), are dropped with it.

    openai-harmony 0.0.8 drops only analysis before the *first* answer, and nothing while a later
    turn calls tools. The documentation has no such exceptions.
    """
    # 0 also means that there is no answer: then nothing precedes it, and nothing is dropped.
    last_final = 0
    for number, message in enumerate(messages):
        if message.channel == "final":
            last_final = number

    earlier = [message for message in messages[:last_final] if message.channel != "analysis"]
    return [*earlier, *messages[last_final:]]


def assistant_message(
    channel: str,
    text: str,
    recipient: str | None = None,
    content_type: str | None = None,
) -> Message:
    """Create an assistant message."""
    return Message(
        author=_author(Role.ASSISTANT, None),
        content=[TextContent(text=text)],
        channel=channel,
        recipient=recipient,
        content_type=content_type,
    )


def tool_message(name: str, channel: str, text: str, recipient: str = "assistant") -> Message:
    """Create the message of a tool output.

    ``name`` and ``channel`` are the call's recipient and channel.
    """
    return Message(
        author=_author(Role.TOOL, name),
        content=[TextContent(text=text)],
        channel=channel,
        recipient=recipient,
    )


def user_message(text: str, name: str | None = None) -> Message:
    """Create a message of the user."""
    return Message(author=_author(Role.USER, name), content=[TextContent(text=text)])


@lru_cache(maxsize=1024)
def _author(role: Role, name: str | None) -> Author:
    """Return the author of a message. Equal authors share an object, which must not change."""
    return Author(role=role, name=name)


def content_text(message: dict[str, Any]) -> str:
    """Return the text of a message in the format of ``prompt_messages``, "" if it has none."""
    if not message.get("content"):
        return ""
    return _content(message)


def _to_harmony(message: dict[str, Any], open_calls: list[OpenCall]) -> list[Message]:
    """Convert one message to Harmony, and append its calls to the open calls."""
    if not isinstance(message, dict):
        raise ValueError(f"a message must be an object, not {type(message).__name__}")

    role = _check_keys(message)
    if role == "assistant":
        rendered, calls = _assistant_messages(message)
        open_calls += calls
        return rendered
    if role == "user":
        return [user_message(_content(message), _header_word(message, "name"))]

    instructions = DeveloperContent(instructions=_content(message))
    return [Message.from_role_and_content(Role.DEVELOPER, instructions)]


def _check_keys(message: dict[str, Any]) -> str:
    """Return the role of a message. Raises ValueError for a wrong role or an unknown key."""
    role = message.get("role")
    if not isinstance(role, str) or role not in ALLOWED_KEYS:
        raise ValueError(f"the role must be one of {', '.join(ALLOWED_KEYS)}")

    # Data sets write null, "" and [] for missing values.
    present = {key for key, value in message.items() if value not in (None, "", [], {})}
    allowed = ALLOWED_KEYS[role]
    if unknown := sorted(present - allowed - {"role"}):
        known = ", ".join(sorted(allowed))
        raise ValueError(f"{unknown[0]!r} cannot be rendered here. Known keys: {known}")
    return role


def _assistant_messages(message: dict[str, Any]) -> tuple[list[Message], list[OpenCall]]:
    """Convert an assistant message to thoughts, text and calls. Returns them and the calls."""
    rendered: list[Message] = []
    calls: list[OpenCall] = []

    # The order of a turn in Harmony: analysis, text, calls.
    if message.get("thinking"):
        thoughts = _text(message["thinking"], "thinking")
        rendered.append(assistant_message("analysis", thoughts))

    tool_calls = message.get("tool_calls") or []
    if not isinstance(tool_calls, list):
        raise ValueError(f"tool_calls must be a list, not {type(tool_calls).__name__}")
    recipient = _header_word(message, "recipient")
    if tool_calls and recipient:
        raise ValueError("the message has both tool_calls and a recipient. Use one of them")

    # A message with thoughts or calls needs no text message, unless its header has further
    # fields.
    has_header = any(message.get(key) for key in ("channel", "recipient", "content_type"))
    says_more = tool_calls or message.get("thinking")
    if message.get("content") or has_header or not says_more:
        channel = message.get("channel") or _usual_channel(recipient, bool(tool_calls))
        _check_channel(channel)
        text = _content(message)
        content_type = sampled_content_type(_content_type(message), recipient)
        rendered.append(assistant_message(channel, text, recipient, content_type))
        if recipient:
            # Such a call has no id. Its answer is found by the name of the tool or by its position.
            calls.append(OpenCall(None, recipient, channel))

    for tool_call in tool_calls:
        call = _function_call(tool_call)
        rendered.append(
            assistant_message(
                "commentary",
                call.arguments,
                recipient=call.recipient,
                # As GPT-OSS samples function calls.
                content_type=f"{CONSTRAIN}json",
            )
        )
        calls.append(OpenCall(call.call_id, call.recipient, "commentary"))

    return rendered, calls


def _usual_channel(recipient: str | None, before_calls: bool) -> str:
    """Return the channel of a message without one."""
    if recipient is None:
        # Text before calls is a preamble for the user.
        return "commentary" if before_calls else "final"
    is_function = recipient.startswith(FUNCTIONS)
    return "commentary" if is_function else "analysis"


@dataclass(frozen=True)
class _FunctionCall:
    """One item of ``tool_calls``."""

    call_id: str | None
    recipient: str
    arguments: str
    """Arguments as JSON."""


def _function_call(tool_call: Any) -> _FunctionCall:
    function = None
    if isinstance(tool_call, dict):
        function = tool_call.get("function") or tool_call
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(
            'a tool call must have the form {"id": ..., "function": {"name": ..., '
            '"arguments": ...}}'
        )

    name = function["name"].removeprefix(FUNCTIONS)
    if not HEADER_WORD.fullmatch(name):
        raise ValueError(
            f"{name!r} is not a valid name of a function, because a Harmony header cannot "
            "contain it"
        )

    # OpenAI's format has a JSON string. Data sets often have the object itself.
    arguments = function.get("arguments")
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, str):
        # Escapes would take more tokens than the characters.
        arguments = json.dumps(arguments, ensure_ascii=False)
    return _FunctionCall(
        call_id=tool_call.get("id"),
        recipient=f"{FUNCTIONS}{name}",
        arguments=_text(arguments, "arguments"),
    )


def _tool_output(message: dict[str, Any], call: OpenCall) -> Message:
    """Convert the tool output of ``call`` to a message of Harmony."""
    channel = message.get("channel") or call.channel
    _check_channel(channel)
    recipient = _header_word(message, "recipient") or "assistant"
    return tool_message(call.recipient, channel, _content(message), recipient)


def _check_channel(channel: Any) -> None:
    if channel not in CHANNELS:
        raise ValueError(f"{channel!r} is not a channel. Use one of {', '.join(CHANNELS)}")


def _content(message: dict[str, Any]) -> str:
    """Return the text of a message. Raises ValueError if it has none."""
    content = message.get("content")
    if not isinstance(content, list):
        return _text(content, "content")

    texts: list[str] = []
    for part in content:
        kind = None
        if isinstance(part, dict):
            kind = part.get("type")
        if kind != "text":
            raise ValueError(
                f"a part of the content has the type {kind!r}, but only text can be rendered"
            )
        texts.append(_text(part.get("text"), "content"))
    return "".join(texts)


def _text(value: Any, key: str) -> str:
    """Return ``value`` if it is text that UTF-8 can encode. Raises ValueError otherwise."""
    if not isinstance(value, str):
        raise ValueError(f"{key!r} must be text, not {type(value).__name__}")
    try:
        # openai-harmony is written in Rust, whose strings cannot contain half of a pair.
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{key!r} has half of a surrogate pair at index {error.start}, which UTF-8 cannot "
            "encode"
        ) from None
    return value


def _header_word(message: dict[str, Any], key: str) -> str | None:
    """Return a value for a header. None if there is none."""
    value = message.get(key)
    if not value:
        return None
    if not isinstance(value, str) or not HEADER_WORD.fullmatch(value):
        raise ValueError(f"{key} is {value!r}, but a header needs one word without any of < > |")
    return value


def _content_type(message: dict[str, Any]) -> str | None:
    value = message.get("content_type")
    if not value:
        return None
    if not isinstance(value, str) or not CONTENT_TYPE.fullmatch(value):
        raise ValueError(
            f"content_type is {value!r}, but it must be one word, optionally after {CONSTRAIN}"
        )
    return value


def sampled_content_type(content_type: str | None, recipient: str | None) -> str | None:
    """Return a content type in the form that GPT-OSS samples, so that it is parsed correctly.

    There is no space behind <|constrain|>. Without a recipient, a single word would be parsed as
    the recipient.
    """
    if content_type is None:
        return None
    word = content_type.removeprefix(CONSTRAIN).removeprefix(" ")
    is_constrained = content_type.startswith(CONSTRAIN) or recipient is None
    return f"{CONSTRAIN}{word}" if is_constrained else word


def message_text(message: Message) -> str:
    """Return the text of a message."""
    return "".join(getattr(part, "text", "") for part in message.content)
