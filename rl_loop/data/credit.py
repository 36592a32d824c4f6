"""Credit assignment: rewards of episodes to advantages of sampled tokens. Pure functions.

An episode is one Trajectory of a group. Its token sequences are the samples: the trajectory itself,
and its branches if an agent held several conversations.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch

from megatron_gptoss.samples import TrainingSamples
from rl_loop.algorithms import advantages
from rl_loop.algorithms.choices import GaeAdvantage
from rl_loop.algorithms.config import AlgorithmConfig
from rl_loop.algorithms.policy_loss import kl_estimate
from rl_loop.data.shaping import shaping_terms
from rl_loop.data.trajectory import Trajectory, TrajectoryGroup


def assign_advantages(
    samples: TrainingSamples,
    groups: Sequence[TrajectoryGroup],
    config: AlgorithmConfig,
    max_response_tokens: int,
    max_episode_tokens: int | None = None,
) -> TrainingSamples:
    """Return the samples with advantages, and with returns if they have values.

    The teacher's advantages (``algorithm.distillation.loss`` is "sampled_token") are added to those of
    the rewards.

    Episodes are compared: an episode with several sequences counts once, and all its sequences have
    its advantage. A truncated episode that is masked counts, too, but has no token in the loss.
    Invalid episodes are not among the trajectories. A KL penalty in the reward applies per token
    with a critic, and as a sum otherwise.

    Args:
        samples: the sequences of all episodes.
        groups: the episodes of ``samples``, in order.
        config: the algorithm.
        max_response_tokens: maximum sampled tokens of an episode.
        max_episode_tokens: maximum tokens of a sequence, including prompt and tool outputs. None
            for no limit.

    Raises:
        ValueError: a reward is not finite. The message names the task.
    """
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    if not trajectories:
        return samples.with_columns(advantages=np.zeros(0, dtype=np.float32))
    samples = _assign_rewards(samples, groups, config, max_response_tokens, max_episode_tokens)
    return _add_distillation(samples, config)


def _assign_rewards(
    samples: TrainingSamples,
    groups: Sequence[TrajectoryGroup],
    config: AlgorithmConfig,
    max_response_tokens: int,
    max_episode_tokens: int | None,
) -> TrainingSamples:
    """Return the samples with the advantages of their rewards, as ``assign_advantages`` does."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    for trajectory in trajectories:
        _check_reward(trajectory)

    # Compute in fp64, because whitening divides differences of nearly equal numbers.
    terms = shaping_terms(groups, config)
    weights = [term.weight for term in config.shaping.values()]
    if config.overlong_buffer_tokens is not None:
        penalties = _length_penalties(trajectories, config, max_response_tokens, max_episode_tokens)
        terms = torch.cat([terms, penalties[:, None]], dim=1)
        weights.append(config.overlong_penalty)
    rewards = torch.tensor([trajectory.reward for trajectory in trajectories], dtype=torch.float64)
    rewards = rewards + terms @ torch.tensor(weights, dtype=torch.float64)
    # An episode's advantage is repeated for each of its sequences.
    sequences = torch.tensor([len(trajectory.sequences) for trajectory in trajectories])
    # GAE does not compare episodes. Every sequence ends with the reward of its episode.
    if isinstance(config.advantage, GaeAdvantage):
        per_sample = rewards.repeat_interleave(sequences)
        return _assign_generalized_advantages(samples, per_sample, config, config.advantage)

    # Only gdpo compares parts. The other functions use the totals.
    batch = advantages.BatchRewards(
        totals=rewards - _summed_kl_penalties(samples, sequences, config),
        parts=torch.cat([_reward_parts(trajectories, config), terms], dim=1),
        part_weights=[*config.reward_weights.values(), *weights],
        # Infrastructure failures can leave a group without episodes.
        group_sizes=[len(group.trajectories) for group in groups if group.trajectories],
    )
    per_episode = advantages.sample_advantages(config, batch)
    if config.whitens_over == "samples":
        per_episode = advantages.whiten(per_episode, config.standard_deviation)

    return _assign_per_sample(samples, per_episode.repeat_interleave(sequences), config)


