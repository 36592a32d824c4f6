"""The SGLang servers of a run: weight syncs, scores and pauses.

After a failed sync its servers are killed. They restart with random weights, as UNSYNCED, and serve
only after the next sync.

Servers on the trainer's GPUs are paused while the trainer works: they serve no requests and hold
less memory. No server starts during that time, because it would take memory that the trainer needs.
A server that ended restarts with the next sync.
"""

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import urlsplit

from rl_loop.cluster.ray_session import LOOPBACK, local_directory
from rl_loop.engines.backend import BackendContext, EngineUnavailableError
from rl_loop.engines.sglang.client import RequestRejectedError, ServerError, SglangClient
from rl_loop.engines.sglang.config import SglangConfig
from rl_loop.engines.sglang.engine import score_on
from rl_loop.engines.sglang.server import ServerState, ServerStatus
from rl_loop.engines.sglang.server_actors import ServerActors, statuses
from rl_loop.engines.sglang.weight_endpoints import SglangSender
from rl_loop.infrastructure import describe
from rl_loop.weight_sync.canary import SAME_WEIGHTS, Canary, exceeds
from rl_loop.weight_sync.servers import SyncPlan, TransportName
from rl_loop.weight_sync.source import SyncError, WeightSource

logger = logging.getLogger(__name__)

SYNC_ATTEMPTS = 3
"""Attempts of one weight sync. Failed servers are restarted between attempts."""

SCORE_ATTEMPTS = 3
"""Attempts to let all servers score one text."""
SCORE_RETRY_SECONDS = 0.5
"""Seconds between two such attempts."""

MIN_VERSIONS_BETWEEN_COMPARISONS = 7
"""Smallest number of versions between two comparisons of checksums."""

DISK_TIMEOUT_FACTOR = 15
"""Factor between the time limit for reading all weights from a disk and that for one bucket."""


@dataclass(frozen=True)
class CurrentWeights:
    """Weights for servers that restart."""

    source: WeightSource
    version: int


def comparison_interval(num_layers: int) -> int:
    """Return the number of versions between two comparisons of checksums.

    A version selects a layer, and one of up to three parameters outside of the layers
    (``server_layout``). The interval has no common divisor with these numbers, so that each layer and
    parameter is compared in turn.

    Example:
        >>> comparison_interval(24), comparison_interval(28)
        (7, 11)
    """
    return next(
        interval
        for interval in itertools.count(MIN_VERSIONS_BETWEEN_COMPARISONS)
        if math.gcd(interval, 6 * num_layers) == 1
    )


