"""Chunks of streamed chat completions."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rl_loop.gateway.answer import FunctionCall, Reasoning
from rl_loop.gateway.errors import ApiError
from rl_loop.gateway.turn_reader import AnswerDelta


@dataclass
class _Choice:
    """State of one choice of a stream."""

    reasonings: int = 0
    """Number of reasoning messages that have begun."""
    texts: int = 0
    calls: dict[int, int] = field(default_factory=dict)
    """Index among the calls, by the number of the item."""
    last_item: int = -1
    """Number of the last item that has begun."""


class ChatEvents:
    """Chunks of one answer."""

    ends_with_done = True
    """True if a stream ends with ``data: [DONE]``."""

    def __init__(self, model: str, *, log_probs: bool, include_usage: bool) -> None:
        """Create a stream without chunks.

        Args:
            model: name of the policy.
            log_probs: whether chunks have the log-probs of their content.
            include_usage: whether the last chunk has token counts.
        """
        self._log_probs = log_probs
        self._include_usage = include_usage
        self._frame: dict[str, Any] = {
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": model,
        }
        if include_usage:
            # Null in all chunks but the last one, as in OpenAI's streams.
            self._frame["usage"] = None
        self._choices: dict[int, _Choice] = {}

    def begin(self, response_id: str) -> Iterator[dict[str, Any]]:
        """Begin the stream of a response. It has no chunk before the first delta."""
        self._frame["id"] = response_id
        return iter(())

    def add(self, choice: int, deltas: Sequence[AnswerDelta]) -> Iterator[dict[str, Any]]:
        """Yield the chunks of deltas of one choice."""
        if choice not in self._choices:
            self._choices[choice] = _Choice()
            # Only the first chunk of a choice has the role.
            yield self._chunk(choice, {"role": "assistant", "content": ""})
        state = self._choices[choice]
        for delta in deltas:
            begins = delta.number > state.last_item
            state.last_item = max(state.last_item, delta.number)
            content = _content(state, delta, begins=begins)
            if content is None:
                continue
            tokens = None
            if self._log_probs and "content" in content:
                listed = [token.to_json() for token in delta.log_probs]
                tokens = {"content": listed, "refusal": None}
            yield self._chunk(choice, content, tokens)

    def end_choice(self, choice: int, finish_reason: str) -> Iterator[dict[str, Any]]:
        """Yield the last chunk of a choice."""
        yield self._chunk(choice, {}, finish_reason=finish_reason)

    def end(self, usage: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the chunk after all choices, if there is one."""
        if self._include_usage:
            yield self._frame | {"choices": [], "usage": usage}

    def error_events(self, error: ApiError) -> Iterator[dict[str, Any]]:
        """Yield the chunk of an error, which OpenAI's clients raise."""
        yield error.body()

    def _chunk(
        self,
        choice: int,
        delta: dict[str, Any],
        log_probs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
    ) -> dict[str, Any]:
        """Return a chunk of the stream for one choice."""
        entry = {"index": choice, "delta": delta, "logprobs": log_probs}
        return self._frame | {"choices": [entry | {"finish_reason": finish_reason}]}


def _content(state: _Choice, delta: AnswerDelta, *, begins: bool) -> dict[str, Any] | None:
    """Return the ``delta`` of a chunk. None if it adds nothing.

    Messages of one kind are joined by newlines, as in ``PolicyAnswer``.
    """
    item = delta.item
    if isinstance(item, FunctionCall):
        function = {"arguments": delta.text}
        if not begins:
            return {"tool_calls": [{"index": state.calls[delta.number], "function": function}]}
        index = state.calls[delta.number] = len(state.calls)
        call = {"index": index, "id": item.call_id, "type": "function"}
        return {"tool_calls": [call | {"function": {"name": item.name} | function}]}

    text = delta.text
    if isinstance(item, Reasoning):
        text = "\n" * (begins and state.reasonings > 0) + text
        state.reasonings += begins
        return {"reasoning": text} if text else None
    text = "\n" * (begins and state.texts > 0) + text
    state.texts += begins
    return {"content": text} if text else None
