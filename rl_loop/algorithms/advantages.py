"""Advantages: how much better an episode, or a token, is than what was to be expected.

Everything is computed in fp64, and rewards that fp32 could hardly tell apart count as equal. In fp32 the mean of eight
rewards of -0.8 is not -0.8, and the difference over a standard deviation of nearly 0 is an advantage made of rounding.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

GroupEstimator = Literal["grpo", "dr_grpo", "leave_one_out"]
StandardDeviation = Literal["sample", "population"]
"""What a standard deviation of n values divides the sum of squares by: n - 1 (sample) or n (population)."""

EQUAL = 1e-6
"""Values are equal if they differ by at most this share of the largest: fp32 keeps seven digits."""
ROUNDING = 1e-12
"""A mean below this share of the largest value is 0: fp64 keeps sixteen digits, of which a sum may lose a few."""


def are_equal(values: torch.Tensor) -> bool:
    """Say whether all of ``values`` [n] are the same but for rounding. True for none and for one."""
    if len(values) < 2:
        return True
    spread = values.max() - values.min()
    return bool(spread <= EQUAL * values.abs().max())


def centre(values: torch.Tensor) -> torch.Tensor:
    """Subtract the mean: values [n] -> fp64 [n], exactly 0 if they are equal. Raises ValueError unless finite."""
    if not values.isfinite().all():
        raise ValueError(f"rewards must be finite, got {values.tolist()}")

    values = values.double()
    if are_equal(values):
        return torch.zeros_like(values)
    return values - values.mean()


def spread_of(values: torch.Tensor, standard_deviation: StandardDeviation) -> torch.Tensor:
    """Compute the standard deviation of values [n], n > 1 -> scalar."""
    return values.std(correction=1 if standard_deviation == "sample" else 0)


def group_advantages(
    rewards: torch.Tensor,
    estimator: GroupEstimator = "grpo",
    standard_deviation: StandardDeviation = "sample",
    epsilon: float = 1e-6,
) -> torch.Tensor:
    """Compare the samples of one task: rewards [samples] -> advantages fp64 [samples].

    - ``grpo``: (R - mean) / (std + epsilon) (arXiv 2402.03300, section 4.1.2, which does not say which std).
    - ``dr_grpo``: R - mean; no division, which favours tasks almost always or never solved (arXiv 2503.20783).
    - ``leave_one_out``: R minus the mean of the *other* samples, an unbiased baseline (RLOO, arXiv 2402.14740);
      equal to samples / (samples - 1) times ``dr_grpo``.

    A group of one sample, or one in which all rewards are equal, has advantages of exactly 0. Raises ValueError for
    anything but a non-empty vector of finite numbers."""
    if rewards.ndim != 1 or len(rewards) == 0:
        raise ValueError(f"rewards must be a non-empty vector, got shape {tuple(rewards.shape)}")

    centred = centre(rewards)
    if estimator == "dr_grpo" or not centred.any():
        return centred
    if estimator == "leave_one_out":
        return centred * (len(rewards) / (len(rewards) - 1))
    if estimator == "grpo":
        return centred / (spread_of(rewards.double(), standard_deviation) + epsilon)
    raise ValueError(f"unknown group estimator {estimator!r}")


def gdpo_advantages(
    parts: torch.Tensor, weights: Sequence[float], standard_deviation: StandardDeviation = "sample"
) -> torch.Tensor:
    """Normalise every reward of one task by itself: parts [samples, rewards] -> fp64 [samples].

    sum_k w_k (r_k - mean_k) / (std_k + 1e-6) (GDPO, arXiv 2601.05242), so that a rare reward is not drowned by a common
    one. The batch is whitened afterwards (``whiten``)."""
    total = torch.zeros(len(parts), dtype=torch.float64)
    for column, weight in zip(parts.unbind(dim=1), weights, strict=True):
        total += weight * group_advantages(column, "grpo", standard_deviation)
    return total


def reinforce_advantages(rewards: torch.Tensor) -> torch.Tensor:
    """Subtract the mean of the whole batch: rewards [samples] -> fp64 [samples]: REINFORCE with a constant baseline
    (Williams, 1992)."""
    return centre(rewards)


@dataclass(frozen=True)
class BatchRewards:
    """What the episodes of a batch earned, group after group."""

    totals: torch.Tensor  # fp64 [samples]
    parts: torch.Tensor  # fp64 [samples, rewards]: what gdpo compares; no columns for the others
    part_weights: list[float]  # of the columns of ``parts``
    group_sizes: list[int]  # samples of each task; they add up to the number of samples


def sample_advantages(
    estimator: str, rewards: BatchRewards, standard_deviation: StandardDeviation = "sample"
) -> torch.Tensor:
    """Compute one advantage per sample of a batch, fp64 [samples], by ``AlgorithmConfig.advantage``; gae has one per
    token instead (``generalized_advantages``). Raises ValueError for a name that is not known."""
    if estimator == "reinforce":
        return reinforce_advantages(rewards.totals)

    if estimator == "gdpo":
        groups = rewards.parts.split(rewards.group_sizes)
        return torch.cat([gdpo_advantages(group, rewards.part_weights, standard_deviation) for group in groups])

    groups = rewards.totals.split(rewards.group_sizes)
    return torch.cat([group_advantages(group, estimator, standard_deviation) for group in groups])  # type: ignore[arg-type]


def generalized_advantages(
    rewards: torch.Tensor, values: torch.Tensor, gamma: float = 1.0, lam: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute advantages and returns, [samples, time] each, from rewards and values [samples, time].

    A_t = sum_k (gamma lambda)^k delta_{t+k}, delta_t = r_t + gamma V_{t+1} - V_t, and return_t = A_t + V_t (GAE,
    arXiv 1506.02438, eq. 16). Time counts sampled tokens only: V_{t+1} is the value before the next token that the
    policy chose, whatever a tool said in between. Shorter samples are filled up with zeros, which change nothing."""
    following = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], dim=1)
    delta = rewards + gamma * following - values

    advantages = torch.zeros_like(delta)
    running = torch.zeros_like(delta[:, 0])
    for t in range(delta.shape[1] - 1, -1, -1):
        running = delta[:, t] + gamma * lam * running
        advantages[:, t] = running
    return advantages, advantages + values


def whiten(
    values: torch.Tensor, standard_deviation: StandardDeviation = "sample", epsilon: float = 1e-8
) -> torch.Tensor:
    """Bring values [n] to mean 0 and variance 1: (v - mean) / sqrt(variance + epsilon), fp64 [n]; 0 if all are equal.

    The epsilon under the root, as in verl and slime, keeps differences below 1e-4 small instead of blowing them up."""
    values = values.double()
    if are_equal(values):
        return torch.zeros_like(values)

    mean = values.mean()
    if mean.abs() <= ROUNDING * values.abs().max():
        # Group-relative advantages have mean 0: what is left of it would move groups of equal rewards away from 0.
        mean = torch.zeros_like(mean)
    return (values - mean) / (spread_of(values, standard_deviation).square() + epsilon).sqrt()


def overlong_penalty(tokens: int, limit: int, buffer: int) -> float:
    """Penalise a long response: 0 up to ``limit - buffer`` tokens, then linearly down to -1 at ``limit`` (DAPO, arXiv
    2503.14476, eq. 13). ``tokens``: of the response, which is what the policy sampled, prompt and tool outputs left
    out; ``limit``: the most that a response can have; ``buffer``: the last tokens before it."""
    return -min(1.0, max(0.0, (tokens - (limit - buffer)) / buffer))
