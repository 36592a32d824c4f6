"""Translates conversations to Harmony and checks that a policy could have sampled them."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from openai_harmony import DeveloperContent, Message, ReasoningEffort, Role

from rl_loop.chat.tools import FUNCTIONS
from rl_loop.conversations.errors import ConversationError
from rl_loop.harmony.codec import Tool
from rl_loop.harmony.conversation import MessageTranslator, describe_message, message_text

BUILTIN_NAMESPACES = frozenset({"python", "browser"})
"""Built-in tools of GPT-OSS: first components of their recipients."""
CONTROL_KEYS = ("weight", "finish_reason")
"""Keys of the assistant's messages that control the loss and are not rendered."""

SPECIAL_TOKEN = re.compile(
    r"<\|(?:start|end|message|channel|constrain|return|call|startoftext|endoftext|endofprompt"
    r"|reserved_\d+)\|>"
)
"""Names of Harmony's special tokens.

They are plain text in a message. A file that contains them was probably rendered before.
"""


@dataclass(frozen=True)
class ConversationEntry:
    """One message of Harmony, its index in the file and its part in the loss."""

    message: Message
    number: int
    """Index of the message in the file, from 0."""
    in_loss: bool
    """True if the tokens are in the loss: messages of the assistant, unless their weight is 0."""

    @property
    def is_by_assistant(self) -> bool:
        return self.message.author.role is Role.ASSISTANT

    @property
    def is_answer(self) -> bool:
        return self.is_by_assistant and self.message.channel == "final"

    @property
    def is_call(self) -> bool:
        return self.is_by_assistant and self.message.recipient is not None


@dataclass(frozen=True)
class Conversation:
    """Checked conversation, ready for rendering."""

    developer_messages: list[Message]
    """Developer messages at the beginning."""
    tools: list[Tool]
    """Functions that the developer message describes."""
    entries: list[ConversationEntry]
    """Messages after ``developer_messages``. The last one is the assistant's."""
    system: Message | None = None
    """System message. None for the system message of the run."""
    reasoning_effort: ReasoningEffort | None = None
    """Reasoning effort in the run's system message. None for the run's setting."""
    truncated: bool = False
    """True if sampling was cut off within the last message."""

    @property
    def turns(self) -> list[range]:
        """Turns of the assistant, as ranges of ``entries``.

        Each turn ends with a call or an answer. The last one may be cut off.
        """
        turns: list[range] = []
        start = 0
        for i, entry in enumerate(self.entries):
            if not entry.is_by_assistant:
                if i > start:
                    turns.append(range(start, i))
                start = i + 1
        # The checks make sure that the assistant speaks last.
        turns.append(range(start, len(self.entries)))
        return turns


def make_conversation(
    messages: Iterable[tuple[int, Mapping[str, Any]]],
    *,
    tools: Sequence[Tool] = (),
    developer_messages: Sequence[Message] = (),
    callable_functions: frozenset[str] | None = None,
    namespaces: frozenset[str] = BUILTIN_NAMESPACES,
    system: Message | None = None,
    reasoning_effort: ReasoningEffort | None = None,
) -> Conversation:
    """Translate and check a conversation.

    Args:
        messages: pairs of an index in the file and a message in the format of
            ``rl_loop.harmony.conversation``, with CONTROL_KEYS.
        tools: functions that the developer describes.
        developer_messages: first developer messages, already in Harmony's format.
        callable_functions: names of the functions that may be called; None allows any.
        namespaces: tools and namespaces of tools that may be called, without functions.
        system: replacement for the run's system message.
        reasoning_effort: replacement for the run's reasoning effort.

    Raises:
        ConversationError: if it is not valid. The message names the file's message.
    """
    entries, truncated = _translate(messages)

    # Developer messages at the beginning are rendered together with the system message.
    first_turn = 0
    while first_turn < len(entries) and entries[first_turn].message.author.role is Role.DEVELOPER:
        first_turn += 1
    conversation = Conversation(
        developer_messages=[
            *developer_messages,
            *(entry.message for entry in entries[:first_turn]),
        ],
        tools=list(tools),
        entries=entries[first_turn:],
        system=system,
        reasoning_effort=reasoning_effort,
        truncated=truncated,
    )

    # The ends come first: the turns below exist only if the assistant speaks last.
    _check_ends(conversation)
    for turn in conversation.turns:
        is_last = turn.stop == len(conversation.entries)
        in_turn = conversation.entries[turn.start : turn.stop]
        _check_turn(in_turn, may_be_cut=is_last and truncated)
    _check_recipients(conversation, namespaces)
    if callable_functions is not None:
        _check_calls(conversation, callable_functions)
    _check_texts(conversation)
    if not any(entry.in_loss for entry in conversation.entries):
        raise ConversationError("no token is in the loss: every message has weight 0")
    return conversation


# ---- from messages to entries


