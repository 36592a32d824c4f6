"""Sessions, tenants and samplers of a server, and the settings that their requests share."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from megatron_gptoss.config import AdapterConfig, ModelConfig
from rl_loop.config.tinker_api import ApiConfig
from rl_loop.tinker.errors import ClientError, not_found
from rl_loop.tinker.futures import RequestFutures
from rl_loop.tinker.policy import Policy, SampleRequest, Samples
from rl_loop.tinker.queue import TenantQueue
from rl_loop.tinker.scheduler import Scheduler
from rl_loop.tinker.snapshots import Snapshot, SnapshotStore
from rl_loop.tinker.store import CheckpointFacts, CheckpointName, CheckpointStore

SESSION_SECONDS = 600.0
"""Time in seconds without a heartbeat after which a session ends. Clients send one every 10 s."""
STALE_SECONDS = 60.0
"""Time in seconds without a heartbeat after which another session may take the place of a tenant."""


@dataclass(frozen=True)
class ServedModel:
    """Facts about the model that requests need."""

    api_name: str
    """Name of the base in the API."""
    base_digest: str
    """Digest of the base and of the settings of its adapters."""
    vocabulary_size: int
    """Exclusive upper bound of token ids."""
    max_tokens: int
    """Maximum tokens of a datum, and of a prompt with its continuation."""
    max_rank: int
    """Rank of the model's adapters."""
    has_adapters: dict[str, bool]
    """True for each flag of the API, such as ``train_mlp``, whose modules have adapters."""
    architecture: ModelConfig
    """Configuration of the base."""
    adapter: AdapterConfig
    """Settings of the adapters."""
    peft_base_name: str | None
    """Name or directory of the base in adapters of PEFT's format. None if there is none."""


@dataclass
class Session:
    """A session of a client."""

    owner: str
    """Owner of the session and of everything that it creates."""
    user_metadata: dict[str, str] | None = None
    """Data of the client."""
    seen: float = field(default_factory=time.monotonic)
    """Time of the last heartbeat by ``time.monotonic``."""


@dataclass
class Tenant:
    """An adapter that a client trains. The API calls it a model."""

    model_id: str
    owner: str
    rank: int
    user_metadata: dict[str, str] | None
    """Data of the client."""
    queue: TenantQueue
    """Requests of the client."""
    last_request: float = field(default_factory=time.time)
    """Time of the last request in seconds since the epoch."""
    unnamed_samplers: deque[str] = field(default_factory=deque)
    """Ids of the samplers of snapshots without a name, oldest first."""

    @property
    def session_id(self) -> str:
        """Session of the tenant."""
        return self.queue.session_id


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
        self,
        policy: Policy,
        thread: Executor,
        directory: Path,
        model: ServedModel,
        limits: ApiConfig,
    ) -> None:
        """Start without sessions.

        Args:
            policy: trainer and engine.
            thread: the only thread that uses ``policy``.
            directory: directory of checkpoints and snapshots.
            model: facts about the model.
            limits: limits of clients.
        """
        self.policy = policy
        self.thread = thread
        self.store = CheckpointStore(directory, int(limits.checkpoint_gigabytes * 1e9))
        self.snapshots = SnapshotStore(directory / "snapshots")
        self.model = model
        self.limits = limits
        self.futures = RequestFutures()
        self.sessions: dict[str, Session] = {}
        self.tenants: dict[str, Tenant] = {}
        self.samplers: dict[str, Sampler] = {}
        self.base_snapshot = Snapshot()
        self.scheduler: Scheduler[SampleRequest, Samples] = Scheduler(
            self._sample, self.clean_up, limits.turn_tokens
        )

    async def run_on_policy_thread[**P, T](
        self, function: Callable[P, T], *arguments: P.args, **options: P.kwargs
    ) -> T:
        """Call a function on the thread of the policy, and return its result."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.thread, partial(function, *arguments, **options))

    async def _sample(
        self, snapshot: Hashable, requests: Sequence[SampleRequest]
    ) -> Sequence[Samples | ClientError]:
        assert isinstance(snapshot, Snapshot)
        return await self.run_on_policy_thread(self.policy.sample, snapshot, requests)

    # -- objects of an owner ----------------------------------------------------------------------

    def session(self, owner: str, session_id: object) -> str:
        """Return the id of an owner's session. Raises ApiError."""
        found = self.sessions.get(session_id) if isinstance(session_id, str) else None
        if found is None or found.owner != owner:
            raise not_found(f"there is no session {str(session_id)[:64]!r}")
        return str(session_id)

    def use_tenant(self, owner: str, model_id: object) -> Tenant:
        """Return an owner's tenant, and record the time of its request. Raises ApiError."""
        found = self.tenants.get(model_id) if isinstance(model_id, str) else None
        if found is None or found.owner != owner:
            raise not_found(f"there is no model {str(model_id)[:128]!r}")
        found.last_request = time.time()
        return found

    def sampler(self, owner: str, sampler_id: object) -> Sampler:
        """Return an owner's sampling session. Raises ApiError."""
        found = self.samplers.get(sampler_id) if isinstance(sampler_id, str) else None
        if found is None or self.sessions[found.session_id].owner != owner:
            kept = self.limits.snapshots_per_model
            raise not_found(
                f"there is no sampling session {str(sampler_id)[:128]!r}. Of snapshots without a name, "
                f"the newest {kept} of each model are kept"
            )
        return found

    def checkpoint(self, owner: str, name: CheckpointName) -> CheckpointFacts:
        """Return the data about an owner's checkpoint. Raises ApiError."""
        facts = self.store.facts(name)
        if facts is None or facts.owner != owner:
            raise not_found(f"there is no checkpoint {name}")
        return facts

    # -- ends -------------------------------------------------------------------------------------

    def make_room(self) -> bool:
        """End silent sessions if no tenant can be created. Return True if one can be created now."""
        limit = time.monotonic() - STALE_SECONDS
        if len(self.tenants) >= self.limits.max_models:
            for session_id in {tenant.session_id for tenant in self.tenants.values()}:
                if self.sessions[session_id].seen < limit:
                    self.end_session(session_id)
        return len(self.tenants) < self.limits.max_models

    def add_unnamed_sampler(self, tenant: Tenant, sampler: Sampler) -> None:
        """Add a sampler of a snapshot without a name. The oldest ones of the tenant leave."""
        self.samplers[sampler.sampler_id] = sampler
        tenant.unnamed_samplers.append(sampler.sampler_id)
        while len(tenant.unnamed_samplers) > self.limits.snapshots_per_model:
            self.samplers.pop(tenant.unnamed_samplers.popleft(), None)

    def end_session(self, session_id: str) -> None:
        """Drop a session with its tenants, samplers and futures."""
        self.sessions.pop(session_id, None)
        for tenant in [t for t in self.tenants.values() if t.session_id == session_id]:
            self.scheduler.remove(tenant.queue)
            del self.tenants[tenant.model_id]
            # After the running operation, which may be of this tenant.
            self.thread.submit(self.policy.drop, tenant.model_id)
        for sampler in [s for s in self.samplers.values() if s.session_id == session_id]:
            del self.samplers[sampler.sampler_id]
        self.futures.drop_session(session_id)

    def clean_up(self) -> None:
        """Drop old answers, silent sessions and expired checkpoints."""
        self.futures.drop_received()
        limit = time.monotonic() - SESSION_SECONDS
        for session_id in [name for name, one in self.sessions.items() if one.seen < limit]:
            self.end_session(session_id)
        self.store.delete_expired()
