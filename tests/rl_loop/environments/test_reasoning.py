"""reasoning-gym: faults of its scorers neither punish the policy nor delay other episodes."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import replace
from typing import Any

import pytest

from rl_loop.environments import RewardConfig, StepResult, Task, make_offline_environment, reasoning
from rl_loop.environments.reasoning import ReasoningGymEnvironment, ReasoningGymOptions
from rl_loop.environments.scripted_messages import final
from rl_loop.infrastructure import InfrastructureError
from rl_loop.rewards import CheckerError
from rl_loop.rewards.checker_pool import CheckerPool

TASK = ReasoningGymEnvironment.generate("train", 0, 3, ReasoningGymOptions())


async def judge(text: str, task: Task = TASK) -> StepResult:
    return await make_offline_environment(task).step([final(text)])


class Scorer:
    """Data set with given scores, or exceptions, for the right answer and for others."""

    def __init__(self, right: Any, other: Any) -> None:
        self.right, self.other = right, other

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"answer": TASK.ground_truth}

    def score_answer(self, answer: str, entry: dict[str, Any]) -> Any:
        told = self.right if answer == entry["answer"] else self.other
        return told() if callable(told) else told


def broken() -> float:
    raise ModuleNotFoundError("No module named 'sympy'")


def scored_slowly(question: tuple[Any, str | None]) -> float:
    """Use 0.5 s of processor time for the right answer, and unlimited time for others."""
    _, answer = question
    end = time.process_time() + (0.5 if answer in (None, TASK.ground_truth) else 1e9)
    while time.process_time() < end:
        pass
    return 1.0


def never_scored(question: tuple[Any, str | None]) -> float:
    while True:
        pass


def processes(monkeypatch: pytest.MonkeyPatch, function: str) -> CheckerPool:
    pool = CheckerPool("the scorer", f"{__name__}:{function}", seconds=1.0, control=None)
    monkeypatch.setattr(reasoning, "_processes", pool)
    return pool


def test_right_and_wrong_answers_are_scored() -> None:
    assert asyncio.run(judge(rf"\boxed{{{TASK.ground_truth}}}")).reward == RewardConfig().correct
    assert asyncio.run(judge(r"\boxed{no number}")).reward == RewardConfig().wrong
    assert asyncio.run(judge("no box")).reward == RewardConfig().wrong


def test_answer_that_makes_a_working_scorer_raise_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise the policy could escape from difficult tasks with answers that break the scorer."""
    monkeypatch.setattr(reasoning, "_dataset", lambda *place: Scorer(1.0, broken))
    assert reasoning.score((TASK.metadata["place"], "garbage")) == 0.0


@pytest.mark.parametrize(
    "scorer",
    [Scorer(broken, broken), Scorer(math.nan, math.nan), Scorer(None, None)],
    ids=["broken", "nan", "none"],
)
@pytest.mark.parametrize("answer", ["garbage", TASK.ground_truth])
def test_broken_scorer_is_a_checker_failure(
    monkeypatch: pytest.MonkeyPatch, scorer: Scorer, answer: str
) -> None:
    monkeypatch.setattr(reasoning, "_dataset", lambda *place: scorer)
    with pytest.raises(CheckerError, match="the scorer of chain_sum fails"):
        reasoning.score((TASK.metadata["place"], answer))


def test_unknown_generator_is_an_infrastructure_failure() -> None:
    """The exception of a worker arrives in the episode."""
    place = ["no_generator", 1, "{}", 0]
    task = replace(TASK, metadata={**TASK.metadata, "place": place})
    with pytest.raises(InfrastructureError, match="no_generator") as failure:
        asyncio.run(judge(r"\boxed{1}", task))
    assert failure.value.component == "checker"


def test_slow_scorer_does_not_block_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = processes(monkeypatch, "scored_slowly")

    async def main() -> tuple[StepResult, int]:
        judged = asyncio.create_task(judge(rf"\boxed{{{TASK.ground_truth}}}"))
        turns = 0
        while not judged.done():
            await asyncio.sleep(0.01)
            turns += 1
        return judged.result(), turns

    result, turns = asyncio.run(main())
    pool.close()
    assert result.reward == RewardConfig().correct
    assert turns >= 5


def test_answer_that_hangs_a_scorer_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scorer needs time for the right answer, too, but less than the limit."""
    pool = processes(monkeypatch, "scored_slowly")
    assert asyncio.run(judge(r"\boxed{hangs}")).reward == RewardConfig().wrong
    pool.close()


def test_scorer_that_hangs_on_the_right_answer_is_a_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = processes(monkeypatch, "never_scored")
    with pytest.raises(
        InfrastructureError, match="the scorer answers no question within its limits"
    ):
        asyncio.run(judge(r"\boxed{1}"))
    pool.close()
