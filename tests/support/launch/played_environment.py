"""Environment for tests of `gptoss play`: two numbers to add, and tools that fail in every way."""

from __future__ import annotations

import os
from pathlib import Path
from random import Random
from typing import Any

from rl_loop.chat.tools import Tool
from rl_loop.environments import (
    Environment,
    EnvironmentOptions,
    ScriptedPolicy,
    StepResult,
    Task,
    ToolError,
    UnknownToolError,
)
from rl_loop.environments.base import Split
from rl_loop.environments.scripted_messages import final, function_call, think
from rl_loop.environments.tool_calls import parse_arguments

CLOSED = "PLAYED_ENVIRONMENT_CLOSED"
"""Variable with the path of a file that `close` creates."""
NAME = "tests.support.launch.played_environment:Sums"


class SumsOptions(EnvironmentOptions):
    scripted: bool = True
    """Whether `solve` can solve the task."""
    turns: int = 2
    """Turns of the script. 2 for a whole episode."""


class Sums(Environment):
    Options = SumsOptions

    @classmethod
    def generate(cls, split: Split, seed: int, index: int, options: SumsOptions) -> Task:
        a, b = index % 100 + 1, 7 if split == "train" else 9
        messages = [{"role": "user", "content": f"{a}+{b}"}]
        metadata = {"a": a, "b": b, "scripted": options.scripted, "turns": options.turns}
        return Task(f"{split}-{index}", messages, str(a + b), metadata=metadata)

    @classmethod
    def solve(cls, task: Task, rng: Random, inject_errors: bool) -> ScriptedPolicy:
        if not task.metadata["scripted"]:
            raise NotImplementedError("Sums cannot be scripted")
        result = yield [
            think("add"),
            function_call("add", a=task.metadata["a"], b=task.metadata["b"]),
        ]
        if task.metadata["turns"] == 2:
            yield [final("0" if inject_errors else result.tool_outputs[0].text)]

    @classmethod
    def vocabulary_text(cls) -> str:
        # Without it, the vocabulary would be built from episodes of scripts, which fail here.
        return "functions.add Adds. number " + " ".join(str(number) for number in range(120))

    def tools(self) -> list[Tool]:
        numbers = {"type": "object", "properties": {"a": {"type": "integer"}}}
        return [Tool("add", "Adds.", numbers)]

    async def call(self, tool: str, arguments: str) -> str:
        values: dict[str, Any] = parse_arguments(arguments)
        match tool:
            case "functions.add" if "a" not in values:
                raise ToolError("a is missing \x1b[2J")
            case "functions.add":
                return str(values["a"] + values["b"])
            case "functions.echo":
                return "\x1b]0;owned\x07 :smile: [bold] \u202e"
            case "functions.crash":
                return str({}["port"])
        raise UnknownToolError

    async def answer(self, text: str) -> StepResult:
        return self.end_with_score(float(text == self.task.ground_truth), text)

    async def close(self) -> None:
        if CLOSED in os.environ:
            # Fails if the sandbox was closed first.
            await self.execute("print(1)")
            Path(os.environ[CLOSED]).touch()
