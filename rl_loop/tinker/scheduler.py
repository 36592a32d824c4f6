"""Scheduler: decides which operation the policy runs next. One operation runs at a time."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from megatron_gptoss.user_error import UserError
from rl_loop.gateway.errors import ApiError
from rl_loop.tinker.errors import ClientError
from rl_loop.tinker.futures import Answer, RequestFuture
from rl_loop.tinker.queue import TenantQueue, Work

MAX_WAITING_SAMPLES = 4096
"""Maximum number of waiting sampling requests. Clients repeat further ones later."""
MAX_BATCH = 64
"""Maximum number of sampling requests that run together."""
MAX_BURST = 64
"""Maximum number of operations in a tenant's turn."""
CLEAN_UP_SECONDS = 5.0
"""Time in seconds between clean-ups."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SampleOperation[Request]:
    """A sampling request that waits."""

    snapshot: Hashable
    """Weights that sample. Requests with equal snapshots run together."""
    request: Request
    """Argument of the function that samples."""
    future: RequestFuture
    """Receives the answer."""


class Scheduler[Request]:
    """Runs operations.

    Tenants take turns. A turn ends with an optimizer step, so that unfinished gradients are rare.
    After every turn, waiting sampling requests of one snapshot run.
    """

    def __init__(
        self,
        sample: Callable[[Hashable, Sequence[Request]], Awaitable[Sequence[Answer | ClientError]]],
        clean_up: Callable[[], None],
    ) -> None:
        """Create a scheduler that does not run yet.

        Args:
            sample: samples requests of one snapshot. Returns an answer or an error for each.
            clean_up: called regularly on the event loop.
        """
        self._sample = sample
        self._clean_up = clean_up
        self._ready: deque[TenantQueue] = deque()
        self._samples: deque[SampleOperation[Request]] = deque()
        self._singles: deque[tuple[Work, RequestFuture]] = deque()
        self._wake = asyncio.Event()

    def notify(self, queue: TenantQueue) -> None:
        """Run the operations of a queue, if the next one has arrived."""
        if queue.is_ready and queue not in self._ready:
            self._ready.append(queue)
            self._wake.set()

    def add_single(self, work: Work, future: RequestFuture) -> None:
        """Run an operation that belongs to no queue, such as the creation of a tenant."""
        self._singles.append((work, future))
        self._wake.set()

    def check_room(self) -> None:
        """Raise ApiError if too many sampling requests wait."""
        if len(self._samples) >= MAX_WAITING_SAMPLES:
            raise ApiError(429, "too_many_requests", "too many sampling requests wait")

    def add_sample(self, operation: SampleOperation[Request]) -> None:
        """Add a sampling request."""
        self._samples.append(operation)
        self._wake.set()

    def cancel_sample(self, request_id: str) -> None:
        """Drop a sampling request that waits."""
        kept = [one for one in self._samples if one.future.request_id != request_id]
        self._samples = deque(kept)

    def remove(self, queue: TenantQueue) -> None:
        """Drop a queue, whose tenant has left."""
        with suppress(ValueError):
            self._ready.remove(queue)

    async def run(self) -> None:
        """Run operations until the task is cancelled."""
        cleaned_up = time.monotonic()
        while True:
            while self._singles:
                await self._run(*self._singles.popleft())
            if self._ready:
                await self._run_turn(self._ready.popleft())
            if self._samples:
                await self._run_samples()
            if not (self._singles or self._ready or self._samples):
                self._wake.clear()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), CLEAN_UP_SECONDS)
            if time.monotonic() - cleaned_up >= CLEAN_UP_SECONDS:
                self._clean_up()
                cleaned_up = time.monotonic()

    async def _run_turn(self, queue: TenantQueue) -> None:
        """Run the operations of a tenant up to its next optimizer step."""
        for _ in range(MAX_BURST):
            if not queue.is_ready:
                return
            operation = queue.take()
            await self._run(operation.work, operation.future)
            if operation.ends_turn:
                break
        self.notify(queue)

    async def _run(self, work: Work, future: RequestFuture) -> None:
        """Run one operation and set its answer."""
        try:
            future.resolve(await work())
        except ClientError as error:
            future.fail(str(error), "user")
        except UserError as error:
            # A full disk, for example. The client cannot correct it, but its user can.
            future.fail(str(error), "server")
        except Exception:
            logger.exception("%s failed", future.request_id)
            future.fail("the server failed. Its log has the reason", "server")

    async def _run_samples(self) -> None:
        """Sample waiting requests of the snapshot that has waited longest."""
        snapshot = self._samples[0].snapshot
        chosen = [one for one in self._samples if one.snapshot == snapshot][:MAX_BATCH]
        self._samples = deque(one for one in self._samples if one not in chosen)
        requests = [one.request for one in chosen]
        try:
            answers = await self._sample(snapshot, requests)
        except Exception:
            logger.exception("sampling failed")
            for one in chosen:
                one.future.fail("the server failed. Its log has the reason", "server")
            return
        for one, answer in zip(chosen, answers, strict=True):
            if isinstance(answer, ClientError):
                one.future.fail(str(answer), "user")
            else:
                one.future.resolve(answer)
