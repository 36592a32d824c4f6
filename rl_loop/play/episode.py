"""Plays one episode in this process with the agent loop of training, and shows it step by step."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, Protocol

import torch

from rl_loop.agents.worker import select_worker_class
from rl_loop.chat.codec import ChatCodec
from rl_loop.chat.messages import ParsedMessage
from rl_loop.config.every_run import RunConfig
from rl_loop.config.run import RlConfig
from rl_loop.data.trajectory import Trajectory, TrajectoryGroup
from rl_loop.engines.backend import EngineFactory
from rl_loop.engines.completions import CompletionsEngine
from rl_loop.engines.protocol import GenerateResult
from rl_loop.environments import Environment, StepResult, Task, environment_class
from rl_loop.infrastructure import InfrastructureError
from rl_loop.lifecycle.interrupt import run_until_interrupted
from rl_loop.play.policies import Person, PlayError, Script, WrittenPolicy, WrittenTurns
from rl_loop.rollout.agent import EpisodeRunner, RunnerFactory
from rl_loop.rollout.episode import Episode
from rl_loop.rollout.episode_clock import CallTime
from rl_loop.rollout.worker import RolloutWorker
from rl_loop.run import local_engine
from rl_loop.run_parts import build_tasks
from rl_loop.tasks.source import TaskMixture

PolicyName = Literal["scripted", "model", "me"]


@dataclass(frozen=True)
class PlayOptions:
    """Choice of the episode."""

    policy: PolicyName
    task: int = 0
    """Position of the task."""
    held_out: bool = False
    """True if the task is a held-out task instead of a training task."""
    seed: int = 0
    """Seed of the policy."""
    weights: Path | None = None
    """Replacement for the configuration's ``initial_weights``."""


class EpisodeView(Protocol):
    """Display of an episode in progress."""

    def show_task(self, task: Task, codec: ChatCodec) -> None:
        """Begin the display."""

    def show_tokens(self, role: str, start: int, ids: Sequence[int]) -> None:
        """Show tokens.

        Args:
            role: author of the tokens: "prompt", "assistant", "tool" or "user".
            start: position of the first token in the episode.
            ids: token ids.
        """

    def show_result(self, result: StepResult) -> None:
        """Show what the environment made of a turn."""

    def show_failure(self, failure: InfrastructureError) -> None:
        """Show the exception that made the episode invalid."""

    def tell(self, text: str) -> None:
        """Show a message to the person who plays."""

    async def read_line(self) -> str | None:
        """Return a line of the person who plays. None at the end of input."""
        ...


class ShownRunner(EpisodeRunner):
    """Runs an episode of the agent loop, and shows every step when it happens."""

    def __init__(
        self,
        view: EpisodeView,
        policy: WrittenPolicy | None,
        task_id: str,
        environment: Environment,
        codec: ChatCodec,
        episode: Episode,
    ) -> None:
        """Create a runner. The first two arguments are bound by ``partial``.

        Args:
            view: display of the episode.
            policy: policy that needs the results of its turns. None for an engine.
            task_id, environment, codec, episode: see ``RunnerFactory``.
        """
        super().__init__(task_id, environment, codec, episode)
        self._view = view
        self._policy = policy

    async def begin(self) -> None:
        await super().begin()
        if self._policy is not None:
            self._policy.begin(self.environment)

    def append(
        self,
        role: str,
        ids: list[int],
        sampled: GenerateResult | None = None,
        time: CallTime | None = None,
    ) -> None:
        # Results of tools were shown before the policy answered them.
        if role in ("prompt", "assistant"):
            # Shown before they are appended, when the draft's length is still their position.
            self._view.show_tokens(role, len(self.draft), ids)
        super().append(role, ids, sampled, time)

    async def take_step(self, sampled: GenerateResult, messages: list[ParsedMessage]) -> StepResult:
        result = await super().take_step(sampled, messages)
        self._view.show_result(result)
        if self._policy is not None:
            self._policy.receive(result)
        return result

    async def observe(self, result: StepResult) -> None:
        await super().observe(result)
        self._view.show_tokens(self.pending_role, len(self.draft), self.pending_ids)

    def invalidate(self, failure: InfrastructureError) -> Trajectory:
        self._view.show_failure(failure)
        return super().invalidate(failure)


