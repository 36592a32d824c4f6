"""Environment of a user: rows of a file are its only tasks, and a script solves them."""

from __future__ import annotations

from random import Random
from typing import Any

from rl_loop.environments import Environment, ScriptedPolicy, StepResult, Task
from rl_loop.environments.scripted_messages import final

NAME = "tests.support.rl_loop.environments.reversing:ReversingEnvironment"


class ReversingEnvironment(Environment):
    """The policy writes a word backwards."""

    @classmethod
    def from_record(cls, record: dict[str, Any], name: str, options: Any) -> Task:
        word = record["word"]
        messages = [{"role": "user", "content": f"Reverse: {word}"}]
        return Task(name, messages, word[::-1])

    @classmethod
    def solve(cls, task: Task, rng: Random, inject_errors: bool) -> ScriptedPolicy:
        yield [final("?" if inject_errors else task.ground_truth)]

    async def answer(self, text: str) -> StepResult:
        return self.end_with_score(float(text == self.task.ground_truth))
