"""A rollout worker without Ray: groups of episodes, skipped tasks, and a sandbox that fails or is busy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rl_loop.config.load import load_config
from rl_loop.config.run import RlConfig
from rl_loop.data.trajectory import FinishReason, TrajectoryGroup
from rl_loop.environments import Task
from rl_loop.harmony.codec import ParsedMessage
from rl_loop.rollout import agent
from rl_loop.rollout.worker import RolloutWorker
from rl_loop.sandbox import ExecutionResult, SandboxError
from tests.support.rl_loop.scripted_engine import EngineOfMany

CONFIG = Path(__file__).parents[3] / "configs/rl/tiny_retool.yaml"
METADATA = {"expression": "17*23", "stateful": False}


class Sandbox:
    """A mock sandbox that waits ``queue_seconds`` and returns the result of ``answer``."""

    def __init__(
        self, answer: Callable[[int], ExecutionResult], queue_seconds: float = 0.0
    ) -> None:
        self._answer, self._queue_seconds = answer, queue_seconds
        self.calls = 0

    async def run(
        self, code: str, history: Sequence[str] = (), on_begin: Callable[[], None] | None = None
    ) -> ExecutionResult:
        self.calls += 1
        number = self.calls
        await asyncio.sleep(self._queue_seconds)
        if on_begin is not None:
            on_begin()
        return self._answer(number)


def run(
    sandbox: Sandbox, *overrides: str, content: str = "What is 17*23?", samples: int = 4
) -> TrajectoryGroup:
    config = load_config(CONFIG, RlConfig, [*overrides, "rollout.temperature=1"])
    worker = RolloutWorker(config, lambda: EngineOfMany([]), 1)  # type: ignore
    call = worker.codec.render_assistant(
        [ParsedMessage("analysis", "python", "code", "print(17*23)")], "<|call|>"
    )
    final = [ParsedMessage("final", None, None, r"\boxed{391}")]
    worker.engine._turns = [call, worker.codec.render_assistant(final, "<|return|>")]  # type: ignore[attr-defined]
    worker.sandbox = sandbox  # type: ignore[assignment]
    task = Task("t", [{"role": "user", "content": content}], "391", metadata=METADATA)
    return asyncio.run(worker.run_group(task, tuple(range(samples)), 1.0))


def good(number: int) -> ExecutionResult:
    return ExecutionResult("391\n", 0)


def unavailable(number: int) -> ExecutionResult:
    raise SandboxError("bwrap: No space left on device")


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "TOOL_RETRY_DELAYS", (0.0, 0.0, 0.0))


def test_group_has_one_episode_per_seed() -> None:
    group = run(Sandbox(good))
    assert [episode.reward for episode in group.trajectories] == [1.0] * 4
    assert (group.invalid, group.skipped) == ([], None)


def test_task_with_a_too_long_prompt_is_skipped() -> None:
    group = run(Sandbox(good), content="1 " * 5000)
    assert (group.trajectories, group.invalid) == ([], [])
    assert group.skipped is not None
    assert "the prompt of task t has" in group.skipped


def test_episodes_of_a_failing_sandbox_are_invalid() -> None:
    group = run(Sandbox(unavailable))
    assert group.trajectories == []
    assert {episode.invalid.component for episode in group.invalid if episode.invalid} == {
        "sandbox"
    }
    assert "No space left" in group.invalid[0].invalid.reason  # type: ignore[union-attr]


def test_recovering_sandbox_loses_no_episode() -> None:
    # Scheduling decides which episodes get the failures. One episode may get all of them.
    failures = len(agent.TOOL_RETRY_DELAYS)
    sandbox = Sandbox(lambda number: unavailable(number) if number <= failures else good(number))
    assert [episode.reward for episode in run(sandbox).trajectories] == [1.0] * 4


def test_program_killed_by_the_sandbox_is_a_tool_error() -> None:
    killed = ExecutionResult("", -9, "killed: its processes used more than 2 GB of memory")
    group = run(Sandbox(lambda number: killed))
    assert group.invalid == []
    assert [episode.tool_errors for episode in group.trajectories] == [1] * 4


def test_wait_in_the_sandbox_queue_is_not_episode_time() -> None:
    group = run(Sandbox(good, queue_seconds=1.0), "rollout.max_episode_seconds=0.6")
    assert {episode.finish_reason for episode in group.trajectories} == {FinishReason.STOP}


def test_other_errors_are_not_hidden() -> None:
    """A bug of the agent loop is not an infrastructure failure of an episode."""

    def broken(self: Any, *arguments: Any) -> None:
        raise AssertionError("a bug")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(AssertionError, match="a bug"):
        patch.setattr(agent.EpisodeRunner, "finish", broken)
        run(Sandbox(good))
