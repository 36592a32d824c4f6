"""Sends answers: as one JSON object, or as server-sent events while turns are sampled."""

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Protocol

from aiohttp import web

from rl_loop.chat.codec import ChatCodec
from rl_loop.gateway.errors import ApiError
from rl_loop.gateway.node import TokenUsage, TurnNode, total_usage
from rl_loop.gateway.observed_engine import TurnObserver
from rl_loop.gateway.request import TurnRequest
from rl_loop.gateway.session import SHORT_LISTS, ConversationSession, choice_id
from rl_loop.gateway.turn_reader import AnswerDelta, AnswerDeltas, AnswerReader
from rl_loop.threads import run_in_thread

LONG_ANSWER_BYTES = 65_536
"""Bytes of a stream that are sent at a time. A longer event is sent at once."""


class AnswerEvents(Protocol):
    """Events of one streamed answer."""

    ends_with_done: bool
    """True if a stream ends with ``data: [DONE]``."""

    def begin(self, response_id: str) -> Iterator[dict[str, Any]]:
        """Yield the first events."""
        ...

    def add(self, choice: int, deltas: Sequence[AnswerDelta]) -> Iterator[dict[str, Any]]:
        """Yield the events of deltas of one choice."""
        ...

    def error_events(self, error: ApiError) -> Iterator[dict[str, Any]]:
        """Yield the events of an error."""
        ...


class DialectCall[Events: AnswerEvents](Protocol):
    """One request of a dialect."""

    id_prefix: str
    stream: bool
    requests: tuple[TurnRequest, ...]
    """Conversations to continue. Only completions may have several."""
    choices: int
    """Number of turns to sample for each of them."""

    def answer(self, nodes: Sequence[TurnNode], usage: TokenUsage) -> dict[str, Any]:
        """Return the body of a plain answer."""
        ...

    def events(self) -> Events:
        """Return the events of a streamed answer, before the first one."""
        ...

    def end_events(
        self, events: Events, nodes: Sequence[TurnNode], usage: TokenUsage
    ) -> Iterator[dict[str, Any]]:
        """Yield the events behind the last delta."""
        ...

    def to_json(self, value: dict[str, Any], *, in_pieces: bool = False) -> bytes:
        """Return an answer or an event as JSON, see ``json_text``."""
        ...


def count_turns(call: DialectCall[Any]) -> int:
    """Return the number of turns to sample for all requests of a call."""
    return len(call.requests) * call.choices


async def send_whole(
    request: web.Request, call: DialectCall[Any], nodes: Sequence[TurnNode]
) -> web.StreamResponse:
    """Send turns as one JSON object."""
    # Log-probs are by far the largest part of an answer: up to 21 entries for every token.
    listed = sum(token.entries for node in nodes for text in node.log_probs for token in text)
    if listed <= SHORT_LISTS:
        body = call.to_json(call.answer(nodes, total_usage(nodes, call.choices)))
    else:
        body = await run_in_thread(_long_body, call, nodes)
    response = web.Response(body=body, content_type="application/json", charset="utf-8")
    # Sent here, not by aiohttp after the handler, so that the caller notices a lost connection.
    await response.prepare(request)
    await response.write_eof()
    return response


def _long_body(call: DialectCall[Any], nodes: Sequence[TurnNode]) -> bytes:
    """Return the JSON of an answer. Other threads run in between, in contrast to json.dumps."""
    usage = total_usage(nodes, call.choices)
    return call.to_json(call.answer(nodes, usage), in_pieces=True)


