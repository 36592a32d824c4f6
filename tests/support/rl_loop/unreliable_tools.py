"""An environment whose tool server is away, for good or now and then, and some of whose prompts are too long."""

from __future__ import annotations

import random
from typing import Any

from rl_loop.environments.base import (
    Environment,
    EnvironmentOptions,
    Script,
    Split,
    StepResult,
    Task,
    final,
)


class UnreliableOptions(EnvironmentOptions):
    failing: float = 1.0
    """Share of the episodes that end illegally and whose checker cannot be reached."""
    long_prompts: float = 0.0
    """Share of the tasks whose prompt is longer than any episode may be."""


class UnreliableEnvironment(Environment):
    Options = UnreliableOptions

    @classmethod
    def generate(cls, split: Split, seed: int, index: int, options: Any) -> Task:
        rng = random.Random(f"{split}/{seed}/{index}")
        words = 2000 if rng.random() < options.long_prompts else 1
        messages = [{"role": "user", "content": f"Task {index} " + "1 " * words}]
        return Task(f"{split}-{index}", messages, "1", metadata={"failing": options.failing})

    @classmethod
    def solve(cls, task: Task, rng: random.Random, faulty: bool) -> Script:
        yield [final("1")]

    async def answer(self, text: str) -> StepResult:
        return self.finished(0.0)

    def illegal(self, kind: str) -> StepResult:
        """Of what an untrained policy samples, this is called most often."""
        if random.random() < self.task.metadata["failing"]:
            raise ConnectionRefusedError(111, "Connection refused: http://tools:8080")
        return super().illegal(kind)

    def unfinished(self) -> StepResult:
        return self.finished(random.random())
