"""One rollout worker: an engine, a sandbox and the agent loop in one process. A plain class; ``rollout_pool`` makes Ray
actors of it. It knows neither Megatron nor the optimizer."""

import asyncio
from collections.abc import Sequence
from typing import Any

import torch

from rl_loop.config.run import RunConfig
from rl_loop.data.trajectory import Trajectory, TrajectoryGroup
from rl_loop.engines.protocol import ModelShape, RolloutEngine, SamplingParams
from rl_loop.environments import Task, make_environment
from rl_loop.infrastructure import InfrastructureFailure
from rl_loop.rollout.agent import run_episode
from rl_loop.rollout.episode_clock import running_clock
from rl_loop.rollout.prompt_limit import UnusablePrompt
from rl_loop.sandbox import ExecutionResult, PythonSandbox, SandboxFailure
from rl_loop.tasks.demonstrations import harmony_of


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
        """One episode per seed, all at the same time; failed calls are retried only with ``purify``. Episodes that
        infrastructure failures ended are set apart; a task whose prompt is of no use is skipped."""
        try:
            async with asyncio.TaskGroup() as running:
                tasks = [running.create_task(self._run_episode(task, seed, temperature, purify)) for seed in seeds]
        except ExceptionGroup as errors:
            error = errors.exceptions[0]  # the others are the same, or were cancelled for it
            if isinstance(error, UnusablePrompt):
                return TrajectoryGroup(task.task_id, [], skipped=str(error))
            raise error from None

        episodes = [finished.result() for finished in tasks]
        valid = [episode for episode in episodes if episode.invalid is None]
        invalid = [episode for episode in episodes if episode.invalid is not None]
        return TrajectoryGroup(task.task_id, valid, invalid)

    async def _run_episode(self, task: Task, seed: int, temperature: float, purify: bool) -> Trajectory:
        rollout, model = self.config.rollout, self.config.model
        environment = make_environment(task, self._execute, self.config.reward)
        return await run_episode(
            task.task_id,
            environment,
            self.engine,
            self.harmony,
            rollout,
            SamplingParams(rollout.max_new_tokens_per_turn, temperature, rollout.top_p),
            seed=seed,
            routed_experts=rollout.routed_experts,
            purification=rollout.purification if purify else None,
            shape=ModelShape(model.vocab_size, model.num_layers, model.experts_per_token, model.num_experts),
        )

    async def _execute(self, code: str, history: Sequence[str] = ()) -> ExecutionResult:
        """Run a program after those of its session. Raises InfrastructureFailure if the sandbox, and not the program,
        failed."""
        clock = running_clock()
        clock.stop()  # while other episodes' programs have the sandbox
        try:
            return await self.sandbox.run(code, history, on_begin=clock.start)
        except SandboxFailure as failure:
            raise InfrastructureFailure("sandbox", str(failure)) from failure
        finally:
            clock.start()

    async def close(self) -> None:
        await self.sandbox.close()
        await self.engine.close()


def _embedded_engine(config: RunConfig) -> RolloutEngine:
    from transformers import GptOssConfig

    from rl_loop.engines.embedded.engine import TransformersEngine

    model, dtype = GptOssConfig(**config.model.to_hf_config()), getattr(torch, config.dtype)
    return TransformersEngine.from_config(model, dtype=dtype, max_batch_size=config.rollout.max_batch_size)


def _engine_over(servers: list[Any], config: RunConfig) -> RolloutEngine:
    from rl_loop.engines.sglang.engine import SglangEngine
    from rl_loop.engines.sglang.fleet import statuses

    model, patience = config.model, config.rollout.sglang.start_seconds
    shape = {"num_layers": model.num_layers, "top_k": model.experts_per_token, "num_experts": model.num_experts}
    shape["vocab_size"] = model.vocab_size
    return SglangEngine(lambda: statuses(servers), **shape, wait_seconds=patience)
