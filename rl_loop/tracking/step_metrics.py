"""Metrics of the episodes and updates of one step."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from megatron_gptoss.samples import TrainingSamples
from megatron_gptoss.step_results import SharedTokens, StepStatistics
from rl_loop.algorithms.config import AlgorithmConfig
from rl_loop.algorithms.objectives import LOSS_METRICS, STALENESS_CLASSES
from rl_loop.algorithms.policy_loss import kl_estimate
from rl_loop.data.credit import compared_with_teacher, teacher_gains
from rl_loop.data.rollout_batch import AsyncGroups, RlUpdates
from rl_loop.data.shaping import shaping_terms
from rl_loop.data.trajectory import FinishReason, Trajectory, TrajectoryGroup
from rl_loop.infrastructure import COMPONENTS
from rl_loop.tracking.metrics import MetricName, StepMetrics

PER_TOKEN = ("entropy", "clip_fraction", "ratio/", "correction/", "kl_reference", LOSS_METRICS)
"""Name prefixes of sums over all loss tokens."""

USED_SUMS = (
    *("loss", "tokens", "comparable", "teacher_tokens", "sequences"),
    *("routes_agreeing", "routes_compared"),
)
"""Sums of the policy's update that are divisors, or are plotted under another name."""

SPEEDS = ("tokens_per_second_per_gpu", "tflops_per_gpu", "mfu")
"""Fields of StepStatistics that are None if they were not measured."""


# -- episodes -------------------------------------------------------------------------------------


def outcome_sums(episodes: Sequence[Trajectory]) -> dict[str, float]:
    """Return the sums of the episodes' main metrics."""
    return {
        MetricName.REWARD: sum(episode.reward for episode in episodes),
        MetricName.ACCURACY: sum(episode.reward_parts["correct"] for episode in episodes),
        MetricName.TOOL_CALL_RATE: sum(
            any(sequence.tool_calls > 0 for sequence in episode.sequences) for episode in episodes
        ),
        MetricName.TURNS: sum(episode.episode_assistant_turns for episode in episodes),
    }


def add_rollout_metrics(metrics: StepMetrics, groups: Sequence[TrajectoryGroup]) -> None:
    """Add the metrics of a step's episodes."""
    episodes = [trajectory for group in groups for trajectory in group.trajectories]
    sums = outcome_sums(episodes)
    sums[MetricName.RESPONSE_TOKENS] = sum(episode.episode_sampled_tokens for episode in episodes)
    sums["rollout/tool_errors"] = sum(episode.tool_errors for episode in episodes)
    sums["rollout/purified_turns"] = sum(len(episode.spliced) for episode in episodes)
    for reason in FinishReason:
        sums[f"finish/{reason}"] = sum(episode.finish_reason is reason for episode in episodes)
    # Plot only kinds of errors that occurred, because there are many kinds.
    sums |= Counter(
        f"format_error/{e.format_error}" for e in episodes if e.format_error is not None
    )
    for name, total in sums.items():
        metrics.add_mean(name, total, len(episodes), "sequences")

    _add_reward_parts(metrics, episodes, prefix="")

    sequences = [sequence for episode in episodes for sequence in episode.sequences]
    reusable = sum(sequence.reusable_tokens for sequence in sequences)
    # Without tokens to reuse, as in episodes of one turn, there is no hit rate.
    if reusable > 0:
        cached = sum(sequence.cached_tokens for sequence in sequences)
        metrics.add_mean("rollout/cache_hit_rate", cached, reusable, "tokens")
    add_invalid_episodes(metrics, groups, prefix="rollout")


def add_held_out_metrics(metrics: StepMetrics, groups: Sequence[TrajectoryGroup]) -> None:
    """Add the metrics of an evaluation's episodes."""
    episodes = [trajectory for group in groups for trajectory in group.trajectories]
    add_invalid_episodes(metrics, groups, prefix="held_out")
    if not episodes:
        return
    for name, total in outcome_sums(episodes).items():
        metrics.add_mean(f"held_out/{name}", total, len(episodes), "sequences")
    _add_reward_parts(metrics, episodes, prefix="held_out/")


