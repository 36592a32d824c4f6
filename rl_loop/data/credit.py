"""Credit assignment: from the rewards of episodes to an advantage for every sampled
token. Pure functions."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from megatron_gptoss.packing import Sample
from rl_loop.algorithms import advantages
from rl_loop.algorithms.config import AlgorithmConfig
from rl_loop.algorithms.policy_loss import kl_estimate
from rl_loop.data.trajectory import Trajectory, TrajectoryGroup

Columns = list[torch.Tensor]
"""One tensor per sample, fp64 [loss tokens of the sample]."""


def assign_advantages(
    samples: Sequence[Sample],
    groups: Sequence[TrajectoryGroup],
    config: AlgorithmConfig,
    max_response_tokens: int,
) -> list[Sample]:
    """Return the samples with advantages, and with returns where they have values.

    ``groups`` hold the episodes of ``samples``, in order. ``max_response_tokens``: the most that
    an episode can sample. A KL penalty in the reward is taken token by token where there is a
    critic, in sum otherwise. Raises ValueError naming a task whose reward is not finite."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    if not trajectories:
        return []
    for trajectory in trajectories:
        _check_reward(trajectory)

    # In fp64 throughout: whitening divides differences of nearly equal numbers.
    length_penalties = _length_penalties(trajectories, config, max_response_tokens)
    rewards = torch.tensor([trajectory.reward for trajectory in trajectories], dtype=torch.float64)
    rewards = rewards + config.overlong_penalty * length_penalties
    kl_penalties = [_kl_penalties(sample, config) for sample in samples]

    if config.advantage == "gae":
        return _assign_generalized_advantages(samples, rewards, kl_penalties, config)

    parts, part_weights = _reward_parts(trajectories, length_penalties, config)
    batch = advantages.BatchRewards(
        totals=rewards - torch.stack([penalty.sum() for penalty in kl_penalties]),
        parts=parts,
        part_weights=part_weights,
        group_sizes=[len(group.trajectories) for group in groups if group.trajectories],
    )
    per_sample = advantages.sample_advantages(config, batch)
    if config.whitens_over == "samples":
        per_sample = advantages.whiten(per_sample, config.standard_deviation)

    # Every sampled token of a sample has the sample's advantage.
    lengths = [sum(sample.loss_mask) for sample in samples]
    per_token = per_sample.repeat_interleave(torch.tensor(lengths))
    return _attach(samples, _whiten_over_tokens(list(per_token.split(lengths)), config))


def has_signal(group: TrajectoryGroup, config: AlgorithmConfig) -> bool:
    """Say whether the episodes of a task differ in what a group-relative ``config.advantage``
    compares, and any of them is trained on: what dynamic sampling keeps.

    That is the reward, and with gdpo every weighted part of it, without penalties on length and
    KL: as in DAPO, these shape the advantages of a task but are no reason to train on it."""
    if all(
        trajectory.excluded or not trajectory.sampled_tokens for trajectory in group.trajectories
    ):
        return False

    # What is compared, one column after the other: any difference in any of them is a signal.
    columns = [[trajectory.reward for trajectory in group.trajectories]]
    if config.advantage == "gdpo":
        compared = [name for name, weight in config.reward_weights.items() if weight != 0]
        columns = [[t.reward_parts.get(name, 0.0) for t in group.trajectories] for name in compared]
    return not all(
        advantages.are_equal(torch.tensor(column, dtype=torch.float64)) for column in columns
    )


# -- rewards --------------------------------------------------------------------------------------


def _check_reward(trajectory: Trajectory) -> None:
    numbers = (trajectory.reward, *trajectory.reward_parts.values())
    if not all(map(math.isfinite, numbers)):
        raise ValueError(
            f"task {trajectory.task_id}: a reward must be a finite number, got {trajectory.reward}, parts "
            f"{trajectory.reward_parts}"
        )


def _length_penalties(
    trajectories: Sequence[Trajectory], config: AlgorithmConfig, max_response_tokens: int
) -> torch.Tensor:
    """Compute DAPO's penalty on long responses, fp64 [episodes], between -1 and 0; 0 without
    ``overlong_buffer``."""
    penalties = torch.zeros(len(trajectories), dtype=torch.float64)
    if config.overlong_buffer is None:
        return penalties
    for i, trajectory in enumerate(trajectories):
        penalties[i] = advantages.overlong_penalty(
            trajectory.sampled_tokens, max_response_tokens, config.overlong_buffer
        )
    return penalties


