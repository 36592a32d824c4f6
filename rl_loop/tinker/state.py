"""Sessions, tenants and samplers of a server, and the settings that their requests share."""

import asyncio
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rl_loop.tinker.errors import ClientError, not_found
from rl_loop.tinker.futures import Answer, RequestFutures
from rl_loop.tinker.policy import Policy, SampleRequest, Snapshot
from rl_loop.tinker.queue import TenantQueue
from rl_loop.tinker.scheduler import Scheduler
from rl_loop.tinker.store import CheckpointStore

SESSION_SECONDS = 600.0
"""Time in seconds without a heartbeat after which a session ends. Clients send one every 10 s."""
STALE_SECONDS = 60.0
"""Time in seconds without a heartbeat after which another session may take the place of a tenant."""


@dataclass(frozen=True)
class ServedModel:
    """Facts about the model that requests need."""

    name: str
    """Name of the base in the API."""
    base: str
    """Digest of the base."""
    vocabulary_size: int
    """Exclusive upper bound of token ids."""
    max_tokens: int
    """Maximum tokens of a datum, and of a prompt with its continuation."""
    max_rank: int
    """Rank of the model's adapters."""
    trained: dict[str, bool]
    """For each flag of the API, whether the parts of the model have adapters."""
    stop_token_ids: tuple[int, ...]
    """Tokens that end a sample without ``stop`` in its request."""


@dataclass
class Tenant:
    """An adapter that a client trains."""

    model_id: str
    session_id: str
    rank: int
    user_metadata: dict[str, Any] | None
    """Data of the client."""
    queue: TenantQueue
    """Requests of the client."""
    last_request: float = field(default_factory=time.time)
    """Time of the last request in seconds since the epoch."""


@dataclass(frozen=True)
class Sampler:
    """A sampling session of a client."""

    sampler_id: str
    session_id: str
    snapshot: Snapshot
    model_path: str | None = None
    """Checkpoint of the snapshot. None for the base and for weights without a name."""


class TinkerState:
    """Everything that a server holds in memory. Used on the event loop only."""

    def __init__(
        self, policy: Policy, thread: Executor, store: CheckpointStore, model: ServedModel
    ) -> None:
        """Start without sessions. ``thread`` is the only thread that uses ``policy``."""
        self.policy = policy
        self.thread = thread
        self.store = store
        self.model = model
        self.futures = RequestFutures()
        self.sessions: dict[str, float] = {}
        """Time of the last heartbeat by session, by ``time.monotonic``."""
        self.tenants: dict[str, Tenant] = {}
        self.samplers: dict[str, Sampler] = {}
        self.base_snapshot = Snapshot()
        self.scheduler: Scheduler[SampleRequest] = Scheduler(self._sample, self.clean_up)

    async def on_thread[**P, T](
        self, function: Callable[P, T], *arguments: P.args, **options: P.kwargs
    ) -> T:
        """Call a function on the thread of the policy, and return its result."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.thread, partial(function, *arguments, **options))

    async def _sample(
        self, snapshot: Hashable, requests: Sequence[SampleRequest]
    ) -> Sequence[Answer | ClientError]:
        assert isinstance(snapshot, Snapshot)
        return await self.on_thread(self.policy.sample, snapshot, requests)

    def session(self, session_id: object) -> str:
        """Return the id of a session that exists. Raises ApiError."""
        if not isinstance(session_id, str) or session_id not in self.sessions:
            raise not_found(f"there is no session {str(session_id)[:64]!r}")
        return session_id

    def tenant(self, model_id: object) -> Tenant:
        """Return a tenant. Raises ApiError."""
        found = self.tenants.get(model_id) if isinstance(model_id, str) else None
        if found is None:
            raise not_found(f"there is no model {str(model_id)[:128]!r}")
        found.last_request = time.time()
        return found

    def blocking_tenant(self) -> Tenant | None:
        """Return the tenant that occupies the server. Tenants of silent sessions leave.

        The trainer holds one tenant. With several, this is the place of a limit.
        """
        limit = time.monotonic() - STALE_SECONDS
        for tenant in list(self.tenants.values()):
            if self.sessions.get(tenant.session_id, 0.0) >= limit:
                return tenant
            self.end_session(tenant.session_id)
        return None

    def end_session(self, session_id: str) -> None:
        """Drop a session with its tenants, samplers and futures."""
        self.sessions.pop(session_id, None)
        for tenant in [t for t in self.tenants.values() if t.session_id == session_id]:
            self.scheduler.remove(tenant.queue)
            del self.tenants[tenant.model_id]
        for sampler in [s for s in self.samplers.values() if s.session_id == session_id]:
            del self.samplers[sampler.sampler_id]
        self.futures.drop_session(session_id)

    def clean_up(self) -> None:
        """Drop old answers, silent sessions and expired checkpoints."""
        self.futures.drop_received()
        limit = time.monotonic() - SESSION_SECONDS
        for session_id in [name for name, seen in self.sessions.items() if seen < limit]:
            self.end_session(session_id)
        self.store.delete_expired()
