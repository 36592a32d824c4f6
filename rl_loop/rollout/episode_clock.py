"""The wall-clock limit of one episode, and calls that end with it."""

import asyncio
import time
from collections.abc import Coroutine
from contextlib import suppress
from contextvars import ContextVar
from typing import Any

from rl_loop.infrastructure import InfrastructureFailure

CANCEL_SECONDS = 1.0
"""How long a cancelled call is waited for. One that goes on nevertheless is left behind."""


_running_clock: ContextVar["EpisodeClock"] = ContextVar("running_clock")


class OutOfTime(Exception):
    """The time of the episode is over."""


class EpisodeClock:
    """Measures how long an episode has run; it stands while the episode waits for something that is not its own doing:
    in an engine's queue, or for what failed to be tried again. It begins standing."""

    def __init__(self, seconds: float) -> None:
        self._left = seconds
        self._running_since: float | None = None

    def start(self) -> None:
        if self._running_since is None:
            self._running_since = time.monotonic()

    def stop(self) -> None:
        self._left = self.left
        self._running_since = None

    @property
    def left(self) -> float:
        """Seconds; negative when it is over."""
        if self._running_since is None:
            return self._left
        return self._left - (time.monotonic() - self._running_since)

    @property
    def is_over(self) -> bool:
        return self.left <= 0

    async def pause(self, seconds: float) -> None:
        """Sleep while the clock stands; afterwards it is as before."""
        was_running = self._running_since is not None
        self.stop()
        try:
            await asyncio.sleep(seconds)
        finally:
            if was_running:
                self.start()

    async def limit[T](self, call: Coroutine[Any, Any, T]) -> T:
        """The result of ``call``, which is cancelled when the time is over: then raises OutOfTime."""
        _running_clock.set(self)
        task = asyncio.ensure_future(call)
        try:
            await asyncio.wait({task}, timeout=max(0.0, self.left))
            while not task.done() and not self.is_over:  # the clock stood meanwhile
                await asyncio.wait({task}, timeout=max(0.001, self.left))
            if not task.done():
                raise OutOfTime
            if task.cancelled():  # by itself: nobody asked for it
                raise InfrastructureFailure("environment", "a call was cancelled from within")
            return task.result()
        finally:
            await end_task(task)


def running_clock() -> EpisodeClock:
    """The clock of the episode that calls, so that a tool with a queue can stop it while a call waits in there. Outside
    of episodes, one that limits nothing."""
    return _running_clock.get(None) or EpisodeClock(float("inf"))


async def end_task(task: "asyncio.Future[Any]") -> None:
    """Cancel a task, if it runs, and wait a little for its end."""
    if not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=CANCEL_SECONDS)
    if task.done():
        with suppress(asyncio.CancelledError):
            task.exception()  # seen: asyncio need not complain
    else:
        task.add_done_callback(lambda late: late.cancelled() or late.exception())
