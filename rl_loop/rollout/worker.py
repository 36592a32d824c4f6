"""One rollout worker: an engine, a sandbox and the agent loop in one process.

A plain class, of which ``rollout.pool`` makes Ray actors. It knows neither
Megatron nor the optimizer."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from converters.mxfp4_tensors import Digests
from megatron_gptoss.config import ModelConfig
from rl_loop.config.parts import EpisodesConfig
from rl_loop.data.stored_routes import StoredRoutes
from rl_loop.data.tensor_bytes import TensorBytes
from rl_loop.data.trajectory import Trajectory, TrajectoryGroup
from rl_loop.engines.backend import EngineFactory
from rl_loop.engines.protocol import (
    MeasuresRounding,
    ModelShape,
    PackedExpertsEngine,
    SamplingParams,
    server_client,
    weight_holder,
)
from rl_loop.environments import Task, make_environment
from rl_loop.heap import exempt_from_collection
from rl_loop.infrastructure import InfrastructureFailure
from rl_loop.rollout.agent import run_episode
from rl_loop.rollout.episode_clock import running_clock
from rl_loop.rollout.purification import purifying
from rl_loop.sandbox import ExecutionResult, PythonSandbox, SandboxFailure
from rl_loop.tasks.codec import codec_of
from rl_loop.tasks.prompt_limit import UnusablePrompt


class RolloutWorker:
    """Runs whole episodes. ``start`` must have returned before anything else is called."""

    def __init__(self, config: EpisodesConfig, engine_factory: EngineFactory, threads: int) -> None:
        """Build codec, engine and sandbox.

        Args:
            config: configuration of the run.
            engine_factory: makes the engine of this process.
            threads: threads of torch in this process.
        """
        torch.set_num_threads(threads)
        self.config = config
        self.codec = codec_of(config)
        self.engine = engine_factory()
        self.sandbox = PythonSandbox(config.sandbox)

        # Engines are not believed: every answer is checked against the model's shape.
        self._shape = model_shape(config.model)

    async def start(self) -> None:
        """Start the sandbox; raises SandboxUnavailable with the reason where it cannot isolate."""
        await self.sandbox.start()
        # Engine and libraries are half a million objects, and stay.
        exempt_from_collection()

    async def load_weights(self, weights: TensorBytes, version: int) -> None:
        """Give the engine these weights."""
        await weight_holder(self.engine).sync_weights(weights.tensors().items(), version)

    async def set_min_version(self, version: int) -> None:
        """Let the engine use only answers of servers with weights ``version`` or later."""
        server_client(self.engine).set_min_version(version)

    async def score(self, token_ids: list[int], temperature: float) -> list[float]:
        return await self.engine.score(token_ids, temperature)

    async def rounding_error(self, token_ids: list[int]) -> float | None:
        """Return the engine's rounding error, None if it cannot measure it."""
        if isinstance(self.engine, MeasuresRounding):
            return await self.engine.rounding_error(token_ids)
        return None

    async def packed_digests(self) -> Digests:
        if isinstance(self.engine, PackedExpertsEngine):
            return await self.engine.packed_digests()
        return {}

    async def run_group(
        self,
        task: Task,
        seeds: tuple[int, ...],
        temperature: float,
        *,
        purify: bool = False,
        with_routes: bool = False,
    ) -> TrajectoryGroup:
        """Run one episode per seed, all at the same time.

        Failed calls are retried only with ``purify``, and the engine is asked for routes only with
        ``with_routes``, if the configuration says so besides. Episodes that infrastructure failures
        ended are set apart; a task whose prompt is of no use is skipped."""
        try:
            async with asyncio.TaskGroup() as running:
                tasks = [
                    running.create_task(
                        self._run_episode(task, seed, temperature, purify, with_routes)
                    )
                    for seed in seeds
                ]
        except ExceptionGroup as errors:
            error = errors.exceptions[0]  # the others are the same, or were cancelled for it
            if isinstance(error, UnusablePrompt):
                return TrajectoryGroup(task.task_id, [], skipped=str(error))
            raise error from None

        # Invalid episodes say nothing about the policy: they enter no baseline and no mean.
        episodes = [finished.result() for finished in tasks]
        for episode in episodes:
            for sequence in episode.sequences:
                sequence.expected_answer = task.ground_truth or None
        valid = [episode for episode in episodes if episode.invalid is None]
        invalid = [episode for episode in episodes if episode.invalid is not None]
        return TrajectoryGroup(task.task_id, valid, invalid)

    async def run_group_and_store_routes(
        self, task: Task, seeds: tuple[int, ...], temperature: float, *, purify: bool = False
    ) -> tuple[TrajectoryGroup | np.ndarray | None, ...]:
        """Run episodes like ``run_group`` and return the group without routes, followed by one
        entry per seed: the routes of the group's first, second... episode, None behind the last.

        Of each entry Ray makes an object of its own, which belongs to the caller: it outlives this
        process and never passes through the caller's."""
        group = await self.run_group(task, seeds, temperature, purify=purify, with_routes=True)

        routes: list[np.ndarray | None] = [None] * len(seeds)
        for i, episode in enumerate(group.trajectories):
            group.trajectories[i], routes[i] = _without_routes(episode)
        return group, *routes

    async def _run_episode(
        self, task: Task, seed: int, temperature: float, purify: bool, with_routes: bool
    ) -> Trajectory:
        rollout = self.config.rollout
        return await run_episode(
            task.task_id,
            make_environment(task, self._execute, self.config.reward),
            self.engine,
            self.codec,
            rollout,
            SamplingParams(rollout.max_new_tokens_per_turn, temperature, rollout.top_p),
            seed=seed,
            routed_experts=rollout.routed_experts and with_routes,
            shape=self._shape,
            runner=purifying(rollout.purification) if purify and rollout.purification else None,
        )

    async def _execute(self, code: str, history: Sequence[str] = ()) -> ExecutionResult:
        """Run a program after those of its session. Raises InfrastructureFailure if the sandbox,
        and not the program, failed."""
        # Waiting while other episodes' programs have the sandbox costs this episode no time.
        clock = running_clock()
        clock.stop()
        try:
            return await self.sandbox.run(code, history, on_begin=clock.start)
        except SandboxFailure as failure:
            raise InfrastructureFailure("sandbox", str(failure), failure.culprit) from failure
        finally:
            clock.start()

    async def close(self) -> None:
        await self.sandbox.close()
        await self.engine.close()


