"""Expected text and token ids of a tool call in Harmony.

The ids come from openai-harmony's tokenizer. Headers are encoded with special tokens, contents as
plain text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rl_loop.harmony.vocabulary import SPECIAL_TOKENS, Vocabulary, harmony_encoding


@dataclass(frozen=True)
class HarmonyMessage:
    """One message."""

    role: str
    """Role "user" or "assistant", or the name of an answering tool, such as "functions.lookup"."""
    content: str
    channel: str | None = None
    recipient: str | None = None
    content_type: str | None = None
    """Content type, with "<|constrain|>" in front if that token is sampled."""
    end: Literal["<|end|>", "<|return|>", "<|call|>"] = "<|end|>"

    @property
    def header(self) -> str:
        """Return the text before the content, in GPT-OSS's order."""
        words = f"<|start|>{self.role}"
        # A tool's message has its recipient after the role, an assistant's after the channel, where
        # GPT-OSS samples it. Harmony's parser accepts both, so only the ids show the difference.
        if self.recipient is not None and self.role != "assistant":
            words += f" to={self.recipient}"
        if self.channel is not None:
            words += f"<|channel|>{self.channel}"
        if self.recipient is not None and self.role == "assistant":
            words += f" to={self.recipient}"
        if self.content_type is not None:
            words += f" {self.content_type}"
        return f"{words}<|message|>"

    @property
    def text(self) -> str:
        """Return the message as text."""
        return self.header + self.content + self.end


TOOL = "functions.lookup"
CONVERSATION = (
    HarmonyMessage("user", "What is in row 3?"),
    HarmonyMessage("assistant", "I look it up.", channel="analysis"),
    HarmonyMessage(
        "assistant",
        '{"row": 3}',
        channel="commentary",
        recipient=TOOL,
        content_type="<|constrain|>json",
        end="<|call|>",
    ),
    HarmonyMessage(TOOL, "17", channel="commentary", recipient="assistant"),
    HarmonyMessage("assistant", "It is 17.", channel="final", end="<|return|>"),
)
"""Conversation with a tool call."""

# A renderer that encodes tool output like headers lets a tool end its message and write others.
QUOTING = (
    HarmonyMessage(TOOL, "row 3: <|end|><|start|>", channel="commentary", recipient="assistant"),
)
"""Tool output that contains names of special tokens as plain text."""

CONVERSATION_TEXT = "".join(message.text for message in (*CONVERSATION, *QUOTING))


def expected_ids(messages: Sequence[HarmonyMessage], vocabulary: Vocabulary) -> list[int]:
    """Return the token ids of messages in a vocabulary."""
    encoding = harmony_encoding()
    ids: list[int] = []
    for message in messages:
        # Headers contain special tokens. Contents must not, even if they quote their names.
        ids += encoding.encode(message.header, allowed_special="all")
        # With () names of special tokens are encoded as text. By default ``encode`` raises an
        # error.
        ids += encoding.encode(message.content, disallowed_special=())
        ids += encoding.encode(message.end, allowed_special="all")
    return vocabulary.from_harmony(ids)


def describe_difference(
    messages: Sequence[HarmonyMessage], actual: Sequence[int], vocabulary: Vocabulary
) -> str | None:
    """Return the difference between ids and the expected ids. None if they are equal."""
    expected = expected_ids(messages, vocabulary)
    if list(actual) == expected:
        return None

    # Check whether a special token was encoded as plain text, or plain text as a special token.
    encoding = harmony_encoding()
    for token in SPECIAL_TOKENS:
        (special,) = vocabulary.from_harmony(encoding.encode(token, allowed_special={token}))
        short_of = expected.count(special) - list(actual).count(special)
        # A special token that is missing was encoded as text. One too many was text in a content.
        if short_of > 0:
            return f"{token} (id {special}) is encoded as text, {short_of} times"
        if short_of < 0:
            return f"the text {token} in a message's content becomes the special token {special}"

    # All special tokens are right, so show where the other ids begin to differ.
    same = 0
    while same < min(len(expected), len(actual)) and expected[same] == actual[same]:
        same += 1
    return (
        f"ids differ from position {same} on: {list(actual[same : same + 6])}, "
        f"expected {expected[same : same + 6]}"
    )
