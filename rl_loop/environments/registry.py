"""Environments by the name that a task gives."""

from __future__ import annotations

from typing import Protocol

from rl_loop.environments.base import Environment, Task
from rl_loop.environments.retool import Execute, ReToolEnvironment, RewardConfig


class EnvironmentFactory(Protocol):
    def __call__(self, task: Task, execute: Execute, reward: RewardConfig) -> Environment:
        """A fresh world for one episode of ``task``; ``execute`` runs untrusted Python."""
        ...


ENVIRONMENTS: dict[str, EnvironmentFactory] = {"retool": ReToolEnvironment}


def make_environment(task: Task, execute: Execute, reward: RewardConfig) -> Environment:
    """The environment of one episode. Raises ValueError naming the task if its environment does not exist."""
    if task.environment not in ENVIRONMENTS:
        known = ", ".join(sorted(ENVIRONMENTS))
        raise ValueError(f"task {task.task_id}: there is no environment {task.environment!r}; known: {known}")
    return ENVIRONMENTS[task.environment](task, execute, reward)
