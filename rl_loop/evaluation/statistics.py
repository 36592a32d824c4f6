"""avg@k, pass@k and maj@k with confidence intervals.

They are computed from the records of ``rl_loop.evaluation.evaluate``.
"""

import itertools
import math
import operator
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rl_loop.tasks.evaluation_records import by_task, is_correct, pass_rates

Z_95 = 1.96
"""Standard normal quantile of a two-sided 95% interval."""

MAX_SUBSETS = 200
"""Maximum number of subsets with k answers that maj@k averages over."""


@dataclass(frozen=True)
class MeanEstimate:
    """Mean over tasks with its 95% confidence interval.

    Tasks are independent. Episodes of the same task are not.
    """

    value: float
    low: float
    high: float
    tasks: int

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True)
class SampleMoments:
    """Count, mean and unbiased variance of a sample. The variance of a single value is 0.

    With weights, ``variance / count`` is the variance of the weighted mean to first order. The
    weighted mean is a ratio of two sums over the tasks.
    """

    count: int
    mean: float
    variance: float

    @classmethod
    def of(cls, values: Sequence[float], weights: Sequence[float] | None = None) -> "SampleMoments":
        count = len(values)
        if weights is None:
            weights = [1.0] * count
        total = sum(weights)
        mean = sum(map(operator.mul, values, weights)) / total
        # Weights are scaled to a mean of 1.
        deviations = [
            weight * count / total * (value - mean)
            for value, weight in zip(values, weights, strict=True)
        ]
        squares = sum(deviation**2 for deviation in deviations)
        return cls(count, mean, squares / max(1, count - 1))


def estimate(values: Sequence[float], weights: Sequence[float] | None = None) -> MeanEstimate:
    """Estimate the mean of one number between 0 and 1 per task, with Wilson's interval.

    The interval is valid for all values between 0 and 1, even if all tasks are equal.

    Args:
        values: one number per task.
        weights: weight of each task, above 0, such as its number of turns. None for equal weights.

    Example:
        >>> # Accuracy on 4 tasks.
        >>> accuracy = estimate([1.0, 0.5, 0.0, 1.0])
        >>> print(f"{accuracy.value:.2f}, from {accuracy.low:.2f} to {accuracy.high:.2f}")
        0.62, from 0.22 to 0.91
    """
    # Wilson's formula is for binomials. The number of trials is chosen to give the standard error
    # of the tasks.
    sample = SampleMoments.of(values, weights)
    mean = sample.mean
    trials = float(sample.count)
    # Values that are all equal have no variance. Then each task is one trial.
    if sample.variance > 0:
        # A binomial with this number of trials has the observed variance of the mean.
        trials = max(1.0, sample.count * mean * (1 - mean) / sample.variance)

    # Wilson's score interval.
    shrinkage = 1 + Z_95 * Z_95 / trials
    center = (mean + Z_95 * Z_95 / (2 * trials)) / shrinkage
    spread = math.sqrt(mean * (1 - mean) / trials + Z_95 * Z_95 / (4 * trials * trials))
    half = Z_95 / shrinkage * spread
    return MeanEstimate(mean, max(0.0, center - half), min(1.0, center + half), sample.count)


def normal_estimate(
    values: Sequence[float], weights: Sequence[float] | None = None
) -> MeanEstimate:
    """Estimate the mean of any numbers, one per task, with a normal interval.

    ``weights`` are those of ``estimate``.
    """
    sample = SampleMoments.of(values, weights)
    half = Z_95 * math.sqrt(sample.variance / sample.count)
    return MeanEstimate(sample.mean, sample.mean - half, sample.mean + half, sample.count)


def pass_at(correct: Sequence[bool], k: int) -> float:
    """Return an unbiased estimate of the probability that at least one of k episodes is correct.

    See arXiv 2107.03374, eq. 1.

    Example:
        >>> # One of 4 episodes is correct.
        >>> pass_at([True, False, False, False], 2)
        0.5
    """
    episodes = len(correct)
    wrong = episodes - sum(correct)
    # comb is 0 if fewer than k episodes are wrong, so the probability is 1.
    return 1.0 - math.comb(wrong, k) / math.comb(episodes, k)


def majority_at(answers: Sequence[str | None], correct: Sequence[bool], k: int) -> float:
    """Estimate the probability that the most frequent answer of k episodes is correct.

    A tie counts by its share of correct answers. Episodes without an answer have no vote.

    Example:
        >>> majority_at(["7", "7", "9"], [True, True, False], 3)
        1.0
    """
    indices = range(len(answers))
    subsets: Iterable[Sequence[int]]
    if math.comb(len(answers), k) <= MAX_SUBSETS:
        subsets = itertools.combinations(indices, k)
    else:
        # A fixed seed gives the same table for the same answers.
        rng = random.Random(0)
        subsets = [rng.sample(indices, k) for _ in range(MAX_SUBSETS)]

    shares = [_share_of_correct_winners(subset, answers, correct) for subset in subsets]
    return sum(shares) / len(shares)


def _share_of_correct_winners(
    subset: Sequence[int], answers: Sequence[str | None], correct: Sequence[bool]
) -> float:
    """Return the share of a subset's most frequent answers that are correct, 0 without answers."""
    votes = Counter(answers[i] for i in subset if answers[i] is not None)
    if not votes:
        return 0.0
    # Equal answers to a task are equally correct.
    correct_answers = {answers[i] for i in subset if correct[i]}
    most = max(votes.values())
    winners = [answer for answer, count in votes.items() if count == most]
    return sum(answer in correct_answers for answer in winners) / len(winners)


def accuracy_estimates(records: Sequence[dict[str, Any]]) -> dict[str, MeanEstimate]:
    """Compute avg@n of correctness, and pass@k and maj@k for k = 2, 4, ... n.

    n is the smallest number of samples for a task. maj@k is left out if no episode has an answer.
    """
    tasks = list(by_task(records).values())
    # All tasks need k samples, so the task with the fewest samples limits k.
    samples = min(map(len, tasks))
    answers = [[record["answer"] for record in task] for task in tasks]
    correct = [[is_correct(record) for record in task] for task in tasks]
    has_answers = any(record["answer"] is not None for record in records)

    table = {f"avg@{samples}": estimate(list(pass_rates(records).values()))}
    k = 2
    while k <= samples:
        table[f"pass@{k}"] = estimate([pass_at(column, k) for column in correct])
        if has_answers:
            majorities = [majority_at(*task, k) for task in zip(answers, correct, strict=True)]
            table[f"maj@{k}"] = estimate(majorities)
        k *= 2
    return table


def compare(
    records: Sequence[dict[str, Any]], baseline: Sequence[dict[str, Any]]
) -> MeanEstimate | None:
    """Estimate accuracy minus the accuracy of ``baseline``, per task. None without common tasks."""
    new = pass_rates(records)
    old = pass_rates(baseline)
    # A difference per task does not depend on the task's difficulty.
    gains = [new[task] - old[task] for task in new if task in old]
    if not gains:
        return None
    return normal_estimate(gains)
