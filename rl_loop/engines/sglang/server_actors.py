"""The SGLang servers of a run as Ray actors: creation, states, and requests to several of them."""

import asyncio
import json
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import ray

from megatron_gptoss.config import AdapterConfig, ModelConfig
from rl_loop.cluster.actor_deaths import ACTOR_DEATHS
from rl_loop.cluster.placement import ENGINE_SERVER, placement_options
from rl_loop.engines.backend import BackendContext, EngineUnavailableError
from rl_loop.engines.sglang.client import SglangClient
from rl_loop.engines.sglang.config import SglangConfig
from rl_loop.engines.sglang.gpu_memory import memory_fault
from rl_loop.engines.sglang.server import ServerState, ServerStatus, SglangServer
from rl_loop.engines.sglang.server_command import server_command
from rl_loop.infrastructure import describe
from rl_loop.logs import with_logging

logger = logging.getLogger(__name__)

LOG_INTERVAL_SECONDS = 30.0
"""Seconds between two log lines about servers that are not ready."""

KEY_BYTES = 32

EXPERT_ADAPTER = "GPTOSS_EXPERT_ADAPTER"
"""Environment variable of servers: rank and scale of unmerged adapters (``gptoss_adapted_moe`` of the plugin)."""

ANSWER_SECONDS = 60.0
"""Seconds within which an actor must respond. Its methods return at once."""


async def statuses(actors: list[Any]) -> list[ServerStatus]:
    """Return the status of all servers. A server whose actor is restarting counts as dead."""
    results = await asyncio.gather(
        *(actor.status.remote() for actor in actors), return_exceptions=True
    )

    known = []
    for result in results:
        if isinstance(result, ServerStatus):
            known.append(result)
        else:
            known.append(ServerStatus("", ServerState.DEAD, fault=describe(result)))
    return known


