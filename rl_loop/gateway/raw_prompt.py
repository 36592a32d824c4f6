"""Completions without a chat format: the prompt, and the sampled text behind it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rl_loop.chat.codec import ChatCodec
from rl_loop.chat.messages import ParsedMessage
from rl_loop.chat.turn_reader import GrowingMessage, MessageDelta, join_deltas, stop_markers

PromptKind = Literal["text", "token ids"]
ID_BYTES = 4
"""Bytes of a token id in ``RawPrompt.content``."""


@dataclass(frozen=True)
class RawPrompt:
    """Prompt of a completion: text or token ids."""

    kind: PromptKind
    content: bytes
    """UTF-8 of a text, or little-endian int32 token ids. A prefix of it identifies an earlier
    completion."""

    @classmethod
    def of_text(cls, text: str) -> "RawPrompt":
        """Return a prompt of text. Names of special tokens become these tokens."""
        # Halves of surrogate pairs cannot be encoded otherwise. The encoder replaces them.
        return cls("text", text.encode(errors="surrogatepass"))

    @classmethod
    def of_ids(cls, ids: Sequence[int]) -> "RawPrompt":
        """Return a prompt of token ids."""
        return cls("token ids", np.asarray(ids, dtype="<i4").tobytes())

    def text_from(self, begin: int) -> str:
        """Return the text from a byte on."""
        return self.content[begin:].decode(errors="surrogatepass")

    def ids_from(self, begin: int) -> list[int]:
        """Return the token ids from a byte on."""
        ids: list[int] = np.frombuffer(self.content[begin:], dtype="<i4").tolist()
        return ids

    def extend(self, text: str, ids: Sequence[int]) -> "RawPrompt":
        """Return the prompt with a completion behind it, as the client has them.

        Args:
            text: text of the completion.
            ids: tokens of the completion.
        """
        more = RawPrompt.of_text(text) if self.kind == "text" else RawPrompt.of_ids(ids)
        return RawPrompt(self.kind, self.content + more.content)


def text_range(codec: ChatCodec, ids: Sequence[int]) -> range:
    """Return the positions of a completion's text: all but a token that ends it."""
    has_end = bool(ids) and ids[-1] in codec.stop_token_ids
    return range(len(ids) - has_end)


class RawReader:
    """Reads a completion while it is sampled."""

    def __init__(self, codec: ChatCodec, stop: Sequence[str]) -> None:
        """Create a reader.

        Args:
            codec: chat format of the policy, for its vocabulary.
            stop: texts that end the completion.
        """
        self._codec = codec
        self._current = GrowingMessage(
            0, ParsedMessage("final", None, None, ""), markers=stop_markers(stop)
        )
        self._position = 0

    def read(self, ids: Sequence[int]) -> list[MessageDelta]:
        """Return what these tokens add to the text."""
        deltas: list[MessageDelta] = []
        for token in ids:
            if self._current.is_over:
                break
            if token in self._codec.stop_token_ids:
                deltas += self._current.end()
                break
            piece = self._codec.vocabulary.token_bytes(token)
            deltas += self._current.add(piece, self._position)
            self._position += 1
        return join_deltas(deltas)