def _add_reward_parts(metrics: StepMetrics, episodes: Sequence[Trajectory], prefix: str) -> None:
    """Add the mean of every reward part. ``prefix`` precedes the names of the metrics."""
    # Some parts exist in some environments only. Average them over the episodes that have them.
    known = {"correct", "format_error"}
    parts = {part for episode in episodes for part in episode.reward_parts} - known
    for part in parts:
        rewards = [
            episode.reward_parts[part] for episode in episodes if part in episode.reward_parts
        ]
        metrics.add_mean(f"{prefix}reward/{part}", sum(rewards), len(rewards), "sequences")


def add_invalid_episodes(
    metrics: StepMetrics, groups: Sequence[TrajectoryGroup], prefix: str
) -> None:
    """Add the shares of invalid episodes, by cause, and of skipped tasks.

    Args:
        metrics: metrics of the step.
        groups: groups of the step.
        prefix: prefix of the names.
    """
    causes = [episode.invalid for group in groups for episode in group.invalid]
    invalid = [cause for cause in causes if cause is not None]
    episodes = len(causes) + sum(len(group.trajectories) for group in groups)

    name = f"{prefix}/invalid_fraction"
    # Plot components without failures as 0, so that their curves begin before the first failure.
    shares = Counter({name: len(causes)} | {f"{name}/{component}": 0 for component in COMPONENTS})
    shares.update(f"{name}/{reason.component}" for reason in invalid)
    # Plot only sources of failures that occurred. They are names of servers and functions.
    shares.update(
        f"{name}/{reason.component}/{_curve_name(reason.failure_source)}"
        for reason in invalid
        if reason.failure_source
    )
    for share, failed in shares.items():
        metrics.add_mean(share, failed, episodes, "sequences")

    skipped = sum(group.skipped is not None for group in groups)
    metrics.add_mean(f"{prefix}/skipped_tasks", skipped, len(groups), "groups")


def _curve_name(failure_source: str) -> str:
    """Replace the characters of a source's name that are not allowed in names of metrics."""
    return re.sub(r"[^A-Za-z0-9.-]+", "_", failure_source).strip("_")[:80] or "unnamed"


def add_zero_advantage_fraction(
    metrics: StepMetrics, groups: Sequence[TrajectoryGroup], samples: TrainingSamples
) -> None:
    """Add the share of groups in which the advantages of all loss tokens are 0.

    Args:
        metrics: metrics of the step.
        groups: groups of the step.
        samples: samples of the groups' episodes, in order, with advantages.
    """
    assert samples.advantages is not None
    without_signal = 0
    first = 0
    for group in groups:
        # Samples have the order of the groups' sequences.
        last = first + len(group.sequences)
        tokens = slice(int(samples.offsets[first]), int(samples.offsets[last]))
        # Advantages of equal rewards are exactly 0, see `rl_loop.algorithms.advantages`.
        has_advantage = samples.advantages[tokens] != 0
        without_signal += not (has_advantage & samples.loss_mask[tokens]).any()
        first = last
    metrics.add_mean(MetricName.ZERO_ADVANTAGE_FRACTION, without_signal, len(groups), "groups")


def add_shaping_metrics(
    metrics: StepMetrics, groups: Sequence[TrajectoryGroup], algorithm: AlgorithmConfig
) -> None:
    """Add the mean of every shaping term with its weight."""
    columns = shaping_terms(groups, algorithm).unbind(dim=1)
    for (name, term), column in zip(algorithm.shaping.items(), columns, strict=True):
        total = term.weight * column.sum().item()
        metrics.add_mean(f"shaping/{name}", total, len(column), "sequences")