class ServerActors:
    """The actors of the ``servers`` of an SglangConfig. Methods block."""

    def __init__(self, settings: SglangConfig, context: BackendContext) -> None:
        """Create the actors. Their servers start with the first status request (``ready``)."""
        self._directory = context.directory
        self.api_key = secrets.token_hex(KEY_BYTES)
        """Key of all servers. Without it a server serves only health checks."""
        self.actors = self._create_actors(settings, context)

    def _create_actors(self, settings: SglangConfig, context: BackendContext) -> list[Any]:
        self._directory.mkdir(parents=True, exist_ok=True)
        architecture = settings.describe_model(context.model, context.dtype)
        # Servers read the architecture from this directory, but no weights.
        (self._directory / "config.json").write_text(json.dumps(architecture, indent=2))

        # A cluster without GPUs (tests, SGLang on CPUs) has none to reserve. The ranks of the
        # trainer have reserved the GPUs of colocated servers.
        has_gpus = (
            ray.cluster_resources().get("GPU", 0) >= settings.servers * settings.tensor_parallel
        )
        gpus = settings.tensor_parallel if has_gpus and not settings.colocated else 0
        # Ray restarts an actor without limit. The actor itself counts failed starts of its server.
        actor_class = ray.remote(num_cpus=0, num_gpus=gpus, max_restarts=-1)(
            with_logging(SglangServer)
        )

        actors = []
        for index in range(settings.servers):
            command = server_command(
                settings,
                index,
                self._directory,
                context.dtype,
                routed_experts=context.routed_experts,
                seed=context.seed,
                adapter=context.adapter,
            )
            actor = actor_class.options(**placement_options(ENGINE_SERVER, index)).remote(
                command,
                settings.environment | adapter_environment(context.model, context.adapter),
                self._directory / f"server_{index}.log",
                start_seconds=settings.start_seconds,
                memory_fault=partial(memory_fault, fraction=settings.memory_fraction),
                api_key=self.api_key,
            )
            actors.append(actor)
        return actors

    def ready(self) -> None:
        """Wait until every server is healthy.

        Raises:
            EngineUnavailableError: if a server cannot start. The message gives a remedy, or quotes the
                end of the server's log.
        """
        self.healthy(wait_for=(ServerState.DEAD, ServerState.STARTING))

    def healthy(self, wait_for: Sequence[ServerState] = ()) -> dict[Any, ServerStatus]:
        """Wait for servers and return the healthy ones, at least one, by actor.

        Logs the number of ready servers every ``LOG_INTERVAL_SECONDS``.

        Args:
            wait_for: states of servers to wait for.

        Raises:
            EngineUnavailableError: if a server was given up that is waited for, or none is healthy and
                one was given up.
        """
        began = last_log = time.monotonic()
        while True:
            known = dict(zip(self.actors, asyncio.run(statuses(self.actors)), strict=True))
            healthy = {actor: status for actor, status in known.items() if status.healthy}
            awaited = [status for status in known.values() if status.state in wait_for]

            for status in known.values():
                is_missed = status in awaited or not healthy
                if status.given_up and is_missed:
                    raise EngineUnavailableError(f"an SGLang server does not start: {status.fault}")
            if healthy and not awaited:
                return healthy

            now = time.monotonic()
            if now - last_log >= LOG_INTERVAL_SECONDS:
                logger.info(
                    "waiting for SGLang servers: %d of %d are ready after %.0f s; their output "
                    "is in %s",
                    len(healthy), len(known), now - began, self._directory / "server_*.log",
                )  # fmt: skip
                last_log = now
            time.sleep(0.2)

    def synced_servers(self) -> dict[Any, ServerStatus]:
        """Wait for a healthy server. Return all healthy servers with the current weights."""
        return {
            actor: status
            for actor, status in self.healthy().items()
            if status.state is ServerState.SYNCED
        }

    def settings(self, names: Sequence[str]) -> dict[str, Any]:
        """Return the named settings as the first healthy server reports them in /server_info.

        Unknown names are left out. "engine" names the server.
        """
        url = next(iter(self.healthy().values())).url
        (info,) = self.at_all((url,), lambda client: client.call("/server_info", seconds=60))
        return {"engine": f"SGLang at {url}"} | {name: info[name] for name in names if name in info}

    def close(self) -> None:
        """End all servers and actors."""
        for actor in self.actors:
            # ``stop`` kills all processes of the server. ``ray.kill`` alone could leave some.
            _ask(actor.stop.remote())
            ray.kill(actor)

    @staticmethod
    def begin_syncs(servers: dict[Any, ServerStatus]) -> dict[Any, ServerStatus]:
        """Take ``servers`` out of service. Return those whose process has not changed."""
        started = {}
        for actor, status in servers.items():
            if _ask(actor.begin_sync.remote(status.incarnation)):
                started[actor] = status
        return started

    @staticmethod
    def end_sync(actor: Any, status: ServerStatus, version: int | None) -> None:
        """Let a server serve weights ``version``. None kills it, because its weights are unknown."""
        _ask(actor.end_sync.remote(status.incarnation, version))

    def call_all(self, method: str) -> None:
        """Call a method of every server's actor."""
        for reference in [getattr(actor, method).remote() for actor in self.actors]:
            _ask(reference)

    def at_all[T](
        self, urls: tuple[str, ...], call: Callable[[SglangClient], Awaitable[T]]
    ) -> list[T]:
        """Make one call at every server, in parallel."""

        async def call_one(url: str) -> T:
            # A client belongs to its event loop, and every ``asyncio.run`` creates another one.
            client = SglangClient(url, api_key=self.api_key)
            try:
                return await call(client)
            finally:
                await client.close()

        async def call_all() -> list[T]:
            return list(await asyncio.gather(*map(call_one, urls)))

        return asyncio.run(call_all())


def adapter_environment(model: ModelConfig, adapter: AdapterConfig | None) -> dict[str, str]:
    """Return the environment variables of servers that add expert adapters without merging.

    Args:
        model: configuration of the model.
        adapter: settings of the adapters. None for servers without them.
    """
    if adapter is None:
        return {}
    rank = adapter.rank_of_experts(model)
    return {EXPERT_ADAPTER: json.dumps({"rank": rank, "scale": adapter.alpha / rank})}


def _ask(reference: Any) -> Any:
    """Return the result of an actor's method. None if the actor died or did not respond."""
    try:
        return ray.get(reference, timeout=ANSWER_SECONDS)
    except (*ACTOR_DEATHS, TimeoutError):
        return None
