"""Reads a turn in ChatML while it is sampled."""

from collections.abc import Sequence

from rl_loop.chat.messages import ParsedMessage
from rl_loop.chat.turn_reader import GrowingMessage, MessageDelta, join_deltas, stop_markers
from rl_loop.chatml.vocabulary import TOOL_CALL, ChatMlVocabulary


class ChatMlReader:
    """Implements ``rl_loop.chat.turn_reader.TurnReader``.

    It reads the text of a turn. Calls are complete JSON values, so they come last.
    """

    def __init__(self, vocabulary: ChatMlVocabulary, stop: Sequence[str]) -> None:
        """Create a reader.

        Args:
            vocabulary: token ids of the model.
            stop: texts that end the text of a turn.
        """
        self._vocabulary = vocabulary
        # The line break before a call belongs to the format.
        call = TOOL_CALL.encode()
        self._current = GrowingMessage(
            0,
            ParsedMessage("final", None, None, ""),
            markers=(*stop_markers(stop), b"\n" + call, call),
        )
        self._position = 0
        """Position of the next token in the turn."""

    def read(self, ids: Sequence[int]) -> list[MessageDelta]:
        """Return what these tokens add to the text."""
        deltas: list[MessageDelta] = []
        for token in ids:
            if self._current.is_over:
                break
            if not self._vocabulary.is_text(token):
                # The end of the turn, a call, or an error.
                self._current.is_over = True
                break
            deltas += self._current.add(self._vocabulary.token_bytes(token), self._position)
            self._position += 1
        return join_deltas(deltas)
