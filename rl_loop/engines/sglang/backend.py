"""Backend for SGLang servers, which all rollout workers share."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from megatron_gptoss.config import ModelConfig
from rl_loop.engines.backend import (
    BackendContext,
    EngineFactory,
    EngineWorkers,
    RolloutBackend,
)
from rl_loop.engines.protocol import RolloutEngine
from rl_loop.engines.sglang.config import SglangConfig
from rl_loop.engines.sglang.fleet import SglangFleet
from rl_loop.engines.sglang.server_actors import ServerActors, statuses
from rl_loop.weight_sync.source import WeightSource


class SglangBackend(RolloutBackend):
    """Fleet of servers that hold the policy, and rollout workers with clients of the servers."""

    settings: SglangConfig

    def __init__(self, settings: SglangConfig, context: BackendContext) -> None:
        super().__init__(settings, context)
        self.servers = ServerActors(settings, context)
        self.fleet = SglangFleet(self.servers, settings, context)

    def engine_factory(self) -> EngineFactory:
        return partial(
            connect_engine,
            # Actors instead of addresses, because a restarted server has another address.
            servers=self.servers.actors,
            model=self.context.model,
            wait_seconds=self.settings.start_seconds,
            api_key=self.servers.api_key,
            # Servers compute a prompt in other batches, so some of its experts may differ.
            keep_groups=self.context.routed_experts and self.context.shares_prefixes,
        )

    def start(self, workers: EngineWorkers) -> None:
        super().start(workers)
        self.servers.ready()

    def sync_weights(self, source: WeightSource, version: int) -> None:
        assert self.workers is not None
        self.fleet.sync(source, version)

        # Last, because from then on clients use no server with older weights.
        self.workers.set_min_version(version)

    def score(self, token_ids: list[int], temperature: float) -> list[list[float]]:
        return self.fleet.score(token_ids, temperature)

    def compare_weights(self) -> None:
        self.fleet.compare()

    def pause(self) -> None:
        self.fleet.pause()

    def recover_engines(self) -> None:
        self.fleet.recover_engines()

    def updating_weights(self, version: int) -> AbstractContextManager[None]:
        return self.fleet.updating_weights(version)

    def engine_settings(self, names: Sequence[str]) -> dict[str, Any]:
        return self.servers.settings(names)

    def close(self) -> None:
        self.servers.close()


def connect_engine(
    servers: list[Any],
    model: ModelConfig,
    wait_seconds: float,
    api_key: str,
    keep_groups: bool,
) -> RolloutEngine:
    """Return a client of ``servers``. It sends no request yet.

    Args:
        servers: Ray actors of SglangServer.
        model: configuration of the model.
        wait_seconds: longest time that a request waits for a server that holds the policy.
        api_key: key of the servers.
        keep_groups: whether all episodes of a task use the same server.
    """
    from rl_loop.engines.sglang.engine import SglangEngine

    return SglangEngine(
        lambda: statuses(servers),
        model,
        wait_seconds=wait_seconds,
        api_key=api_key,
        keep_groups=keep_groups,
    )