def add_teacher_metrics(metrics: StepMetrics, samples: TrainingSamples) -> None:
    """Add the distance to the teacher, from samples with the teacher's log-probs.

    It is the k1 estimate of KL(policy || teacher) at the sampling temperature, in nats per token.
    """
    compared = compared_with_teacher(samples)
    total = -teacher_gains(samples)[compared].sum()
    metrics.add_mean(MetricName.TEACHER_KL, total, compared.sum(), "tokens")


def add_staleness_metrics(
    metrics: StepMetrics,
    async_groups: AsyncGroups,
    episodes: Sequence[Trajectory],
    samples: TrainingSamples,
) -> None:
    """Add the number of asynchronous groups, and the staleness of the step's tokens.

    Args:
        metrics: metrics of the step.
        async_groups: groups of later steps.
        episodes: episodes of the step.
        samples: token sequences of ``episodes``, in order.
    """
    metrics.add("rollout/async_groups", async_groups.groups, "last")
    metrics.add("rollout/async_groups_ended", async_groups.ended, "last")

    staleness = 0
    if samples.staleness is not None:
        staleness = int(samples.staleness[samples.loss_mask].sum())
    sampled = int(np.count_nonzero(samples.loss_mask))
    metrics.add_mean("rollout/staleness_mean", staleness, sampled, "tokens")
    versions = 0
    for episode in episodes:
        spans = [span for sequence in episode.sequences for span in sequence.weight_versions]
        versions += len({span.version for span in spans})
    metrics.add_mean("rollout/versions_per_episode", versions, len(episodes), "sequences")
    recomputed = sum(episode.recomputed_tokens for episode in episodes)
    metrics.add("rollout/recomputed_tokens", recomputed, "sum", "sequences")


def add_mismatch_without_replay(
    metrics: StepMetrics, samples: TrainingSamples, scores: np.ndarray
) -> None:
    """Add the mismatch of a trainer without routing replay.

    Args:
        metrics: metrics of the step.
        samples: samples of the step.
        scores: the trainer's log-probs with its own choice of experts, in nats, float32 [tokens].
    """
    assert samples.rollout_log_probs is not None
    rollout = torch.from_numpy(samples.rollout_log_probs[samples.loss_mask])
    scored = torch.from_numpy(scores[samples.loss_mask])
    # A step has millions of tokens, whose sum would lose digits in fp32.
    k3 = kl_estimate(rollout, scored, "k3").sum(dtype=torch.float64)
    metrics.add_mean("routing/kl_k3_without_replay", float(k3), len(rollout), "tokens")


# -- updates --------------------------------------------------------------------------------------


def add_update_metrics(metrics: StepMetrics, updates: RlUpdates) -> None:
    """Add the metrics of policy's and critic's optimizer steps."""
    # During the critic's warm-up there are no updates of the policy, and its curves have gaps.
    for update in updates.policy:
        _add_policy_update(metrics, update)
    for update in updates.critic:
        _add_critic_update(metrics, update)
    metrics.add("skipped_updates", updates.skipped, "sum")
    if updates.shared_tokens is not None:
        _add_shared_tokens(metrics, updates.shared_tokens)


def _add_policy_update(metrics: StepMetrics, update: StepStatistics) -> None:
    sums = update.sums
    metrics.add_mean(MetricName.LOSS, sums["loss"], 1, "updates")
    for name, total in sums.items():
        if name == "mismatch/log_perplexity_gap_mean":
            metrics.add_mean(name, total, sums["sequences"], "sequences")
        # Spliced tokens are not compared, so the divisor is smaller.
        elif name.startswith("mismatch/"):
            metrics.add_mean(name, total, sums["comparable"], "tokens")
        elif name.startswith("distillation/"):
            metrics.add_mean(name, total, sums["teacher_tokens"], "tokens")
        elif name.startswith(PER_TOKEN):
            metrics.add_mean(name, total, sums["tokens"], "tokens")
        elif name not in USED_SUMS and not name.startswith(STALENESS_CLASSES):
            raise ValueError(
                f"sums of the policy's update: unknown name {name!r}. Return metrics of a loss in "
                "PolicyLoss.sums, or add the name to rl_loop/tracking/step_metrics.py"
            )
    if "routes_compared" in sums:
        metrics.add_mean(
            "routing/agreement", sums["routes_agreeing"], sums["routes_compared"], "routes"
        )
    for staleness in STALENESS_CLASSES:
        _add_metrics_by_staleness(metrics, staleness, sums)

    for name, value in update.maxima.items():
        metrics.add(name, value, "max", "tokens")
    add_optimizer_metrics(metrics, update)


