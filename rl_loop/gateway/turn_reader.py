"""Reads a turn while it is sampled, for streams.

A reader returns only what the complete turn will certainly contain. It stops at the first doubt,
such as a malformed header. ``AnswerDeltas.rest`` then returns the remainder of the parsed turn.
Therefore a streamed answer and a plain answer are equal.
"""

import codecs
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, assert_never

from rl_loop.chat.codec import ChatCodec
from rl_loop.chat.messages import FormatError, ParsedMessage
from rl_loop.chat.tools import FUNCTIONS
from rl_loop.chatml.codec import ChatMl
from rl_loop.chatml.vocabulary import TOOL_CALL
from rl_loop.engines.protocol import NewTokens
from rl_loop.gateway.answer import (
    AnswerItem,
    AnswerText,
    FunctionCall,
    PolicyAnswer,
    Reasoning,
    call_id,
)
from rl_loop.gateway.errors import invalid_content
from rl_loop.gateway.request import TurnRequest
from rl_loop.gateway.token_log_probs import TextLogProbs, TokenLogProb
from rl_loop.harmony.codec import Harmony
from rl_loop.harmony.vocabulary import special_id

MAX_HEADER_TOKENS = 128
"""Maximum tokens of a header that is read before the turn is complete."""


@dataclass(frozen=True)
class AnswerDelta:
    """Text that is added to one item of an answer."""

    number: int
    """Index of the item in ``PolicyAnswer.items``."""
    item: AnswerItem
    """The item without its text. It has the name and the id of a call."""
    text: str
    log_probs: TextLogProbs = ()
    """Tokens that begin in ``text``, if they were requested and the item is a text."""


class TurnReader(Protocol):
    """Reads the tokens of one turn."""

    def read(self, tokens: NewTokens) -> list[AnswerDelta]:
        """Return what these tokens add to the answer."""
        ...


@dataclass
class _GrowingItem:
    """An item of an answer whose tokens arrive."""

    number: int
    item: AnswerItem
    markers: tuple[bytes, ...] = ()
    """Texts that end the item. They and everything behind them are held back."""
    has_log_probs: bool = False
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
    _waiting: deque[tuple[int, TokenLogProb]] = field(default_factory=deque)
    """Tokens without a delta, and the bytes before each."""

    def delta(self, text: str) -> AnswerDelta:
        """Return a delta with the tokens that begin in the text so far."""
        # The decoder keeps the bytes of an incomplete character, which are not in the text yet.
        decoded = self._passed - len(self._decoder.getstate()[0])
        tokens = []
        while self._waiting and self._waiting[0][0] < decoded:
            tokens.append(self._waiting.popleft()[1])
        return AnswerDelta(self.number, self.item, text, tuple(tokens))

    def add(self, piece: bytes, token: TokenLogProb | None) -> str:
        """Add a token. Return the text that is certain."""
        if token is not None:
            self._waiting.append((self._received, token))
        self._received += len(piece)
        data = self._held + piece
        found = [
            (begin + len(marker), begin)
            for marker in self.markers
            if (begin := data.find(marker)) >= 0
        ]
        if found:
            self.is_over = True
            return self._decoded(data[: min(found)[1]])
        kept = _longest_beginning(data, self.markers)
        self._held = data[len(data) - kept :]
        return self._decoded(data[: len(data) - kept])

    def end(self) -> str:
        """Return the text that was held back, because the item has ended without a marker."""
        self.is_over = True
        return self._decoded(self._held)

    def _decoded(self, data: bytes) -> str:
        try:
            text = self._decoder.decode(data)
        except UnicodeDecodeError:
            # The parser of the complete turn decides how invalid bytes are written.
            self.is_over = True
            return ""
        self._passed += len(data)
        return text


def _longest_beginning(data: bytes, markers: Sequence[bytes]) -> int:
    """Return the number of bytes at the end of ``data`` that a marker may begin with."""
    longest = 0
    for marker in markers:
        for length in range(min(len(marker) - 1, len(data)), longest, -1):
            if marker.startswith(data[len(data) - length :]):
                longest = length
                break
    return longest


