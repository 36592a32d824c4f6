"""One rollout worker: an engine, a sandbox and the agent loop in one process.

It is a plain class from which ``rollout.pool`` creates Ray actors. It does not depend on Megatron
or the optimizer.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from converters.mxfp4_tensors import Digests
from megatron_gptoss.config import ModelConfig
from rl_loop.config.partial_configs import EpisodesConfig
from rl_loop.data.stored_routes import StoredRoutes
from rl_loop.data.tensor_bytes import TensorBytes
from rl_loop.data.trajectory import Trajectory, TrajectoryGroup
from rl_loop.engines.backend import EngineFactory
from rl_loop.engines.protocol import (
    MeasuresRounding,
    ModelShape,
    Mxfp4Engine,
    SamplingParams,
    server_client,
    weight_holder,
)
from rl_loop.environments import Task, make_environment
from rl_loop.infrastructure import InfrastructureError
from rl_loop.process_memory import exempt_from_collection
from rl_loop.rewards.judge import Judge
from rl_loop.rollout.agent import RunnerFactory, run_episode
from rl_loop.rollout.episode_clock import running_clock
from rl_loop.rollout.judgment import judge_episode
from rl_loop.rollout.purification import purifying
from rl_loop.sandbox import ExecutionResult, PythonSandbox, SandboxError
from rl_loop.tasks.codec import build_codec
from rl_loop.tasks.episode_prompts import UnusablePromptError


class RolloutWorker:
    """Runs whole episodes. Other methods may be called only after ``start`` has returned."""

    def __init__(self, config: EpisodesConfig, engine_factory: EngineFactory, threads: int) -> None:
        """Build codec, engine and sandbox.

        Args:
            config: configuration of the run.
            engine_factory: makes the engine of this process.
            threads: threads of torch in this process.
        """
        torch.set_num_threads(threads)
        self.config = config
        self.codec = build_codec(config)
        self.engine = engine_factory()
        self.sandbox = PythonSandbox(config.sandbox)
        self._judges = {
            name: Judge(source.judge)
            for name, source in config.tasks.sources.items()
            if source.judge is not None
        }

        # Engines are not trusted: every answer is checked against the model's shape.
        self._shape = model_shape(config.model)

    async def start(self) -> None:
        """Start the sandbox. Raises SandboxUnavailableError with the reason if it cannot isolate."""
        await self.sandbox.start()
        # Engine and libraries have 500,000 objects, which live as long as the process.
        exempt_from_collection()

    async def load_weights(self, weights: TensorBytes, version: int) -> None:
        """Load these weights into the engine."""
        await weight_holder(self.engine).sync_weights(weights.tensors().items(), version)

    async def set_min_version(self, version: int) -> None:
        """Make the client of servers reject tokens of weights older than ``version``."""
        server_client(self.engine).set_min_version(version)

    async def score(self, token_ids: list[int], temperature: float) -> list[float]:
        return await self.engine.score(token_ids, temperature)

    async def rounding_error(self, token_ids: list[int]) -> float | None:
        """Return the engine's rounding error, or None if the engine cannot measure it."""
        if isinstance(self.engine, MeasuresRounding):
            return await self.engine.rounding_error(token_ids)
        return None

    async def mxfp4_digests(self) -> Digests:
        if isinstance(self.engine, Mxfp4Engine):
            return await self.engine.mxfp4_digests()
        return {}

    async def run_group(
        self,
        task: Task,
        seeds: tuple[int, ...],
        temperature: float,
        *,
        purify: bool = False,
        with_routes: bool = False,
        make_runner: RunnerFactory | None = None,
    ) -> TrajectoryGroup:
        """Run one episode per seed, all at the same time.

        Args:
            task: task of the episodes.
            seeds: seed of each episode.
            temperature: sampling temperature.
            purify: whether to retry failed calls, if the configuration enables it.
            with_routes: whether to request routes from the engine, if the configuration enables it.
            make_runner: makes the runners of the agent loop. None: ``EpisodeRunner``.

        Returns:
            The group, with separate lists of valid and invalid episodes. A task whose prompt cannot
            be used is skipped.
        """
        if make_runner is None and purify and self.config.rollout.purification is not None:
            make_runner = purifying(self.config.rollout.purification)
        try:
            async with asyncio.TaskGroup() as running:
                tasks = [
                    running.create_task(
                        self._run_judged(task, seed, temperature, with_routes, make_runner)
                    )
                    for seed in seeds
                ]
        except ExceptionGroup as errors:
            # The other tasks raised an equal error, or were cancelled because of this one.
            error = errors.exceptions[0]
            if isinstance(error, UnusablePromptError):
                return TrajectoryGroup(task.task_id, [], skipped=str(error))
            raise error from None

        # Invalid episodes say nothing about the policy, so they enter no baseline and no mean.
        episodes = [finished.result() for finished in tasks]
        for episode in episodes:
            for sequence in episode.sequences:
                # For people who read the recorded episodes. Checkers have their own copy.
                sequence.expected_answer = task.ground_truth or None
        valid = [episode for episode in episodes if episode.invalid is None]
        invalid = [episode for episode in episodes if episode.invalid is not None]
        return TrajectoryGroup(task.task_id, valid, invalid, task.source)

    async def run_group_and_store_routes(
        self, task: Task, seeds: tuple[int, ...], temperature: float, *, purify: bool = False
    ) -> tuple[TrajectoryGroup | np.ndarray | None, ...]:
        """Run episodes like ``run_group``, and return their routes separately.

        Ray stores each entry of the result as a separate object, which belongs to the caller. It
        survives this process, and does not pass through the caller's process.

        Returns:
            The group without routes, followed by one entry per seed: the routes of the group's
            episodes, then None.
        """
        group = await self.run_group(task, seeds, temperature, purify=purify, with_routes=True)

        routes: list[np.ndarray | None] = [None] * len(seeds)
        for i, episode in enumerate(group.trajectories):
            group.trajectories[i], routes[i] = _without_routes(episode)
        return group, *routes

    async def _run_judged(
        self,
        task: Task,
        seed: int,
        temperature: float,
        with_routes: bool,
        make_runner: RunnerFactory | None,
    ) -> Trajectory:
        """Run one episode of a task, and let the judge of its source score it."""
        episode = await self._run_episode(task, seed, temperature, with_routes, make_runner)
        judge = self._judges.get(task.source)
        # Judged after the end of the episode, so a slow judge costs it no time.
        if judge is None or episode.invalid is not None:
            return episode
        return await judge_episode(judge, task, episode, self.codec)

    async def _run_episode(
        self,
        task: Task,
        seed: int,
        temperature: float,
        with_routes: bool,
        make_runner: RunnerFactory | None,
    ) -> Trajectory:
        """Run one episode of a task."""
        rollout = self.config.rollout
        return await run_episode(
            task.task_id,
            make_environment(task, self._execute, self.config.reward),
            self.engine,
            self.codec,
            rollout,
            SamplingParams(rollout.max_sampled_tokens_per_turn, temperature, rollout.top_p),
            seed=seed,
            record_routes=rollout.routed_experts and with_routes,
            shape=self._shape,
            make_runner=make_runner,
        )

    async def _execute(self, code: str, history: Sequence[str] = ()) -> ExecutionResult:
        """Run a program after the earlier ones of its session.

        Raises:
            InfrastructureError: the sandbox, and not the program, failed.
        """
        # Time in the queue for the sandbox does not count as time of this episode.
        clock = running_clock()
        clock.stop()
        try:
            return await self.sandbox.run(code, history, on_begin=clock.start)
        except SandboxError as failure:
            raise InfrastructureError("sandbox", str(failure), failure.failure_source) from failure
        finally:
            clock.start()

    async def close(self) -> None:
        for judge in self._judges.values():
            await judge.close()
        await self.sandbox.close()
        await self.engine.close()


class ChatWorker(RolloutWorker):
    """Worker for turns of conversations. It executes no calls, so it has no sandbox."""

    async def start(self) -> None:
        exempt_from_collection()


def _without_routes(episode: Trajectory) -> tuple[Trajectory, np.ndarray | None]:
    """Return an episode with placeholders for its routes, and the routes in one array.

    The array has the routes of the sequences one after another. None if there are none.
    """
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

    # One array per episode, because the number of Ray's results is fixed before the call.
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
    """Return the shape against which answers of a model's engines are checked."""
    return ModelShape(
        vocabulary_size=model.vocab_size,
        layers=model.num_layers,
        top_k=model.experts_per_token,
        experts=model.num_experts,
    )