def play_episode(config: RunConfig, options: PlayOptions, view: EpisodeView) -> TrajectoryGroup:
    """Play one episode.

    Args:
        config: configuration of a run.
        options: choice of the episode.
        view: display of the episode.

    Returns:
        A group with the episode. It is empty if the prompt of the task cannot be used.

    Raises:
        PlayError: there is no such task or policy, or the policy stopped before the end.
    """
    tasks = build_tasks(config)
    task = choose_task(tasks, options)
    is_agents = environment_class(task.environment).uses_external_agent
    if is_agents and options.policy != "model":
        raise PlayError(
            f"--policy {options.policy}: an external agent plays the episodes of "
            f"{task.environment}. Use --policy model"
        )

    policy: WrittenPolicy | None = None
    if options.policy == "scripted":
        policy = Script(task, tasks.codec, options.seed)
    elif options.policy == "me":
        policy = Person(tasks.codec, view.read_line, view.tell)

    view.show_task(task, tasks.codec)
    make_runner = partial(ShownRunner, view, policy)
    with ExitStack() as stack:
        if policy is not None:
            return run_until_interrupted(
                _play_written(config, task, options.seed, policy, make_runner)
            )
        if isinstance(config, RlConfig) and config.evaluation.endpoint is not None:
            url, name = config.evaluation.endpoint, config.evaluation.endpoint_model
            # Created in the event loop, which its connections need.
            factory: EngineFactory = partial(CompletionsEngine, url, name)
        else:
            engine = stack.enter_context(local_engine(config, options.weights))
            factory = lambda: engine  # noqa: E731
        return run_until_interrupted(_play_model(config, task, options.seed, factory, make_runner))


def choose_task(tasks: TaskMixture, options: PlayOptions) -> Task:
    """Return the task of an episode. Raises PlayError if it does not exist."""
    if not options.held_out:
        return tasks.train(options.task, 1)[0]
    held_out = tasks.held_out()
    if options.task >= len(held_out):
        raise PlayError(f"--task {options.task}: the last held-out task is {len(held_out) - 1}")
    return held_out[options.task]


async def _play_written(
    config: RunConfig, task: Task, seed: int, policy: WrittenPolicy, make_runner: RunnerFactory
) -> TrajectoryGroup:
    """Play an episode of a written policy, and stop it when the policy fails."""
    turns = WrittenTurns(policy)
    worker = RolloutWorker(config, lambda: turns, torch.get_num_threads())

    async def play(running: RolloutWorker) -> TrajectoryGroup:
        episode = asyncio.ensure_future(
            running.run_group(task, (seed,), config.rollout.temperature, make_runner=make_runner)
        )
        stop = asyncio.ensure_future(turns.stopped.wait())
        try:
            await asyncio.wait({episode, stop}, return_when=asyncio.FIRST_COMPLETED)
            # The episode waits for its turn forever if the policy failed.
            if turns.error is not None:
                raise turns.error
            return episode.result()
        finally:
            # A cancelled episode closes its environment, which may take seconds.
            stop.cancel()
            episode.cancel()
            await asyncio.wait({episode, stop})

    return await _with_worker(worker, play)


async def _play_model(
    config: RunConfig, task: Task, seed: int, factory: EngineFactory, make_runner: RunnerFactory
) -> TrajectoryGroup:
    """Play an episode of an engine."""
    worker = select_worker_class(config.tasks)(config, factory, torch.get_num_threads())
    temperature = config.rollout.temperature
    return await _with_worker(
        worker,
        lambda running: running.run_group(task, (seed,), temperature, make_runner=make_runner),
    )


async def _with_worker(
    worker: RolloutWorker, play: Callable[[RolloutWorker], Awaitable[TrajectoryGroup]]
) -> TrajectoryGroup:
    """Start a worker, play, and close it."""
    await worker.start()
    try:
        return await play(worker)
    finally:
        await worker.close()
