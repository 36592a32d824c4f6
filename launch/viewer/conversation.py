"""A recorded episode as the messages of a conversation.

Messages are found by their special tokens: what merely spells one, in a prompt or in a tool's
output, is text like any other."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

ENDS = ("<|end|>", "<|call|>", "<|return|>")


@dataclass
class Message:
    """One Harmony message: tokens [start, end) of the episode, its text in [body, body_end)."""

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
    """Split an episode into messages.

    ``texts``: of every token; ``mask``: which ones the policy sampled. Tokens that are in no legal
    message become one without a channel, so that nothing is hidden."""
    messages: list[Message] = []
    start = 0
    while start < len(texts):
        message = _message_at(start, texts, mask)
        start = message.end
        messages.append(message)
    return messages


def _message_at(start: int, texts: Sequence[str], mask: Sequence[bool]) -> Message:
    header_begin = start + 1 if texts[start] == "<|start|>" else start
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
