"""Advantages: the difference between a reward, of an episode or a token, and a baseline.

All computations are in fp64, and rewards that differ by less than fp32 rounding count as equal. In
fp32 the mean of eight rewards of -0.8 is not -0.8. Divided by a standard deviation of nearly 0,
that difference would be an advantage without meaning.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from rl_loop.algorithms.config import AlgorithmConfig
from rl_loop.algorithms.registry import ADVANTAGES

GroupEstimator = Literal["grpo", "dr_grpo", "rloo"]
StandardDeviation = Literal["sample", "population"]
"""Divisor of the sum of squares of n values: n - 1 (sample) or n (population)."""

EQUAL = 1e-6
"""Values are equal if they differ by at most this share of the largest value. fp32 has 7 digits."""
ROUNDING = 1e-12
"""A mean below this share of the largest value is 0. fp64 has 16 digits, and a sum loses some."""
TIME_BLOCK = 256
"""Tokens per sample in one block when generalized advantages are computed."""


# ---- advantages of a batch's samples


@dataclass(frozen=True)
class BatchRewards:
    """Rewards of a batch's episodes, ordered by group: the input of an estimator."""

    totals: torch.Tensor
    """fp64 [samples]: rewards after all penalties."""
    parts: torch.Tensor
    """fp64 [samples, parts]: the parts in ``algorithm.advantage.reward_weights``, often none, the
    terms of ``algorithm.shaping``, and the length penalty if there is one."""
    part_weights: list[float]
    """Weight of each column of ``parts``."""
    group_sizes: list[int]
    """Samples per task. The sum is the number of samples."""

    def groups(self) -> tuple[torch.Tensor, ...]:
        """Return the rewards of each task: fp64 [samples of the task] each."""
        return self.totals.split(self.group_sizes)


def sample_advantages(config: AlgorithmConfig, rewards: BatchRewards) -> torch.Tensor:
    """Compute one advantage per sample of a batch, fp64 [samples], by ``config.advantage``.

    gae has one advantage per token instead (``generalized_advantages``).

    Args:
        config: algorithm with the estimator.
        rewards: rewards of the samples.

    Raises:
        ValueError: a custom estimator does not return one finite number per sample.
    """
    estimate = ADVANTAGES.resolve(config.advantage.type)
    advantages = estimate(rewards, **config.advantage_arguments)

    # A tensor of a different shape would be broadcast or assigned to the wrong samples later.
    if not torch.is_tensor(advantages) or advantages.shape != rewards.totals.shape:
        shape = (
            tuple(advantages.shape) if torch.is_tensor(advantages) else type(advantages).__name__
        )
        raise ValueError(
            f"algorithm.advantage {config.advantage.type} returned {shape}, expected a tensor of "
            f"shape [{len(rewards.totals)}]"
        )
    if not advantages.isfinite().all():
        raise ValueError(
            f"algorithm.advantage {config.advantage.type} returned advantages that are not "
            f"finite ({advantages.tolist()})"
        )
    return advantages.detach().double()


def grpo(rewards: BatchRewards, *, standard_deviation: StandardDeviation) -> torch.Tensor:
    """Divide the distance to the group's mean by its standard deviation: fp64 [samples]."""
    groups = [group_advantages(group, "grpo", standard_deviation) for group in rewards.groups()]
    return torch.cat(groups)


def dr_grpo(rewards: BatchRewards) -> torch.Tensor:
    """Subtract the mean of the group: fp64 [samples]."""
    return torch.cat([group_advantages(group, "dr_grpo") for group in rewards.groups()])


def rloo(rewards: BatchRewards) -> torch.Tensor:
    """Subtract the mean of the group's other samples: fp64 [samples]."""
    return torch.cat([group_advantages(group, "rloo") for group in rewards.groups()])


def gdpo(rewards: BatchRewards, *, standard_deviation: StandardDeviation) -> torch.Tensor:
    """Normalize every reward part of a group separately and sum the parts: fp64 [samples]."""
    # Normalize parts, because in a total a common reward hides a rare reward.
    groups = rewards.parts.split(rewards.group_sizes)
    return torch.cat(
        [gdpo_advantages(group, rewards.part_weights, standard_deviation) for group in groups]
    )


