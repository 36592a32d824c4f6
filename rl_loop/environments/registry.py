"""Environments by the name that a task gives."""

import importlib

from rl_loop.environments.base import Environment, Execute, RewardConfig, Task
from rl_loop.environments.gsm8k import Gsm8kEnvironment
from rl_loop.environments.incident import IncidentEnvironment
from rl_loop.environments.instructions import InstructionEnvironment
from rl_loop.environments.reasoning import ReasoningGymEnvironment
from rl_loop.environments.retool import ReToolEnvironment

ENVIRONMENTS: dict[str, type[Environment]] = {
    "retool": ReToolEnvironment,
    "gsm8k": Gsm8kEnvironment,
    "instructions": InstructionEnvironment,
    "incident": IncidentEnvironment,
    "reasoning_gym": ReasoningGymEnvironment,
}


def environment_class(name: str) -> type[Environment]:
    """The environment of a name in ``ENVIRONMENTS``, or of ``module:Class``. Raises ValueError if there is none."""
    if name in ENVIRONMENTS:
        return ENVIRONMENTS[name]
    module, colon, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute) if colon else None
    except (ImportError, AttributeError) as error:
        raise ValueError(f"environment {name!r} cannot be imported: {error}") from None
    if not (isinstance(found, type) and issubclass(found, Environment)):
        known = ", ".join(sorted(ENVIRONMENTS))
        raise ValueError(f"there is no environment {name!r}; known: {known}, or give MODULE:CLASS")
    return found


def make_environment(task: Task, execute: Execute, reward: RewardConfig) -> Environment:
    """The environment of one episode. Raises ValueError if there is no such environment."""
    return environment_class(task.environment)(task, execute, reward)