class HarmonyReader:
    """Reads a turn in Harmony."""

    def __init__(self, codec: Harmony, request: TurnRequest, response_id: str) -> None:
        self._codec = codec
        self._response_id = response_id
        self._names = {f"{FUNCTIONS}{tool.name}" for tool in request.tools}
        self._stops = tuple(text.encode(errors="replace") for text in request.stop)
        self._has_log_probs = request.log_probs
        names = ("<|start|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>")
        self._start, self._message, self._end, *self._ends = (
            codec.vocabulary.from_harmony([special_id(name)])[0] for name in names
        )
        self._is_over = False
        self._header: list[int] = [*codec.assistant_header]
        """Tokens of the current header, from ``<|start|>`` on. It begins in the prompt."""
        self._item: _GrowingItem | None = None
        """Current item. None within a header."""
        self._items = 0
        self._calls = 0

    def read(self, tokens: NewTokens) -> list[AnswerDelta]:
        """Return what these tokens add to the answer."""
        deltas: list[AnswerDelta] = []
        for place, token in enumerate(tokens.ids):
            if self._is_over:
                break
            if self._item is None:
                self._read_header(token, deltas)
            else:
                self._read_text(self._item, token, tokens, place, deltas)
        return joined(deltas)

    def _read_header(self, token: int, deltas: list[AnswerDelta]) -> None:
        if len(self._header) > MAX_HEADER_TOKENS or (not self._header and token != self._start):
            self._is_over = True
            return
        self._header.append(token)
        if token == self._message:
            self._begin_item(deltas)

    def _begin_item(self, deltas: list[AnswerDelta]) -> None:
        # The prompt ends with this header, so the parser expects ids without it. Every further
        # message of the turn has to begin with it.
        begin = self._codec.assistant_header
        if self._header[: len(begin)] != begin:
            self._is_over = True
            return
        message = self._parsed_header(self._header[len(begin) :])
        item = None if message is None else self._build_item(message)
        if item is None:
            self._is_over = True
            return
        is_text = isinstance(item, AnswerText)
        self._item = _GrowingItem(
            self._items,
            item,
            markers=self._stops if is_text else (),
            has_log_probs=self._has_log_probs and is_text,
        )
        self._items += 1
        # An empty delta begins the item for the client, with the name and id of a call, although
        # its first text may be held back for long.
        deltas.append(self._item.delta(""))

    def _parsed_header(self, header: list[int]) -> ParsedMessage | None:
        """Return the message of a header, without text. None if it is malformed."""
        # Parsed as a turn with an empty message. Only the end token says whether the message is a
        # call, so try both.
        for end in (self._codec.answer_end, self._codec.call_end):
            messages = self._codec.parse_for_client([*header, end])
            if not isinstance(messages, FormatError):
                return messages[0]
        return None

    def _build_item(self, message: ParsedMessage) -> AnswerItem | None:
        """Return the item that a message begins. None if the turn may be malformed."""
        if message.recipient is not None:
            if message.recipient not in self._names:
                return None
            name = message.recipient.removeprefix(FUNCTIONS)
            self._calls += 1
            return FunctionCall(
                call_id(self._response_id, self._calls - 1), name, "", message.channel
            )
        # A turn that ends behind a call with another message is malformed.
        if self._calls:
            return None
        return Reasoning("") if message.channel == "analysis" else AnswerText("")

    def _read_text(
        self,
        item: _GrowingItem,
        token: int,
        tokens: NewTokens,
        place: int,
        deltas: list[AnswerDelta],
    ) -> None:
        if token == self._end or token in self._ends:
            if (text := item.end()) != "":
                deltas.append(item.delta(text))
            self._item = None
            self._header = []
            # ``<|end|>`` ends a message. The other two end the turn.
            self._is_over = token != self._end
            return
        # A message without an end is malformed. The parser of the complete turn decides about it.
        if token == self._start or token == self._message:
            self._is_over = True
            return
        piece = self._codec.vocabulary.token_bytes(token)
        if (text := item.add(piece, _listed(self._codec, item, tokens, place))) != "":
            deltas.append(item.delta(text))
        self._is_over = item.is_over