def reinforce(rewards: BatchRewards) -> torch.Tensor:
    """Subtract the mean of the whole batch: fp64 [samples]."""
    return reinforce_advantages(rewards.totals)


def none(rewards: BatchRewards) -> torch.Tensor:
    """Ignore the rewards: zeros, fp64 [samples]."""
    return torch.zeros_like(rewards.totals)


# ---- one group


def group_advantages(
    rewards: torch.Tensor,
    estimator: GroupEstimator = "grpo",
    standard_deviation: StandardDeviation = "sample",
    epsilon: float = 1e-6,
) -> torch.Tensor:
    """Compare the samples of one task: rewards [samples] -> advantages fp64 [samples].

    - ``grpo``: (R - mean) / (std + epsilon) (arXiv 2402.03300, section 4.1.2, which does not define
      std).
    - ``dr_grpo``: R - mean. A division would favor tasks that are almost always or never solved
      (arXiv 2503.20783).
    - ``rloo``: R minus the mean of the *other* samples, an unbiased baseline (RLOO,
      arXiv 2402.14740). It is samples / (samples - 1) times ``dr_grpo``.

    A group of one sample, or with equal rewards, has advantages of exactly 0.

    Args:
        rewards: rewards of one task's samples.
        estimator: one of the above.
        standard_deviation: divisor of the sum of squared differences.
        epsilon: added to the standard deviation.

    Raises:
        ValueError: ``rewards`` is not a non-empty vector of finite numbers.

    Example:
        >>> group_advantages(torch.tensor([1.0, 0.0, 0.0, 1.0]), "dr_grpo").tolist()
        [0.5, -0.5, -0.5, 0.5]
    """
    # A matrix would be centered over all groups at once.
    if rewards.ndim != 1 or len(rewards) == 0:
        raise ValueError(f"rewards must be a non-empty vector (got shape {tuple(rewards.shape)})")

    # Equal rewards have no standard deviation to divide by.
    centered = center(rewards)
    if estimator == "dr_grpo" or not centered.any():
        return centered
    if estimator == "rloo":
        # The others have the sum n mean - R, and R - (n mean - R) / (n - 1) is the line below.
        return centered * (len(rewards) / (len(rewards) - 1))
    if estimator == "grpo":
        return centered / (
            compute_standard_deviation(rewards.double(), standard_deviation) + epsilon
        )
    raise ValueError(f"unknown group estimator {estimator!r}")


def gdpo_advantages(
    parts: torch.Tensor, weights: Sequence[float], standard_deviation: StandardDeviation = "sample"
) -> torch.Tensor:
    """Normalize every reward part of one task: parts [samples, rewards] -> fp64 [samples].

    The result is sum_k w_k (r_k - mean_k) / (std_k + 1e-6) (GDPO, arXiv 2601.05242), in which a
    rare reward counts as much as a common one. The batch is whitened afterwards (``whiten``).

    Args:
        parts: reward parts of one task's samples.
        weights: weight of each part.
        standard_deviation: divisor of the sum of squared differences.

    Example:
        >>> # Rewards: correct, and short. Each part is scaled to a standard deviation of 1.
        >>> parts = torch.tensor([[1.0, 0.0], [0.0, 0.1], [0.0, 0.0], [1.0, 0.1]])
        >>> gdpo_advantages(parts, [1.0, 0.5]).round(decimals=2).tolist()
        [0.43, -0.43, -1.3, 1.3]
    """
    total = torch.zeros(len(parts), dtype=torch.float64)
    for column, weight in zip(parts.unbind(dim=1), weights, strict=True):
        total += weight * group_advantages(column, "grpo", standard_deviation)
    return total


def reinforce_advantages(rewards: torch.Tensor) -> torch.Tensor:
    """Subtract the mean of the whole batch: rewards [samples] -> fp64 [samples].

    REINFORCE with a constant baseline (Williams, 1992).

    Example:
        >>> reinforce_advantages(torch.tensor([1.0, 0.0, 0.0, 1.0])).tolist()
        [0.5, -0.5, -0.5, 0.5]
    """
    return center(rewards)


