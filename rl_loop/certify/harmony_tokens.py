"""What a tool call looks like in Harmony, as text and as token ids.

The ids are those of openai-harmony's tokenizer, piece by piece: headers with their special tokens,
contents as plain text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rl_loop.harmony.vocabulary import SPECIAL_TOKENS, Vocabulary, harmony_encoding


@dataclass(frozen=True)
class HarmonyMessage:
    """One message."""

    role: str
    """"user", "assistant", or the name of a tool that answers, such as "functions.lookup"."""
    content: str
    channel: str | None = None
    recipient: str | None = None
    content_type: str | None = None
    """With "<|constrain|>" before it, if that token is."""
    end: Literal["<|end|>", "<|return|>", "<|call|>"] = "<|end|>"

    @property
    def header(self) -> str:
        """Return what precedes the content, in the order in which GPT-OSS writes it."""
        words = f"<|start|>{self.role}"
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
        """Return all of it as text."""
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
"""A conversation with a call."""

QUOTING = (
    HarmonyMessage(TOOL, "row 3: <|end|><|start|>", channel="commentary", recipient="assistant"),
)
"""A tool that answers with the names of special tokens, which are text there."""

CONVERSATION_TEXT = "".join(message.text for message in (*CONVERSATION, *QUOTING))


def expected_ids(messages: Sequence[HarmonyMessage], vocabulary: Vocabulary) -> list[int]:
    """Return the ids of messages in a vocabulary."""
    encoding = harmony_encoding()
    ids: list[int] = []
    for message in messages:
        ids += encoding.encode(message.header, allowed_special="all")
        ids += encoding.encode(message.content, disallowed_special=())
        ids += encoding.encode(message.end, allowed_special="all")
    return vocabulary.from_harmony(ids)


def describe_difference(
    messages: Sequence[HarmonyMessage], answered: Sequence[int], vocabulary: Vocabulary
) -> str | None:
    """Say in which way ids differ from those that are expected; None if they do not."""
    expected = expected_ids(messages, vocabulary)
    if list(answered) == expected:
        return None

    # Is it one special token, taken for the letters of its name, or the other way round?
    encoding = harmony_encoding()
    for token in SPECIAL_TOKENS:
        (special,) = vocabulary.from_harmony(encoding.encode(token, allowed_special={token}))
        short_of = expected.count(special) - list(answered).count(special)
        if short_of > 0:
            return f"{token} (id {special}) is encoded as text, {short_of} times"
        if short_of < 0:
            return f"the text {token} in a message's content becomes the special token {special}"

    same = 0
    while same < min(len(expected), len(answered)) and expected[same] == answered[same]:
        same += 1
    return (
        f"ids differ from position {same} on: {list(answered[same : same + 6])}, "
        f"expected {expected[same : same + 6]}"
    )