class ChatMlReader:
    """Reads the text of a turn in ChatML. Calls are complete JSON values, so they come last."""

    def __init__(self, codec: ChatMl, request: TurnRequest) -> None:
        self._codec = codec
        # The line break before a call belongs to the format.
        call = TOOL_CALL.encode()
        stops = (text.encode(errors="replace") for text in request.stop)
        self._item = _GrowingItem(
            0, AnswerText(""), (*stops, b"\n" + call, call), has_log_probs=request.log_probs
        )

    def read(self, tokens: NewTokens) -> list[AnswerDelta]:
        """Return what these tokens add to the answer."""
        deltas = []
        for place, token in enumerate(tokens.ids):
            if self._item.is_over:
                break
            if not self._codec.vocabulary.is_text(token):
                # The end of the turn, a call, or an error.
                self._item.is_over = True
                break
            piece = self._codec.vocabulary.token_bytes(token)
            text = self._item.add(piece, _listed(self._codec, self._item, tokens, place))
            if text:
                deltas.append(self._item.delta(text))
        return joined(deltas)


class NoReader:
    """Reader for a chat format that is not read before its end."""

    def read(self, tokens: NewTokens) -> list[AnswerDelta]:
        """Return nothing."""
        return []


def _listed(
    codec: ChatCodec, item: _GrowingItem, tokens: NewTokens, place: int
) -> TokenLogProb | None:
    """Return the entry of a token for the client. None if it is not requested."""
    if not item.has_log_probs:
        return None
    return TokenLogProb.of(
        codec.vocabulary, tokens.ids[place], tokens.log_probs[place], tokens.top_log_probs[place]
    )


def build_turn_reader(codec: ChatCodec, request: TurnRequest, response_id: str) -> TurnReader:
    """Return the reader of a turn.

    Args:
        codec: chat format of the policy.
        request: request of the client.
        response_id: name of the turn.
    """
    if isinstance(codec, Harmony):
        return HarmonyReader(codec, request, response_id)
    if isinstance(codec, ChatMl):
        return ChatMlReader(codec, request)
    return NoReader()


def joined(deltas: Sequence[AnswerDelta]) -> list[AnswerDelta]:
    """Join consecutive deltas of one item."""
    result: list[AnswerDelta] = []
    for delta in deltas:
        if result and result[-1].number == delta.number:
            last = result.pop()
            delta = AnswerDelta(
                delta.number, delta.item, last.text + delta.text, last.log_probs + delta.log_probs
            )
        result.append(delta)
    return result


def without_text(item: AnswerItem) -> AnswerItem:
    """Return an item of a complete answer with an empty text."""
    match item:
        case Reasoning():
            return Reasoning("")
        case AnswerText():
            return AnswerText("")
        case FunctionCall():
            return FunctionCall(item.call_id, item.name, "", item.channel)
        case _:
            assert_never(item)


def text_of_item(item: AnswerItem) -> str:
    """Return the text of an item: reasoning, message or arguments."""
    return item.arguments if isinstance(item, FunctionCall) else item.text


class AnswerDeltas:
    """The deltas of one answer that a client has received."""

    def __init__(self) -> None:
        self._items: list[AnswerItem] = []
        """Items without text."""
        self._texts: list[str] = []
        self._listed: list[int] = []
        """Number of log-probs of each item."""

    def add(self, deltas: Sequence[AnswerDelta]) -> None:
        """Note deltas that are sent."""
        for delta in deltas:
            if delta.number == len(self._items):
                self._items.append(delta.item)
                self._texts.append("")
                self._listed.append(0)
            self._texts[delta.number] += delta.text
            self._listed[delta.number] += len(delta.log_probs)

    def rest(
        self, answer: PolicyAnswer, log_probs: Sequence[TextLogProbs]
    ) -> Sequence[AnswerDelta]:
        """Return what the complete answer adds.

        Args:
            answer: the complete answer.
            log_probs: tokens of each text. Empty if not requested.

        Raises:
            ApiError: the complete answer differs from what the client has received.
        """
        deltas = []
        texts = 0
        if len(self._items) > len(answer.items):
            raise invalid_content("structure")
        for number, item in enumerate(answer.items):
            text = text_of_item(item)
            tokens: TextLogProbs = ()
            if isinstance(item, AnswerText):
                tokens = log_probs[texts] if log_probs else ()
                # Log-probs are listed for texts only, so their index is not that of the item.
                texts += 1
            # The client cannot take text back. If the complete turn does not begin with the text
            # that was sent, only an error is left.
            if number < len(self._items):
                sent = self._texts[number]
                if self._items[number] != without_text(item) or not text.startswith(sent):
                    raise invalid_content("structure")
                text = text[len(sent) :]
                tokens = tokens[self._listed[number] :]
                if not text and not tokens:
                    continue
            deltas.append(AnswerDelta(number, without_text(item), text, tokens))
        return deltas
