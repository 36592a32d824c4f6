"""Advantages: how much better an episode, or a token, is than what was to be expected.

Everything is computed in fp64, and rewards that fp32 could hardly tell apart count as equal. In
fp32 the mean of eight rewards of -0.8 is not -0.8, and that difference over a standard deviation
of nearly 0 would be an advantage made of rounding."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from rl_loop.algorithms.config import AlgorithmConfig
from rl_loop.algorithms.registry import ADVANTAGES

GroupEstimator = Literal["grpo", "dr_grpo", "leave_one_out"]
StandardDeviation = Literal["sample", "population"]
"""What a standard deviation of n values divides the sum of squares by: n - 1 (sample) or n
(population)."""

EQUAL = 1e-6
"""Values are equal if they differ by at most this share of the largest: fp32 keeps seven
digits."""
ROUNDING = 1e-12
"""A mean below this share of the largest value is 0: fp64 keeps sixteen digits and a sum loses a
few."""
TIME_BLOCK = 256
"""Tokens of every sample that generalized advantages are computed of at a time."""


# ---- advantages of the samples of a batch


@dataclass(frozen=True)
class BatchRewards:
    """What the episodes of a batch earned, group after group: what an estimator looks at."""

    totals: torch.Tensor
    """fp64 [samples]: rewards after all penalties."""
    parts: torch.Tensor
    """fp64 [samples, parts]: the parts in ``algorithm.advantage.reward_weights``, often none, and the
    penalty on length if there is one."""
    part_weights: list[float]
    """Weight of each column of ``parts``."""
    group_sizes: list[int]
    """Samples of each task; they add up to the number of samples."""

    def groups(self) -> tuple[torch.Tensor, ...]:
        """Split ``totals`` into the rewards of each task: fp64 [samples of the task] each."""
        return self.totals.split(self.group_sizes)


def sample_advantages(config: AlgorithmConfig, rewards: BatchRewards) -> torch.Tensor:
    """Compute one advantage per sample of a batch, fp64 [samples], by ``config.advantage``.

    gae has one advantage per token instead (``generalized_advantages``).

    Raises:
        ValueError: a custom estimator does not return one finite number per sample."""
    estimate = ADVANTAGES.resolve(config.advantage.type)
    advantages = estimate(rewards, **config.advantage_arguments)

    # Anything of another shape would be broadcast or dealt out to the wrong samples further on.
    if not torch.is_tensor(advantages) or advantages.shape != rewards.totals.shape:
        shape = (
            tuple(advantages.shape) if torch.is_tensor(advantages) else type(advantages).__name__
        )
        raise ValueError(
            f"algorithm.advantage {config.advantage.type} returned {shape}, expected [{len(rewards.totals)}]"
        )
    if not advantages.isfinite().all():
        raise ValueError(
            f"algorithm.advantage {config.advantage.type} returned {advantages.tolist()}"
        )
    return advantages.detach().double()


def grpo(rewards: BatchRewards, *, standard_deviation: StandardDeviation) -> torch.Tensor:
    """Divide the distance to the group's mean by its standard deviation: fp64 [samples]."""
    groups = [group_advantages(group, "grpo", standard_deviation) for group in rewards.groups()]
    return torch.cat(groups)


def dr_grpo(rewards: BatchRewards) -> torch.Tensor:
    """Subtract the mean of the group: fp64 [samples]."""
    return torch.cat([group_advantages(group, "dr_grpo") for group in rewards.groups()])


def leave_one_out(rewards: BatchRewards) -> torch.Tensor:
    """Subtract the mean of the other samples of the group: fp64 [samples]."""
    return torch.cat([group_advantages(group, "leave_one_out") for group in rewards.groups()])


def gdpo(rewards: BatchRewards, *, standard_deviation: StandardDeviation) -> torch.Tensor:
    """Normalise every reward part of a group by itself and add up: fp64 [samples]."""
    # Parts, not totals: a total hides a rare reward behind a common one.
    groups = rewards.parts.split(rewards.group_sizes)
    return torch.cat(
        [gdpo_advantages(group, rewards.part_weights, standard_deviation) for group in groups]
    )


def reinforce(rewards: BatchRewards) -> torch.Tensor:
    """Subtract the mean of the whole batch: fp64 [samples]."""
    return reinforce_advantages(rewards.totals)


# ---- one group


