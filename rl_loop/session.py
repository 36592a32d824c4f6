"""Builds the parts of a run from its configuration."""

from typing import TYPE_CHECKING

from rl_loop.config.run import RlConfig, RunConfig
from rl_loop.engines.backend import BackendContext
from rl_loop.engines.registry import build_backend

# Whatever imports torch or Ray is imported where it is built: a mistake in a configuration is reported before.
if TYPE_CHECKING:
    from rl_loop.rollout.pool import RolloutPool
    from rl_loop.rollout.worker import WorkerSettings
    from rl_loop.tasks.demonstrations import HarmonySettings
    from rl_loop.tasks.source import TaskSource


def build_tasks(config: RunConfig) -> "TaskSource":
    """Read and check the task data of a run. Raises TaskFileError."""
    from rl_loop.tasks.demonstrations import harmony_of
    from rl_loop.tasks.source import TaskSource

    max_prompt_tokens = config.rollout.max_tokens if isinstance(config, RlConfig) else None
    return TaskSource(config.tasks, harmony_of(harmony_settings(config)), max_prompt_tokens)


def build_rollouts(config: RunConfig) -> "RolloutPool":
    """Start the engines and the rollout workers of a run; ``ready`` waits for them."""
    from rl_loop.rollout.pool import RolloutPool

    context = BackendContext(
        model=config.model,
        dtype=config.dtype,
        seed=config.seed,
        directory=config.directory.absolute() / "engine",
        routed_experts=config.rollout.routed_experts,
    )
    return RolloutPool(build_backend(config.rollout.engine, context), worker_settings(config))


def harmony_settings(config: RunConfig) -> "HarmonySettings":
    """Collect what decides how episodes are rendered."""
    from rl_loop.tasks.demonstrations import HarmonySettings

    return HarmonySettings(
        vocabulary=config.vocabulary,
        vocabulary_size=config.model.vocab_size,
        prompt=config.prompt,
        tool_timeout_seconds=config.sandbox.timeout_seconds,
        tasks=config.tasks,
    )


def worker_settings(config: RunConfig) -> "WorkerSettings":
    """Collect what rollout workers need."""
    from rl_loop.rollout.worker import WorkerSettings

    return WorkerSettings(
        rollout=config.rollout,
        model=config.model,
        harmony=harmony_settings(config),
        reward=config.reward,
        sandbox=config.sandbox,
    )
