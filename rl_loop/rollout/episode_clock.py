"""Wall-clock limit of one episode, and calls that end with it."""

import asyncio
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from rl_loop.infrastructure import InfrastructureError

CANCEL_SECONDS = 1.0
"""Time for a cancelled call to end. A call that takes longer is abandoned."""

_running_clock: ContextVar["EpisodeClock"] = ContextVar("running_clock")


class OutOfTimeError(Exception):
    """The time of the episode is over."""


@dataclass
class CallTime:
    """Duration of a call of an episode."""

    seconds: float | None = None
    """Seconds in which the clock ran. None before the call ends, or if it was not measured."""
    waited: float | None = None
    """Seconds in which the clock was stopped. None like ``seconds``."""


class EpisodeClock:
    """Measures the running time of an episode.

    The clock stops while the episode waits in an engine's queue, or before it retries a failed
    call. It begins stopped.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._left = seconds
        """Seconds that were left when the clock last stopped."""
        self._ran = 0.0
        """Seconds in which the clock had run when it last stopped or was reset."""
        self._running_since: float | None = None

    def start(self) -> None:
        """Start the clock if it is stopped."""
        if self._running_since is None:
            self._running_since = time.monotonic()

    def restart(self) -> None:
        """Reset the clock to the whole time limit and start it."""
        self._ran = self.ran
        self._left = self._seconds
        self._running_since = time.monotonic()

    def stop(self) -> None:
        """Stop the clock if it is running."""
        self._ran = self.ran
        self._left = self.left
        self._running_since = None

    @property
    def is_running(self) -> bool:
        """True if the clock is running."""
        return self._running_since is not None

    @property
    def ran(self) -> float:
        """Seconds in which the clock has run, including the time before ``restart``."""
        if self._running_since is None:
            return self._ran
        return self._ran + (time.monotonic() - self._running_since)

    @contextmanager
    def measure(self) -> Iterator[CallTime]:
        """Measure the block. The yielded object has the result after the block."""
        call = CallTime()
        began, ran = time.monotonic(), self.ran
        try:
            yield call
        finally:
            total = time.monotonic() - began
            call.seconds = min(total, self.ran - ran)
            call.waited = total - call.seconds

    @property
    def left(self) -> float:
        """Remaining seconds. Negative after the time limit."""
        if self._running_since is None:
            return self._left
        return self._left - (time.monotonic() - self._running_since)

    @property
    def is_over(self) -> bool:
        return self.left <= 0

    async def sleep(self, seconds: float) -> None:
        """Sleep with the clock stopped. Afterwards the clock runs again if it ran before."""
        was_running = self.is_running
        self.stop()
        try:
            await asyncio.sleep(seconds)
        finally:
            if was_running:
                self.start()

    async def limit[T](self, call: Coroutine[Any, Any, T]) -> T:
        """Return the result of ``call``. Cancel it after the time limit.

        Raises:
            OutOfTimeError: the time of the episode is over.
            InfrastructureError: other code cancelled the call.
        """
        # The task that is created next copies the context, so the call sees this clock.
        _running_clock.set(self)
        task = asyncio.ensure_future(call)
        try:
            await asyncio.wait({task}, timeout=max(0.0, self.left))
            # If the clock was stopped during the call, there is time left.
            while not task.done() and not self.is_over:
                await asyncio.wait({task}, timeout=max(0.001, self.left))

            if not task.done():
                raise OutOfTimeError
            # A cancelled task raises CancelledError, which would look like a cancellation of this
            # episode.
            if task.cancelled():
                raise InfrastructureError("environment", "a call was cancelled from within")
            return task.result()
        finally:
            await end_task(task)


def running_clock() -> EpisodeClock:
    """Return the calling episode's clock, which a tool with a queue can stop while a call waits.

    Outside of episodes the clock has no limit.
    """
    return _running_clock.get(None) or EpisodeClock(float("inf"))


async def end_task(task: "asyncio.Future[Any]") -> None:
    """Cancel a task if it is running, and wait briefly for its end."""
    if not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=CANCEL_SECONDS)

    # asyncio warns of exceptions that no code has read.
    if task.done():
        with suppress(asyncio.CancelledError):
            task.exception()
    else:
        # An abandoned task that ends later must not warn either.
        task.add_done_callback(lambda late: late.cancelled() or late.exception())
