"""Jobs that take long: reading a body, rendering a conversation, and parsing a sampled turn.

Short requests are worked on where they arrive, because a process costs a millisecond. Long ones
have a process (``RequestWorkers``): parsers and tokenizers hold the interpreter, and with it the
event loop, while they run. Jobs and results are small in number of objects, so that pickling them
holds the loop for milliseconds only.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from rl_loop.chat.codec import ChatCodec, Effort
from rl_loop.chat.open_calls import OpenCall
from rl_loop.chat.tools import Tool
from rl_loop.data.trajectory import FinishReason
from rl_loop.engines.protocol import GenerateResult
from rl_loop.forked_pool import CallLimitError, ForkedPool, PoolError
from rl_loop.gateway.answer import ReadTurn, read_completion, read_turn
from rl_loop.gateway.body import parse_json
from rl_loop.gateway.errors import ApiError
from rl_loop.gateway.request import TurnRequest

JOB_SECONDS = 30.0
"""Processor time of one job. The longest request that fits into a context takes 10 s."""
JOB_MEMORY_BYTES = 2 << 30
"""Address space of a process that runs a job."""
WORKERS = 8
"""Maximum concurrent requests in processes. Further requests wait."""
IDLE_WORKERS = 2
"""Processes that are kept for the next request."""
NICENESS = 5
"""Added to the niceness of the gateway, so that the event loop has precedence."""


class RequestJob[Result](Protocol):
    """Work on one request."""

    def run(self, codec: ChatCodec) -> Result:
        """Return the result. Raises ApiError."""
        ...


class HasTurnRequest(Protocol):
    """One request of a dialect."""

    @property
    def requests(self) -> Sequence[TurnRequest]: ...


@dataclass(frozen=True)
class ReadJob[AnyCall: HasTurnRequest]:
    """Reads the body of a request, and computes all its values that take long."""

    body: bytes
    dialect: Callable[[Any, str], AnyCall]
    model: str
    """Name of the model in answers."""

    def run(self, codec: ChatCodec) -> AnyCall:
        """Return the request. Raises ApiError."""
        try:
            call = self.dialect(parse_json(self.body), self.model)
            # Here instead of on the event loop: the cached values are pickled together with the
            # request.
            for request in call.requests:
                request.prepare()
        # ``parse_json`` checks the body. A schema may also be too deep for ``canonical_value``.
        except RecursionError:
            raise ApiError(400, "invalid_request", "the body has too many nested levels") from None
        return call


@dataclass(frozen=True)
class StoredTokens:
    """A stored turn from which a conversation continues."""

    closing: tuple[int, ...]
    """Token ids that close the turn."""
    open_calls: tuple[OpenCall, ...]
    history: Sequence[int] | None
    """All token ids up to the end of the turn, from which finished analysis is left out. None to
    keep all analysis."""


@dataclass(frozen=True)
class RenderJob:
    """Renders the new messages of a conversation."""

    messages: tuple[dict[str, Any], ...]
    first_number: int
    """Client messages before ``messages``."""
    tools: tuple[Tool, ...]
    reasoning_effort: Effort | None
    keys: Sequence[bytes]
    """See ``ChatCodec.render_conversation``."""
    stored: StoredTokens | None
    """Stored turn to continue. None for a new conversation."""
    max_tokens: int
    """Limit of a conversation."""

    def run(self, codec: ChatCodec) -> "RenderedMessages":
        """Return the tokens. Raises ApiError if the messages cannot be rendered."""
        rendered = self._render(codec)
        count = len(rendered.new_ids)
        if count > self.max_tokens:
            # Unpickling millions of tokens would block the event loop.
            return RenderedMessages([], [], too_many=count)
        return rendered

    def _render(self, codec: ChatCodec) -> "RenderedMessages":
        """Return the tokens of the request's messages. Raises ApiError."""
        try:
            if self.stored is None:
                opened: list[OpenCall] = []
                ids = codec.render_conversation(
                    self.messages,
                    self.tools,
                    opened,
                    reasoning_effort=self.reasoning_effort,
                    keys=self.keys,
                )
                return RenderedMessages(ids, opened)

            # Copy the calls, because other conversations continue from this turn.
            open_calls = [replace(call) for call in self.stored.open_calls]
            ids = codec.render_continuation(self.messages, open_calls, self.first_number)
        except ValueError as error:
            raise ApiError(400, "invalid_request", str(error), parameter="messages") from None

        history = kept = self.stored.history
        if history is not None:
            kept = codec.without_finished_analysis(history)
        # Unchanged tokens are not returned: the stored sequence continues, and there is less to
        # pickle.
        is_changed = kept is not None and list(kept) != list(history or ())
        return RenderedMessages(
            [*self.stored.closing, *ids], open_calls, list(kept or ()) if is_changed else None
        )


@dataclass(frozen=True)
class RenderedMessages:
    """The tokens of new messages."""

    new_ids: list[int]
    open_calls: list[OpenCall]
    """Calls that no message has answered."""
    history: list[int] | None = None
    """Token ids before ``new_ids`` if they differ from the stored ones."""
    too_many: int | None = None
    """Number of new tokens if they alone exceed the limit. They are left out."""