# ---- tokens


def generalized_advantages(
    rewards: torch.Tensor, values: torch.Tensor, gamma: float = 1.0, lam: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute advantages and returns, [samples, time] each.

    A_t = sum_k (gamma lambda)^k delta_{t+k}, delta_t = r_t + gamma V_{t+1} - V_t, and return_t =
    A_t + V_t (GAE, arXiv 1506.02438, eq. 16). Time counts only sampled tokens: V_{t+1} is the value
    before the next sampled token, even if a tool output lies in between. Shorter samples are padded
    with zeros, which change nothing.

    Args:
        rewards: [samples, time], of the dtype of ``values``.
        values: [samples, time], fp32 or fp64. The computation has this dtype.
        gamma: discount per token.
        lam: lambda of the estimator.

    Example:
        >>> rewards = torch.tensor([[0.0, 0.0, 1.0]])
        >>> values = torch.tensor([[0.25, 0.5, 0.5]])
        >>> advantages, returns = generalized_advantages(rewards, values, lam=0.0)
        >>> advantages.tolist(), returns.tolist()
        ([[0.25, 0.0, 0.5]], [[0.5, 0.5, 1.0]])
    """
    # The function below fills both in place. ``numpy()`` shares the memory of the tensors.
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
    """Compute advantages and returns of samples with different lengths, in existing memory.

    Args:
        values: [sampled tokens] of each sample. Replaced by the returns.
        estimates: arrays of the same lengths. Filled with the advantages.
        final_rewards: [samples], reward of each sample's last token. The computation has this
            dtype.
        token_rewards: [sampled tokens] of each sample, added to the final rewards. None for none.
        gamma: discount per token.
        lam: lambda of the estimator.
    """
    # Sort by decreasing length, so that a time block's samples are its first rows.
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

    # Go backwards in blocks of time, because one fp64 array would be larger than all columns.
    longest = int(lengths.max(initial=0))
    for begin in reversed(range(0, longest, TIME_BLOCK)):
        # Samples that end before this block are the last rows, so the others are a slice.
        rows = int(np.count_nonzero(lengths > begin))
        counts = np.minimum(lengths[:rows] - begin, TIME_BLOCK)
        block_values = _cut_block(values[:rows], begin, counts, running.dtype)
        # V_{t+1}: within the block, and behind its last column the first column of the later block.
        delta = np.concatenate([block_values[:, 1:], next_values[:rows, None]], axis=1)
        delta *= gamma

        # The samples whose last token is in this block. Longer samples fill it and continue.
        ending = np.flatnonzero(lengths[:rows] - begin == counts)
        last_tokens = (ending, counts[ending] - 1)
        if token_rewards is None:
            delta[last_tokens] += final_rewards[ending]
        else:
            rewards = _cut_block(token_rewards[:rows], begin, counts, running.dtype)
            rewards[last_tokens] += final_rewards[ending]
            delta += rewards
        # Padding stays 0: its values are 0, and no later block has changed the state of its row.
        delta -= block_values

        _sum_backwards(delta, running[:rows], gamma * lam)
        # The block before needs the value at the beginning of this one.
        next_values[:rows] = block_values[:, 0]

        _paste_block(delta, estimates[:rows], begin, counts)
        # return_t = A_t + V_t, after the advantages have been copied out.
        delta += block_values
        _paste_block(delta, values[:rows], begin, counts)


def _sum_backwards(delta: np.ndarray, running: np.ndarray, decay: float) -> None:
    """Replace delta_t by A_t = delta_t + decay * A_{t+1}: [rows, time], in place.

    ``running`` [rows] is A of the time after the block. On return it is A of the block's first
    time.
    """
    # Store the numbers of one time together, so that every step reads memory in order.
    by_time = np.ascontiguousarray(delta.T)
    later = running
    discounted = np.empty_like(running)
    # One step per token for all samples at once, because A_t needs A_{t+1}.
    for now in by_time[::-1]:
        np.multiply(decay, later, out=discounted)
        now += discounted
        later = now

    running[:] = later
    delta[:] = by_time.T


def _cut_block(
    rows: Sequence[np.ndarray], begin: int, counts: np.ndarray, dtype: np.dtype
) -> np.ndarray:
    """Copy ``counts`` entries of every row from ``begin`` on: [rows, TIME_BLOCK or fewer].

    Shorter rows are padded with zeros.
    """
    # Rows have different lengths, so a block is copied row by row.
    block = np.zeros((len(rows), int(counts.max())), dtype)
    for target, row, count in zip(block, rows, counts.tolist(), strict=True):
        target[:count] = row[begin : begin + count]
    return block


def _paste_block(
    block: np.ndarray, rows: Sequence[np.ndarray], begin: int, counts: np.ndarray
) -> None:
    """Copy a block to the place from which ``_cut_block`` reads it."""
    for source, row, count in zip(block, rows, counts.tolist(), strict=True):
        row[begin : begin + count] = source[:count]


def whiten(
    values: torch.Tensor, standard_deviation: StandardDeviation = "sample", epsilon: float = 1e-8
) -> torch.Tensor:
    """Scale values [n] to mean 0 and variance 1: fp64 [n], 0 if all are equal.

    The result is (v - mean) / sqrt(variance + epsilon). As in verl and slime, epsilon is under the
    root, so differences below 1e-4 stay small.

    Args:
        values: numbers to scale.
        standard_deviation: divisor of the sum of squared differences.
        epsilon: added to the variance.

    Example:
        >>> whiten(torch.tensor([1.0, 2.0, 3.0])).round(decimals=3).tolist()
        [-1.0, 0.0, 1.0]
    """
    values = values.double()
    if are_equal(values):
        return torch.zeros_like(values)

    mean = values.mean()
    # Group-relative advantages have mean 0. A rounding error of the mean would move groups of equal
    # rewards away from 0.
    if mean.abs() <= ROUNDING * values.abs().max():
        mean = torch.zeros_like(mean)
    return (values - mean) / (
        compute_standard_deviation(values, standard_deviation).square() + epsilon
    ).sqrt()


def overlong_penalty(tokens: int, limit: int, buffer: int) -> float:
    """Return the penalty on a long response (DAPO, arXiv 2503.14476, eq. 13).

    It is 0 up to ``limit - buffer`` tokens, then falls linearly to -1 at ``limit``.

    Args:
        tokens: sampled tokens in the response, without prompt and tool outputs.
        limit: maximum length of a response.
        buffer: number of tokens before the limit over which the penalty grows.

    Example:
        >>> [overlong_penalty(tokens, limit=1000, buffer=200) for tokens in (850, 900, 1000)]
        [-0.25, -0.5, -1.0]
    """
    # The share of the buffer that is used: 0 at its beginning, 1 at the limit.
    overlong = (tokens - (limit - buffer)) / buffer
    return -min(1.0, max(0.0, overlong))


# ---- numbers that are equal except for rounding


def are_equal(values: torch.Tensor) -> bool:
    """Return True if ``values``, float [n], are equal except for rounding, or if n is at most 1."""
    if len(values) < 2:
        return True
    # Relative to the largest value, because rewards may have any scale.
    spread = values.max() - values.min()
    return bool(spread <= EQUAL * values.abs().max())


def center(values: torch.Tensor) -> torch.Tensor:
    """Subtract the mean: values [n] -> fp64 [n], exactly 0 if they are equal.

    Raises:
        ValueError: a value is not finite.
    """
    if not values.isfinite().all():
        raise ValueError(f"rewards must be finite (got {values.tolist()})")

    # Even in fp64 the mean of equal values need not be that value.
    values = values.double()
    if are_equal(values):
        return torch.zeros_like(values)
    return values - values.mean()


def compute_standard_deviation(
    values: torch.Tensor, standard_deviation: StandardDeviation
) -> torch.Tensor:
    """Compute the standard deviation of values, float [n] with n > 1 -> scalar of their dtype."""
    return values.std(correction=1 if standard_deviation == "sample" else 0)
