"""Renders conversations in ChatML, with the tokens that inference would consume and sample.

ChatML shows earlier turns in full, so a conversation is one sample with any ``data.history``. The
loss covers the sampled tokens of a turn: from the end of its header through <|im_end|>. The line
break after <|im_end|> belongs to the format and is not in the loss. All calls of one message are
one turn.
"""

import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from rl_loop.chat.messages import FormatError
from rl_loop.chat.open_calls import Numbered
from rl_loop.chat.tools import Tool
from rl_loop.chatml.codec import ChatMl
from rl_loop.chatml.conversation import ChatMessage, chat_message
from rl_loop.chatml.functions import call_recipient
from rl_loop.chatml.vocabulary import TOOL_CALL, TOOL_CALL_END
from rl_loop.conversations.config import Format
from rl_loop.conversations.conversation import (
    CONTROL_KEYS,
    check_not_empty,
    read_control,
)
from rl_loop.conversations.errors import ConversationError
from rl_loop.conversations.formats import (
    outputs_in_call_order,
    plain_messages,
    plain_sharegpt,
    resolve_format,
)
from rl_loop.conversations.harmony import RenderedSample, RenderOptions, fit

SPELLED_MARKUP = re.compile(r"<\|(?:im_start|im_end|endoftext)\|>")
"""Names of tokens that no text may contain. A file with them was probably rendered before."""
SPELLED_CALL = re.compile(f"{re.escape(TOOL_CALL)}|{re.escape(TOOL_CALL_END)}")
"""Tags that parsing would take for a call in a text of the assistant."""


@dataclass(frozen=True)
class ChatEntry:
    """One message of ChatML, its index in its conversation and its part in the loss."""

    message: ChatMessage
    number: int
    """Index of the message in its conversation, from 0."""
    in_loss: bool
    """True if the tokens are in the loss: messages of the assistant, unless their weight is 0."""
    is_truncated: bool
    """True if sampling was cut off within the message."""

    @property
    def is_by_assistant(self) -> bool:
        return self.message.role == "assistant"


class ChatMlRenderer:
    """Reads records of files and renders them for one vocabulary."""

    def __init__(self, codec: ChatMl, options: RenderOptions) -> None:
        self._codec = codec
        self._options = options

    def render_record(
        self, record: Any, record_format: Format
    ) -> tuple[list[RenderedSample], list[str]]:
        """Render the sample of a record.

        Args:
            record: JSON value.
            record_format: format of the record.

        Returns:
            A list with the sample, and an empty list of reasons.

        Raises:
            ConversationError: if a policy could not have sampled it, if ChatML cannot express it, or
                if it is too long.
        """
        messages, tools = _read(record, record_format)
        # Order the messages first, because the checks below compare neighboring messages.
        entries = _entries(outputs_in_order(messages))
        check_conversation(entries, tools)

        sample = self._render(entries, tools)
        reason = fit(sample, self._options)
        if reason is not None:
            raise ConversationError(reason)
        return [sample], []

    def _render(self, entries: Sequence[ChatEntry], tools: Sequence[Tool]) -> RenderedSample:
        """Render the messages as a policy samples and sees them."""
        sample = RenderedSample()
        # Messages since the last turn of the assistant.
        others: list[ChatMessage] = []
        is_first_turn = True
        for entry in entries:
            if not entry.is_by_assistant:
                others.append(entry.message)
                continue

            # Only the prefix has the system message and the tools.
            if is_first_turn:
                sample.add(self._render_prefix(others, tools), in_loss=False)
            else:
                sample.add(self._codec.render_replies(others), in_loss=False)
            turn = self._codec.render_turn(entry.message, entry.is_truncated)
            # A turn that was cut off has no end, so parsing would report a format error.
            if not entry.is_truncated:
                self._check_round_trip(entry, turn)
            sample.add(turn, entry.in_loss)
            others, is_first_turn = [], False
        return sample

    def _check_round_trip(self, entry: ChatEntry, turn: Sequence[int]) -> None:
        """Check that parsing the rendered turn gives the calls of the message.

        Raises:
            ConversationError: if it does not. The error has the index of the message in its conversation.
        """
        # Text without calls cannot be misread, because ``_check_text`` refuses the format's markup.
        if not entry.message.calls:
            return
        read = self._codec.parse(turn)
        if isinstance(read, FormatError):
            raise ConversationError(
                f"message {entry.number}: in RL its calls would be a format error ({read.kind})"
            )
        # Text before the calls is a message without a recipient.
        recipients = [message.recipient for message in read if message.recipient is not None]
        meant = [call_recipient(call) for call in entry.message.calls]
        if recipients != meant:
            raise ConversationError(
                f"message {entry.number}: parsing would change its calls of {meant} to {recipients}"
            )

    def _render_prefix(self, messages: Sequence[ChatMessage], tools: Sequence[Tool]) -> list[int]:
        try:
            return self._codec.render_prefix(messages, tools)
        except ValueError as error:
            raise ConversationError(f"its tools cannot be described: {error}") from None


