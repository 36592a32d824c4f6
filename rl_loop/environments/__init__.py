"""Environments: what an agent acts in. Writing one needs neither Ray nor Megatron.

Write a class with the methods of ``base.Environment`` (``retool.py`` is the example to copy) and name it in
``registry.ENVIRONMENTS``.
"""

from rl_loop.environments.base import Environment, StepResult, Task
from rl_loop.environments.registry import ENVIRONMENTS, make_environment
from rl_loop.environments.task_file import TaskFileError, read_tasks

__all__ = [
    "ENVIRONMENTS",
    "Environment",
    "StepResult",
    "Task",
    "TaskFileError",
    "make_environment",
    "read_tasks",
]