def _add_metrics_by_staleness(
    metrics: StepMetrics, staleness: str, sums: Mapping[str, float]
) -> None:
    """Add the metrics of the fresh or the stale tokens, if there are any."""
    tokens = sums.get(f"{staleness}/tokens", 0)
    if tokens == 0:
        return
    for name in ("kl_k3", "weight", "ratio"):
        metrics.add_mean(f"{staleness}/{name}", sums[f"{staleness}/{name}"], tokens, "tokens")

    # (sum w)^2 / (n sum w^2): 1 if all weights are equal, 1 / n if one token outweighs all others.
    share = sums[f"{staleness}/weight"] ** 2 / (tokens * sums[f"{staleness}/weight_square"])
    metrics.add_mean(f"{staleness}/effective_sample_size", share, 1, "updates")


def _add_critic_update(metrics: StepMetrics, update: StepStatistics) -> None:
    sums = update.sums
    tokens = sums["tokens"]
    metrics.add_mean("critic/loss", sums["loss"], 1, "updates")
    metrics.add_mean("critic/clip_fraction", sums["clipped"], tokens, "tokens")
    metrics.add("critic/grad_norm", update.grad_norm, "last")

    # Sums over all ranks and micro-batches give the same value for any split. Equal returns have no
    # variance to explain.
    variance = sums["returns_square"] / tokens - (sums["returns"] / tokens) ** 2
    if variance > 1e-12:
        explained = 1 - sums["error"] / tokens / variance
        metrics.add_mean("critic/explained_variance", explained, 1, "updates")


def add_optimizer_metrics(metrics: StepMetrics, update: StepStatistics) -> None:
    """Add the metrics that every optimizer step has, for any loss."""
    metrics.add(MetricName.GRAD_NORM, update.grad_norm, "last")
    metrics.add(MetricName.LEARNING_RATE, update.learning_rate, "last")
    metrics.add("skipped_updates", not update.parameters_updated, "sum")
    for name in SPEEDS:
        speed = getattr(update, name)
        if speed is not None:
            metrics.add(f"trainer/{name}", speed, "last")
    if update.shared_tokens is not None:
        _add_shared_tokens(metrics, update.shared_tokens)
    if update.expert_loads is not None:
        metrics.add("routing/load_min", update.expert_loads.smallest, "last")
        metrics.add("routing/load_max", update.expert_loads.largest, "last")
    if update.load_balancing_loss is not None:
        metrics.add("routing/load_balancing_loss", update.load_balancing_loss, "last")
    for part, seconds in update.seconds_by_part.items():
        metrics.add(f"trainer/seconds_{part}", seconds, "sum")
    for name, gigabytes in update.memory.items():
        metrics.add(f"memory/{name}", gigabytes, "max", "GPUs")


def _add_shared_tokens(metrics: StepMetrics, shared: SharedTokens) -> None:
    """Add the share of tokens that were not computed, and the conflicts of routes."""
    saved = shared.tokens - shared.computed
    metrics.add_mean("prefixes/saved_tokens", saved, shared.tokens, "tokens")
    metrics.add_mean("prefixes/route_conflicts", shared.route_conflicts, shared.tokens, "tokens")