def group_advantages(
    rewards: torch.Tensor,
    estimator: GroupEstimator = "grpo",
    standard_deviation: StandardDeviation = "sample",
    epsilon: float = 1e-6,
) -> torch.Tensor:
    """Compare the samples of one task: rewards [samples] -> advantages fp64 [samples].

    - ``grpo``: (R - mean) / (std + epsilon) (arXiv 2402.03300, section 4.1.2, which does not say
      which std).
    - ``dr_grpo``: R - mean; no division, which favours tasks almost always or never solved
      (arXiv 2503.20783).
    - ``leave_one_out``: R minus the mean of the *other* samples, an unbiased baseline (RLOO,
      arXiv 2402.14740); equal to samples / (samples - 1) times ``dr_grpo``.

    A group of one sample, or one in which all rewards are equal, has advantages of exactly 0.
    Raises ValueError for anything but a non-empty vector of finite numbers."""
    if rewards.ndim != 1 or len(rewards) == 0:
        raise ValueError(f"rewards must be a non-empty vector, got shape {tuple(rewards.shape)}")

    # Equal rewards leave here: they have no standard deviation to divide by.
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

    sum_k w_k (r_k - mean_k) / (std_k + 1e-6) (GDPO, arXiv 2601.05242), so that a rare reward is
    not drowned by a common one. The batch is whitened afterwards (``whiten``)."""
    total = torch.zeros(len(parts), dtype=torch.float64)
    for column, weight in zip(parts.unbind(dim=1), weights, strict=True):
        total += weight * group_advantages(column, "grpo", standard_deviation)
    return total


def reinforce_advantages(rewards: torch.Tensor) -> torch.Tensor:
    """Subtract the mean of the whole batch: rewards [samples] -> fp64 [samples].

    REINFORCE with a constant baseline (Williams, 1992)."""
    return centre(rewards)


# ---- tokens


def generalized_advantages(
    rewards: torch.Tensor, values: torch.Tensor, gamma: float = 1.0, lam: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute advantages and returns, [samples, time] each, from rewards and values [samples,
    time].

    A_t = sum_k (gamma lambda)^k delta_{t+k}, delta_t = r_t + gamma V_{t+1} - V_t, and return_t =
    A_t + V_t (GAE, arXiv 1506.02438, eq. 16). Time counts sampled tokens only: V_{t+1} is the
    value before the next token that the policy chose, whatever a tool said in between. Shorter
    samples are filled up with zeros, which change nothing."""
    estimates = torch.empty_like(values)
    returns = values.clone()
    generalized_advantages_in_place(
        values=list(returns.numpy()),
        estimates=list(estimates.numpy()),
        final_rewards=np.zeros(len(values), dtype=values.numpy().dtype),
        token_rewards=list(rewards.numpy()),
        gamma=gamma,
        lam=lam,
    )
    return estimates, returns


def generalized_advantages_in_place(
    *,
    values: Sequence[np.ndarray],
    estimates: Sequence[np.ndarray],
    final_rewards: np.ndarray,
    token_rewards: Sequence[np.ndarray] | None,
    gamma: float,
    lam: float,
) -> None:
    """Compute advantages and returns of samples of different lengths, in memory that is there.

    Args:
        values: [sampled tokens] of each sample. The returns take their place.
        estimates: of the same lengths; get the advantages.
        final_rewards: [samples], what the last token of each earns. The computation has their
            dtype.
        token_rewards: [sampled tokens] of each sample, what every token earns besides, if there
            is anything.
        gamma: discount per token.
        lam: lambda of the estimator.
    """
    # The longest first, so that those which reach a block of time are the first rows of it.
    unsorted_lengths = np.array([len(row) for row in values], dtype=np.int64)
    order = np.argsort(-unsorted_lengths, kind="stable")
    lengths = unsorted_lengths[order]
    values = [values[i] for i in order]
    estimates = [estimates[i] for i in order]
    if token_rewards is not None:
        token_rewards = [token_rewards[i] for i in order]
    final_rewards = final_rewards[order]
    running = np.zeros(len(lengths), final_rewards.dtype)
    next_values = np.zeros(len(lengths), final_rewards.dtype)

    # Backwards in blocks of time: the whole in fp64 would weigh more than all columns together.
    longest = int(lengths.max(initial=0))
    for begin in reversed(range(0, longest, TIME_BLOCK)):
        rows = int(np.count_nonzero(lengths > begin))
        counts = np.minimum(lengths[:rows] - begin, TIME_BLOCK)
        block_values = _cut_block(values[:rows], begin, counts, running.dtype)
        delta = np.concatenate([block_values[:, 1:], next_values[:rows, None]], axis=1)
        delta *= gamma

        ending = np.flatnonzero(lengths[:rows] - begin == counts)
        last_tokens = (ending, counts[ending] - 1)
        if token_rewards is None:
            delta[last_tokens] += final_rewards[ending]
        else:
            rewards = _cut_block(token_rewards[:rows], begin, counts, running.dtype)
            rewards[last_tokens] += final_rewards[ending]
            delta += rewards
        delta -= block_values

        _sum_backwards(delta, running[:rows], gamma * lam)
        next_values[:rows] = block_values[:, 0]

        _paste_block(delta, estimates[:rows], begin, counts)
        delta += block_values
        _paste_block(delta, values[:rows], begin, counts)


