"""A sampled turn in the form that clients see: reasoning, text and calls."""

import hashlib
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from rl_loop.chat.codec import ChatCodec
from rl_loop.chat.messages import FormatError, ParsedMessage
from rl_loop.chat.tools import FUNCTIONS, Tool
from rl_loop.data.trajectory import FinishReason
from rl_loop.engines.protocol import GenerateResult
from rl_loop.gateway.raw_prompt import text_range
from rl_loop.gateway.request import MessageDigest, message_digest
from rl_loop.gateway.stop_text import StopCut, find_stop, shorten


@dataclass(frozen=True)
class FunctionCall:
    """A call of a client's function."""

    call_id: str
    """Id by which the client's tool output refers to the call."""
    name: str
    arguments: str
    """Arguments as written by the policy. Valid arguments are JSON."""
    channel: str
    """Channel of the call, on which its output is rendered."""


@dataclass(frozen=True)
class Reasoning:
    """A message on ``analysis``."""

    text: str


@dataclass(frozen=True)
class AnswerText:
    """A message to the user: a comment before a call, or the final answer."""

    text: str


type AnswerItem = Reasoning | AnswerText | FunctionCall


@dataclass(frozen=True)
class PolicyAnswer:
    """A turn of the policy."""

    items: tuple[AnswerItem, ...] = ()
    """Messages and calls in the order of the turn."""

    @property
    def reasoning(self) -> str:
        """All reasoning, joined by newlines."""
        return "\n".join(item.text for item in self.items if isinstance(item, Reasoning))

    @property
    def texts(self) -> tuple[str, ...]:
        """Messages to the user."""
        return tuple(item.text for item in self.items if isinstance(item, AnswerText))

    @property
    def calls(self) -> tuple[FunctionCall, ...]:
        """Calls of the client's functions."""
        return tuple(item for item in self.items if isinstance(item, FunctionCall))

    @property
    def content(self) -> str:
        """All texts, joined by newlines."""
        return "\n".join(self.texts)

    def as_message(self) -> dict[str, Any]:
        """Return the message that the client adds to its conversation."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        # Absent keys mean no reasoning and no calls: ``new_node`` recognizes an empty turn by its
        # keys.
        if self.reasoning:
            message["thinking"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [
                {"id": call.call_id, "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.calls
            ]
        return message


@dataclass(frozen=True)
class ReadTurn:
    """Parsed content of a sampled turn."""

    answer: PolicyAnswer
    format_error: str | None = None
    """Reason why clients cannot get the turn: a ``FormatError.kind``, "unknown_tool", or
    "unanswered" if it has neither a message nor a call. None for valid turns."""
    closing: tuple[int, ...] = ()
    """Token ids that close a truncated turn when the conversation continues."""
    dropped: int = 0
    """Number of tokens to drop at the end of a truncated turn then, see ``TruncatedTurn``."""
    reasoning_tokens: int = 0
    """Number of sampled tokens in analysis messages, including headers."""
    kept: int | None = None
    """Number of tokens up to the end of a stop text. None if the turn has none."""
    hidden_token_count: int = 0
    """Number of tokens at the end of these that begin within the stop text."""

    @cached_property
    def digest(self) -> MessageDigest:
        """Digest of the answer as a message of the conversation."""
        return message_digest(self.answer.as_message())


def call_id(response_id: str, number: int) -> str:
    """Return the id of a call: unique, and known before the turn is complete.

    Args:
        response_id: name of the turn.
        number: number of the call in the turn, from 0.
    """
    digest = hashlib.blake2b(f"{response_id}/{number}".encode(), digest_size=12)
    return f"call_{digest.hexdigest()}"


def read_turn(
    codec: ChatCodec,
    sampled: GenerateResult,
    tools: Sequence[Tool],
    response_id: str,
    stop: Sequence[str] = (),
) -> ReadTurn:
    """Parse a sampled turn, and compute all values that take long for long turns.

    Args:
        codec: chat format of the policy.
        sampled: the turn.
        tools: functions that the client offered.
        response_id: name of the turn.
        stop: texts that end the turn.
    """
    ids = sampled.output_ids
    cut = find_stop(codec, ids, codec.answer_ranges(ids), stop) if stop else None
    if cut is None:
        turn = _parsed_turn(codec, sampled, tools, response_id)
    else:
        sampled = shorten(sampled, cut.kept)
        turn = _stopped_turn(codec, sampled.output_ids, cut, tools, response_id)
    turn = replace(turn, reasoning_tokens=codec.reasoning_tokens(sampled.output_ids))
    # Computed here, because a worker may run this function, and pickle passes cached values on.
    _ = turn.digest
    return turn


def read_completion(codec: ChatCodec, ids: Sequence[int], stop: Sequence[str] = ()) -> ReadTurn:
    """Read a sampled completion, which is text without a format.

    Args:
        codec: chat format of the policy, for its vocabulary.
        ids: sampled tokens.
        stop: texts that end the completion.
    """
    places = text_range(codec, ids)
    cut = find_stop(codec, ids, [places], stop) if stop else None
    if cut is None:
        text = codec.decode(ids[: len(places)])
        turn = ReadTurn(PolicyAnswer((AnswerText(text),)), dropped=len(ids) - len(places))
    else:
        # The client does not see the stop text, so a continued text does not contain it.
        rest_ids = codec.vocabulary.encode_text(cut.rest) if cut.rest else []
        turn = ReadTurn(
            PolicyAnswer((AnswerText(cut.text),)),
            closing=tuple(rest_ids),
            dropped=cut.dropped,
            kept=cut.kept,
            hidden_token_count=cut.dropped - bool(cut.rest),
        )
    _ = turn.digest
    return turn


def _parsed_turn(
    codec: ChatCodec, sampled: GenerateResult, tools: Sequence[Tool], response_id: str
) -> ReadTurn:
    """Return the answer in sampled tokens."""
    ids = sampled.output_ids
    # Recipients have the prefix of functions, names of the client's tools do not.
    names = {f"{FUNCTIONS}{tool.name}" for tool in tools}
    if sampled.finish_reason is not FinishReason.STOP:
        # A truncated turn is not a format error, whatever its content.
        cut = codec.parse_truncated_for_client(ids)
        # The client cannot run any other call. In a truncated turn it is dropped instead of
        # reported.
        readable = [m for m in cut.messages if m.recipient is None or m.recipient in names]
        return ReadTurn(
            _build_answer(readable, response_id), closing=cut.closing, dropped=cut.dropped
        )

    return _complete_turn(codec, ids, names, response_id)


def _stopped_turn(
    codec: ChatCodec, ids: Sequence[int], cut: StopCut, tools: Sequence[Tool], response_id: str
) -> ReadTurn:
    """Parse a turn that ends with a stop text."""
    names = {f"{FUNCTIONS}{tool.name}" for tool in tools}
    # The turn must be valid up to here. Its last text is closed as if it were complete.
    turn = _complete_turn(codec, [*ids, codec.stop_token_ids[0]], names, response_id)
    if turn.format_error is not None:
        return replace(turn, kept=cut.kept)

    # The client does not see the stop text, so a continued conversation does not contain it.
    rest_ids = codec.vocabulary.encode_text(cut.rest) if cut.rest else []
    closed = codec.parse_truncated_for_client([*ids[: cut.kept - cut.dropped], *rest_ids])
    # The turn ends within a text, so this text is its last item.
    return ReadTurn(
        PolicyAnswer((*turn.answer.items[:-1], AnswerText(cut.text))),
        closing=(*rest_ids, *closed.closing),
        dropped=cut.dropped,
        kept=cut.kept,
        # The first dropped token may begin with text of the answer.
        hidden_token_count=cut.dropped - bool(cut.rest),
    )


def _complete_turn(
    codec: ChatCodec, ids: Sequence[int], names: Container[str], response_id: str
) -> ReadTurn:
    """Parse a turn that the policy ended. ``names`` are the recipients that the client offered."""
    messages = codec.parse_for_client(ids)
    if isinstance(messages, FormatError):
        return ReadTurn(PolicyAnswer(), format_error=messages.kind)
    # Built-in tools are unknown, too: only environments run them, so the call would stay
    # unanswered.
    if any(m.recipient is not None and m.recipient not in names for m in messages):
        return ReadTurn(PolicyAnswer(), format_error="unknown_tool")
    # The client would get neither a text nor a call, so its agent would have nothing to act on.
    if all(message.channel == "analysis" and message.recipient is None for message in messages):
        return ReadTurn(PolicyAnswer(), format_error="unanswered")
    return ReadTurn(_build_answer(messages, response_id))


def _build_answer(messages: Sequence[ParsedMessage], response_id: str) -> PolicyAnswer:
    """Return the items of an answer, in the order of the messages."""
    items: list[AnswerItem] = []
    calls = 0
    for message in messages:
        # The recipient decides, not the channel: a call may be on the channel of reasoning, too.
        if message.recipient is not None:
            # Chat formats have no call ids. The forest finds the turn of a call by this id.
            name = message.recipient.removeprefix(FUNCTIONS)
            items.append(
                FunctionCall(call_id(response_id, calls), name, message.text, message.channel)
            )
            calls += 1
        elif message.channel == "analysis":
            items.append(Reasoning(message.text))
        else:
            items.append(AnswerText(message.text))
    return PolicyAnswer(tuple(items))