def _reward_parts(
    trajectories: Sequence[Trajectory], length_penalties: torch.Tensor, config: AlgorithmConfig
) -> tuple[torch.Tensor, list[float]]:
    """Return what gdpo weighs, fp64 [episodes, parts], and the weight of each part. A penalty on
    length is one more."""
    # A part that an episode does not have counts as 0, which is what doing nothing scores.
    names = list(config.reward_weights)
    rows = [
        [trajectory.reward_parts.get(name, 0.0) for name in names] for trajectory in trajectories
    ]
    parts = torch.tensor(rows, dtype=torch.float64).reshape(len(trajectories), len(names))
    weights = list(config.reward_weights.values())

    if config.overlong_buffer is not None:
        parts = torch.cat([parts, length_penalties[:, None]], dim=1)
        weights.append(config.overlong_penalty)
    return parts, weights


def _kl_penalties(sample: Sample, config: AlgorithmConfig) -> torch.Tensor:
    """Compute what the reward of every sampled token loses to a KL penalty in the reward: fp64
    [sampled tokens].

    Tokens that are left out as stale lose nothing: they were sampled by another policy."""
    is_sampled = torch.tensor(sample.loss_mask) > 0
    if config.kl is None or config.kl.place != "reward":
        return torch.zeros(int(is_sampled.sum()), dtype=torch.float64)

    rollout = torch.tensor(sample.rollout_log_probs, dtype=torch.float64)[is_sampled]
    reference = torch.tensor(sample.reference_log_probs, dtype=torch.float64)[is_sampled]
    penalties = config.kl.coefficient * kl_estimate(rollout, reference, config.kl.estimator)
    if sample.staleness is None:
        return penalties
    is_fresh = torch.tensor(sample.staleness)[is_sampled] <= config.max_staleness
    return torch.where(is_fresh, penalties, 0.0)


# -- generalized advantage estimation -------------------------------------------------------------


def _assign_generalized_advantages(
    samples: Sequence[Sample],
    rewards: torch.Tensor,
    kl_penalties: Columns,
    config: AlgorithmConfig,
) -> list[Sample]:
    # Rows of sampled tokens, filled up with zeros to the longest sample: the recursion runs over
    # all of them at once.
    lengths = [len(penalty) for penalty in kl_penalties]
    shape = (len(samples), max(1, *lengths))
    token_rewards = torch.zeros(shape, dtype=torch.float64)
    values = torch.zeros(shape, dtype=torch.float64)
    for i, (sample, penalty, length) in enumerate(zip(samples, kl_penalties, lengths, strict=True)):
        if length == 0:
            continue
        # The reward comes with the last token, the KL penalty with every one.
        token_rewards[i, :length] = -penalty
        token_rewards[i, length - 1] += rewards[i]
        is_sampled = torch.tensor(sample.loss_mask) > 0
        values[i, :length] = torch.tensor(sample.values, dtype=torch.float64)[is_sampled]

    estimates, returns = advantages.generalized_advantages(
        token_rewards, values, config.gamma, config.gae_lambda
    )
    cut_estimates = [row[:length] for row, length in zip(estimates, lengths, strict=True)]
    cut_returns = [row[:length] for row, length in zip(returns, lengths, strict=True)]
    return _attach(samples, _whiten_over_tokens(cut_estimates, config), cut_returns)


# -- columns of samples ---------------------------------------------------------------------------


def _whiten_over_tokens(columns: Columns, config: AlgorithmConfig) -> Columns:
    """Whiten advantages over all loss tokens of the batch, if ``config`` says so."""
    if config.whitens_over != "tokens":
        return columns
    lengths = [len(column) for column in columns]
    whitened = advantages.whiten(torch.cat(columns), config.standard_deviation)
    return list(whitened.split(lengths))


def _attach(
    samples: Sequence[Sample], advantage: Columns, returns: Columns | None = None
) -> list[Sample]:
    """Return the samples with per-token columns, 0 where a token is not trained on."""
    attached = []
    for i, sample in enumerate(samples):
        sample = replace(sample, advantages=_spread(advantage[i], sample))
        if returns is not None:
            sample = replace(sample, returns=_spread(returns[i], sample))
        attached.append(sample)
    return attached


def _spread(column: torch.Tensor, sample: Sample) -> Any:
    """Put the numbers of the loss tokens at their places: fp64 [tokens of the sample]."""
    is_trained = np.asarray(sample.loss_mask) > 0
    row = np.zeros(len(is_trained))
    row[is_trained] = column.numpy()
    return row