def _sum_backwards(delta: np.ndarray, running: np.ndarray, decay: float) -> None:
    """Replace delta_t by A_t = delta_t + decay * A_{t+1}: [rows, time], in place.

    ``running`` [rows] is A of the time behind the block, and that of its first time afterwards."""
    # All rows' numbers of one time lie together, so that every step runs through memory in order.
    by_time = np.ascontiguousarray(delta.T)
    later = running
    discounted = np.empty_like(running)
    for now in by_time[::-1]:
        np.multiply(decay, later, out=discounted)
        now += discounted
        later = now

    running[:] = later
    delta[:] = by_time.T


def _cut_block(
    rows: Sequence[np.ndarray], begin: int, counts: np.ndarray, dtype: np.dtype
) -> np.ndarray:
    """Copy ``counts`` entries of every row from ``begin`` on, filled up with zeros: [rows,
    TIME_BLOCK or fewer]."""
    block = np.zeros((len(rows), int(counts.max())), dtype)
    for target, row, count in zip(block, rows, counts.tolist(), strict=True):
        target[:count] = row[begin : begin + count]
    return block


def _paste_block(
    block: np.ndarray, rows: Sequence[np.ndarray], begin: int, counts: np.ndarray
) -> None:
    """Copy a block to where ``_cut_block`` would have taken it from."""
    for source, row, count in zip(block, rows, counts.tolist(), strict=True):
        row[begin : begin + count] = source[:count]


def whiten(
    values: torch.Tensor, standard_deviation: StandardDeviation = "sample", epsilon: float = 1e-8
) -> torch.Tensor:
    """Bring values [n] to mean 0 and variance 1: fp64 [n], 0 if all are equal.

    (v - mean) / sqrt(variance + epsilon): the epsilon under the root, as in verl and slime, keeps
    differences below 1e-4 small instead of blowing them up."""
    values = values.double()
    if are_equal(values):
        return torch.zeros_like(values)

    mean = values.mean()
    # Group-relative advantages have mean 0: what rounding leaves of it would move groups of equal
    # rewards away from 0.
    if mean.abs() <= ROUNDING * values.abs().max():
        mean = torch.zeros_like(mean)
    return (values - mean) / (spread_of(values, standard_deviation).square() + epsilon).sqrt()


def overlong_penalty(tokens: int, limit: int, buffer: int) -> float:
    """Penalise a long response: 0 up to ``limit - buffer`` tokens, then linearly to -1 at
    ``limit``.

    ``tokens``: of the response, which is what the policy sampled, prompt and tool outputs left
    out; ``limit``: the most that a response can have; ``buffer``: the last tokens before it (DAPO,
    arXiv 2503.14476, eq. 13)."""
    overlong = (tokens - (limit - buffer)) / buffer
    return -min(1.0, max(0.0, overlong))


# ---- numbers that are equal but for rounding


def are_equal(values: torch.Tensor) -> bool:
    """Say whether all of ``values`` [n] are the same but for rounding. True for none and for
    one."""
    if len(values) < 2:
        return True
    spread = values.max() - values.min()
    return bool(spread <= EQUAL * values.abs().max())


def centre(values: torch.Tensor) -> torch.Tensor:
    """Subtract the mean: values [n] -> fp64 [n], exactly 0 if they are equal.

    Raises ValueError unless all are finite."""
    if not values.isfinite().all():
        raise ValueError(f"rewards must be finite, got {values.tolist()}")

    # Even in fp64 the mean of equal values need not be that value.
    values = values.double()
    if are_equal(values):
        return torch.zeros_like(values)
    return values - values.mean()


def spread_of(values: torch.Tensor, standard_deviation: StandardDeviation) -> torch.Tensor:
    """Compute the standard deviation of values [n], n > 1 -> scalar."""
    return values.std(correction=1 if standard_deviation == "sample" else 0)
