"""Environments: what an agent acts in. Writing one needs neither Ray nor Megatron.

A class with ``prompt`` and ``step`` is enough; ``retool.py`` is the example to copy.
"""

from rl_loop.environments.base import Environment, Observation, StepResult, Task, read_tasks

__all__ = ["Environment", "Observation", "StepResult", "Task", "read_tasks"]
