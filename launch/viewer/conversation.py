"""A recorded episode as the messages of a conversation.

Messages are found by their special tokens: what merely spells one, in a prompt or in a tool's
output, is text like any other."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from rl_loop.chatml.vocabulary import IM_END, IM_START, TOOL_CALL, TOOL_CALL_END

ENDS = ("<|end|>", "<|call|>", "<|return|>")


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

    messages: list[Message] = []
    start = 0
    while start < len(texts):
        message = _message_at(start, texts, mask)
        start = message.end
        messages.append(message)
    return messages


def _message_at(start: int, texts: Sequence[str], mask: Sequence[bool]) -> Message:
    header_begin = start + 1 if texts[start] == "<|start|>" else start

    # The end is behind the token that ends the message, or where the next one starts without it.
    end = header_begin
    body = None
    while end < len(texts):
        token = texts[end]
        if token == "<|start|>":
            break  # the message before was not ended
        if token == "<|message|>" and body is None:
            body = end + 1
        end += 1
        if token in ENDS:
            break

    ended_by = texts[end - 1] if texts[end - 1] in ENDS else None
    body_end = end - 1 if ended_by else end

    if body is None:
        # A header without a message: where sampling was cut short, or nonsense.
        header, body = "assistant", min(header_begin, body_end)
    else:
        header = "".join(texts[header_begin : body - 1])
    role, channel, recipient, content_type = _read_header(header)

    return Message(
        start=start,
        body=body,
        body_end=body_end,
        end=end,
        role=role,
        channel=channel,
        recipient=recipient,
        content_type=content_type,
        ended_by=ended_by,
        is_sampled=any(mask[start:end]),
        text="".join(texts[body:body_end]),
    )


def _read_header(header: str) -> tuple[str, str | None, str | None, str | None]:
    """Read role, channel, recipient and content type, in either order that Harmony allows:
    "assistant<|channel|>commentary to=functions.f <|constrain|>json", "assistant to=f<|channel|>"."""
    before, _, after = header.partition("<|channel|>")
    role = ""
    channel = recipient = content_type = None
    for word in before.split():
        if word.startswith("to="):
            recipient = word.removeprefix("to=")
        elif not role:
            role = word
    for word in after.replace("<|constrain|>", " <|constrain|>").split():
        if word.startswith("to="):
            recipient = word.removeprefix("to=")
        elif channel is None:
            channel = word
        else:
            content_type = word
    return role or "assistant", channel, recipient, content_type


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
