"""From groups of trajectories to training samples, and the numbers worth watching about both. Pure functions."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from megatron_gptoss.packing import GRAFTED, Sample
from megatron_gptoss.trainer import StepStatistics
from rl_loop.algorithms import advantages
from rl_loop.algorithms.config import AlgorithmConfig
from rl_loop.algorithms.policy_loss import kl_estimate
from rl_loop.metrics import Name, StepMetrics
from rl_loop.trajectory import FinishReason, Trajectory, TrajectoryGroup


class OffPolicyError(RuntimeError):
    """Tokens of older weights are about to be trained on as if they were sampled with the current ones."""


def to_samples(groups: Sequence[TrajectoryGroup], config: AlgorithmConfig, version: int) -> list[Sample]:
    """One sample per trajectory, in order, without advantages. ``version``: of the trainer's weights. Raises
    OffPolicyError if the configuration says on-policy and a token was sampled with older weights."""
    samples = []
    for trajectory in (t for group in groups for t in group.trajectories):
        trajectory.validate()
        staleness = _staleness(trajectory, version)
        oldest = max(staleness, default=0)
        if oldest > 0 and config.old_log_probs_from == "substitute":
            stale = f"task {trajectory.task_id}: tokens sampled {oldest} weight versions ago would count as on-policy"
            advice = "With algorithm.old_log_probs rollout or forward they would be left out"
            raise OffPolicyError(f"{stale} (importance ratio 1). {advice}")
        replayed = config.routing_replay == "R3"
        if replayed and trajectory.routed_experts is None:
            raise ValueError(f"task {trajectory.task_id}: routing_replay R3, and the episode has no routes")
        mask = [0] * len(trajectory) if trajectory.excluded else trajectory.loss_mask
        sample = Sample(trajectory.token_ids, mask, rollout_log_probs=trajectory.rollout_log_probs)
        sample.staleness = staleness if any(staleness) else None
        sample.routed_experts = trajectory.routed_experts if replayed else None
        samples.append(sample)
    return samples


def _staleness(trajectory: Trajectory, version: int) -> list[int]:
    staleness = [0] * len(trajectory)
    for span in trajectory.weight_versions:
        staleness[span.start : span.end] = [version - span.version] * (span.end - span.start)
    for start, end in trajectory.grafted:
        staleness[start:end] = [GRAFTED] * (end - start)
    return staleness


def with_advantages(
    samples: Sequence[Sample], groups: Sequence[TrajectoryGroup], config: AlgorithmConfig, max_tokens: int
) -> list[Sample]:
    """The samples with advantages, and with returns where they have values. ``max_tokens``: longest possible episode. A
    KL penalty in the reward is taken token by token where there is a critic, in sum otherwise."""
    lengths = [len(group.trajectories) for group in groups]
    trajectories = [t for group in groups for t in group.trajectories]
    buffer, scale = config.overlong_buffer, config.overlong_penalty
    lengthy = [scale * advantages.overlong_penalty(len(t), max_tokens, buffer) if buffer else 0.0 for t in trajectories]
    rewards = torch.tensor([t.reward + penalty for t, penalty in zip(trajectories, lengthy, strict=True)])
    kl = config.kl.coefficient if config.kl and config.kl.place == "reward" else 0.0
    penalties = [kl * _kl_of_tokens(s, config) if kl else torch.zeros(sum(s.loss_mask)) for s in samples]
    if config.advantage == "gae":
        return _with_generalized_advantages(samples, rewards, penalties, config)
    rewards = rewards - torch.stack([penalty.sum() for penalty in penalties])
    if config.advantage == "reinforce":
        per_sample = advantages.reinforce_advantages(rewards)
    elif config.advantage == "gdpo":
        columns = torch.tensor([[_reward_part(t, name) for name in config.reward_weights] for t in trajectories])
        weights = list(config.reward_weights.values())
        per_sample = torch.cat([advantages.gdpo_advantages(part, weights) for part in columns.split(lengths)])
    else:
        per_sample = torch.cat([advantages.group_advantages(part, config.advantage) for part in rewards.split(lengths)])
    tokens = torch.tensor([sum(sample.loss_mask) for sample in samples])
    each = per_sample.repeat_interleave(tokens)
    return _with_columns(samples, config, advantages=list(each.split(tokens.tolist())))


def _reward_part(trajectory: Trajectory, name: str) -> float:
    parts = trajectory.reward_parts
    if name not in parts:
        raise ValueError(f"algorithm.reward_weights: no reward part {name!r}; there are {sorted(parts)}")
    return parts[name]


def _kl_of_tokens(sample: Sample, config: AlgorithmConfig) -> torch.Tensor:
    """[sampled tokens]"""
    on = torch.tensor(sample.loss_mask) > 0
    rollout, reference = torch.tensor(sample.rollout_log_probs), torch.tensor(sample.reference_log_probs)
    return kl_estimate(rollout[on], reference[on], config.kl.estimator if config.kl else "k1")


def _with_generalized_advantages(
    samples: Sequence[Sample], rewards: torch.Tensor, penalties: list[torch.Tensor], config: AlgorithmConfig
) -> list[Sample]:
    lengths = [len(penalty) for penalty in penalties]
    token_rewards, values = torch.zeros(2, len(samples), max(1, *lengths))
    for i, (sample, penalty) in enumerate(zip(samples, penalties, strict=True)):
        if lengths[i] == 0:
            continue
        token_rewards[i, : lengths[i]] = -penalty
        token_rewards[i, lengths[i] - 1] += rewards[i]
        values[i, : lengths[i]] = torch.tensor(sample.values)[torch.tensor(sample.loss_mask) > 0]
    both = advantages.generalized_advantages(token_rewards, values, config.gamma, config.gae_lambda)
    columns = dict(zip(("advantages", "returns"), both, strict=True))
    cut = {name: [row[:n] for row, n in zip(rows, lengths, strict=True)] for name, rows in columns.items()}
    return _with_columns(samples, config, **cut)


def _with_columns(samples: Sequence[Sample], config: AlgorithmConfig, **columns: list[torch.Tensor]) -> list[Sample]:
    """The samples with per-token columns that are given for their loss tokens only; advantages whitened if wanted."""
    if config.whiten_advantages or config.advantage == "gdpo":
        lengths = [len(part) for part in columns["advantages"]]
        columns["advantages"] = list(advantages.whiten(torch.cat(columns["advantages"])).split(lengths))
    out = []
    for i, sample in enumerate(samples):
        on = np.asarray(sample.loss_mask) > 0
        rows: dict[str, Any] = {name: np.zeros(len(on)) for name in columns}
        for name, row in rows.items():
            row[on] = columns[name][i].numpy()
        out.append(replace(sample, **rows))
    return out


def has_signal(group: TrajectoryGroup) -> bool:
    """Whether the rewards differ: otherwise every group-relative advantage is 0."""
    return len({trajectory.reward for trajectory in group.trajectories}) > 1


def outcome_sums(episodes: Sequence[Trajectory]) -> dict[str, float]:
    """What matters most about episodes, added up."""
    return {
        Name.REWARD: sum(e.reward for e in episodes),
        Name.ACCURACY: sum(e.reward_parts["correct"] for e in episodes),
        Name.TOOL_CALL_RATE: sum(e.tool_calls > 0 for e in episodes),
        Name.TURNS: sum(e.assistant_turns for e in episodes),
    }


def rollout_metrics(metrics: StepMetrics, groups: Sequence[TrajectoryGroup]) -> None:
    """What the episodes of a step were like."""
    episodes = [trajectory for group in groups for trajectory in group.trajectories]
    sums = outcome_sums(episodes) | {
        Name.RESPONSE_TOKENS: sum(e.sampled_tokens for e in episodes),
        "rollout/tool_errors": sum(e.tool_errors for e in episodes),
        "rollout/purified_turns": sum(len(e.grafted) for e in episodes),
    }
    sums |= {f"finish/{reason}": sum(e.finish_reason is reason for e in episodes) for reason in FinishReason}
    sums |= Counter(f"format_error/{e.format_error}" for e in episodes if e.format_error is not None)
    for name, total in sums.items():
        metrics.add_mean(name, total, len(episodes), "sequences")
    for part in {part for e in episodes for part in e.reward_parts} - {"correct", "format_error"}:
        having = [e.reward_parts[part] for e in episodes if part in e.reward_parts]
        metrics.add_mean(f"reward/{part}", sum(having), len(having), "sequences")
    if reusable := sum(e.reusable_tokens for e in episodes):
        metrics.add_mean("rollout/cache_hit", sum(e.cached_tokens for e in episodes), reusable, "tokens")
    silent = sum(not has_signal(group) for group in groups)
    metrics.add_mean("rollout/groups_without_signal", silent, len(groups), "groups")


PER_TOKEN = ("entropy", "clip_fraction", "ratio/", "correction/", "kl_reference")
"""How the names of sums over all loss tokens begin."""


def training_metrics(metrics: StepMetrics, updates: Sequence[StepStatistics]) -> None:
    """What the policy's optimizer steps on those episodes were like."""
    for update in updates:
        sums = update.sums
        metrics.add_mean(Name.LOSS, sums["loss"], 1, "updates")
        for name, total in sums.items():
            if name == "mismatch/log_ppl_gap":
                metrics.add_mean(name, total, sums["sequences"], "sequences")
            elif name.startswith("mismatch/"):  # grafted tokens are not compared
                metrics.add_mean(name, total, sums["comparable"], "tokens")
            elif name.startswith(PER_TOKEN):
                metrics.add_mean(name, total, sums["tokens"], "tokens")
        if "routes_compared" in sums:
            metrics.add_mean("routing/agreement", sums["routes_agreeing"], sums["routes_compared"], "routes")
        for name, value in update.maxima.items():
            metrics.add(name, value, "max", "tokens")
        optimizer_metrics(metrics, update)


