"""Reads a turn in Harmony while it is sampled."""

from collections.abc import Container, Sequence

from rl_loop.chat.messages import FormatError, ParsedMessage
from rl_loop.chat.turn_reader import GrowingMessage, MessageDelta, join_deltas, stop_markers
from rl_loop.harmony.sampled_turn import parse_turn
from rl_loop.harmony.vocabulary import Vocabulary, special_id

MAX_HEADER_TOKENS = 128
"""Maximum tokens of a header that is read before the turn is complete."""


class HarmonyReader:
    """Implements ``rl_loop.chat.turn_reader.TurnReader``."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        assistant_header: Sequence[int],
        recipients: Container[str],
        stop: Sequence[str],
    ) -> None:
        """Create a reader.

        Args:
            vocabulary: token ids of the model.
            assistant_header: tokens at the end of the prompt.
            recipients: recipients that the client can call.
            stop: texts that end a message to the client.
        """
        self._vocabulary = vocabulary
        self._assistant_header = list(assistant_header)
        self._recipients = recipients
        self._stops = stop_markers(stop)
        names = ("<|start|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>")
        self._start, self._message, self._end, *self._ends = (
            vocabulary.from_harmony([special_id(name)])[0] for name in names
        )
        self._is_over = False
        self._position = 0
        """Position of the next token in the turn."""
        self._header = list(assistant_header)
        """Tokens of the current header, from ``<|start|>`` on. It begins in the prompt."""
        self._current: GrowingMessage | None = None
        """Current message. None within a header."""
        self._messages = 0
        self._has_call = False

    def read(self, ids: Sequence[int]) -> list[MessageDelta]:
        """Return what these tokens add to the messages."""
        deltas: list[MessageDelta] = []
        for token in ids:
            if self._is_over:
                break
            if self._current is None:
                self._read_header(token, deltas)
            else:
                deltas += self._read_text(self._current, token)
            self._position += 1
        return join_deltas(deltas)

    def _read_header(self, token: int, deltas: list[MessageDelta]) -> None:
        if len(self._header) > MAX_HEADER_TOKENS or (not self._header and token != self._start):
            self._is_over = True
            return
        self._header.append(token)
        if token == self._message:
            self._begin_message(deltas)

    def _begin_message(self, deltas: list[MessageDelta]) -> None:
        # The prompt ends with this header, so the parser expects ids without it. Every further
        # message of the turn has to begin with it.
        begin = self._assistant_header
        message = None
        if self._header[: len(begin)] == begin:
            message = self._parsed_header(self._header[len(begin) :])
        if message is None or not self._is_expected(message):
            self._is_over = True
            return
        is_text = message.recipient is None and message.channel != "analysis"
        self._has_call = message.recipient is not None
        self._current = GrowingMessage(
            self._messages, message, markers=self._stops if is_text else ()
        )
        self._messages += 1
        # An empty delta begins the message for the client, with the name and id of a call, although
        # its first text may be held back for long.
        deltas.append(self._current.delta(""))

    def _parsed_header(self, header: list[int]) -> ParsedMessage | None:
        """Return the message of a header, without text. None if it is malformed."""
        # Parsed as a turn with an empty message. Only the end token says whether the message is a
        # call, so try both.
        for end in self._ends:
            messages = parse_turn(self._vocabulary.to_harmony([*header, end]))
            if not isinstance(messages, FormatError):
                return messages[0]
        return None

    def _is_expected(self, message: ParsedMessage) -> bool:
        """Return False if a turn with this message may be malformed."""
        if message.recipient is not None:
            return message.recipient in self._recipients
        # A turn that ends behind a call with another message is malformed.
        return not self._has_call

    def _read_text(self, current: GrowingMessage, token: int) -> list[MessageDelta]:
        if token == self._end or token in self._ends:
            self._current = None
            self._header = []
            # ``<|end|>`` ends a message. The other two end the turn.
            self._is_over = token != self._end
            return current.end()
        # A message without an end is malformed. The parser of the complete turn decides about it.
        if token == self._start or token == self._message:
            self._is_over = True
            return []
        deltas = current.add(self._vocabulary.token_bytes(token), self._position)
        self._is_over = current.is_over
        return deltas
