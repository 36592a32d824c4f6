"""An environment whose tool server is unreachable, always or sometimes, and with long prompts."""

from __future__ import annotations

import random
from typing import Any

from rl_loop.environments.base import (
    Environment,
    EnvironmentOptions,
    ScriptedPolicy,
    Split,
    StepResult,
    Task,
)
from rl_loop.environments.scripted_messages import final


class UnreliableOptions(EnvironmentOptions):
    failing: float = 1.0
    """Fraction of episodes that end with a format error and whose checker is unreachable."""
    long_prompts: float = 0.0
    """Fraction of tasks whose prompt exceeds the maximum length of an episode."""


class UnreliableEnvironment(Environment):
    Options = UnreliableOptions

    @classmethod
    def generate(cls, split: Split, seed: int, index: int, options: Any) -> Task:
        rng = random.Random(f"{split}/{seed}/{index}")
        words = 2000 if rng.random() < options.long_prompts else 1
        messages = [{"role": "user", "content": f"Task {index} " + "1 " * words}]
        return Task(f"{split}-{index}", messages, "1", metadata={"failing": options.failing})

    @classmethod
    def solve(cls, task: Task, rng: random.Random, inject_errors: bool) -> ScriptedPolicy:
        yield [final("1")]

    async def answer(self, text: str) -> StepResult:
        return self.end_with_score(0.0)

    def end_with_format_error(self, kind: str) -> StepResult:
        """Fail sometimes. Most turns of an untrained policy have format errors."""
        if random.random() < self.task.metadata["failing"]:
            raise ConnectionRefusedError(111, "Connection refused: http://tools:8080")
        return super().end_with_format_error(kind)

    def end_truncated(self) -> StepResult:
        return self.end_with_score(random.random())
