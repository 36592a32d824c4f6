"""Turns conversations, as data sets and clients write them, into messages of Harmony.

A message is a dictionary, as in OpenAI's chat format, and may say more where Harmony knows more:

    role          "system" or "developer", "user", "assistant", "tool"
    content       text, or a list of parts {"type": "text", "text": ...}
    name          of a user; of the tool that answers
    tool_call_id  which call a tool answers, by the id that the call has
    thinking      the analysis before an assistant's message
    tool_calls    functions that the assistant calls: [{"id", "function": {"name", "arguments"}}]
    channel       of an assistant's message or a tool's answer: "analysis", "commentary" or "final"
    recipient     whom an assistant's message calls, such as "python" or "functions.search"
    content_type  of an assistant's message, such as "code" or "<|constrain|>json"

What is left out, or null as Parquet has it, is filled in as the format documents it
(github.com/openai/harmony, docs/format.md).
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from openai_harmony import Author, DeveloperContent, Message, Role, TextContent

from rl_loop.chat.open_calls import Numbered, OpenCall, UnmatchedAnswer, in_call_order
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

# What a header can carry: it is read by splitting it at spaces, and "<" begins a special token.
HEADER_WORD = re.compile(r"[^\s<>|]+")
CONTENT_TYPE = re.compile(r"(<\|constrain\|> ?)?[^\s<>|]+")


class MessageTranslator:
    """Turns one message of a conversation after the other into those of Harmony.

    A tool's answer belongs to a call that came before, so the order counts.
    """

    def __init__(self, open_calls: list[OpenCall] | None = None) -> None:
        """``open_calls``: of messages that were translated before; changed in place."""
        self.open_calls: list[OpenCall] = [] if open_calls is None else open_calls
        """The calls that no tool has answered yet, the oldest first."""

    def translate(self, number: int, message: Any) -> list[Message]:
        """Turn message ``number`` into one or, with thoughts or calls, several.

        Raises ValueError naming the message and the reason.
        """
        if isinstance(message, dict) and message.get("role") == "tool":
            return self.translate_answers([(number, message)])
        for call in self.open_calls:
            call.is_left = True
        try:
            return _to_harmony(message, self.open_calls)
        except ValueError as error:
            raise ValueError(f"{describe_message(number, message)}: {error}") from None

    def translate_answers(self, answers: Sequence[Numbered]) -> list[Message]:
        """Turn answers of tools that follow one another into messages, in the order of their calls.

        Raises ValueError naming the message and the reason.
        """
        for number, message in answers:
            try:
                _check_keys(message)
                _header_word(message, "name")
            except ValueError as error:
                raise ValueError(f"{describe_message(number, message)}: {error}") from None
        try:
            ordered = in_call_order(self.open_calls, answers)
        except UnmatchedAnswer as error:
            raise ValueError(f"{describe_message(*answers[error.place])}: {error}") from None

        rendered: list[Message] = []
        for (number, message), call in ordered:
            self.open_calls.remove(call)
            try:
                rendered.append(_tool_answer(message, call))
            except ValueError as error:
                raise ValueError(f"{describe_message(number, message)}: {error}") from None
        return rendered


def describe_message(number: int, message: Any) -> str:
    """Name a message of a conversation, as errors do."""
    role = None
    if isinstance(message, dict):
        role = message.get("role")
    return f"message {number} (role {role!r})"


def prompt_messages(
    messages: Sequence[dict[str, Any]],
    open_calls: list[OpenCall] | None = None,
    first_number: int = 0,
) -> list[Message]:
    """Turn the conversation of a prompt into messages of Harmony, analysis of every turn included.

    A chat's "system" message is what Harmony calls the developer message. A tool's answer belongs
    to the open call of its ``tool_call_id`` or its ``name``, or to the only one, and gets that
    call's recipient as its name. Answers that follow one another are put into the order of their
    calls.

    Raises ValueError, naming the message and the reason, for what cannot be rendered, and if the
    assistant's turn is not what comes next.

    Where ``messages`` go on from others, ``open_calls`` are the calls in those that no tool has
    answered, and ``first_number`` is how many they are, for error messages. ``open_calls`` is
    changed: afterwards it holds the calls that are open then.
    """
    translator = MessageTranslator(open_calls)
    rendered: list[Message] = []
    answers: list[Numbered] = []
    for number, message in enumerate(messages, start=first_number):
        if isinstance(message, dict) and message.get("role") == "tool":
            answers.append((number, message))
            continue
        rendered += translator.translate_answers(answers)
        answers.clear()
        rendered += translator.translate(number, message)
    rendered += translator.translate_answers(answers)

    if messages and messages[-1]["role"] == "assistant":
        raise ValueError(
            "the prompt ends with a message of the assistant, whose turn comes next; "
            "end it with a message of the user, the developer or a tool"
        )
    return rendered


def without_finished_analysis(messages: Sequence[Message]) -> list[Message]:
    """Leave out the analysis that led to earlier answers, as the format does once they are given.

    Analysis since the last message on ``final`` stays: calls to tools are part of a train of
    thought that goes on. With it go calls on that channel and their answers (Python's).

    openai-harmony 0.0.8 drops only what precedes the *first* answer, and nothing while a later
    turn is calling tools; the documentation has no such exceptions.
    """
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
    """Make a message of the assistant."""
    return Message(
        author=_author(Role.ASSISTANT, None),
        content=[TextContent(text=text)],
        channel=channel,
        recipient=recipient,
        content_type=content_type,
    )


def tool_message(name: str, channel: str, text: str, recipient: str = "assistant") -> Message:
    """Make a tool's answer; ``name`` and ``channel`` are the call's recipient and channel."""
    return Message(
        author=_author(Role.TOOL, name),
        content=[TextContent(text=text)],
        channel=channel,
        recipient=recipient,
    )


def user_message(text: str, name: str | None = None) -> Message:
    """Make a message of the user."""
    return Message(author=_author(Role.USER, name), content=[TextContent(text=text)])


@lru_cache(maxsize=1024)
def _author(role: Role, name: str | None) -> Author:
    """Make the author of a message, once for all that have the same: nobody changes one."""
    return Author(role=role, name=name)


def content_text(message: dict[str, Any]) -> str:
    """Return the text of a message that ``prompt_messages`` takes, "" if it has none."""
    if not message.get("content"):
        return ""
    return _content(message)


def _to_harmony(message: dict[str, Any], open_calls: list[OpenCall]) -> list[Message]:
    """Turn one message into those of Harmony, and keep account of the open calls."""
    if not isinstance(message, dict):
        raise ValueError(
            f"a message must be a mapping of keys to values, not {type(message).__name__}"
        )

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
    """Return the role of a message. Raises ValueError for a wrong one and for an unknown key."""
    role = message.get("role")
    if not isinstance(role, str) or role not in ALLOWED_KEYS:
        raise ValueError(f"the role must be one of {', '.join(ALLOWED_KEYS)}")

    # null, "" and [] say nothing, and data sets write them for what is not there.
    present = {key for key, value in message.items() if value not in (None, "", [], {})}
    allowed = ALLOWED_KEYS[role]
    if unknown := sorted(present - allowed - {"role"}):
        known = ", ".join(sorted(allowed))
        raise ValueError(f"{unknown[0]!r} cannot be rendered here; known: {known}")
    return role


def _assistant_messages(message: dict[str, Any]) -> tuple[list[Message], list[OpenCall]]:
    """Turn a message of the assistant into thoughts, text and calls; return them and the calls."""
    rendered: list[Message] = []
    calls: list[OpenCall] = []

    if message.get("thinking"):
        thoughts = _text(message["thinking"], "thinking")
        rendered.append(assistant_message("analysis", thoughts))

    tool_calls = message.get("tool_calls") or []
    if not isinstance(tool_calls, list):
        raise ValueError(f"tool_calls must be a list, not {type(tool_calls).__name__}")
    recipient = _header_word(message, "recipient")
    if tool_calls and recipient:
        raise ValueError("it has both tool_calls and a recipient")

    # Beside thoughts or calls, a message without text is none, unless its header says that there
    # is one.
    has_header = any(message.get(key) for key in ("channel", "recipient", "content_type"))
    says_more = tool_calls or message.get("thinking")
    if message.get("content") or has_header or not says_more:
        channel = message.get("channel") or _usual_channel(recipient, bool(tool_calls))
        _check_channel(channel)
        text = _content(message)
        content_type = sampled_content_type(_content_type(message), recipient)
        rendered.append(assistant_message(channel, text, recipient, content_type))
        if recipient:
            calls.append(OpenCall(None, recipient, channel))

    for tool_call in tool_calls:
        call = _function_call(tool_call)
        rendered.append(
            assistant_message(
                "commentary",
                call.arguments,
                recipient=call.recipient,
                content_type=f"{CONSTRAIN}json",
            )
        )
        calls.append(OpenCall(call.call_id, call.recipient, "commentary"))

    return rendered, calls


def _usual_channel(recipient: str | None, before_calls: bool) -> str:
    """Return the channel of a message that names none."""
    if recipient is None:
        # Text before calls is a preamble for the user.
        return "commentary" if before_calls else "final"
    is_function = recipient.startswith(FUNCTIONS)
    return "commentary" if is_function else "analysis"


@dataclass(frozen=True)
class _FunctionCall:
    """One entry of ``tool_calls``."""

    call_id: str | None
    recipient: str
    arguments: str
    """JSON."""


def _function_call(tool_call: Any) -> _FunctionCall:
    function = None
    if isinstance(tool_call, dict):
        function = tool_call.get("function") or tool_call
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(
            'a tool call must be like {"id": ..., "function": {"name": ..., "arguments": ...}}'
        )

    name = function["name"].removeprefix(FUNCTIONS)
    if not HEADER_WORD.fullmatch(name):
        raise ValueError(f"a function is called {name!r}, which no header can carry")

    # OpenAI's format has them as a string of JSON, data sets often as the object itself.
    arguments = function.get("arguments")
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return _FunctionCall(
        call_id=tool_call.get("id"),
        recipient=f"{FUNCTIONS}{name}",
        arguments=_text(arguments, "arguments"),
    )


def _tool_answer(message: dict[str, Any], call: OpenCall) -> Message:
    """Turn a tool's answer into a message. ``call``: the call that it answers."""
    channel = message.get("channel") or call.channel
    _check_channel(channel)
    recipient = _header_word(message, "recipient") or "assistant"
    return tool_message(call.recipient, channel, _content(message), recipient)


def _check_channel(channel: Any) -> None:
    if channel not in CHANNELS:
        raise ValueError(f"there is no channel {channel!r}; there are {', '.join(CHANNELS)}")


def _content(message: dict[str, Any]) -> str:
    """Return the text of a message; raise ValueError if it has none."""
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
                f"a part of its content is of type {kind!r}; only text can be rendered"
            )
        texts.append(_text(part.get("text"), "content"))
    return "".join(texts)


