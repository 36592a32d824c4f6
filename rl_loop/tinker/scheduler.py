"""Scheduler: decides which operation the policy runs next. One operation runs at a time."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from megatron_gptoss.user_error import UserError
from rl_loop.gateway.errors import ApiError
from rl_loop.tinker.errors import ClientError
from rl_loop.tinker.futures import Answer, RequestFuture
from rl_loop.tinker.queue import TenantQueue, Work

MAX_WAITING_SAMPLES = 4096
"""Maximum number of waiting sampling requests. Clients repeat further ones later."""
MAX_BATCH = 256
"""Maximum number of continuations that are sampled together."""
MAX_BURST = 64
"""Maximum number of operations in a tenant's turn."""
CLEAN_UP_SECONDS = 5.0
"""Time in seconds between clean-ups."""
SERVER_FAILED = "the server failed. Its log has the reason"
"""Message for clients about an unexpected error."""

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class SampleOperation[Part, Result]:
    """A sampling request that waits. It runs in parts, so that a large one does not stop others."""

    snapshot: Hashable
    """Weights that sample. Requests with equal snapshots run together."""
    parts: Sequence[tuple[Part, int]]
    """Arguments of the function that samples, each with its number of continuations."""
    future: RequestFuture
    """Receives the answer."""
    combine: Callable[[Sequence[Result]], Answer]
    """Makes the answer from the results of all parts."""
    started_parts: int = 0
    """Number of parts that run or have run."""
    results: list[Result] = field(default_factory=list)
    """Results of the parts that have run."""

    def add_result(self, result: Result | ClientError) -> None:
        """Add the result of the next part, and set the answer after the last one."""
        if self.future.answer is not None:
            return
        if isinstance(result, ClientError):
            self.fail(str(result), "user")
            return
        self.results.append(result)
        if len(self.results) == len(self.parts):
            self.future.resolve(self.combine(self.results))

    def fail(self, message: str, category: str) -> None:
        """Set an error as the answer, and start no further parts."""
        self.started_parts = len(self.parts)
        if self.future.answer is None:
            self.future.fail(message, category)

    @property
    def is_fully_started(self) -> bool:
        """True if no part is left to start: all have started, or the request has an answer."""
        return self.started_parts == len(self.parts) or self.future.answer is not None


class Scheduler[Part, Result]:
    """Runs operations.

    Tenants take turns. A turn ends with an optimizer step, so that unfinished gradients are rare. It
    also ends after ``turn_tokens`` tokens, after ``MAX_BURST`` operations, or if the next request
    has not arrived. After every turn, waiting sampling requests of one snapshot run. Snapshots take
    turns, too.

    Example with tenants A and B and the snapshot S:

        A: forward_backward, optim_step | S: 3 samples | B: forward_backward | S: 1 sample | A: ...
    """

    def __init__(
        self,
        sample: Callable[[Hashable, Sequence[Part]], Awaitable[Sequence[Result | ClientError]]],
        clean_up: Callable[[], None],
        turn_tokens: int,
    ) -> None:
        """Create a scheduler that does not run yet.

        Args:
            sample: samples parts of requests of one snapshot. Returns a result or an error for each.
            clean_up: called regularly on the event loop.
            turn_tokens: number of tokens after which a tenant's turn ends.
        """
        self._sample = sample
        self._clean_up = clean_up
        self._turn_tokens = turn_tokens
        self._ready: deque[TenantQueue] = deque()
        self._samples: dict[Hashable, deque[SampleOperation[Part, Result]]] = {}
        self._other_operations: deque[tuple[Work, RequestFuture]] = deque()
        self._wake = asyncio.Event()

    def notify(self, queue: TenantQueue) -> None:
        """Run the operations of a queue, if the next one has arrived."""
        if queue.is_ready and queue not in self._ready:
            self._ready.append(queue)
            self._wake.set()

    def add_operation(self, work: Work, future: RequestFuture) -> None:
        """Run an operation that belongs to no queue, such as the creation of a tenant."""
        self._other_operations.append((work, future))
        self._wake.set()

    def check_room(self) -> None:
        """Raise ApiError if too many sampling requests wait."""
        if sum(map(len, self._samples.values())) >= MAX_WAITING_SAMPLES:
            raise ApiError(429, "too_many_requests", "too many sampling requests wait")

    def add_sample(self, operation: SampleOperation[Part, Result]) -> None:
        """Add a sampling request."""
        self._samples.setdefault(operation.snapshot, deque()).append(operation)
        self._wake.set()

    def cancel_sample(self, request_id: str) -> None:
        """Fail a sampling request that waits."""
        for waiting in self._samples.values():
            for one in waiting:
                if one.future.request_id == request_id:
                    one.fail("the request was canceled", "user")

    def remove(self, queue: TenantQueue) -> None:
        """Drop a queue, whose tenant has left."""
        queue.clear()
        with suppress(ValueError):
            self._ready.remove(queue)

    async def run(self) -> None:
        """Run operations until the task is cancelled."""
        cleaned_up = time.monotonic()
        while True:
            while self._other_operations:
                await self._run(*self._other_operations.popleft())
            if self._ready:
                await self._run_turn(self._ready.popleft())
            if self._samples:
                await self._run_samples()
            if not (self._other_operations or self._ready or self._samples):
                self._wake.clear()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), CLEAN_UP_SECONDS)
            if time.monotonic() - cleaned_up >= CLEAN_UP_SECONDS:
                cleaned_up = time.monotonic()
                try:
                    self._clean_up()
                except Exception:
                    logger.exception("the clean-up failed")

    async def _run_turn(self, queue: TenantQueue) -> None:
        """Run the operations of a tenant up to its next optimizer step."""
        tokens = 0
        for _ in range(MAX_BURST):
            if not queue.is_ready or tokens >= self._turn_tokens:
                break
            operation = queue.first()
            if not await self._run(operation.work, operation.future):
                break
            tokens += operation.tokens
            queue.remove_first()
            if operation.ends_turn:
                break
        self.notify(queue)

    async def _run(self, work: Work, future: RequestFuture) -> bool:
        """Run one operation and set its answer. Return False if a part of it remains."""
        try:
            answer = await work()
            if answer is None:
                return False
            future.resolve(answer)
        except ClientError as error:
            future.fail(str(error), "user")
        except UserError as error:
            # A full disk, for example. The client cannot correct it, but its user can.
            future.fail(str(error), "server")
        except Exception:
            logger.exception("%s failed", future.request_id)
            future.fail(SERVER_FAILED, "server")
        return True

    async def _run_samples(self) -> None:
        """Sample waiting requests of the snapshot whose turn it is."""
        snapshot = next(iter(self._samples))
        chosen = self._take_parts(snapshot)
        if not chosen:
            return
        try:
            results = await self._sample(snapshot, [part for _, part in chosen])
            for (operation, _), result in zip(chosen, results, strict=True):
                operation.add_result(result)
        except Exception:
            logger.exception("sampling failed")
            for operation, _ in chosen:
                operation.fail(SERVER_FAILED, "server")

    def _take_parts(self, snapshot: Hashable) -> list[tuple[SampleOperation[Part, Result], Part]]:
        """Take the next parts of a snapshot's requests. Other snapshots have the next turns."""
        waiting = self._samples.pop(snapshot)
        chosen = []
        count = 0
        while waiting and count < MAX_BATCH:
            operation = waiting[0]
            if operation.is_fully_started:
                waiting.popleft()
                continue
            part, continuations = operation.parts[operation.started_parts]
            operation.started_parts += 1
            chosen.append((operation, part))
            count += continuations
        if waiting:
            self._samples[snapshot] = waiting
        return chosen
