"""Messages that a codec reads from sampled tokens, and messages that it renders."""

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


@dataclass(frozen=True)
class CutTurn:
    """A sampled turn that a limit cut off."""

    messages: list[ParsedMessage]
    """The messages that can be read; the last one, a call too, may be incomplete."""
    closing: tuple[int, ...]
    """Token ids that stand behind the turn when the conversation continues."""
    dropped: int = 0
    """Number of tokens at the end of the conversation that are left out when it continues, because
    they are part of no message."""
