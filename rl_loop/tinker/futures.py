"""Futures: requests that a client polls until they have an answer."""

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from rl_loop.gateway.errors import ApiError

ANSWER_SECONDS = 600.0
"""Time in seconds for which an answer is kept after a client received it."""
MAX_UNREAD_BYTES = 256 * 1024 * 1024
"""Maximum bytes of a session's answers that no client has received."""

type Answer = bytes | dict[str, Any]
"""A protobuf message, or JSON."""


@dataclass(eq=False)
class RequestFuture:
    """A request and, in the end, its answer."""

    request_id: str
    """Unique name of the request."""
    session_id: str
    """Session of the request. Its end drops the future."""
    unread: Counter[str]
    """Bytes of unread answers by session, for all futures."""
    answer: Answer | None = None
    """Answer. None while the request waits or runs."""
    is_done: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when there is an answer."""
    received_at: float | None = None
    """Time at which a client received the answer, by ``time.monotonic``."""

    def resolve(self, answer: Answer) -> None:
        """Set the answer."""
        self.answer = answer
        self.unread[self.session_id] += self._size
        self.is_done.set()

    def fail(self, message: str, category: str) -> None:
        """Set an error as the answer. ``category`` is "user" or "server"."""
        self.resolve({"error": message, "category": category})

    def mark_received(self) -> None:
        """Record that a client received the answer."""
        if self.received_at is None:
            self.unread[self.session_id] -= self._size
        self.received_at = time.monotonic()

    @property
    def _size(self) -> int:
        """Bytes of a large answer. JSON answers are small."""
        return len(self.answer) if isinstance(self.answer, bytes) else 0


class RequestFutures:
    """All futures of a server by name."""

    def __init__(self) -> None:
        self._futures: dict[str, RequestFuture] = {}
        self._unread: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._futures)

    def find(self, request_id: str) -> RequestFuture | None:
        """Return a future. None if it never existed or was dropped."""
        return self._futures.get(request_id)

    def check_room(self, session_id: str) -> None:
        """Raise ApiError if a session has too many unread answers."""
        if self._unread[session_id] > MAX_UNREAD_BYTES:
            raise ApiError(429, "too_many_requests", "fetch the answers of earlier requests first")

    def add(self, request_id: str, session_id: str) -> RequestFuture:
        """Add a future without an answer."""
        future = RequestFuture(request_id, session_id, self._unread)
        self._futures[request_id] = future
        return future

    def drop_received(self) -> None:
        """Drop answers that were received long ago."""
        limit = time.monotonic() - ANSWER_SECONDS
        for future in list(self._futures.values()):
            if future.received_at is not None and future.received_at < limit:
                del self._futures[future.request_id]

    def drop_session(self, session_id: str) -> None:
        """Drop the futures of a session. Those without an answer fail."""
        for future in [f for f in self._futures.values() if f.session_id == session_id]:
            if future.answer is None:
                future.fail("the session has ended", "user")
            del self._futures[future.request_id]
        del self._unread[session_id]