@dataclass(frozen=True)
class EncodeJob:
    """Encodes the prompt of a completion."""

    text: str
    closing: tuple[int, ...]
    """Tokens before the text, see ``StoredTokens``."""
    max_tokens: int
    """Limit of a conversation."""

    def run(self, codec: ChatCodec) -> RenderedMessages:
        """Return the tokens."""
        ids = [*self.closing, *codec.encode_sampled(self.text)]
        if len(ids) > self.max_tokens:
            return RenderedMessages([], [], too_many=len(ids))
        return RenderedMessages(ids, [])


@dataclass(frozen=True)
class TurnJob:
    """Parses a sampled turn."""

    ids: list[int]
    finish_reason: FinishReason
    tools: tuple[Tool, ...]
    """Functions that the client offered."""
    response_id: str
    """Name of the turn."""
    stop: tuple[str, ...] = ()
    """Texts that end the turn."""
    is_completion: bool = False
    """True if the turn has no chat format."""

    def run(self, codec: ChatCodec) -> ReadTurn:
        """Return the parsed turn."""
        if self.is_completion:
            return read_completion(codec, self.ids, self.stop)
        sampled = GenerateResult(self.ids, [], self.finish_reason)
        return read_turn(codec, sampled, self.tools, self.response_id, self.stop)


class RequestWorkers:
    """Processes of one gateway for long requests. The first long request starts them."""

    def __init__(self, codec: ChatCodec) -> None:
        self._pool = ForkedPool(
            "the process that reads requests",
            f"{__name__}:run_job",
            prepare=f"{__name__}:prepare",
            argument=codec,
            seconds=JOB_SECONDS,
            memory_bytes=JOB_MEMORY_BYTES,
            workers=WORKERS,
            idle_workers=IDLE_WORKERS,
            niceness=NICENESS,
            control=NoOpJob(),
        )
        self._running: set[asyncio.Task[Any]] = set()

    def begin[Result](self, job: RequestJob[Result]) -> "asyncio.Task[Result]":
        """Begin a job. The task raises ApiError, and ends with the job even if no caller waits."""
        task = asyncio.create_task(self._run(job))
        # asyncio keeps only weak references to tasks, so a job without a waiting client could
        # vanish.
        self._running.add(task)
        task.add_done_callback(self._note_end)
        return task

    async def close(self) -> None:
        """End all processes, and wait for the jobs in them to fail."""
        # First the processes, because a job ends early only if its process ends.
        await asyncio.to_thread(self._pool.close)
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _run[Result](self, job: RequestJob[Result]) -> Result:
        """Run a job in the pool. Raises ApiError."""
        try:
            result: Result = await self._pool.ask_async(job)
            return result
        # The request caused it, so the client can avoid it. A failure of the pool is not the
        # client's.
        except CallLimitError:
            gigabytes = JOB_MEMORY_BYTES >> 30
            message = (
                f"reading the request needs more than {JOB_SECONDS:g} s or {gigabytes} GiB. Send "
                "a shorter request"
            )
            raise ApiError(413, "invalid_request", message) from None
        except PoolError as error:
            raise ApiError(503, "internal_error", str(error)) from None

    def _note_end(self, task: "asyncio.Task[Any]") -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # Read, because the client may have left and asyncio warns of unread errors.


class SessionJobs:
    """Runs the jobs of one session: short jobs here, one long job at a time in a process.

    Otherwise one session could use all processes.
    """

    def __init__(self, codec: ChatCodec, workers: RequestWorkers | None) -> None:
        """Create the queue of a session.

        Args:
            workers: processes for long jobs. None to start processes for this session.
        """
        self._codec = codec
        self._workers = workers or RequestWorkers(codec)
        self._owns_workers = workers is None
        self._is_working = asyncio.Lock()
        self._is_working_here = asyncio.Lock()

    async def run[Result](self, job: RequestJob[Result], *, is_short: bool) -> Result:
        """Run a job. The next job begins after its end, even if the client leaves.

        Raises ApiError.
        """
        if is_short:
            async with self._is_working_here:
                # The event loop serves other sessions between two jobs of a session.
                await asyncio.sleep(0)
                return job.run(self._codec)
        # The job's end releases the lock, not this coroutine's: the client may leave before.
        await self._is_working.acquire()
        task = self._workers.begin(job)
        task.add_done_callback(lambda _: self._is_working.release())
        return await asyncio.shield(task)

    async def close(self) -> None:
        """End the processes that were started for this session."""
        if self._owns_workers:
            await self._workers.close()


@dataclass(frozen=True)
class NoOpJob:
    """A job that shows that processes run."""

    def run(self, codec: ChatCodec) -> None:
        """Return at once."""


# ---- in a worker

_codec: ChatCodec | None = None
"""Codec of the gateway that has started this process."""


def prepare(codec: ChatCodec) -> None:
    """Load the tables that jobs need, before workers are forked."""
    global _codec
    _codec = codec
    # The first rendering loads the tokenizer's tables. Forked workers share them.
    codec.render_continuation([{"role": "user", "content": "Hi"}], [], 0)


def run_job(job: RequestJob[Any]) -> Any:
    """Run a job in this process."""
    assert _codec is not None
    return job.run(_codec)
