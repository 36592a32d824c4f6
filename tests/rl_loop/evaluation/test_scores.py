"""avg@k, pass@k, maj@k and their intervals, against brute force and simulation."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from rl_loop.evaluation.statistics import (
    accuracy_estimates,
    compare,
    estimate,
    majority_at,
    normal_estimate,
    pass_at,
)


def record(task: str, sample: int, correct: bool, answer: str | None = None) -> dict[str, Any]:
    parts = {"correct": float(correct)}
    return {
        "task_id": task,
        "sample": sample,
        "reward_parts": parts,
        "answer": answer,
        "category": "c",
    }


@pytest.mark.parametrize("right", range(7))
@pytest.mark.parametrize("k", [1, 2, 4, 6])
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_one(right: int, k: int) -> None:
    correct = [i < right for i in range(6)]
    subsets = list(itertools.combinations(correct, k))
    assert pass_at(correct, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_majority_vote_splits_ties_and_ignores_missing_answers() -> None:
    answers, correct = ["4", "4", "5", None], [True, True, False, False]
    assert majority_at(answers, correct, 1) == pytest.approx(0.5)
    assert majority_at(answers, correct, 4) == 1.0
    assert majority_at(["4", "5"], [True, False], 2) == 0.5
    assert majority_at([None, None], [False, False], 2) == 0.0
    many = ["4"] * 20 + ["5"] * 12
    assert majority_at(many, [a == "4" for a in many], 16) > 0.9


def test_interval_covers_the_true_score_in_95_percent_of_runs() -> None:
    rng, held = random.Random(0), 0
    for _ in range(400):  # tasks differ in difficulty; 4 episodes each
        tasks = [
            sum(rng.random() < p for _ in range(4)) / 4
            for p in (rng.betavariate(1, 2) for _ in range(60))
        ]
        found = estimate(tasks)
        held += found.low <= 1 / 3 <= found.high
    assert 0.92 <= held / 400 <= 0.98


def test_interval_is_not_empty_when_all_tasks_score_alike() -> None:
    assert estimate([1.0] * 20).low < 0.9
    assert estimate([1.0] * 20).high == 1.0
    assert estimate([0.0]).high > 0.5


def test_scores_use_the_fewest_samples_that_a_task_has() -> None:
    records = [record("a", i, i == 0, str(i)) for i in range(4)] + [
        record("b", i, True, "x") for i in range(2)
    ]
    found = accuracy_estimates(records)
    assert set(found) == {"avg@2", "pass@2", "maj@2"}
    assert found["avg@2"].value == pytest.approx((0.25 + 1) / 2)
    assert found["pass@2"].value == pytest.approx((0.5 + 1) / 2)
    assert found["avg@2"].tasks == 2


def test_comparison_pairs_evaluations_by_task() -> None:
    better = [record(str(t), 0, True) for t in range(10)]
    worse = [record(str(t), 0, t < 5) for t in range(20)]
    found = compare(better, worse)
    assert found is not None
    assert (found.value, found.tasks) == (0.5, 10)
    assert found.low > 0
    assert compare(better, [record("other", 0, True)]) is None
    assert normal_estimate([0.0, 0.0]).low == 0.0