def _assign_per_sample(
    samples: TrainingSamples, per_sample: torch.Tensor, config: AlgorithmConfig
) -> TrainingSamples:
    """Return the samples with the advantage [samples] of its sample for every sampled token."""
    # Over tokens, long samples have more weight in the mean and the deviation.
    if config.whitens_over == "tokens":
        lengths = torch.from_numpy(_sampled_tokens(samples))
        per_token = per_sample.repeat_interleave(lengths).numpy()
        whitened = _whiten_over_tokens(per_token, config)
        return samples.with_columns(advantages=_spread(whitened, samples))
    return samples.with_columns(advantages=_spread_evenly(per_sample.numpy(), samples))


def rewards_differ(group: TrajectoryGroup, config: AlgorithmConfig) -> bool:
    """Return True if the rewards of a task's episodes differ. Dynamic sampling keeps such groups.

    The values that a group-relative ``config.advantage`` compares must differ, and at least one
    episode must be trained on. The values are the reward, or with gdpo every weighted reward part.
    Shaping and penalties on length and KL do not count. As in DAPO, they shape the advantages of a task but are
    no reason to train on it.
    """
    if all(sequence.excluded or not sequence.sampled_tokens for sequence in group.sequences):
        return False

    # One column for each compared value. A difference in any column suffices.
    columns = [[trajectory.reward for trajectory in group.trajectories]]
    # Parts without weight have no effect on gdpo's advantages.
    if config.advantage.type == "gdpo":
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
            f"task {trajectory.task_id}: rewards must be finite numbers (got "
            f"{trajectory.reward}, parts {trajectory.reward_parts})"
        )


def _length_penalties(
    trajectories: Sequence[Trajectory],
    config: AlgorithmConfig,
    max_response_tokens: int,
    max_episode_tokens: int | None,
) -> torch.Tensor:
    """Return DAPO's penalty on long responses: fp64 [episodes], between -1 and 0."""
    assert config.overlong_buffer_tokens is not None
    penalties = torch.zeros(len(trajectories), dtype=torch.float64)
    for i, trajectory in enumerate(trajectories):
        penalty = advantages.overlong_penalty(
            trajectory.episode_sampled_tokens, max_response_tokens, config.overlong_buffer_tokens
        )
        # The strictest penalty counts. Their sum could be below -1.
        for sequence in trajectory.sequences:
            penalty = min(
                penalty,
                _context_penalty(sequence, config, max_response_tokens, max_episode_tokens),
            )
        penalties[i] = penalty
    return penalties


def _context_penalty(
    sequence: Trajectory,
    config: AlgorithmConfig,
    max_response_tokens: int,
    max_episode_tokens: int | None,
) -> float:
    """Return the length penalty for the tokens that prompt and tool outputs leave free."""
    assert config.overlong_buffer_tokens is not None
    if max_episode_tokens is None or sequence.sampled_tokens == 0:
        return 0.0
    # With a long prompt an episode is cut off long before ``max_response_tokens``. Prompt and tool
    # outputs take the rest of the context.
    room = max_episode_tokens - (len(sequence) - sequence.sampled_tokens)
    # The context leaves enough tokens for the longest response.
    if room >= max_response_tokens:
        return 0.0
    # The same share of the remaining tokens. Otherwise every answer in a nearly full context would
    # have a penalty. The penalty divides by the buffer.
    buffer = max(1, round(config.overlong_buffer_tokens * room / max_response_tokens))
    return advantages.overlong_penalty(sequence.sampled_tokens, room, buffer)


def _reward_parts(trajectories: Sequence[Trajectory], config: AlgorithmConfig) -> torch.Tensor:
    """Return the parts in ``advantage.reward_weights``: fp64 [episodes, parts]."""
    # A missing part counts as 0, the score of doing nothing.
    names = list(config.reward_weights)
    rows = [
        [trajectory.reward_parts.get(name, 0.0) for name in names] for trajectory in trajectories
    ]
    return torch.tensor(rows, dtype=torch.float64).reshape(len(trajectories), len(names))


# -- KL penalties ---------------------------------------------------------------------------------


def _penalizes_kl(config: AlgorithmConfig) -> bool:
    """Return True if the reward contains a KL penalty."""
    return config.kl is not None and config.kl.apply_to == "reward"