def _without_routes(episode: Trajectory) -> tuple[Trajectory, np.ndarray | None]:
    """Return an episode with placeholders for the routes of its sequences, and these routes in one
    array, one sequence after the other; None if there are none."""
    placeholders: list[StoredRoutes] = []
    arrays: list[np.ndarray] = []
    start = 0
    for sequence in episode.sequences:
        array = sequence.routed_experts
        if not isinstance(array, np.ndarray):
            return episode, None
        placeholders.append(StoredRoutes(None, array.shape, array.dtype, start))
        arrays.append(array)
        start += len(array)

    joined = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
    return with_routes(episode, placeholders), joined


def with_routes(episode: Trajectory, routes: Sequence[StoredRoutes]) -> Trajectory:
    """Return an episode whose sequences have these routes, in their order."""
    first, *others = routes
    branches = [
        replace(branch, routed_experts=stored)
        for branch, stored in zip(episode.branches, others, strict=True)
    ]
    return replace(episode, routed_experts=first, branches=branches)


def model_shape(model: ModelConfig) -> ModelShape:
    """Return what a model's engines are checked against."""
    return ModelShape(
        vocabulary_size=model.vocab_size,
        layers=model.num_layers,
        top_k=model.experts_per_token,
        experts=model.num_experts,
    )
