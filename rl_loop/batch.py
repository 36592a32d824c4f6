"""From groups of trajectories to training samples, and the numbers worth watching about both. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_gptoss.packing import Sample
from megatron_gptoss.trainer import StepStatistics
from rl_loop.algorithms.advantages import AdvantageEstimator, group_advantages
from rl_loop.metrics import Name, StepMetrics
from rl_loop.trajectory import FinishReason, TrajectoryGroup


def advantages_of(groups: Sequence[TrajectoryGroup], estimator: AdvantageEstimator) -> list[list[float]]:
    """One advantage per trajectory, group by group."""
    return [
        group_advantages(torch.tensor([t.reward for t in group.trajectories]), estimator).tolist() for group in groups
    ]


def to_samples(groups: Sequence[TrajectoryGroup], advantages: Sequence[Sequence[float]]) -> list[Sample]:
    """One sample per trajectory; every sampled token carries its trajectory's advantage."""
    samples = []
    for group, group_values in zip(groups, advantages, strict=True):
        for trajectory, advantage in zip(group.trajectories, group_values, strict=True):
            trajectory.validate()
            samples.append(
                Sample(
                    token_ids=trajectory.token_ids,
                    loss_mask=trajectory.loss_mask,
                    advantages=[advantage * m for m in trajectory.loss_mask],
                    rollout_log_probs=trajectory.rollout_log_probs,
                )
            )
    return samples


def rollout_metrics(metrics: StepMetrics, groups: Sequence[TrajectoryGroup]) -> None:
    """What the episodes of a step were like."""
    episodes = [trajectory for group in groups for trajectory in group.trajectories]
    n = len(episodes)

    def mean(name: str, values: list[float]) -> None:
        metrics.add_mean(name, sum(values), n, "sequences")

    mean(Name.REWARD, [e.reward for e in episodes])
    mean(Name.ACCURACY, [e.reward_parts["correct"] for e in episodes])
    mean(Name.TOOL_CALL_RATE, [float(e.tool_calls > 0) for e in episodes])
    mean(Name.TURNS, [float(e.assistant_turns) for e in episodes])
    mean(Name.RESPONSE_TOKENS, [float(e.sampled_tokens) for e in episodes])
    mean("rollout/tool_errors", [float(e.tool_errors) for e in episodes])
    for reason in FinishReason:
        mean(f"finish/{reason}", [float(e.finish_reason is reason) for e in episodes])
    silent = sum(len({t.reward for t in group.trajectories}) == 1 for group in groups)
    metrics.add_mean("rollout/groups_without_signal", silent, len(groups), "groups")


def training_metrics(metrics: StepMetrics, updates: Sequence[StepStatistics]) -> None:
    """What the optimizer steps on those episodes were like."""
    for update in updates:
        tokens = update.sums["tokens"]
        for name, key in (
            (Name.LOSS, "loss"),
            (Name.ENTROPY, "entropy"),
            (Name.CLIP_FRACTION, "clipped"),
            ("ratio/mean", "ratio"),
            (Name.LOGPROB_GAP, "logprob_gap"),
            (Name.KL, "kl_k3"),
            ("mismatch/kl_k1", "kl_k1"),
            ("mismatch/kl_k2", "kl_k2"),
            ("mismatch/prob_ratio", "prob_ratio"),
            ("mismatch/chi_square", "chi_square"),
            ("mismatch/log_perplexity_train", "log_perplexity_train"),
            ("mismatch/log_perplexity_rollout", "log_perplexity_rollout"),
        ):
            metrics.add_mean(name, update.sums[key], tokens, "tokens")
        metrics.add_max("mismatch/logprob_gap_max", update.maxima["logprob_gap_max"], "tokens")
        metrics.add_max("ratio/deviation_max", update.maxima["ratio_deviation"], "tokens")
        metrics.add_last(Name.GRAD_NORM, update.grad_norm)
        metrics.add_last(Name.LEARNING_RATE, update.learning_rate)
        metrics.add_sum("skipped_updates", float(not update.parameters_updated), "steps")