def _summed_kl_penalties(
    samples: TrainingSamples, sequences: torch.Tensor, config: AlgorithmConfig
) -> torch.Tensor:
    """Return the sum of the KL penalties in the reward of every episode: fp64 [episodes].

    ``sequences`` has each episode's number of samples, int64 [episodes].
    """
    totals = torch.zeros(len(sequences), dtype=torch.float64)
    if _penalizes_kl(config):
        episodes = torch.arange(len(sequences)).repeat_interleave(sequences).tolist()
        bounds = pairwise(samples.offsets.tolist())
        for episode, (start, end) in zip(episodes, bounds, strict=True):
            totals[episode] += _kl_penalties(samples, start, end, config).sum()
    return totals


def _kl_penalties(
    samples: TrainingSamples, start: int, end: int, config: AlgorithmConfig
) -> torch.Tensor:
    """Return the KL penalty in the reward of every sampled token in [start, end).

    The result is fp64 [sampled tokens], 0 for tokens older than ``max_staleness``, which the losses
    leave out, too.
    """
    assert config.kl is not None
    assert samples.rollout_log_probs is not None
    if samples.reference_log_probs is None:
        raise ValueError(
            "algorithm.kl.apply_to=reward needs the column reference_log_probs. Compute it before the "
            "advantages"
        )

    is_sampled = samples.loss_mask[start:end]
    rollout = torch.from_numpy(samples.rollout_log_probs[start:end][is_sampled]).double()
    reference = torch.from_numpy(samples.reference_log_probs[start:end][is_sampled]).double()
    penalties = config.kl.coefficient * kl_estimate(rollout, reference, config.kl.estimator)
    if samples.staleness is None:
        return penalties
    # ``rollout.collector`` begins no episode with tokens that are too old, so this is a second
    # safeguard.
    is_recent = samples.staleness[start:end][is_sampled] <= config.max_staleness
    return torch.where(torch.from_numpy(is_recent), penalties, 0.0)


# -- distillation ---------------------------------------------------------------------------------


def _add_distillation(samples: TrainingSamples, config: AlgorithmConfig) -> TrainingSamples:
    """Return the samples with the teacher's advantages added to those of sampled tokens.

    A token's own difference of log-probs is its credit: later tokens do not count, as with a discount
    of 0. Tokens older than ``max_staleness`` get none, because the losses leave them out.
    """
    if config.distillation is None or not config.compares_sampled_tokens:
        return samples
    assert samples.advantages is not None
    compared = compared_with_teacher(samples)
    if samples.staleness is not None:
        compared &= samples.staleness <= config.max_staleness
    gains = np.where(compared, teacher_gains(samples), 0.0)
    if not np.isfinite(gains).all():
        token = int(np.isfinite(gains).argmin())
        sequence = int(np.searchsorted(samples.offsets, token, side="right")) - 1
        raise ValueError(
            f"{samples.sequence_name(sequence)}: the teacher has no finite log-prob of token "
            f"{token - samples.offsets[sequence]}. Check the teacher's weights"
        )
    added = samples.advantages + config.distillation.coefficient * gains
    return samples.with_columns(advantages=added.astype(np.float32))


def teacher_gains(samples: TrainingSamples) -> np.ndarray:
    """Return log pi_teacher - log pi of every token, with the policy that sampled: fp64 [tokens]."""
    teacher = samples.column("teacher_log_probs").astype(np.float64)
    return teacher - samples.column("rollout_log_probs")


def compared_with_teacher(samples: TrainingSamples) -> np.ndarray:
    """Return which tokens policy and teacher predict from the same context: bool [tokens].

    They are the sampled tokens of sequences with a teacher. A spliced token was sampled in another
    context than the teacher sees.
    """
    compared = samples.loss_mask.copy()
    if samples.is_off_policy is not None:
        compared &= ~samples.is_off_policy
    if samples.has_teacher is not None:
        compared &= samples.has_teacher
    return compared


# -- generalized advantage estimation -------------------------------------------------------------


