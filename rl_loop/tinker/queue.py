"""Queues of requests: in the order of their numbers, and each of them once."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from rl_loop.gateway.errors import ApiError
from rl_loop.tinker.errors import bad_request
from rl_loop.tinker.futures import Answer, RequestFuture, RequestFutures

MAX_WAITING_BYTES = 512 * 1024 * 1024
"""Maximum bytes of a tenant's waiting requests."""
MAX_WAITING = 4096
"""Maximum number of a tenant's waiting requests."""


type Work = Callable[[], Awaitable[Answer | None]]
"""Carries a request out, or a part of it, on the event loop.

Returns None if another call must carry out a further part. Raises ClientError for the user of the
client.
"""


@dataclass(frozen=True)
class Operation:
    """A request of a training client that waits."""

    work: Work
    """Carries the request out."""
    future: RequestFuture
    """Receives the answer."""
    size: int = 0
    """Bytes of the request."""
    tokens: int = 0
    """Tokens of the request."""
    ends_turn: bool = False
    """True if another tenant's turn begins after the operation."""


@dataclass
class TenantQueue:
    """Requests of one tenant.

    A client sends them in any order and may repeat them. They run in the order of their numbers.
    """

    name: str
    """Id of the tenant, in the names of futures."""
    session_id: str
    """Session of the tenant."""
    next_number: int = 1
    """Number of the operation that runs or is the next to run."""
    waiting_bytes: int = 0
    """Bytes of all waiting requests."""
    _waiting: dict[int, Operation] = field(default_factory=dict)

    def add(
        self,
        number: object,
        kind: str,
        work: Work,
        futures: RequestFutures,
        *,
        size: int = 0,
        tokens: int = 0,
        ends_turn: bool = False,
    ) -> RequestFuture:
        """Add a request, or return the future of an earlier request of the same number.

        Args:
            number: number of the request, from 1.
            kind: kind of the request, in its name.
            work: see ``Operation``.
            futures: futures of the server.
            size: bytes of the request.
            tokens: tokens of the request.
            ends_turn: see ``Operation``.

        Raises:
            ApiError: the number is wrong, the answer was dropped, or too many requests wait.
        """
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise bad_request("seq_id must be an integer from 1")
        request_id = f"{self.name}/{number}/{kind}"
        known = futures.find(request_id)
        if known is not None:
            return known
        if number < self.next_number:
            message = f"request {number} of {self.name} was carried out before"
            raise ApiError(410, "not_found", message)
        if number in self._waiting:
            raise bad_request(f"request {number} of {self.name} is of another kind")
        is_full = self.waiting_bytes + size > MAX_WAITING_BYTES or len(self._waiting) >= MAX_WAITING
        # The next request always has room: the others wait for it.
        if is_full and number != self.next_number:
            raise ApiError(429, "too_many_requests", "too many requests of this model wait")
        futures.check_room(self.session_id)
        future = futures.add(request_id, self.session_id)
        self._waiting[number] = Operation(work, future, size, tokens, ends_turn)
        self.waiting_bytes += size
        return future

    @property
    def is_ready(self) -> bool:
        """True if the next operation has arrived."""
        return self.next_number in self._waiting

    def first(self) -> Operation:
        """Return the next operation, which stays in the queue."""
        return self._waiting[self.next_number]

    def remove_first(self) -> None:
        """Remove the next operation. Without effect if the queue was cleared."""
        operation = self._waiting.pop(self.next_number, None)
        if operation is not None:
            self.next_number += 1
            self.waiting_bytes -= operation.size

    def clear(self) -> None:
        """Remove all operations, because the tenant has left."""
        self._waiting.clear()
        self.waiting_bytes = 0
