"""Renders turns in the form that GPT-OSS samples, which differs from the form of a history."""

import re
from collections.abc import Sequence
from typing import Literal

from rl_loop.chat.messages import ParsedMessage
from rl_loop.harmony.conversation import CONSTRAIN, sampled_content_type
from rl_loop.harmony.vocabulary import Vocabulary, harmony_encoding, model_special_id

CACHED_HEADERS = 4096
"""Size of the header cache. There are few distinct headers."""
SPECIAL_NAME = re.compile(r"<\|\w+\|>")
"""Texts that may be the name of a special token."""


class SampledTurnRenderer:
    """Renders turns, and encodes turns that a person wrote, with one vocabulary."""

    def __init__(self, vocabulary: Vocabulary, assistant_header: list[int]) -> None:
        """Create a renderer.

        Args:
            vocabulary: token ids of the model.
            assistant_header: ids of ``<|start|>assistant``, which precede every message.
        """
        self._vocabulary = vocabulary
        self._assistant_header = assistant_header
        self._headers: dict[tuple[str, str | None, str | None], list[int]] = {}
        """Rendered headers by channel, recipient and content type."""

    def render_turn(
        self,
        messages: Sequence[ParsedMessage],
        end: Literal["<|return|>", "<|call|>"] | None = None,
    ) -> list[int]:
        """Render an assistant turn as a policy would sample it, after ``<|start|>assistant``.

        Args:
            messages: messages of the turn.
            end: last token. None chooses it by the last message: a call or an answer.
        """
        if end is None:
            end = "<|return|>" if messages[-1].recipient is None else "<|call|>"
        ids: list[int] = []
        for message in messages[:-1]:
            ids += self.render_message(message, "<|end|>") + self._assistant_header
        return ids + self.render_message(messages[-1], end)

    def render_message(
        self,
        message: ParsedMessage,
        end: Literal["<|end|>", "<|return|>", "<|call|>"] | None,
    ) -> list[int]:
        """Render one message as a policy would sample it, after ``<|start|>assistant``.

        The header has the order that GPT-OSS samples: channel, recipient, content type. In history
        openai-harmony writes the recipient before the channel. Both orders are parsed equally.

        Args:
            message: message to render.
            end: last token. None if sampling was cut off within the message.
        """
        key = (message.channel, message.recipient, message.content_type)
        header = self._headers.get(key)
        if header is None:
            header = self._render_header(*key)
            # Bound the cache, because data sets contain any number of recipients.
            if len(self._headers) >= CACHED_HEADERS:
                self._headers.clear()
            self._headers[key] = header

        ids = header + self._vocabulary.encode_text(message.text)
        if end is not None:
            ids += self._special(end)
        return ids

    def _render_header(
        self, channel: str, recipient: str | None, content_type: str | None
    ) -> list[int]:
        """Render the header of a message, including <|message|>."""
        encode_text = self._vocabulary.encode_text
        ids = self._special("<|channel|>") + encode_text(channel)
        if recipient is not None:
            ids += encode_text(f" to={recipient}")
        written = sampled_content_type(content_type, recipient)
        if written is not None:
            ids += self._content_type(written)
        return ids + self._special("<|message|>")

    def _special(self, token: str) -> list[int]:
        return [model_special_id(self._vocabulary, token)]

    def _content_type(self, content_type: str) -> list[int]:
        """Encode a content type, including the space before it."""
        encode_text = self._vocabulary.encode_text
        if not content_type.startswith(CONSTRAIN):
            return encode_text(f" {content_type}")
        kind = content_type.removeprefix(CONSTRAIN)
        return encode_text(" ") + self._special(CONSTRAIN) + encode_text(kind)

    def encode(self, text: str) -> list[int]:
        """Encode a turn that a person wrote. Names of special tokens become these tokens."""
        names = harmony_encoding().special_tokens_set
        ids: list[int] = []
        begin = 0
        # openai-harmony encodes a text in time that is quadratic in its longest word, so it encodes
        # only the special tokens.
        for match in SPECIAL_NAME.finditer(text):
            if match[0] in names:
                ids += self._vocabulary.encode_text(text[begin : match.start()])
                ids += self._special(match[0])
                begin = match.end()
        return ids + self._vocabulary.encode_text(text[begin:])