class EventStream:
    """Sends the events of one answer. The response begins with the first event.

    Until then an error is an HTTP status, later it is an event.
    """

    def __init__(self, request: web.Request, call: DialectCall[Any]) -> None:
        self.has_begun = False
        self._request = request
        self._call = call
        self._response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )

    async def send(self, events: Iterable[dict[str, Any]]) -> None:
        """Send events. Raises ConnectionResetError if the client has left."""
        lines: list[bytes] = []
        size = 0
        for event in events:
            # Events of Responses have a type, chunks of chat completions do not.
            if "type" in event:
                lines.append(f"event: {event['type']}\n".encode())
            lines += [b"data: ", self._call.to_json(event), b"\n\n"]
            size += len(lines[-2])
            # A long answer is sent in pieces, so that other requests are served between them.
            if size > LONG_ANSWER_BYTES:
                await self._write(lines)
                await asyncio.sleep(0)
                lines, size = [], 0
        await self._write(lines)

    async def end(self, *, is_done: bool) -> web.StreamResponse:
        """End the response. ``is_done`` sends ``data: [DONE]`` before."""
        if is_done:
            await self._write([b"data: [DONE]\n\n"])
        await self._response.write_eof()
        return self._response

    async def _write(self, lines: list[bytes]) -> None:
        """Send lines, after the headers."""
        if not lines:
            return
        if not self.has_begun:
            self.has_begun = True
            await self._response.prepare(self._request)
        await self._response.write(b"".join(lines))


class StreamedTurns:
    """The turns of one streamed request: sampled, read and sent at the same time."""

    def __init__(
        self,
        stream: EventStream,
        call: DialectCall[Any],
        codec: ChatCodec,
        session: ConversationSession,
        response_id: str,
    ) -> None:
        """Prepare the stream of a request.

        Args:
            stream: stream to the client.
            call: request of the client.
            codec: chat format of the policy.
            session: session of the client.
            response_id: name of the response if it is a new one.
        """
        self._stream = stream
        self._call = call
        self._session = session
        self._response_id = response_id
        self._changed = asyncio.Event()
        numbers = range(count_turns(call))
        self._observers = [TurnObserver(on_change=self._changed.set) for _ in numbers]
        self._readers = [
            AnswerReader(
                codec, call.requests[number // call.choices], choice_id(response_id, number)
            )
            for number in numbers
        ]
        self._deltas = [AnswerDeltas() for _ in numbers]
        self._events: AnswerEvents | None = None

    async def sample(self, *, is_retry: bool) -> list[TurnNode]:
        """Sample the turns, and send their deltas.

        Args:
            is_retry: whether the client marks the request as a retry.

        Raises:
            ApiError: one of the turns failed.
            ConnectionResetError: the client has left.
        """
        turns = asyncio.ensure_future(
            self._session.respond_choices(
                self._call.requests,
                self._response_id,
                self._call.choices,
                is_retry=is_retry,
                observers=self._observers,
            )
        )
        # Also wakes the loop below for a turn that ends without new tokens.
        turns.add_done_callback(lambda _: self._changed.set())
        try:
            while not turns.done():
                await self._changed.wait()
                self._changed.clear()
                for number, observer in enumerate(self._observers):
                    new = observer.take()
                    await self._send(number, self._readers[number].read(new), self._response_id)
            return turns.result()
        finally:
            # The client has left. Sampling stops if no other client waits for the turns.
            turns.cancel()
            with suppress(asyncio.CancelledError, ApiError):
                await turns

    async def send_rest(self, nodes: Sequence[TurnNode]) -> web.StreamResponse:
        """Send the remainder of complete turns, and end the stream."""
        # Not the reserved name if a repeated request gets an earlier turn, which was not streamed.
        name = nodes[0].response_id
        for number, node in enumerate(nodes):
            rest = self._deltas[number].rest(node.answer, node.log_probs)
            await self._send(number, rest, name, always=True)
        assert self._events is not None
        usage = total_usage(nodes, self._call.choices)
        await self._stream.send(self._call.end_events(self._events, nodes, usage))
        return await self._stream.end(is_done=self._events.ends_with_done)

    async def send_error(self, error: ApiError) -> web.StreamResponse:
        """End the stream with an error."""
        assert self._events is not None
        await self._stream.send(self._events.error_events(error))
        return await self._stream.end(is_done=False)

    async def _send(
        self,
        choice: int,
        deltas: Sequence[AnswerDelta],
        response_id: str,
        *,
        always: bool = False,
    ) -> None:
        """Send deltas of a choice. ``always`` begins the choice even if there are none."""
        if not deltas and not always:
            return
        if self._events is None:
            self._events = self._call.events()
            await self._stream.send(self._events.begin(response_id))
        # Before sending: if the client leaves now, no deltas are sent again.
        self._deltas[choice].add(deltas)
        await self._stream.send(self._events.add(choice, deltas))
