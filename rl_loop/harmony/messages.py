"""Splits Harmony tokens into messages and reads their headers.

A message is <|start|> HEADER <|message|> TEXT and <|end|>, <|call|> or <|return|>. HEADER is a role
with <|channel|>, <|constrain|> and a recipient. ``split_messages`` finds messages in any tokens,
including truncated ones. ``split_turn`` is strict, for sampled turns. openai-harmony's parser is
not: it reads special tokens inside a text as text, and inside a header as a recipient.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rl_loop.harmony.vocabulary import (
    FIRST_SPECIAL_ID,
    SPECIAL_TOKENS,
    TURN_ENDS,
    special_id,
)

MESSAGE_ENDS = ("<|end|>", *TURN_ENDS)
HEADER_TOKENS = ("<|channel|>", "<|constrain|>")
"""Special tokens that a header may contain, once each and in any order."""


@dataclass(frozen=True)
class MessageSpan:
    """Positions of one message in a sequence of tokens."""

    start: int
    """Index of the first token: <|start|>, or the header if <|start|> precedes the sequence."""
    header: int
    """Index of the header's first token."""
    body: int | None
    """Index of the text's first token; None if there is no <|message|>."""
    body_end: int
    """Index behind the last token of the text, or of the header if there is no text."""
    end: int
    """Index behind the last token."""
    ended_by: str | None
    """Special token that ends the message; None if it is truncated."""


class MessageHeader(NamedTuple):
    """Fields of a header."""

    role: str
    """system, developer, user, assistant or the name of a tool. Default: assistant."""
    channel: str | None
    """analysis, commentary or final."""
    recipient: str | None
    """Called tool, or the role that a tool output is for."""
    content_type: str | None
    """Content type, such as "code" or "<|constrain|>json"."""


def split_messages(specials: Iterable[tuple[int, str]], length: int) -> list[MessageSpan]:
    """Split a sequence of tokens into messages.

    Every token belongs to exactly one message. Tokens outside valid messages become messages
    without a text.

    Args:
        specials: index and name of every special token, in order.
        length: number of all tokens.
    """
    messages: list[MessageSpan] = []
    start = header = 0
    body: int | None = None

    def close(end: int, ended_by: str | None) -> None:
        body_end = end if ended_by is None else end - 1
        messages.append(MessageSpan(start, header, body, body_end, end, ended_by))

    for place, name in specials:
        if name == "<|start|>":
            # The message before has no end: it was cut off, or is malformed.
            if place > start:
                close(place, None)
            start, header, body = place, place + 1, None
        # A second one within a text belongs to the text. ``split_turn`` rejects such a turn.
        elif name == "<|message|>" and body is None:
            body = place + 1
        elif name in MESSAGE_ENDS:
            close(place + 1, name)
            start = header = place + 1
            body = None
    if start < length:
        close(length, None)
    return messages


def split_turn(harmony_ids: Sequence[int]) -> list[MessageSpan] | None:
    """Return the messages of an assistant turn, or None if its special tokens are out of order.

    A turn begins inside a header, after <|start|>. The last message ends with <|return|> or <|call|>,
    all others with <|end|>.
    """
    names = {special_id(token): token for token in SPECIAL_TOKENS}
    # Reserved tokens have no name and are not valid in any position.
    specials = [
        (place, names.get(token_id, ""))
        for place, token_id in enumerate(harmony_ids)
        if token_id >= FIRST_SPECIAL_ID
    ]

    named = dict(specials)
    messages = split_messages(specials, len(harmony_ids))
    for number, message in enumerate(messages):
        has_start = message.header > message.start
        ends = TURN_ENDS if number == len(messages) - 1 else ("<|end|>",)
        # The <|start|> of the first message is in the prompt.
        if has_start != (number > 0) or message.ended_by not in ends:
            return None
        if not _has_valid_specials(message, named):
            return None
    return messages or None


def _has_valid_specials(message: MessageSpan, specials: Mapping[int, str]) -> bool:
    """Return True if a message has a body, and special tokens only where they are allowed.

    Args:
        message: the message.
        specials: names of the special tokens by place.
    """
    if message.body is None:
        return False
    header = range(message.header, message.body - 1)
    in_header = [specials[place] for place in header if place in specials]
    if len(in_header) != len(set(in_header)) or not set(in_header) <= set(HEADER_TOKENS):
        return False
    return not any(place in specials for place in range(message.body, message.body_end))


def read_header(text: str) -> MessageHeader:
    """Read a header in either order of Harmony.

    Both "assistant<|channel|>commentary to=functions.f <|constrain|>json" and
    "assistant to=functions.f<|channel|>commentary" are valid.
    """
    before, _, after = text.partition("<|channel|>")
    role = ""
    channel = recipient = content_type = None
    for word in before.split():
        if word.startswith("to="):
            recipient = word.removeprefix("to=")
        elif not role:
            role = word
    # The token may follow a word without a space.
    for word in after.replace("<|constrain|>", " <|constrain|>").split():
        if word.startswith("to="):
            recipient = word.removeprefix("to=")
        elif channel is None:
            channel = word
        else:
            content_type = word
    return MessageHeader(role or "assistant", channel, recipient, content_type)
