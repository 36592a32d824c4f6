"""Turns in flight, and the clients that wait for them."""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rl_loop.gateway.node import TurnNode

MAX_ABANDONED = 256
"""Number of abandoned requests that are remembered. Their retries have no turn to join."""


class TurnsClosedError(Exception):
    """The turn was cancelled because the session was closed."""


@dataclass(eq=False)
class PendingTurn:
    """A turn in flight."""

    task: "asyncio.Task[TurnNode]"
    waiting: int = 0
    """Number of clients that wait for it."""


class PendingTurns:
    """The turns in flight of one session."""

    def __init__(self) -> None:
        self._turns: dict[bytes, list[PendingTurn]] = {}
        """By the fingerprint of the request. Several clients may send the same request."""
        self._abandoned: deque[bytes] = deque(maxlen=MAX_ABANDONED)
        """Fingerprints of requests whose turns were cancelled because their clients left."""
        self._is_closed = False

    def __len__(self) -> int:
        """Return the number of turns in flight."""
        return len(self.all())

    def all(self) -> list[PendingTurn]:
        """Return the turns in flight."""
        return [turn for equal in self._turns.values() for turn in equal]

    def remove_abandoned(self, fingerprint: bytes) -> bool:
        """Return True if the turn of a request was abandoned. The next call returns False."""
        if fingerprint not in self._abandoned:
            return False
        self._abandoned.remove(fingerprint)
        return True

    async def wait(
        self,
        fingerprint: bytes,
        take_turn: Callable[[], Coroutine[Any, Any, TurnNode]],
        *,
        is_retry: bool,
    ) -> TurnNode:
        """Wait for a turn. If no client waits for the turn any more, it is cancelled.

        Args:
            fingerprint: fingerprint of the request.
            take_turn: begins a turn.
            is_retry: whether to join a turn in flight whose client may have sent its request again.

        Raises:
            TurnsClosedError: the session was closed.
            Exception: whatever the turn raises.
        """
        pending = self._find_retried(fingerprint) if is_retry else None
        if pending is None:
            pending = PendingTurn(asyncio.create_task(take_turn()))
            self._turns.setdefault(fingerprint, []).append(pending)

        pending.waiting += 1
        try:
            # Shielded: a client that leaves must not take the turn from its own retry.
            return await asyncio.shield(pending.task)
        except asyncio.CancelledError:
            # Either the turn or this client was canceled. A canceled turn of a closed session is an
            # error for the client.
            if pending.task.cancelled() and self._is_closed:
                raise TurnsClosedError from None
            # The client left after the end of the turn, and before it got the answer.
            if pending.task.done() and not pending.task.cancelled():
                _mark_lost(pending.task)
            raise
        finally:
            pending.waiting -= 1
            if pending.waiting == 0:
                self._remove(fingerprint, pending)

    async def settle(self, seconds: float) -> None:
        """Wait until all turns have ended, for this many seconds at most."""
        tasks = [pending.task for pending in self.all()]
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)

    async def close(self) -> None:
        """Cancel all turns and wait for their ends."""
        self._is_closed = True
        # Copy the list, because turns remove themselves when they end. Cancel all turns before
        # waiting for any, so that they end at the same time.
        tasks = [pending.task for pending in self.all()]
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError, Exception):
                await task

    def _find_retried(self, fingerprint: bytes) -> PendingTurn | None:
        """Return a turn in flight for which one client waits."""
        # If two clients wait for a turn, the second one is the retry already. A third request is
        # another client's.
        for pending in self._turns.get(fingerprint, ()):
            if pending.waiting == 1:
                return pending
        return None

    def _remove(self, fingerprint: bytes, pending: PendingTurn) -> None:
        """Remove a turn for which no client waits. Cancel the turn if it is in flight."""
        equal = self._turns[fingerprint]
        equal.remove(pending)
        if not equal:
            del self._turns[fingerprint]
        # A turn that has ended is in the forest already, so there is nothing to cancel.
        if not pending.task.done():
            pending.task.cancel()
            self._abandoned.append(fingerprint)


def _mark_lost(task: "asyncio.Task[TurnNode]") -> None:
    """Note that the client left when its turn was complete."""
    # ``delivered`` is True if a retry of the request has received the turn.
    if task.exception() is None and task.result().delivered is None:
        task.result().delivered = False
