"""What a codec makes of sampled tokens, and what it is given to render."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ParsedMessage:
    """One message that the policy wrote.

    Channels and recipients are those of Harmony in every format: environments read them, and a
    format without them says them in its own way.
    """

    channel: str
    """"analysis" (thoughts), "commentary" (calls of functions) or "final" (what the user reads)."""
    recipient: str | None
    """The tool that is called, such as "python" or "functions.search"; None if it is no call."""
    content_type: str | None
    """Such as "code"; begins with "<|constrain|>" where Harmony has that token before it."""
    text: str


@dataclass(frozen=True)
class ToolOutput:
    """What a tool answers."""

    tool: str
    """The recipient of the call."""
    channel: str
    """The channel of the call."""
    text: str


@dataclass(frozen=True)
class FormatError:
    """The sampled ids are not what the chat format allows."""

    kind: str
    """Under which it is counted. Of Harmony "structure", "header", "role", "channel" or "recipient",
    of ChatML "structure" or "tool_call"."""
