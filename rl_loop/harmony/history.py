"""Finds messages in tokenized conversations, and drops finished analysis."""

from collections.abc import Sequence

from rl_loop.harmony.messages import (
    MESSAGE_ENDS,
    MessageHeader,
    MessageSpan,
    read_header,
    split_messages,
)
from rl_loop.harmony.vocabulary import Vocabulary, special_id


class MessageFinder:
    """Finds messages in the tokens of one vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._names = {
            self._special(name): name for name in ("<|start|>", "<|message|>", *MESSAGE_ENDS)
        }
        self._end = self._special("<|end|>")
        self._return = self._special("<|return|>")

    def spans(self, ids: Sequence[int]) -> list[MessageSpan]:
        """Return the messages of a conversation, or of a sampled turn, in their order."""
        names = self._names
        specials = [(place, names[token]) for place, token in enumerate(ids) if token in names]
        return split_messages(specials, len(ids))

    def without_finished_analysis(self, ids: Sequence[int]) -> list[int]:
        """Leave out the analysis before earlier answers, as the format specifies.

        Analysis since the last message on ``final`` stays, because the reasoning is not finished.
        ``<|return|>`` behind an answer becomes ``<|end|>``, as in every history. Texts keep their
        tokens.
        """
        spans = self.spans(ids)
        last_final = -1
        for number, span in enumerate(spans):
            if self._read_channel(ids, span) == "final":
                last_final = number

        kept: list[int] = []
        for number, span in enumerate(spans):
            if number < last_final and self._read_channel(ids, span) == "analysis":
                continue
            piece = list(ids[span.start : span.end])
            # <|return|> only stops sampling. Histories have <|end|> instead (openai/harmony,
            # docs/format.md).
            if piece[-1] == self._return:
                piece[-1] = self._end
            kept += piece
        return kept

    def reasoning_tokens(self, sampled: Sequence[int]) -> int:
        """Return the number of analysis tokens in a sampled turn, including headers."""
        # A turn begins behind <|start|>assistant, so its first token is in a header.
        return sum(
            span.end - span.start
            for span in self.spans(sampled)
            if self._read_channel(sampled, span) == "analysis"
        )

    def answer_ranges(self, sampled: Sequence[int]) -> list[range]:
        """Return the positions of the texts on commentary and final that are not calls."""
        ranges = []
        for span in self.spans(sampled):
            header = self._read_header(sampled, span)
            if span.body is None or header.recipient is not None:
                continue
            if header.channel in ("commentary", "final"):
                ranges.append(range(span.body, span.body_end))
        return ranges

    def _read_channel(self, ids: Sequence[int], span: MessageSpan) -> str | None:
        """Return the channel of a message. None for users' messages and truncated headers."""
        return self._read_header(ids, span).channel

    def _read_header(self, ids: Sequence[int], span: MessageSpan) -> MessageHeader:
        # A text begins behind <|message|>, which is not a part of the header.
        header_end = span.body_end if span.body is None else span.body - 1
        return read_header(self._vocabulary.decode(ids[span.header : header_end]))

    def _special(self, token: str) -> int:
        [token_id] = self._vocabulary.from_harmony([special_id(token)])
        return token_id
