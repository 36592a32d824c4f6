"""From groups of trajectories to training samples, and the numbers worth watching about both. Pure functions."""

import math
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
from rl_loop.data.trajectory import FinishReason, Trajectory, TrajectoryGroup
from rl_loop.infrastructure import COMPONENTS
from rl_loop.tracking.metrics import Name, StepMetrics


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
        if oldest > 0 and config.old_log_probs_from == "detach":
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
    samples: Sequence[Sample], groups: Sequence[TrajectoryGroup], config: AlgorithmConfig, max_response_tokens: int
) -> list[Sample]:
    """Give the samples advantages, and returns where they have values.

    ``max_response_tokens``: the most that an episode can sample. A KL penalty in the reward is taken token by token
    where there is a critic, in sum otherwise. Raises ValueError naming a task whose reward is not finite."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    if not trajectories:
        return []
    for trajectory in trajectories:
        if not all(map(math.isfinite, (trajectory.reward, *trajectory.reward_parts.values()))):
            got = f"{trajectory.reward}, parts {trajectory.reward_parts}"
            raise ValueError(f"task {trajectory.task_id}: a reward must be a finite number, got {got}")

    length_penalties = torch.zeros(len(trajectories), dtype=torch.float64)
    if buffer := config.overlong_buffer:
        for i, trajectory in enumerate(trajectories):
            tokens = trajectory.sampled_tokens
            length_penalties[i] = advantages.overlong_penalty(tokens, max_response_tokens, buffer)
    penalised = torch.tensor([t.reward for t in trajectories], dtype=torch.float64)
    penalised = penalised + config.overlong_penalty * length_penalties
    kl_penalties = [_kl_penalties(sample, config) for sample in samples]

    if config.advantage == "gae":
        return _with_generalized_advantages(samples, penalised, kl_penalties, config)

    names, weights = list(config.reward_weights), list(config.reward_weights.values())
    parts = [[t.reward_parts.get(name, 0.0) for name in names] for t in trajectories]
    columns = torch.tensor(parts, dtype=torch.float64).reshape(len(parts), len(names))
    if config.overlong_buffer:
        columns = torch.cat([columns, length_penalties[:, None]], dim=1)
        weights.append(config.overlong_penalty)
    rewards = advantages.BatchRewards(
        totals=penalised - torch.stack([penalty.sum() for penalty in kl_penalties]),
        parts=columns,
        part_weights=weights,
        group_sizes=[len(group.trajectories) for group in groups if group.trajectories],
    )
    per_sample = advantages.sample_advantages(config, rewards)
    if config.whitens_over == "samples":
        per_sample = advantages.whiten(per_sample, config.standard_deviation)

    lengths = [sum(sample.loss_mask) for sample in samples]
    of_tokens = per_sample.repeat_interleave(torch.tensor(lengths))
    return _with_columns(samples, config, advantages=list(of_tokens.split(lengths)))


def _kl_penalties(sample: Sample, config: AlgorithmConfig) -> torch.Tensor:
    """What the reward of every sampled token loses to a KL penalty in the reward: fp64 [sampled tokens].

    Tokens that are left out as stale lose nothing: they were sampled by another policy."""
    on = torch.tensor(sample.loss_mask) > 0
    if config.kl is None or config.kl.place != "reward":
        return torch.zeros(int(on.sum()), dtype=torch.float64)

    rollout = torch.tensor(sample.rollout_log_probs, dtype=torch.float64)
    reference = torch.tensor(sample.reference_log_probs, dtype=torch.float64)
    estimates = config.kl.coefficient * kl_estimate(rollout[on], reference[on], config.kl.estimator)
    if sample.staleness is None:
        return estimates
    fresh = torch.tensor(sample.staleness)[on] <= config.max_staleness
    return torch.where(fresh, estimates, 0.0)


def _with_generalized_advantages(
    samples: Sequence[Sample], rewards: torch.Tensor, penalties: list[torch.Tensor], config: AlgorithmConfig
) -> list[Sample]:
    lengths = [len(penalty) for penalty in penalties]
    shape = (len(samples), max(1, *lengths))
    token_rewards = torch.zeros(shape, dtype=torch.float64)
    values = torch.zeros(shape, dtype=torch.float64)
    for i, (sample, penalty) in enumerate(zip(samples, penalties, strict=True)):
        if lengths[i] == 0:
            continue
        token_rewards[i, : lengths[i]] = -penalty
        token_rewards[i, lengths[i] - 1] += rewards[i]
        of_tokens = torch.tensor(sample.values, dtype=torch.float64)
        values[i, : lengths[i]] = of_tokens[torch.tensor(sample.loss_mask) > 0]

    both = advantages.generalized_advantages(token_rewards, values, config.gamma, config.gae_lambda)
    columns = dict(zip(("advantages", "returns"), both, strict=True))
    cut = {name: [row[:n] for row, n in zip(rows, lengths, strict=True)] for name, rows in columns.items()}
    return _with_columns(samples, config, **cut)


def _with_columns(samples: Sequence[Sample], config: AlgorithmConfig, **columns: list[torch.Tensor]) -> list[Sample]:
    """The samples with per-token columns that are given for their loss tokens only; advantages whitened over tokens if
    wanted."""
    if config.whitens_over == "tokens":
        lengths = [len(part) for part in columns["advantages"]]
        whitened = advantages.whiten(torch.cat(columns["advantages"]), config.standard_deviation)
        columns["advantages"] = list(whitened.split(lengths))

    out = []
    for i, sample in enumerate(samples):
        on = np.asarray(sample.loss_mask) > 0
        rows: dict[str, Any] = {name: np.zeros(len(on)) for name in columns}
        for name, row in rows.items():
            row[on] = columns[name][i].numpy()
        out.append(replace(sample, **rows))
    return out


def has_signal(group: TrajectoryGroup, config: AlgorithmConfig) -> bool:
    """Whether the episodes of a task differ in what a group-relative ``config.advantage`` compares, and any of them is
    trained on: what dynamic sampling keeps.

    That is the reward, and with gdpo every weighted part of it, without penalties on length and KL: as in DAPO, these
    shape the advantages of a task but are no reason to train on it."""
    if all(trajectory.excluded or not trajectory.sampled_tokens for trajectory in group.trajectories):
        return False

    columns = [[trajectory.reward for trajectory in group.trajectories]]
    if config.advantage == "gdpo":
        compared = [name for name, weight in config.reward_weights.items() if weight != 0]
        columns = [[t.reward_parts.get(name, 0.0) for t in group.trajectories] for name in compared]
    return not all(advantages.are_equal(torch.tensor(column, dtype=torch.float64)) for column in columns)


def signal_metrics(metrics: StepMetrics, groups: Sequence[TrajectoryGroup], samples: Sequence[Sample]) -> None:
    """In how many groups no token that is trained on has an advantage: nothing is learned from them. ``samples``: of
    the groups' episodes, in order, with advantages."""
    remaining = iter(samples)
    silent = 0
    for group in groups:
        of_group = [next(remaining) for _ in group.trajectories]
        silent += not any(np.any(np.asarray(s.advantages)[np.asarray(s.loss_mask) > 0]) for s in of_group)
    metrics.add_mean(Name.GROUPS_WITHOUT_SIGNAL, silent, len(groups), "groups")


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
    lost_episodes(metrics, groups, prefix="rollout")


def lost_episodes(metrics: StepMetrics, groups: Sequence[TrajectoryGroup], prefix: str) -> None:
    """How many episodes infrastructure failures ended, by what failed, and how many tasks could not be run."""
    invalid = [episode.invalid for group in groups for episode in group.invalid]
    episodes = len(invalid) + sum(len(group.trajectories) for group in groups)
    for component in COMPONENTS:
        failed = sum(reason is not None and reason.component == component for reason in invalid)
        metrics.add_mean(f"{prefix}/invalid/{component}", failed, episodes, "sequences")
    skipped = sum(group.skipped is not None for group in groups)
    metrics.add_mean(f"{prefix}/skipped_tasks", skipped, len(groups), "groups")


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
