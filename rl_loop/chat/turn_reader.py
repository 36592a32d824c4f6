"""Interface of readers that read a turn while it is sampled, and the text that they share.

A reader returns only what the complete turn will certainly contain. It stops at the first doubt,
such as a malformed header.
"""

import codecs
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rl_loop.chat.messages import ParsedMessage


@dataclass(frozen=True)
class MessageDelta:
    """Text that is added to one message of a turn."""

    number: int
    """Index of the message in the turn."""
    message: ParsedMessage
    """The message without text."""
    text: str
    tokens: tuple[int, ...] = ()
    """Positions in the turn of the tokens that begin in ``text``."""


class TurnReader(Protocol):
    """Reads the tokens of one turn."""

    def read(self, ids: Sequence[int]) -> list[MessageDelta]:
        """Return what these tokens add to the messages."""
        ...


@dataclass
class GrowingMessage:
    """A message whose tokens arrive."""

    number: int
    message: ParsedMessage
    """The message without text."""
    markers: tuple[bytes, ...] = ()
    """Texts that end the message. They and everything behind them are held back."""
    is_over: bool = False
    """True if no further text may be returned."""
    _held: bytes = b""
    """Last bytes, which may be the beginning of a marker."""
    _decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")()
    )
    _received: int = 0
    """Bytes of all tokens."""
    _passed: int = 0
    """Bytes that were given to the decoder."""
    _waiting: deque[tuple[int, int]] = field(default_factory=deque)
    """Bytes before each token without a delta, and the position of the token."""

    def add(self, piece: bytes, position: int) -> list[MessageDelta]:
        """Add a token of the turn. Return the text that is certain: one delta or none."""
        self._waiting.append((self._received, position))
        self._received += len(piece)
        data = self._held + piece
        found = [
            (begin + len(marker), begin)
            for marker in self.markers
            if (begin := data.find(marker)) >= 0
        ]
        if found:
            self.is_over = True
            return self._decode(data[: min(found)[1]])
        kept = _longest_beginning(data, self.markers)
        self._held = data[len(data) - kept :]
        return self._decode(data[: len(data) - kept])

    def end(self) -> list[MessageDelta]:
        """Return the text that was held back, because the message has ended without a marker."""
        self.is_over = True
        return self._decode(self._held)

    def delta(self, text: str) -> MessageDelta:
        """Return a delta with the tokens that begin in the text so far."""
        # The decoder keeps the bytes of an incomplete character, which are not in the text yet.
        decoded = self._passed - len(self._decoder.getstate()[0])
        tokens = []
        while self._waiting and self._waiting[0][0] < decoded:
            tokens.append(self._waiting.popleft()[1])
        return MessageDelta(self.number, self.message, text, tuple(tokens))

    def _decode(self, data: bytes) -> list[MessageDelta]:
        try:
            text = self._decoder.decode(data)
        except UnicodeDecodeError:
            # The parser of the complete turn decides how invalid bytes are written.
            self.is_over = True
            return []
        self._passed += len(data)
        return [self.delta(text)] if text else []


def join_deltas(deltas: Sequence[MessageDelta]) -> list[MessageDelta]:
    """Join consecutive deltas of one message."""
    result: list[MessageDelta] = []
    for delta in deltas:
        if result and result[-1].number == delta.number:
            last = result.pop()
            delta = MessageDelta(
                delta.number, delta.message, last.text + delta.text, last.tokens + delta.tokens
            )
        result.append(delta)
    return result


def _longest_beginning(data: bytes, markers: Sequence[bytes]) -> int:
    """Return the number of bytes at the end of ``data`` that a marker may begin with."""
    longest = 0
    for marker in markers:
        for length in range(min(len(marker) - 1, len(data)), longest, -1):
            if marker.startswith(data[len(data) - length :]):
                longest = length
                break
    return longest


def stop_markers(stop: Sequence[str]) -> tuple[bytes, ...]:
    """Return stop texts as markers of ``GrowingMessage``."""
    return tuple(text.encode(errors="replace") for text in stop)