def _text(value: Any, key: str) -> str:
    """Return ``value`` if it is text that UTF-8 can have."""
    if not isinstance(value, str):
        raise ValueError(f"{key!r} must be text, not {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{key!r} has half of a surrogate pair at place {error.start}, which is no text"
        ) from None
    return value


def _header_word(message: dict[str, Any], key: str) -> str | None:
    """Return a value that goes into a header, None if there is none."""
    value = message.get(key)
    if not value:
        return None
    if not isinstance(value, str) or not HEADER_WORD.fullmatch(value):
        raise ValueError(f"{key} is {value!r}; a header can carry one word without any of < > |")
    return value


def _content_type(message: dict[str, Any]) -> str | None:
    value = message.get("content_type")
    if not value:
        return None
    if not isinstance(value, str) or not CONTENT_TYPE.fullmatch(value):
        raise ValueError(
            f"content_type is {value!r}; it is one word, which {CONSTRAIN} may precede"
        )
    return value


def sampled_content_type(content_type: str | None, recipient: str | None) -> str | None:
    """Return a content type as GPT-OSS samples it, so that it is read as one.

    There is no space behind <|constrain|>. Without a recipient, a single word would be read as the
    recipient.
    """
    if content_type is None:
        return None
    word = content_type.removeprefix(CONSTRAIN).removeprefix(" ")
    is_constrained = content_type.startswith(CONSTRAIN) or recipient is None
    return f"{CONSTRAIN}{word}" if is_constrained else word


def message_text(message: Message) -> str:
    """Return the text of a message."""
    return "".join(getattr(part, "text", "") for part in message.content)
