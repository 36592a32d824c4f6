"""Items of responses, and the events of streamed responses."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rl_loop.gateway.answer import AnswerItem, FunctionCall, Reasoning
from rl_loop.gateway.errors import ApiError
from rl_loop.gateway.token_log_probs import TokenLogProb
from rl_loop.gateway.turn_reader import AnswerDelta

ID_PREFIX = "resp_"


def item_json(
    response_id: str,
    number: int,
    item: AnswerItem,
    text: str,
    log_probs: Sequence[TokenLogProb],
    status: str,
) -> dict[str, Any]:
    """Return an item of a response.

    Args:
        response_id: name of the response.
        number: index of the item.
        item: the item.
        text: text of the item, or arguments of the call.
        log_probs: tokens of the text.
        status: "in_progress", "completed" or "incomplete".
    """
    name = f"{response_id.removeprefix(ID_PREFIX)}_{number}"
    if isinstance(item, Reasoning):
        thoughts = [{"type": "reasoning_text", "text": text}]
        return {"type": "reasoning", "id": f"rs_{name}", "summary": [], "content": thoughts}
    if isinstance(item, FunctionCall):
        return {
            "type": "function_call",
            "id": f"fc_{name}",
            # Tool outputs refer to this id, not to the id of the item.
            "call_id": item.call_id,
            "name": item.name,
            "arguments": text,
            "status": status,
        }
    listed = [token.to_json() for token in log_probs]
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": listed}
    return {
        "type": "message",
        "id": f"msg_{name}",
        "role": "assistant",
        "status": status,
        "content": [part],
    }


@dataclass
class _OpenItem:
    """An item whose end was not sent."""

    number: int
    item: AnswerItem
    pieces: list[str] = field(default_factory=list)
    log_probs: list[TokenLogProb] = field(default_factory=list)


class ResponsesEvents:
    """Events of one response."""

    ends_with_done = False
    """A stream ends with ``response.completed`` or ``response.incomplete``."""

    def __init__(self, frame: Callable[[str, str], dict[str, Any]]) -> None:
        """Create a stream without events.

        Args:
            frame: returns the response without items for an id and a status.
        """
        self._frame = frame
        self._response_id = ""
        self._sent = 0
        self._open: _OpenItem | None = None

    def begin(self, response_id: str) -> Iterator[dict[str, Any]]:
        """Yield the first events of a response."""
        self._response_id = response_id
        # The OpenAI SDK rejects a stream that does not begin with ``response.created``.
        begun = self._frame(response_id, "in_progress")
        yield self._event("response.created", response=begun)
        yield self._event("response.in_progress", response=begun)

    def add(self, choice: int, deltas: Sequence[AnswerDelta]) -> Iterator[dict[str, Any]]:
        """Yield the events of deltas. ``choice`` is 0, because responses have no choices."""
        for delta in deltas:
            if self._open is None or self._open.number != delta.number:
                # Items do not overlap, so the next one ends the current one.
                yield from self._close("completed")
                self._open = _OpenItem(delta.number, delta.item)
                yield from self._item_begin_events(self._open)
            self._open.pieces.append(delta.text)
            self._open.log_probs += delta.log_probs
            if delta.text:
                yield self._delta(delta)

    def end(self, answer: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the last events, the last of which has the whole response ``answer``."""
        # Only the last item of a truncated turn is incomplete, and it is the open one.
        yield from self._close(answer["status"])
        yield self._event(f"response.{answer['status']}", response=answer)

    def error_events(self, error: ApiError) -> Iterator[dict[str, Any]]:
        """Yield the event of an error. OpenAI's clients raise it because of the key ``error``."""
        body = error.body()["error"]
        fields = {key: body[key] for key in ("code", "message", "param")}
        yield self._event("error", **fields, error=body)

    def _item_begin_events(self, opened: _OpenItem) -> Iterator[dict[str, Any]]:
        """Yield the events that begin an item."""
        item = item_json(self._response_id, opened.number, opened.item, "", (), "in_progress")
        parts = item.get("content")
        if parts is not None:
            # OpenAI's streams begin an item without parts, and add its only part in the next event.
            item["content"] = []
        yield self._event("response.output_item.added", output_index=opened.number, item=item)
        if parts is not None:
            place = self._place(opened.number, item["id"], content_index=0)
            yield self._event("response.content_part.added", **place, part=parts[0])

    def _delta(self, delta: AnswerDelta) -> dict[str, Any]:
        """Return the event for further content of an item."""
        item = item_json(self._response_id, delta.number, delta.item, "", (), "in_progress")
        if isinstance(delta.item, FunctionCall):
            place = self._place(delta.number, item["id"])
            return self._event("response.function_call_arguments.delta", **place, delta=delta.text)
        place = self._place(delta.number, item["id"], content_index=0)
        if isinstance(delta.item, Reasoning):
            return self._event("response.reasoning_text.delta", **place, delta=delta.text)
        listed = [token.to_json() for token in delta.log_probs]
        return self._event("response.output_text.delta", **place, delta=delta.text, logprobs=listed)

    def _close(self, status: str) -> Iterator[dict[str, Any]]:
        """Yield the events of the end of the open item, if there is one."""
        if self._open is None:
            return
        number, kind = self._open.number, self._open.item
        text = "".join(self._open.pieces)
        item = item_json(self._response_id, number, kind, text, self._open.log_probs, status)
        self._open = None

        if isinstance(kind, FunctionCall):
            place = self._place(number, item["id"])
            done = {"arguments": text, "name": kind.name}
            yield self._event("response.function_call_arguments.done", **place, **done)
        else:
            place = self._place(number, item["id"], content_index=0)
            [part] = item["content"]
            # Only message texts have log-probs, reasoning has none.
            extra = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
            yield self._event(f"response.{part['type']}.done", **place, text=text, **extra)
            yield self._event("response.content_part.done", **place, part=part)
        yield self._event("response.output_item.done", output_index=number, item=item)

    def _place(self, number: int, item_id: str, **more: int) -> dict[str, Any]:
        return {"output_index": number, "item_id": item_id, **more}

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        event = {"type": kind, **fields, "sequence_number": self._sent}
        self._sent += 1
        return event
