"""One rollout worker: an engine, a sandbox and the agent loop in one process. A plain class; ``rollout_pool`` makes Ray
actors of it. It knows neither Megatron nor the optimizer."""

import asyncio
from functools import partial
from typing import Any

import torch

from rl_loop.agent import run_episode
from rl_loop.config import RunConfig
from rl_loop.demonstrations import harmony_of
from rl_loop.engines.protocol import RolloutEngine, SamplingParams
from rl_loop.environments import Task, make_environment
from rl_loop.sandbox import PythonSandbox
from rl_loop.trajectory import TrajectoryGroup


class RolloutWorker:
    """Runs whole episodes. ``start`` must have returned before anything else is called."""

    def __init__(
        self, config: RunConfig, threads: int, servers: list[Any] | None = None, engine: RolloutEngine | None = None
    ) -> None:
        """``servers``: actors of SglangServer; without them, or an ``engine``, the worker has an engine of its own."""
        torch.set_num_threads(threads)
        self.config = config
        self.harmony = harmony_of(config)
        self.engine = engine or (_embedded_engine(config) if servers is None else _engine_over(servers, config))
        self.sandbox = PythonSandbox(config.sandbox)

    async def start(self) -> None:
        """Start the sandbox; raises SandboxUnavailable with the reason where it cannot isolate."""
        await self.sandbox.start()

    async def sync_weights(self, weights: dict[str, torch.Tensor], version: int) -> None:
        """``weights`` are empty where SGLang's servers have got them already."""
        await self.engine.sync_weights(weights.items(), version)

    async def score(self, token_ids: list[int], temperature: float) -> list[float]:
        return await self.engine.score(token_ids, temperature)

    async def run_group(
        self, task: Task, seeds: tuple[int, ...], temperature: float, purify: bool = False
    ) -> TrajectoryGroup:
        """One episode per seed, all at the same time; failed calls are retried only with ``purify``."""
        rollout = self.config.rollout
        purification = rollout.purification if purify else None
        sampling = SamplingParams(rollout.max_new_tokens_per_turn, temperature, rollout.top_p)
        run = partial(run_episode, routed_experts=rollout.routed_experts, purification=purification)
        episodes = []
        for seed in seeds:
            environment = make_environment(task, self.sandbox.run, self.config.reward)
            episodes.append(run(task.task_id, environment, self.engine, self.harmony, rollout, sampling, seed=seed))
        return TrajectoryGroup(task.task_id, await asyncio.gather(*episodes))

    async def close(self) -> None:
        await self.sandbox.close()
        await self.engine.close()


def _embedded_engine(config: RunConfig) -> RolloutEngine:
    from transformers import GptOssConfig

    from rl_loop.engines.transformers_engine import TransformersEngine

    model, dtype = GptOssConfig(**config.model.to_hf_config()), getattr(torch, config.dtype)
    return TransformersEngine.from_config(model, dtype=dtype, max_batch_size=config.rollout.max_batch_size)


def _engine_over(servers: list[Any], config: RunConfig) -> RolloutEngine:
    from rl_loop.engines.sglang_engine import SglangEngine
    from rl_loop.sglang_fleet import statuses

    model, patience = config.model, config.rollout.sglang.start_seconds
    shape = {"num_layers": model.num_layers, "top_k": model.experts_per_token, "num_experts": model.num_experts}
    return SglangEngine(lambda: statuses(servers), **shape, wait_seconds=patience)