def _translate(
    messages: Iterable[tuple[int, Mapping[str, Any]]],
) -> tuple[list[ConversationEntry], bool]:
    """Return the messages of Harmony, and True if the last one was cut off."""
    # The translator pairs calls and tool outputs, so it needs all messages in order.
    translator = MessageTranslator()
    entries: list[ConversationEntry] = []
    truncated = False

    for number, message in messages:
        if truncated:
            raise ConversationError("a message with finish_reason 'length' must be the last one")
        role = message.get("role") if isinstance(message, Mapping) else None
        # GPT-OSS waits for the tool output after <|call|>. ``_check_turn`` reports an assistant's
        # message.
        if role not in ("assistant", "tool") and translator.open_calls:
            recipient = translator.open_calls[0].recipient
            raise ConversationError(
                f"{describe_message(number, message)}: the earlier call of {recipient} has no tool "
                "output"
            )

        in_loss = False
        if role == "assistant":
            in_loss, truncated = read_control(number, message)
            # The translator refuses keys that it does not render.
            message = {key: value for key, value in message.items() if key not in CONTROL_KEYS}
            check_not_empty(number, message)
        try:
            translated = translator.translate(number, message)
        except ValueError as error:
            raise ConversationError(str(error)) from None
        entries += [ConversationEntry(part, number, in_loss) for part in translated]

    return entries, truncated


def read_control(number: int, message: Mapping[str, Any]) -> tuple[bool, bool]:
    """Read CONTROL_KEYS of an assistant message.

    Returns:
        True if the message is in the loss, and True if it was cut off.

    Raises:
        ConversationError: if a value is invalid.
    """
    name = describe_message(number, message)
    weight = message.get("weight")
    if weight is not None and weight not in (0, 1):
        raise ConversationError(f"{name}: weight is {weight!r}. It must be 0 or 1")

    finish_reason = message.get("finish_reason")
    if finish_reason not in (None, "stop", "tool_calls", "length"):
        raise ConversationError(
            f"{name}: finish_reason is {finish_reason!r}. It must be stop, tool_calls or length"
        )
    return weight != 0, finish_reason == "length"


def check_not_empty(number: int, message: Mapping[str, Any]) -> None:
    keys = ("content", "thinking", "tool_calls")
    # A message without any of these would train only the stop token.
    if not any(message.get(key) for key in keys):
        raise ConversationError(
            f"{describe_message(number, message)}: it needs at least one of {', '.join(keys)}"
        )


# ---- checks


def _check_ends(conversation: Conversation) -> None:
    """Check that the assistant has a message to reply to and speaks last."""
    entries = conversation.entries
    if not any(entry.is_by_assistant for entry in entries):
        raise ConversationError("it has no assistant message")

    first = entries[0]
    # Instructions of a developer are enough for the assistant to begin.
    if first.is_by_assistant and not conversation.developer_messages:
        raise ConversationError("it begins with an assistant message")

    last = entries[-1]
    if not last.is_by_assistant:
        role = last.message.author.role.value
        raise ConversationError(
            f"it ends with message {last.number} (role {role!r}). The last message must be the assistant's"
        )


def _check_turn(turn: Sequence[ConversationEntry], may_be_cut: bool) -> None:
    """Check that inference could sample the turn."""
    for entry in turn[:-1]:
        # A stop token ends sampling, so no message of the turn can follow it.
        if entry.is_call:
            raise ConversationError(
                f"message {entry.number}: the call of {entry.message.recipient} is followed "
                "by an assistant message instead of its answer"
            )
        if entry.is_answer:
            raise ConversationError(
                f"message {entry.number}: an answer of the assistant is followed by "
                "another assistant message"
            )

    last = turn[-1]
    if not (last.is_call or last.is_answer or may_be_cut):
        raise ConversationError(
            f"message {last.number}: the assistant's turn ends on channel {last.message.channel}, "
            "without a call or an answer. If it was cut off, set finish_reason to 'length'"
        )


def _check_recipients(conversation: Conversation, namespaces: frozenset[str]) -> None:
    """Check that every recipient is a function or a known tool. Others are format errors in RL."""
    for entry in conversation.entries:
        recipient = entry.message.recipient
        # ``_check_calls`` checks functions, if their descriptions are known.
        if not entry.is_call or recipient is None or recipient.startswith(FUNCTIONS):
            continue
        if recipient.partition(".")[0] not in namespaces:
            known = ", ".join(sorted(namespaces))
            raise ConversationError(
                f"message {entry.number}: it calls {recipient}, which is neither a function "
                f"({FUNCTIONS}NAME) nor a tool of {known}"
            )


def _check_calls(conversation: Conversation, functions: frozenset[str]) -> None:
    """Check that every called function is described."""
    for entry in conversation.entries:
        recipient = entry.message.recipient
        if not entry.is_call or recipient is None or not recipient.startswith(FUNCTIONS):
            continue
        if recipient.removeprefix(FUNCTIONS) not in functions:
            # List the described names, because the mistake is often a spelling.
            described = ", ".join(sorted(functions)) or "none"
            raise ConversationError(
                f"message {entry.number}: it calls {recipient}, which is not "
                f"described (described: {described})"
            )


def _check_texts(conversation: Conversation) -> None:
    """Check that no text spells a special token."""
    for entry in conversation.entries:
        _check_text(f"message {entry.number}", message_text(entry.message))
    for message in conversation.developer_messages:
        for part in message.content:
            if isinstance(part, DeveloperContent):
                _check_text("the developer's message", part.model_dump_json())
    for tool in conversation.tools:
        # The printed schema contains all its names and descriptions.
        _check_text(f"the tool {tool.name}", f"{tool.description} {tool.parameters}")


def _check_text(name: str, text: str) -> None:
    # Fast path: nearly all texts lack these characters.
    if "<|" not in text:
        return
    token = SPECIAL_TOKEN.search(text)
    if token is not None:
        raise ConversationError(
            f"{name}: its text contains the special token {token.group()}. Remove special "
            "tokens from texts"
        )