def optimizer_metrics(metrics: StepMetrics, update: StepStatistics) -> None:
    """What every optimizer step says of itself, whatever its loss."""
    metrics.add(Name.GRAD_NORM, update.grad_norm, "last")
    metrics.add(Name.LEARNING_RATE, update.learning_rate, "last")
    metrics.add("skipped_updates", not update.parameters_updated, "sum")
    for speed in ("tokens_per_second_per_gpu", "tflops_per_gpu", "mfu"):
        if (value := getattr(update, speed)) is not None:
            metrics.add(f"train/{speed}", value, "last")
    for part, seconds in update.seconds_of.items():
        metrics.add(f"train/seconds_{part}", seconds, "sum")


def kl_without_replay(metrics: StepMetrics, samples: Sequence[Sample], log_probs: Sequence[Sequence[float]]) -> None:
    """The mismatch that the trainer would have with the experts that it chooses itself; ``log_probs``: its scores."""
    for sample, scored in zip(samples, log_probs, strict=True):
        on = torch.tensor(sample.loss_mask) > 0
        k3 = kl_estimate(torch.tensor(sample.rollout_log_probs)[on], torch.tensor(scored)[on], "k3")
        metrics.add_mean("routing/kl_k3_without_replay", float(k3.sum()), int(on.sum()), "tokens")


def critic_metrics(metrics: StepMetrics, updates: Sequence[StepStatistics]) -> None:
    """What the critic's optimizer steps were like."""
    for update in updates:
        sums, tokens = update.sums, update.sums["tokens"]
        metrics.add_mean("critic/loss", sums["loss"], 1, "updates")
        metrics.add_mean("critic/clip_fraction", sums["clipped"], tokens, "tokens")
        variance = sums["returns_square"] / tokens - (sums["returns"] / tokens) ** 2
        if variance > 1e-12:
            metrics.add_mean("critic/explained_variance", 1 - sums["error"] / tokens / variance, 1, "updates")
        metrics.add("critic/grad_norm", update.grad_norm, "last")
