"""The deltas of a turn in the form that clients see, for streams.

A codec's reader returns the messages of a turn while it is sampled. ``AnswerDeltas.rest`` then
returns the remainder of the parsed turn. Therefore a streamed answer and a plain answer are equal.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

from rl_loop.chat.codec import ChatCodec
from rl_loop.chat.messages import ParsedMessage
from rl_loop.chat.tools import FUNCTIONS
from rl_loop.chat.turn_reader import TurnReader
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
from rl_loop.gateway.raw_prompt import RawReader
from rl_loop.gateway.request import TurnRequest
from rl_loop.gateway.token_log_probs import TextLogProbs, TokenLogProb


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


class AnswerReader:
    """Reads the tokens of one turn."""

    def __init__(self, codec: ChatCodec, request: TurnRequest, response_id: str) -> None:
        """Create a reader.

        Args:
            codec: chat format of the policy.
            request: request of the client.
            response_id: name of the turn.
        """
        self._codec = codec
        self._reader: TurnReader
        if request.prompt is None:
            recipients = {f"{FUNCTIONS}{tool.name}" for tool in request.tools}
            self._reader = codec.turn_reader(recipients, request.stop)
        else:
            self._reader = RawReader(codec, request.stop)
        self._response_id = response_id
        self._has_log_probs = request.log_probs
        self._items: list[AnswerItem] = []
        """Items that have begun, without text."""
        self._calls = 0
        self._tokens = NewTokens([], [], [])
        """Tokens so far. Empty if no log-probs are requested."""

    def read(self, tokens: NewTokens) -> list[AnswerDelta]:
        """Return what these tokens add to the answer."""
        if self._has_log_probs:
            self._tokens.ids.extend(tokens.ids)
            self._tokens.log_probs.extend(tokens.log_probs)
            self._tokens.top_log_probs.extend(tokens.top_log_probs)
        deltas = []
        for delta in self._reader.read(tokens.ids):
            if delta.number == len(self._items):
                self._items.append(self._build_item(delta.message))
            item = self._items[delta.number]
            listed: TextLogProbs = ()
            if self._has_log_probs and isinstance(item, AnswerText):
                listed = tuple(map(self._log_prob, delta.tokens))
            deltas.append(AnswerDelta(delta.number, item, delta.text, listed))
        return deltas

    def _build_item(self, message: ParsedMessage) -> AnswerItem:
        """Return the item that a message begins."""
        if message.recipient is None:
            return Reasoning("") if message.channel == "analysis" else AnswerText("")
        name = message.recipient.removeprefix(FUNCTIONS)
        self._calls += 1
        return FunctionCall(call_id(self._response_id, self._calls - 1), name, "", message.channel)

    def _log_prob(self, position: int) -> TokenLogProb:
        """Return the entry of a token for the client."""
        tokens = self._tokens
        return TokenLogProb.of(
            self._codec.vocabulary,
            tokens.ids[position],
            tokens.log_probs[position],
            tokens.top_log_probs[position],
        )


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
                texts += 1
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
