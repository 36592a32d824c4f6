"""A recorded episode as the messages of a conversation.

Messages are found by their special tokens: what merely spells one, in a prompt or in a tool's
output, is text like any other."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from rl_loop.chatml.vocabulary import IM_END, IM_START, TOOL_CALL, TOOL_CALL_END
from rl_loop.harmony.messages import Header, MessageSpan, read_header, split_messages
from rl_loop.harmony.vocabulary import SPECIAL_TOKENS


@dataclass
class Message:
    """One message: tokens [start, end) of the episode, its text in [body, body_end)."""

    start: int
    body: int
    body_end: int
    end: int
    role: str
    """Who speaks: "system", "developer", "user", "assistant" or the name of a tool."""
    channel: str | None
    """Which one: analysis, commentary or final."""
    recipient: str | None
    """The tool that is called, or who is answered."""
    content_type: str | None
    """Such as "code" or "<|constrain|>json"."""
    ended_by: str | None
    """The special token behind it; None if the episode was cut short there."""
    is_sampled: bool
    """Whether the policy wrote it."""
    text: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def messages_of(texts: Sequence[str], mask: Sequence[bool]) -> list[Message]:
    """Split an episode, of Harmony or ChatML, into messages.

    ``texts``: of every token; ``mask``: which ones the policy sampled. Tokens that are in no legal
    message become one without a channel, so that nothing is hidden."""
    if IM_START in texts:
        return chatml_messages(texts, mask)

    specials = [(place, text) for place, text in enumerate(texts) if text in SPECIAL_TOKENS]
    return [_message_of(span, texts, mask) for span in split_messages(specials, len(texts))]


def _message_of(span: MessageSpan, texts: Sequence[str], mask: Sequence[bool]) -> Message:
    if span.body is None:
        # A header without a message: where sampling was cut short, or nonsense.
        header, body = Header("assistant", None, None, None), min(span.header, span.body_end)
    else:
        header, body = read_header("".join(texts[span.header : span.body - 1])), span.body

    return Message(
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
"""What a tool answered: text of a message in the user's name."""


def chatml_messages(texts: Sequence[str], mask: Sequence[bool]) -> list[Message]:
    """Split an episode of ChatML into messages; a function call is one of its own."""
    starts = [i for i, text in enumerate(texts) if text == IM_START]
    cuts = sorted({0, *starts, len(texts)})
    return [
        message
        for start, end in pairwise(cuts)
        for message in _chatml_parts(start, end, texts, mask)
    ]


def _chatml_parts(
    start: int, end: int, texts: Sequence[str], mask: Sequence[bool]
) -> Iterator[Message]:
    """Split the tokens [start, end) from one ``<|im_start|>`` to the next, its calls apart."""
    tokens = list(texts[start:end])
    body_end = start + tokens.index(IM_END) if IM_END in tokens else end
    role, body = _chatml_header(start, body_end, texts)

    calls = []
    if role == "assistant":
        calls = [i for i in range(body, body_end) if texts[i] == TOOL_CALL]
    if not calls or "".join(texts[body : calls[0]]).strip():
        cuts = [start, *calls, end]
    else:
        cuts = [start, *calls[1:], end]  # nothing was said before the call
    for first, last in pairwise(cuts):
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
    """Return the role and where the text begins; of a header without an end, the whole of it is
    text of the assistant."""
    begin = start + 1 if texts[start] == IM_START else start
    for i in range(begin, body_end):
        if "\n" in texts[i]:
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
) -> Message:
    text = "".join(texts[body:body_end])
    recipient = None
    content_type = None

    if role == "assistant" and TOOL_CALL in texts[body:body_end]:
        text = text.strip().removeprefix(TOOL_CALL).removesuffix(TOOL_CALL_END).strip()
        # What was sampled need not be JSON.
        name = re.search(r'"name"\s*:\s*"([^"]*)"', text)
        recipient = name[1] if name else "a tool"
        content_type = "json"
    elif role == "user":
        # ChatML brings what tools answer as a user's message of nothing else.
        responses = RESPONSES.findall(text)
        if responses and not RESPONSES.sub("", text):
            role = "tool"
            text = "\n".join(responses)

    return Message(
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
