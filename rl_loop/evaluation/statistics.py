"""avg@k, pass@k and maj@k with confidence intervals, from the records that ``rl_loop.evaluation.evaluate`` writes."""

import itertools
import math
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rl_loop.tasks.evaluation_records import by_task, is_correct, pass_rates

Z = 1.96  # standard normal quantile of a two-sided 95 % interval
SUBSETS = 200  # subsets of k answers that maj@k averages over, if there are more


@dataclass(frozen=True)
class Estimate:
    """A mean over tasks with its 95 % confidence interval. Tasks are independent, episodes of one task are not."""

    value: float
    low: float
    high: float
    tasks: int

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of one number between 0 and 1 per task. Wilson's interval, with as many trials as a binomial would need
    for the standard error that the tasks show: it holds for all values between 0 and 1, and where tasks are equal."""
    n, mean, variance = _moments(values)
    trials = max(1.0, n * mean * (1 - mean) / variance) if variance > 0 else float(n)
    centre = (mean + Z * Z / (2 * trials)) / (1 + Z * Z / trials)
    half = Z / (1 + Z * Z / trials) * math.sqrt(mean * (1 - mean) / trials + Z * Z / (4 * trials * trials))
    return Estimate(mean, max(0.0, centre - half), min(1.0, centre + half), n)


def _moments(values: Sequence[float]) -> tuple[int, float, float]:
    n, mean = len(values), sum(values) / len(values)
    return n, mean, sum((value - mean) ** 2 for value in values) / max(1, n - 1)


def difference(values: Sequence[float]) -> Estimate:
    """The mean of differences, one per task, with a normal interval."""
    n, mean, variance = _moments(values)
    error = math.sqrt(variance / n)
    return Estimate(mean, mean - Z * error, mean + Z * error, n)


def pass_at(correct: Sequence[bool], k: int) -> float:
    """Unbiased estimate of the chance that one of k episodes is correct (arXiv 2107.03374, eq. 1)."""
    n, wrong = len(correct), len(correct) - sum(correct)
    return 1.0 - math.comb(wrong, k) / math.comb(n, k)


def majority_at(answers: Sequence[str | None], correct: Sequence[bool], k: int) -> float:
    """The chance that the most frequent answer of k episodes is correct; ties are shared, no answer is no vote."""
    indices = range(len(answers))
    if math.comb(len(answers), k) <= SUBSETS:
        subsets: Iterable[Sequence[int]] = itertools.combinations(indices, k)
    else:
        rng = random.Random(0)
        subsets = [rng.sample(indices, k) for _ in range(SUBSETS)]
    scores = []
    for subset in subsets:
        votes = Counter(answers[i] for i in subset if answers[i] is not None)
        right = {answers[i] for i in subset if correct[i]}
        top = [answer for answer, count in votes.items() if count == max(votes.values())]
        scores.append(sum(answer in right for answer in top) / len(top) if top else 0.0)
    return sum(scores) / len(scores)


def scores(records: Sequence[dict[str, Any]]) -> dict[str, Estimate]:
    """avg@n of correctness, pass@k and maj@k for k = 2, 4, ... n, where n is the fewest samples that a task has."""
    tasks = list(by_task(records).values())
    n = min(map(len, tasks))
    answers, correct = [[r["answer"] for r in task] for task in tasks], [list(map(is_correct, task)) for task in tasks]
    found = {f"avg@{n}": estimate(list(pass_rates(records).values()))}
    for k in (1 << i for i in range(1, n.bit_length())):
        found[f"pass@{k}"] = estimate([pass_at(right, k) for right in correct])
        if any(answer is not None for column in answers for answer in column):
            found[f"maj@{k}"] = estimate([majority_at(*task, k) for task in zip(answers, correct, strict=True)])
    return found


def compare(records: Sequence[dict[str, Any]], baseline: Sequence[dict[str, Any]]) -> Estimate | None:
    """Accuracy minus that of ``baseline``, task by task; None if they have no task in common."""
    new, old = pass_rates(records), pass_rates(baseline)
    common = [new[task] - old[task] for task in new if task in old]
    return difference(common) if common else None
