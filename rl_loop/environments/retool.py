r"""ReTool (arXiv 2504.11536): a mathematical problem, a Python interpreter, the answer in \boxed{}.

The reward is +1 for an equivalent answer and -1 for any other; errors of the interpreter are answers like any other,
so that the agent can correct itself, and are not punished.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from pydantic import BaseModel, ConfigDict

from rl_loop.environments.base import StepResult, Task
from rl_loop.harmony import ParsedMessage, Tool, ToolOutput
from rl_loop.rewards.math_answer import is_correct

INSTRUCTIONS = r"Use python. Answer in \boxed{}."


class Execution(Protocol):
    """What running a program gave; rl_loop.sandbox.ExecutionResult is one."""

    @property
    def output(self) -> str: ...

    @property
    def exit_code(self) -> int: ...

    @property
    def error(self) -> str | None: ...


Execute = Callable[[str], Awaitable[Execution]]


class RewardConfig(BaseModel):
    """What an episode earns."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    correct: float = 1.0
    """Final answer equivalent to the ground truth."""
    wrong: float = -1.0
    """Any other final answer, or none."""
    format_error: float = -1.0
    """The sampled tokens are not a legal Harmony message, or call a tool that does not exist."""


class ReToolEnvironment:
    """One episode."""

    def __init__(self, task: Task, execute: Execute, reward: RewardConfig) -> None:
        self._task, self._execute, self._reward = task, execute, reward

    def prompt(self) -> list[dict[str, str]]:
        return self._task.messages

    def tools(self) -> Sequence[Tool]:
        return ()

    async def step(self, messages: Sequence[ParsedMessage]) -> StepResult:
        last = messages[-1]
        if last.recipient is None:
            if last.channel != "final":
                return self.illegal("the turn ends without a tool call or a final answer")
            # sympy may take its time over an odd answer: not on the event loop
            correct = await asyncio.to_thread(is_correct, last.text, self._task.ground_truth)
            return self._finished(correct)
        code = _python_code(last)
        if code is None:
            return self.illegal(f"there is no tool {last.recipient!r}")
        execution = await self._execute(code)
        text = execution.output if execution.error is None else f"{execution.output}\n{execution.error}".lstrip("\n")
        failed = execution.exit_code != 0 or execution.error is not None
        answer = ToolOutput(last.recipient, last.channel, text)
        return StepResult([answer], tool_calls=1, tool_errors=int(failed))

    def unfinished(self) -> StepResult:
        return self._finished(correct=False)

    def illegal(self, reason: str) -> StepResult:
        parts = {"correct": 0.0, "format_error": 1.0}
        return StepResult(done=True, reward=self._reward.format_error, reward_parts=parts, format_error=reason)

    def _finished(self, correct: bool) -> StepResult:
        reward = self._reward.correct if correct else self._reward.wrong
        return StepResult(done=True, reward=reward, reward_parts={"correct": float(correct), "format_error": 0.0})


def _python_code(message: ParsedMessage) -> str | None:
    """The program of a call to ``python`` (plain code) or ``functions.python`` (JSON with a key "code")."""
    if message.recipient == "python":
        return message.text
    if message.recipient == "functions.python":
        try:
            code = json.loads(message.text)["code"]
        except (ValueError, KeyError, TypeError):
            # said to the agent by the interpreter itself, as any other mistake in a call
            return 'raise ValueError(\'arguments of functions.python must be JSON like {"code": "print(1)"}\')'
        return code if isinstance(code, str) else repr(code)
    return None
