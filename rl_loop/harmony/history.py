"""Conversations in tokens: where their messages are, and which of them the format drops."""

from collections.abc import Sequence
from dataclasses import dataclass

from rl_loop.harmony.vocabulary import Vocabulary, special_id


@dataclass(frozen=True)
class MessageSpan:
    """One message in a conversation's tokens, ``[start, end)``."""

    start: int
    """Place of its ``<|start|>``."""
    end: int
    channel: str | None
    """None for messages that are on no channel, such as the user's."""


class History:
    """Finds messages in the tokens of one vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._start = self._special("<|start|>")
        self._channel = self._special("<|channel|>")
        self._message = self._special("<|message|>")
        self._end = self._special("<|end|>")
        self._return = self._special("<|return|>")

    def spans(self, ids: Sequence[int]) -> list[MessageSpan]:
        """Return the messages of a conversation that begins with ``<|start|>``, in their order.

        Text never holds special tokens, and a sampled turn that is no legal one never becomes
        part of a conversation, so each ``<|start|>`` begins a message.
        """
        starts = [place for place, token in enumerate(ids) if token == self._start]
        spans: list[MessageSpan] = []
        for start, end in zip(starts, [*starts[1:], len(ids)], strict=True):
            spans.append(MessageSpan(start, end, self._channel_of(ids[start:end])))
        return spans

    def without_finished_analysis(self, ids: Sequence[int]) -> list[int]:
        """Leave out the analysis that led to earlier answers, as the format documents it.

        Analysis since the last message on ``final`` stays: it is part of a train of thought that
        goes on. ``<|return|>`` behind an answer becomes ``<|end|>``, as in every history. No text
        is tokenized again.
        """
        spans = self.spans(ids)
        last_final = -1
        for number, span in enumerate(spans):
            if span.channel == "final":
                last_final = number

        kept: list[int] = []
        for number, span in enumerate(spans):
            if number < last_final and span.channel == "analysis":
                continue
            piece = list(ids[span.start : span.end])
            if piece[-1] == self._return:
                piece[-1] = self._end
            kept += piece
        return kept

    def reasoning_tokens(self, sampled: Sequence[int]) -> int:
        """Count the tokens of a sampled turn that are analysis, their headers included."""
        # A turn begins behind <|start|>assistant.
        spans = self.spans([self._start, *sampled])
        return sum(span.end - span.start - 1 for span in spans if span.channel == "analysis")

    def _channel_of(self, message: Sequence[int]) -> str | None:
        """Return the channel in the header of a message's tokens."""
        header = list(message)
        if self._message in header:
            header = header[: header.index(self._message)]
        if self._channel not in header:
            return None

        # Behind the channel may stand a recipient, or a special token that decodes to "<|...|>".
        behind = self._vocabulary.decode(header[header.index(self._channel) + 1 :])
        words = behind.partition("<|")[0].split()
        return words[0] if words else None

    def _special(self, token: str) -> int:
        [token_id] = self._vocabulary.from_harmony([special_id(token)])
        return token_id