def _assign_generalized_advantages(
    samples: TrainingSamples, rewards: torch.Tensor, config: AlgorithmConfig, gae: GaeAdvantage
) -> TrainingSamples:
    """Return the samples with advantages and returns of sampled tokens by GAE.

    Args:
        samples: samples with values.
        rewards: fp64 [samples], assigned to the last sampled token. KL penalties are assigned to
            every token.
        config: the algorithm.
        gae: settings of the estimator.
    """
    if samples.values is None:
        raise ValueError(
            "algorithm.advantage gae needs the column values. Let the critic compute it before the "
            "advantages"
        )

    bounds = list(pairwise(samples.offsets.tolist()))
    token_rewards = None
    if _penalizes_kl(config):
        token_rewards = [
            -_kl_penalties(samples, start, end, config).numpy() for start, end in bounds
        ]

    # Allocating columns of this size is slow, so everything is computed in the two returned
    # columns. The numbers of a sample's sampled tokens first lie at the start of the sample's
    # entries.
    counts = _sampled_tokens(samples)
    returns = np.empty(samples.tokens, dtype=np.float32)
    sampled_values = _heads(returns, samples, counts)
    for head, row, is_sampled in zip(
        sampled_values, samples.rows("values"), samples.rows("loss_mask"), strict=True
    ):
        head[:] = row[is_sampled]

    # Whitening needs the estimates of all tokens together, in fp64.
    whitens = config.whitens_over == "tokens"
    if whitens:
        estimates = np.empty(int(counts.sum()), dtype=np.float64)
        sampled_estimates = np.split(estimates, np.cumsum(counts)[:-1])
    else:
        estimates = np.empty(samples.tokens, dtype=np.float32)
        sampled_estimates = _heads(estimates, samples, counts)

    advantages.generalized_advantages_in_place(
        values=sampled_values,
        estimates=sampled_estimates,
        final_rewards=rewards.numpy(),
        token_rewards=token_rewards,
        gamma=gae.gamma,
        lam=gae.gae_lambda,
    )
    _spread_heads(returns, samples, counts)
    if whitens:
        estimates = _spread(_whiten_over_tokens(estimates, config), samples)
    else:
        _spread_heads(estimates, samples, counts)
    return samples.with_columns(advantages=estimates, returns=returns)


# -- columns of samples ---------------------------------------------------------------------------


def _sampled_tokens(samples: TrainingSamples) -> np.ndarray:
    """Return the number of tokens in the loss of each sample: int64 [samples]."""
    # reduceat would convert the mask first and take as long as the rest of this module.
    counts = [np.count_nonzero(row) for row in samples.rows("loss_mask")]
    return np.array(counts, dtype=np.int64)


def _whiten_over_tokens(estimates: np.ndarray, config: AlgorithmConfig) -> np.ndarray:
    """Whiten advantages over all loss tokens of the batch, fp64 [loss tokens]."""
    return advantages.whiten(torch.from_numpy(estimates), config.standard_deviation).numpy()


def _spread(estimates: np.ndarray, samples: TrainingSamples) -> np.ndarray:
    """Scatter the numbers of the loss tokens to their positions: float32 [tokens], else 0."""
    column = np.zeros(samples.tokens, dtype=np.float32)
    column[samples.loss_mask] = estimates
    return column


def _heads(column: np.ndarray, samples: TrainingSamples, counts: np.ndarray) -> list[np.ndarray]:
    """Return views of the first ``counts`` entries of every sample."""
    starts = samples.offsets[:-1].tolist()
    return [column[start : start + n] for start, n in zip(starts, counts.tolist(), strict=True)]


def _spread_heads(column: np.ndarray, samples: TrainingSamples, counts: np.ndarray) -> None:
    """Move the numbers of ``_heads`` to the positions of the loss tokens, in place.

    Other positions get 0.
    """
    bounds = pairwise(samples.offsets.tolist())
    for (start, end), count in zip(bounds, counts.tolist(), strict=True):
        row = column[start:end]
        # A copy, because source and destination overlap.
        numbers = row[:count].copy()
        row[:] = 0
        row[samples.loss_mask[start:end]] = numbers


def _spread_evenly(per_sample: np.ndarray, samples: TrainingSamples) -> np.ndarray:
    """Assign the number of a sample to all its loss tokens: float32 [tokens], else 0."""
    column = np.zeros(samples.tokens, dtype=np.float32)
    for number, (start, end) in zip(per_sample, pairwise(samples.offsets.tolist()), strict=True):
        # The number is fp64, and ``same_kind`` allows its conversion to float32.
        np.copyto(
            column[start:end], number, where=samples.loss_mask[start:end], casting="same_kind"
        )
    return column
