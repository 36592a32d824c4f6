"""Environments with tools as slow and as unreliable as those of real agents.

Use them as ``benchmarks.rollouts.slow_tools:CLASS`` in ``tasks.sources``. Every tool call sleeps
for a time from the published distribution of gaps between turns (``simulation.GAPS``), multiplied
by ``gap_scale``. A sleeping call takes no processor time.
"""

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from random import Random, random
from typing import Any, ClassVar

from benchmarks.rollouts.simulation import CALLS, GAPS, quantile
from rl_loop.environments import Task
from rl_loop.environments.base import (
    Environment,
    EnvironmentOptions,
    ScriptedPolicy,
    Split,
    StepResult,
)
from rl_loop.environments.retool import ReToolEnvironment, ReToolOptions
from rl_loop.environments.scripted_messages import final
from rl_loop.harmony.codec import ParsedMessage, PythonTool

MAX_CALLS = 6
"""Maximum number of tool calls of a scripted episode."""


def draw_call_count(episode: str) -> int:
    """Return the number of tool calls of an episode: published quantiles, cut at MAX_CALLS."""
    return min(MAX_CALLS, round(quantile(CALLS, Random(episode).random())))


class SlowOptions(ReToolOptions):
    gap_scale: float = 1.0
    """Factor of the published seconds (median 1.6, mean 37)."""


class SlowReTool(ReToolEnvironment):
    """ReTool with a slow interpreter."""

    Options = SlowOptions

    _episodes_of: ClassVar[Counter[str]] = Counter()
    """Number of episodes that this process has started, by task."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        # The n-th episode of a task has the same delays in every run, independent of other tasks.
        episode = self._episodes_of[self.task.task_id]
        self._episodes_of[self.task.task_id] += 1
        self._episode = f"{self.task.task_id}/{episode}"

    @classmethod
    def generate(cls, split: Split, seed: int, index: int, options: Any) -> Task:
        task = super().generate(split, seed, index, options)
        task.metadata["gap_scale"] = options.gap_scale
        return task

    async def call(self, tool: str, arguments: str) -> str:
        chance = Random(f"{self._episode}/{self._calls}").random()
        await asyncio.sleep(self.task.metadata["gap_scale"] * quantile(GAPS, chance))
        return await super().call(tool, arguments)


class UnreliableOptions(EnvironmentOptions):
    gap_scale: float = 1.0
    """Factor of the published seconds (median 1.6, mean 37)."""
    failing: float = 0.0
    """Fraction of tool calls that fail once with a connection error."""
    unavailable: float = 0.0
    """Fraction of tasks whose tool is never available. Episodes that call it cannot finish."""


class UnreliableTools(Environment):
    """A slow tool with temporary and permanent infrastructure failures.

    The ``answer`` of an episode is a unique name.
    """

    Options = UnreliableOptions

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._name = uuid.uuid4().hex
        self._began = time.time()
        self._failures = 0.0
        self._has_failed = False

    @classmethod
    def generate(cls, split: Split, seed: int, index: int, options: Any) -> Task:
        # Held-out prompts must differ from training prompts.
        sign = "+" if split == "train" else "*"
        messages = [{"role": "user", "content": f"{index}{sign}1"}]
        metadata = {
            "gap_scale": options.gap_scale,
            "failing": options.failing,
            "unavailable": Random(f"{split}/{seed}/{index}").random() < options.unavailable,
        }
        return Task(f"{split}-{index}", messages, "1", metadata=metadata)

    @classmethod
    def solve(cls, task: Task, rng: Random, inject_errors: bool) -> ScriptedPolicy:
        yield [ParsedMessage("analysis", "python", "code", "print(1)")]
        yield [final(task.ground_truth)]

    @classmethod
    def vocabulary_text(cls) -> str:
        return ReToolEnvironment.vocabulary_text()

    def builtin_tools(self) -> Sequence[PythonTool]:
        return (PythonTool(),)

    def save_state(self) -> dict[str, Any]:
        """Return an empty state. The tool has no state, so calls can be repeated."""
        return {}

    def restore_state(self, state: Any) -> None: ...

    async def call(self, tool: str, arguments: str) -> str:
        # A repeated call does not fail again.
        may_fail = not self._has_failed and random() < self.task.metadata["failing"]
        self._has_failed = self.task.metadata["unavailable"] or may_fail
        if self._has_failed:
            self._failures += 1
            raise ConnectionRefusedError(111, "Connection refused: the tool's server")
        await asyncio.sleep(self.task.metadata["gap_scale"] * quantile(GAPS, random()))
        return "1\n"

    async def answer(self, text: str) -> StepResult:
        return self._end(1.0)

    def end_truncated(self) -> StepResult:
        return self._end(0.0)

    def _end(self, score: float) -> StepResult:
        return self.end_with_score(
            score,
            self._name,
            began=self._began,
            ended=time.time(),
            tool_failures=self._failures,
        )