# ---- from a record to entries


def _read(record: Any, record_format: Format) -> tuple[list[Numbered], list[Tool]]:
    """Return the messages of a record and the tools that it describes."""
    record_format = resolve_format(record, record_format)
    if record_format == "harmony":
        raise ConversationError("it is in Harmony's format, and ChatML has no channels")
    if record.get("reasoning_effort"):
        raise ConversationError("'reasoning_effort' is not supported by ChatML")
    return plain_sharegpt(record) if record_format == "sharegpt" else plain_messages(record)


def outputs_in_order(messages: Sequence[Numbered]) -> list[Numbered]:
    """Sort the tool outputs of each message's calls by the order of these calls.

    ChatML does not name the call of an output, so outputs must have the order of the calls.

    Raises:
        ConversationError: for a call without an output, except at the end, and for an output
            without a call.
    """
    ordered: list[Numbered] = []
    left = deque(messages)
    while left:
        number, message = left.popleft()
        ordered.append((number, message))

        calls = message.get("tool_calls") or []
        outputs: list[Numbered] = []
        while left and left[0][1].get("role") == "tool":
            outputs.append(left.popleft())

        # The conversation may end with calls, which are trained on without their outputs.
        ends_with_calls = not outputs and not left
        if ends_with_calls:
            break
        # Without call ids, a missing output would assign the following outputs to wrong calls.
        if len(outputs) != len(calls):
            raise ConversationError(
                f"message {number} calls {len(calls)} functions, but {len(outputs)} tool outputs "
                "follow"
            )
        ordered += outputs_in_call_order(message, outputs)
    return ordered


def _entries(messages: Sequence[Numbered]) -> list[ChatEntry]:
    return [_entry(number, message) for number, message in messages]


def _entry(number: int, message: Mapping[str, Any]) -> ChatEntry:
    """Read one message. Raises ConversationError."""
    in_loss = is_truncated = False
    if message.get("role") == "assistant":
        in_loss, is_truncated = read_control(number, message)
        # The codec refuses keys that it does not render.
        message = {key: value for key, value in message.items() if key not in CONTROL_KEYS}
        check_not_empty(number, message)
    try:
        return ChatEntry(chat_message(number, message), number, in_loss, is_truncated)
    except ValueError as error:
        raise ConversationError(str(error)) from None


# ---- checks


def check_conversation(entries: Sequence[ChatEntry], tools: Sequence[Tool]) -> None:
    """Check that inference could sample every turn. Raises ConversationError."""
    if not any(entry.is_by_assistant for entry in entries):
        raise ConversationError("it has no assistant message")
    if entries[0].is_by_assistant:
        raise ConversationError("it begins with an assistant message")
    last = entries[-1]
    if not last.is_by_assistant:
        raise ConversationError(
            f"it ends with message {last.number} (role {last.message.role!r}). The last message "
            "must be the assistant's"
        )

    for before, entry in pairwise(entries):
        if before.is_truncated:
            raise ConversationError("a message with finish_reason 'length' must be the last one")
        if before.is_by_assistant and entry.is_by_assistant:
            raise ConversationError(
                f"message {before.number}: a turn of the assistant is followed by "
                "another assistant message"
            )
    _check_calls(entries, tools)
    for entry in entries:
        _check_text(entry)
    if not any(entry.in_loss for entry in entries):
        raise ConversationError("no token is in the loss: every message has weight 0")


def _check_calls(entries: Sequence[ChatEntry], tools: Sequence[Tool]) -> None:
    """Check that called functions are described, if the record describes any."""
    described = {tool.name for tool in tools}
    for entry in entries:
        for call in entry.message.calls:
            # Without tools, instructions may describe the functions in words.
            if described and call.name not in described:
                raise ConversationError(
                    f"message {entry.number}: it calls {call.name}, which is not "
                    f"described (described: {', '.join(sorted(described))})"
                )


def _check_text(entry: ChatEntry) -> None:
    """Check that a text contains no markup of the format."""
    texts = [entry.message.text, *(call.arguments for call in entry.message.calls)]
    for text in texts:
        spelled = SPELLED_MARKUP.search(text)
        # Other roles may quote the tags. Parsing reads only the assistant's turns.
        if spelled is None and entry.is_by_assistant:
            spelled = SPELLED_CALL.search(text)
        if spelled is not None:
            raise ConversationError(
                f"message {entry.number}: its text contains {spelled.group()}. Remove "
                "markup from texts, and give calls in 'tool_calls'"
            )
