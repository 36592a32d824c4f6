"""Environments in which agents act. An author of environments needs neither Ray nor Megatron.

``docs/environments.md`` shows how to write an environment.
"""

from rl_loop.environments.base import (
    Environment,
    EnvironmentOptions,
    RewardConfig,
    ScriptedPolicy,
    StepResult,
    Task,
)
from rl_loop.environments.registry import (
    ENVIRONMENTS,
    environment_class,
    make_environment,
    make_offline_environment,
)
from rl_loop.environments.scripted_messages import final, function_call, think
from rl_loop.environments.tool_calls import (
    ToolError,
    UnknownToolError,
    parse_arguments,
    parse_recipient,
)

__all__ = [
    "ENVIRONMENTS",
    "Environment",
    "EnvironmentOptions",
    "RewardConfig",
    "ScriptedPolicy",
    "StepResult",
    "Task",
    "ToolError",
    "UnknownToolError",
    "environment_class",
    "final",
    "function_call",
    "make_environment",
    "make_offline_environment",
    "parse_arguments",
    "parse_recipient",
    "think",
]