class SglangFleet:
    """All SGLang servers of a run. Syncs, compares and pauses them.

    Methods block and must not overlap. Only ``recover_engines`` may overlap others: rollouts that
    overlap training call it in their thread.
    """

    def __init__(
        self, servers: ServerActors, settings: SglangConfig, context: BackendContext
    ) -> None:
        self.servers = servers
        self._settings = settings
        self._model = context.model
        self._adapter = context.adapter
        self._directory = context.directory

        # Weights for restarted servers. None while there are none to send.
        self._current: CurrentWeights | None = None
        self._canary: Canary | None = None

        # Incarnations of servers that have released their memory, of servers whose checksums were
        # compared once, and of servers that hold the base of unmerged adapters.
        self._paused: set[int] = set()
        self._compared: set[int] = set()
        self._with_base: set[int] = set()

        # Locked while the trainer updates the weights that ``recover_engines`` would send.
        self._updating = Lock()

    # -- weights ----------------------------------------------------------------------------------

    def sync(self, source: WeightSource, version: int) -> None:
        """Give all healthy servers weights ``version``.

        Raises:
            SyncError: after ``SYNC_ATTEMPTS`` failed attempts.
            WeightMismatchError: a ValueError, if the weights do not belong to this model or a server
                holds different weights.
            EngineUnavailableError: if a server's machine lacks a requirement.
        """
        # The canary's log-probs belong to the previous weights.
        self._current = CurrentWeights(source, version)
        self._canary = None
        for attempt in range(SYNC_ATTEMPTS):
            # Servers restart only with the memory that the trainer has released.
            if self._settings.colocated:
                source.release_memory()
                self.servers.call_all("allow_starts")
            try:
                self._sync_servers(self.servers.healthy())
                return
            except SyncError as failure:
                if attempt + 1 == SYNC_ATTEMPTS:
                    raise
                logger.warning(
                    "retrying the weight sync with restarted servers: %s", describe(failure)
                )

    def recover_engines(self) -> None:
        """Bring restarted servers to the current weights.

        They serve only if their canary scores match those of the other servers. Does nothing while
        the trainer updates the weights.

        Raises:
            SyncError: if the sync fails and no other server is healthy.
            EngineUnavailableError: if a server's machine lacks a requirement.
        """
        # Do not wait for the update: the trainer's next sync includes the restarted servers.
        if self._current is None or not self._updating.acquire(blocking=False):
            return
        try:
            healthy = self.servers.healthy()
            unsynced = {
                actor: status
                for actor, status in healthy.items()
                if status.state is ServerState.UNSYNCED
            }
            if not unsynced:
                return

            try:
                self._sync_servers(unsynced)
            except SyncError as failure:
                # Other servers still serve, so the run continues without the restarted ones.
                if len(unsynced) == len(healthy):
                    raise
                logger.warning("a restarted SGLang server does not serve: %s", describe(failure))
        finally:
            self._updating.release()

    @contextmanager
    def updating_weights(self, version: int) -> Iterator[None]:
        """Let ``recover_engines`` do nothing while the trainer updates its weights.

        If the block ends without an error, later calls send weights ``version``.
        """
        with self._updating:
            yield
            if self._current is not None:
                self._current = CurrentWeights(self._current.source, version)
                self._canary = None

    def _sync_servers(self, servers: dict[Any, ServerStatus]) -> None:
        """Give ``servers`` the current weights. Kill them if the sync fails."""
        assert self._current is not None
        version = self._current.version
        taking_part = self.servers.begin_syncs(servers)
        reached: int | None = None  # None: the weights of the servers are unknown
        try:
            if not taking_part:
                raise SyncError(f"weights {version}: every server died before the sync began")
            self._wake_and_send(taking_part, version)
            reached = version
        except (ServerError, RequestRejectedError) as failure:
            # The server did not resume, or ended while it scored.
            raise SyncError(f"weights {version} did not reach all servers: {failure}") from failure
        finally:
            for actor, status in taking_part.items():
                self.servers.end_sync(actor, status, reached)

    def _wake_and_send(self, servers: dict[Any, ServerStatus], version: int) -> None:
        """Restore the memory of paused servers, send the weights and compare with the canary."""
        incarnations = {status.incarnation for status in servers.values()}
        paused = tuple(
            status.url for status in servers.values() if status.incarnation in self._paused
        )
        # Cleared before the attempt: if it fails, all these servers are killed, so none stays
        # paused.
        self._paused.clear()

        # Weights first: the trainer uses memory while it sends, which the caches may need later.
        if not self._settings.keep_weights:
            self._resume_memory(paused, ["weights"])
        # Servers whose weights were never compared are compared in any case.
        is_due = version % comparison_interval(self._model.num_layers) == 0
        compare = is_due or not incarnations <= self._compared
        # A comparison covers the base, too, and therefore needs all tensors.
        adapters_only = not compare and incarnations <= self._with_base
        self._send_weights(servers, compare=compare, adapters_only=adapters_only)
        # Only after the sync has succeeded, so that a failed comparison is repeated.
        self._compared |= incarnations
        if self._adapter is not None and self._settings.holds_base:
            self._with_base |= incarnations
        self._resume_memory(paused, ["kv_cache", "cuda_graph"])

        self._compare_with_canary(tuple(status.url for status in servers.values()))

    def _send_weights(
        self,
        servers: dict[Any, ServerStatus],
        *,
        compare: bool,
        adapters_only: bool = False,
        transport: TransportName | None = None,
    ) -> None:
        """Let the trainer's ranks send the current weights to ``servers``.

        Args:
            servers: servers and their states.
            compare: compare checksums of servers and trainer afterwards.
            adapters_only: leave out the base of the adapters.
            transport: replacement for the configured transport.
        """
        assert self._current is not None
        # One plan per sending rank: a rank sends to the servers with which it shares memory, or rank
        # 0 sends to all.
        urls: dict[int, list[str]] = {}
        for actor, status in servers.items():
            urls.setdefault(self._sending_rank(actor), []).append(status.url)

        seconds = self._settings.sync_seconds
        if self._settings.weight_sync == "disk":
            seconds *= DISK_TIMEOUT_FACTOR
        plans = {
            rank: SyncPlan(
                urls=tuple(its_urls),
                version=self._current.version,
                transport=transport or self._settings.weight_sync,
                tensor_parallel=self._settings.tensor_parallel,
                bucket_bytes=self._settings.resolved_bucket_bytes,
                directory=self._weights_directory,
                stores=self._stores(its_urls),
                authenticated=self._settings.has_plugin,
                seconds=seconds,
                compare=compare,
                mxfp4_experts=self._settings.has_mxfp4_experts,
                adapter=self._adapter,
                adapters_only=adapters_only,
                api_key=self.servers.api_key,
            )
            for rank, its_urls in urls.items()
        }
        self._current.source.send_weights(SglangSender(self._model, plans))

    def _stores(self, urls: Sequence[str]) -> Path | None:
        """Return the directory of rendezvous files. None if sender and servers use a port."""
        is_here = all(urlsplit(url).hostname == LOOPBACK for url in urls)
        # Only the plugin opens a file. Without it, servers know ports only.
        return local_directory() if is_here and self._settings.has_plugin else None

    def _sending_rank(self, actor: Any) -> int:
        """Return the trainer rank that sends weights to a server.

        It is the rank on the server's first GPU if both share memory, else rank 0.
        """
        settings = self._settings
        if settings.colocated and settings.weight_sync in ("cuda_ipc", "shared_memory"):
            return self.servers.actors.index(actor) * settings.tensor_parallel
        return 0

    @property
    def _weights_directory(self) -> Path:
        """Weight directory of transport ``disk``."""
        return self._directory / "weights"

    def compare(self) -> None:
        """Compare the servers' weights with the weights of the last ``sync``.

        Raises:
            WeightMismatchError: if a server holds different weights. The message names the first
                tensor.
        """
        if self._current is not None:
            self._send_weights(self.servers.synced_servers(), compare=True, transport="none")

    # -- scores -----------------------------------------------------------------------------------

    def score(self, token_ids: list[int], temperature: float) -> list[list[float]]:
        """Return the log-probs of ``token_ids[1:]``, in nats, from every server with the policy.

        At least one server scores. The text becomes the canary of servers that restart later. A
        server that ends is left out. A server that lost its connection is asked again.

        Args:
            token_ids: text.
            temperature: must be 1.

        Raises:
            ServerError: if a server failed in the last of ``SCORE_ATTEMPTS`` attempts.
            EngineUnavailableError: if every server ended in the last attempt.
            SyncError: if all servers had ended and the restarted ones could not be synced.
            WeightMismatchError: if a restarted server holds different weights.
            ValueError: if ``temperature`` is not 1.
        """

        async def score(client: SglangClient) -> list[float] | ServerError:
            try:
                return await score_on(client, token_ids, temperature)
            except ServerError as failure:
                return failure

        # Servers may end, or lose a connection, while they score.
        for attempt in range(SCORE_ATTEMPTS):
            synced = self.servers.synced_servers()
            if not synced and self._current is not None:
                # All servers have ended since the sync. Restarted servers have no weights yet.
                self.sync(self._current.source, self._current.version)
                synced = self.servers.synced_servers()

            results = self.servers.at_all(tuple(status.url for status in synced.values()), score)
            failures = [result for result in results if isinstance(result, ServerError)]
            scores = [result for result in results if not isinstance(result, ServerError)]
            if scores and not failures:
                # Any server's scores, because all servers hold the same weights.
                self._canary = Canary(token_ids, scores[0])
                return scores
            if failures and attempt + 1 == SCORE_ATTEMPTS:
                raise failures[0]
            for failure in failures:
                logger.warning("an SGLang server failed to score a text; retrying: %s", failure)
            time.sleep(SCORE_RETRY_SECONDS)
        raise EngineUnavailableError(
            "every SGLang server ended while it scored a text. See the servers' logs in the run's "
            "directory"
        )

    def _compare_with_canary(self, urls: tuple[str, ...]) -> None:
        """Raise SyncError if a server's scores differ from those of the canary."""
        canary = self._canary
        if canary is None:
            return

        scored = self.servers.at_all(urls, lambda client: score_on(client, canary.token_ids))
        for url, log_probs in zip(urls, scored, strict=True):
            gap = canary.gap(log_probs)
            if exceeds(gap, SAME_WEIGHTS):
                raise SyncError(
                    f"{url} received the weights again, but its log-probs differ by {gap:.2e} "
                    "nats from those of the other servers"
                )

    # -- memory -----------------------------------------------------------------------------------

    def pause(self) -> None:
        """Free the weights and caches of colocated servers until the next ``sync``.

        A server that cannot be paused is killed.
        """
        if not self._settings.colocated:
            return
        # A server that restarts from here on must get the next version, and must not start before
        # the trainer has left the GPU.
        self._current = None
        self.servers.call_all("block_starts")

        known = zip(self.servers.actors, asyncio.run(statuses(self.servers.actors)), strict=True)
        servers = self.servers.begin_syncs(
            {actor: status for actor, status in known if status.healthy}
        )
        urls = tuple(status.url for status in servers.values())
        failures = self.servers.at_all(urls, self._pause_server)
        for (actor, status), failure in zip(servers.items(), failures, strict=True):
            if failure is None:
                self._paused.add(status.incarnation)
            else:
                logger.warning("an SGLang server could not be paused and is killed: %s", failure)
                self.servers.end_sync(actor, status, None)

    async def _pause_server(self, client: SglangClient) -> str | None:
        """Abort a server's requests and free its memory. Return the error, or None."""
        seconds = self._settings.sync_seconds
        kept = () if self._settings.keep_weights else ("weights",)
        tags = {"tags": ["kv_cache", *kept, "cuda_graph"]}
        try:
            # First, because running requests use the memory that is released next.
            await client.call("/pause_generation", {"mode": "abort"}, seconds=seconds)
            await client.call("/release_memory_occupation", tags, seconds=seconds)
        except (ServerError, RequestRejectedError) as failure:
            return str(failure)
        return None

    def _resume_memory(self, urls: tuple[str, ...], tags: list[str]) -> None:
        """Restore memory that ``pause`` has freed. ``tags`` are SGLang's names of its kinds."""
        seconds = self._settings.sync_seconds
        self.servers.at_all(
            urls,
            lambda client: client.call(
                "/resume_memory_occupation", {"tags": tags}, seconds=seconds
            ),
        )
