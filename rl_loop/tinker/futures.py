"""Futures: requests that a client polls until they have an answer."""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

ANSWER_SECONDS = 600.0
"""Time in seconds for which an answer is kept after a client received it."""

type Answer = bytes | dict[str, Any]
"""A protobuf message, or JSON."""


@dataclass(eq=False)
class RequestFuture:
    """A request and, in the end, its answer."""

    request_id: str
    """Unique name of the request."""
    session_id: str
    """Session of the request. Its end drops the future."""
    answer: Answer | None = None
    """Answer. None while the request waits or runs."""
    is_done: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when there is an answer."""
    received_at: float | None = None
    """Time at which a client received the answer, by ``time.monotonic``."""

    def resolve(self, answer: Answer) -> None:
        """Set the answer."""
        self.answer = answer
        self.is_done.set()

    def fail(self, message: str, category: str) -> None:
        """Set an error as the answer. ``category`` is "user" or "server"."""
        self.resolve({"error": message, "category": category})


class RequestFutures:
    """All futures of a server by name."""

    def __init__(self) -> None:
        self._futures: dict[str, RequestFuture] = {}

    def __len__(self) -> int:
        return len(self._futures)

    def find(self, request_id: str) -> RequestFuture | None:
        """Return a future. None if it never existed or was dropped."""
        return self._futures.get(request_id)

    def add(self, request_id: str, session_id: str) -> RequestFuture:
        """Add a future without an answer."""
        future = RequestFuture(request_id, session_id)
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
