"""Messages that a codec parses from sampled tokens, and messages that it renders."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ParsedMessage:
    """One message of the policy.

    Channels and recipients are Harmony's in every format, because environments read them. Other
    formats express them in their own way.
    """

    channel: str
    """Channel: "analysis" (thoughts), "commentary" (calls of functions) or "final" (answer)."""
    recipient: str | None
    """Called tool, such as "python" or "functions.search". None if it is not a call."""
    content_type: str | None
    """Content type, such as "code". It begins with "<|constrain|>" if Harmony has that token."""
    text: str


@dataclass(frozen=True)
class ToolOutput:
    """Output of a tool's call."""

    tool: str
    """Recipient of the call."""
    channel: str
    """Channel of the call."""
    text: str


@dataclass(frozen=True)
class FormatError:
    """Violation of the chat format in sampled ids."""

    kind: str
    """Kind of error, for counting. Harmony has "structure", "header", "role", "channel" and
    "recipient". ChatML has "structure" and "tool_call"."""


@dataclass(frozen=True)
class TruncatedTurn:
    """Sampled turn that a limit cut off."""

    messages: list[ParsedMessage]
    """Messages that can be read. The last one, even a call, may be incomplete."""
    closing: tuple[int, ...]
    """Token ids to append to the turn when the conversation continues."""
    dropped: int = 0
    """Number of tokens to drop at the end when the conversation continues, because they belong to
    no message."""
