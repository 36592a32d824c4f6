"""Calls and answer of one turn of the assistant, for comparisons by value."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from rl_loop.chat.json_values import canonical_json
from rl_loop.chat.messages import ParsedMessage
from rl_loop.chat.tools import FUNCTIONS


@dataclass(frozen=True)
class TurnContent:
    """The calls of a turn, or its answer. Thoughts and text before calls are left out."""

    calls: tuple[tuple[str, str], ...]
    """Recipient and arguments of each call, in order. Empty for an answer."""
    answer: str
    """Text of the last message. Empty if there are calls."""

    @classmethod
    def of(cls, messages: Sequence[ParsedMessage]) -> Self:
        """Return the content of a parsed turn."""
        calls = tuple(
            (message.recipient, message.text)
            for message in messages
            if message.recipient is not None
        )
        return cls(calls, "" if calls else messages[-1].text.strip())

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Return the content that ``to_json`` returned."""
        return cls(tuple((name, text) for name, text in value["calls"]), value["answer"])

    def to_json(self) -> dict[str, Any]:
        """Return the content as JSON values."""
        return asdict(self)

    @property
    def functions(self) -> list[str]:
        """Recipients of the calls, in order."""
        return [recipient for recipient, _ in self.calls]

    def equals(self, other: "TurnContent") -> bool:
        """Return True if both make the same calls in the same order, or have the same answer.

        Arguments of functions are compared as JSON values. Other text is compared character by
        character, without white space at the ends of an answer.
        """
        return self._compared == other._compared

    @property
    def _compared(self) -> tuple[list[Any], str]:
        return [_call_value(*call) for call in self.calls], self.answer

    def __str__(self) -> str:
        """Return the answer, or one line per call, such as ``price({"item": "lamp"})``."""
        lines = [f"{name.removeprefix(FUNCTIONS)}({text.strip()})" for name, text in self.calls]
        return "\n".join(lines) or self.answer


def _call_value(recipient: str, text: str) -> tuple[str, Any]:
    """Return equal values for equal calls."""
    # Built-in tools take code or other text instead of JSON.
    return recipient, canonical_json(text) if recipient.startswith(FUNCTIONS) else text
