"""Conversion of a recorded episode to the messages of a conversation.

Messages are delimited by special tokens. Text that only looks like a special token, for example in
a prompt or a tool's output, stays text.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from rl_loop.chatml.vocabulary import IM_END, IM_START, TOOL_CALL, TOOL_CALL_END
from rl_loop.harmony.messages import MessageHeader, MessageSpan, read_header, split_messages
from rl_loop.harmony.vocabulary import SPECIAL_TOKENS


@dataclass
class DisplayedMessage:
    """One message: tokens [start, end) of the episode, its text in [body, body_end)."""

    start: int
    body: int
    body_end: int
    end: int
    role: str
    """Author: "system", "developer", "user", "assistant" or the name of a tool."""
    channel: str | None
    """Channel: analysis, commentary or final."""
    recipient: str | None
    """Tool that is called, or the recipient of a tool's message."""
    content_type: str | None
    """Content type, such as "code" or "<|constrain|>json"."""
    ended_by: str | None
    """Special token that ended the message; None if the episode was truncated."""
    is_sampled: bool
    """True if the policy sampled at least one token of the message."""
    text: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def split_episode(texts: Sequence[str], mask: Sequence[bool]) -> list[DisplayedMessage]:
    """Split an episode in Harmony or ChatML into messages.

    Tokens outside of well-formed messages become messages without a channel, so that all tokens are
    shown.

    Args:
        texts: text of every token.
        mask: True for tokens that the policy sampled.
    """
    # Harmony has no such token, so one of them decides.
    if IM_START in texts:
        return chatml_messages(texts, mask)

    # Compare whole tokens, so that text which spells a special token stays text.
    specials = [(place, text) for place, text in enumerate(texts) if text in SPECIAL_TOKENS]
    return [_build_message(span, texts, mask) for span in split_messages(specials, len(texts))]


def _build_message(
    span: MessageSpan, texts: Sequence[str], mask: Sequence[bool]
) -> DisplayedMessage:
    if span.body is None:
        # A header without a message: sampling was truncated, or is malformed.
        header, body = MessageHeader("assistant", None, None, None), min(span.header, span.body_end)
    else:
        # The token before the body is <|message|>, which is no part of the header.
        header, body = read_header("".join(texts[span.header : span.body - 1])), span.body

    return DisplayedMessage(
        start=span.start,
        body=body,
        body_end=span.body_end,
        end=span.end,
        **header._asdict(),
        ended_by=span.ended_by,
        is_sampled=any(mask[span.start : span.end]),
        text="".join(texts[body : span.body_end]),
    )


# -- ChatML ---------------------------------------------------------------------------------------

RESPONSES = re.compile(r"\s*<tool_response>\n?(.*?)\n?</tool_response>\s*", re.DOTALL)
"""Tool output, which ChatML sends as a message of the user."""


def chatml_messages(texts: Sequence[str], mask: Sequence[bool]) -> list[DisplayedMessage]:
    """Split an episode in ChatML into messages. Each function call is a separate message.

    Args:
        texts: text of every token.
        mask: True for tokens that the policy sampled.
    """
    starts = [i for i, text in enumerate(texts) if text == IM_START]
    # Tokens before the first message also form one, so that none is hidden.
    cuts = sorted({0, *starts, len(texts)})
    return [
        message
        for start, end in pairwise(cuts)
        for message in _chatml_parts(start, end, texts, mask)
    ]


def _chatml_parts(
    start: int, end: int, texts: Sequence[str], mask: Sequence[bool]
) -> Iterator[DisplayedMessage]:
    """Split the tokens [start, end) of one message, and separate its function calls."""
    tokens = list(texts[start:end])
    # Without an end token, the message was truncated, or the next one began.
    body_end = start + tokens.index(IM_END) if IM_END in tokens else end
    role, body = _chatml_header(start, body_end, texts)

    calls = []
    # The token in a message of another author is a quotation, not a call.
    if role == "assistant":
        calls = [i for i in range(body, body_end) if texts[i] == TOOL_CALL]
    if not calls or "".join(texts[body : calls[0]]).strip():
        cuts = [start, *calls, end]
    else:
        cuts = [start, *calls[1:], end]  # no text precedes the first call
    for first, last in pairwise(cuts):
        # Only the last part ends with the message's own end token.
        is_last = last == end
        yield _chatml_message(
            first,
            last,
            role=role,
            body=max(first, body),
            body_end=body_end if is_last else last,
            ended_by=(IM_END if body_end < end else None) if is_last else TOOL_CALL,
            texts=texts,
            mask=mask,
        )


def _chatml_header(start: int, body_end: int, texts: Sequence[str]) -> tuple[str, int]:
    """Return the role and the start of the text.

    An incomplete header counts as text of the assistant.
    """
    begin = start + 1 if texts[start] == IM_START else start
    for i in range(begin, body_end):
        if "\n" in texts[i]:
            # The first line is the role. One token may hold the line break and more.
            role = "".join(texts[begin : i + 1]).partition("\n")[0].strip()
            return role or "assistant", i + 1
    return "assistant", min(begin, body_end)


def _chatml_message(
    start: int,
    end: int,
    *,
    role: str,
    body: int,
    body_end: int,
    ended_by: str | None,
    texts: Sequence[str],
    mask: Sequence[bool],
) -> DisplayedMessage:
    text = "".join(texts[body:body_end])
    recipient = None
    content_type = None

    if role == "assistant" and TOOL_CALL in texts[body:body_end]:
        text = text.strip().removeprefix(TOOL_CALL).removesuffix(TOOL_CALL_END).strip()
        # Sampled text may be invalid JSON, so search for the name instead of parsing.
        name = re.search(r'"name"\s*:\s*"([^"]*)"', text)
        recipient = name[1] if name else "a tool"
        content_type = "json"
    elif role == "user":
        # ChatML sends tool outputs as a message of the user that contains nothing else.
        responses = RESPONSES.findall(text)
        if responses and not RESPONSES.sub("", text):
            role = "tool"
            text = "\n".join(responses)

    return DisplayedMessage(
        start=start,
        body=body,
        body_end=body_end,
        end=end,
        role=role,
        channel=None,
        recipient=recipient,
        content_type=content_type,
        ended_by=ended_by,
        is_sampled=any(mask[start:end]),
        text=text,
    )
