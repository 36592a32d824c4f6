"""Environments: what an agent acts in. Writing one needs neither Ray nor Megatron.

``docs/environments.md`` shows how."""

from rl_loop.environments.base import (
    Environment,
    EnvironmentOptions,
    RewardConfig,
    Script,
    StepResult,
    Task,
    ToolError,
    UnknownTool,
)
from rl_loop.environments.registry import (
    ENVIRONMENTS,
    environment_class,
    make_environment,
    make_offline_environment,
)

__all__ = [
    "ENVIRONMENTS",
    "Environment",
    "EnvironmentOptions",
    "RewardConfig",
    "Script",
    "StepResult",
    "Task",
    "ToolError",
    "UnknownTool",
    "environment_class",
    "make_environment",
    "make_offline_environment",
]
