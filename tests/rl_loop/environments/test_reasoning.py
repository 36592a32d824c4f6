"""reasoning-gym: what its scorers do wrong is not the policy's fault, and does not hold up other episodes."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from typing import Any

import pytest

from rl_loop.environments import RewardConfig, StepResult, Task, make_offline_environment, reasoning
from rl_loop.environments.base import final
from rl_loop.environments.reasoning import ReasoningGymEnvironment, ReasoningGymOptions
from rl_loop.infrastructure import InfrastructureFailure

TASK = ReasoningGymEnvironment.generate("train", 0, 3, ReasoningGymOptions())


async def judge(text: str, task: Task = TASK) -> StepResult:
    return await make_offline_environment(task).step([final(text)])


class Scorer:
    """A data set whose scorer is told what to do with the right answer and with others."""

    def __init__(self, right: Any, other: Any) -> None:
        self.right, self.other = right, other
        self.threads: list[threading.Thread] = []

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"answer": TASK.ground_truth}

    def score_answer(self, answer: str, entry: dict[str, Any]) -> Any:
        self.threads.append(threading.current_thread())
        told = self.right if answer == entry["answer"] else self.other
        return told() if callable(told) else told


def broken() -> float:
    raise ModuleNotFoundError("No module named 'sympy'")


@pytest.fixture
def scorer(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Scorer:
    scorer = Scorer(*request.param)
    monkeypatch.setattr(reasoning, "_dataset", lambda *place: scorer)
    return scorer


def test_right_and_wrong_answers_are_scored() -> None:
    assert asyncio.run(judge(rf"\boxed{{{TASK.ground_truth}}}")).reward == RewardConfig().correct
    assert asyncio.run(judge(r"\boxed{no number}")).reward == RewardConfig().wrong
    assert asyncio.run(judge("no box")).reward == RewardConfig().wrong


@pytest.mark.parametrize("scorer", [(1.0, broken)], indirect=True)
def test_garbage_over_which_a_working_scorer_raises_is_wrong(scorer: Scorer) -> None:
    """Otherwise garbage would be a way out of tasks that go badly."""
    assert asyncio.run(judge(r"\boxed{garbage}")).reward == RewardConfig().wrong


@pytest.mark.parametrize(
    "scorer", [(broken, broken), (math.nan, math.nan), (None, None)], indirect=True
)
@pytest.mark.parametrize("answer", ["garbage", TASK.ground_truth])
def test_a_scorer_that_does_not_work_is_an_infrastructure_failure(
    scorer: Scorer, answer: str
) -> None:
    with pytest.raises(InfrastructureFailure, match="the scorer of chain_sum fails") as failure:
        asyncio.run(judge(rf"\boxed{{{answer}}}"))
    assert failure.value.component == "checker"


@pytest.mark.parametrize("scorer", [(lambda: time.sleep(0.5) or 1.0, 0.0)], indirect=True)
def test_a_slow_scorer_does_not_hold_up_the_event_loop(scorer: Scorer) -> None:
    async def main() -> tuple[StepResult, int]:
        judged = asyncio.create_task(judge(rf"\boxed{{{TASK.ground_truth}}}"))
        turns = 0
        while not judged.done():
            await asyncio.sleep(0.01)
            turns += 1
        return judged.result(), turns

    result, turns = asyncio.run(main())
    assert result.reward == RewardConfig().correct
    assert turns >= 5
    assert scorer.threads and threading.main_thread() not in scorer.threads
