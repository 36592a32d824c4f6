"""Conversion of trajectories to training samples. Pure functions."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from megatron_gptoss.samples import NO_TEACHER, ROUTES, TrainingSamples
from rl_loop.algorithms.config import AlgorithmConfig
from rl_loop.data.trajectory import Trajectory, TrajectoryGroup


class OffPolicyError(RuntimeError):
    """Tokens of older weights would be trained on as if the current weights had sampled them."""


def to_samples(
    groups: Sequence[TrajectoryGroup],
    config: AlgorithmConfig,
    version: int,
    teacher_of_source: Mapping[str, int] | None = None,
) -> TrainingSamples:
    """Lay the sequences of all trajectories end to end, in order, without advantages.

    Args:
        groups: episodes of a step.
        config: the algorithm.
        version: weight version of the trainer.
        teacher_of_source: index of the teacher by task source, or NO_TEACHER. None if the only
            teacher scores all sequences.

    Raises:
        OffPolicyError: the algorithm is on-policy and older weights sampled a token, or the weight
            version of a token does not exist yet.
        ValueError: a trajectory cannot be trained on. The message names its task.
    """
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    sequences = [sequence for trajectory in trajectories for sequence in trajectory.sequences]
    samples = TrainingSamples.join(
        [_columns(sequence, config, version) for sequence in sequences],
        names=[sequence.task_id for sequence in sequences],
    )
    # Losses that average over episodes need to know the sequences of each one.
    counts = [len(trajectory.sequences) for trajectory in trajectories]
    group_counts = [len(group.sequences) for group in groups]
    samples = replace(
        samples, episodes=_repeat_indices(counts), groups=_repeat_indices(group_counts)
    )
    samples = replace(samples, teacher_views=_teacher_views(samples, sequences))
    if teacher_of_source is None:
        return samples
    # A source without an entry raises KeyError, so that no other teacher scores its tokens.
    teachers = np.array([teacher_of_source[group.source] for group in groups], dtype=np.int64)
    return _with_teachers(samples, np.repeat(teachers, group_counts))


def _teacher_views(
    samples: TrainingSamples, sequences: Sequence[Trajectory]
) -> TrainingSamples | None:
    """Return the sequences as their teachers see them. None if all see the policy's prompt.

    The tokens after the prompt are the very ids of the policy's sequence.
    """
    if all(sequence.teacher_prompt is None for sequence in sequences):
        return None
    views = []
    for sequence, loss_mask in zip(sequences, samples.rows("loss_mask"), strict=True):
        ids = sequence.token_ids
        if sequence.teacher_prompt is not None:
            prompt, start = sequence.teacher_prompt, sequence.turns[0].end
            ids = np.concatenate([prompt, ids[start:]])
            loss_mask = np.concatenate([np.zeros(len(prompt), np.bool_), loss_mask[start:]])
        views.append({"token_ids": ids, "loss_mask": loss_mask})
    return replace(TrainingSamples.join(views, names=samples.names), groups=samples.groups)


def _with_teachers(samples: TrainingSamples, teachers: np.ndarray) -> TrainingSamples:
    """Return the samples with the teacher of each sequence, int64 [samples]."""
    samples = replace(samples, teachers=teachers)
    if (teachers != NO_TEACHER).all():
        return samples
    return samples.with_columns(has_teacher=np.repeat(teachers != NO_TEACHER, samples.lengths))


def _repeat_indices(counts: Sequence[int]) -> np.ndarray:
    """Return int64 [sum of ``counts``]: 0 as often as the first count, then 1, ..."""
    return np.repeat(np.arange(len(counts), dtype=np.int64), counts)


def _columns(trajectory: Trajectory, config: AlgorithmConfig, version: int) -> dict[str, Any]:
    """Return {name: column} of a sequence with the columns that the driver fills, and its routes.

    Raises:
        OffPolicyError: see ``to_samples``.
        ValueError: see ``to_samples``.
    """
    trajectory.validate()
    # Tokens without a reported version count as current.
    newest = max((span.version for span in trajectory.weight_versions), default=version)
    # Training would take these tokens for newer than the weights that are updated.
    if newest > version:
        raise OffPolicyError(
            f"task {trajectory.task_id}: the engine reports weight version {newest}, but the trainer "
            f"has only sent versions up to {version}. Correct the engine's weight_versions"
        )
    staleness = _staleness(trajectory, version)
    oldest = 0 if staleness is None else int(staleness.max())
    if oldest > 0 and config.old_log_probs_from == "detach":
        raise OffPolicyError(
            f"task {trajectory.task_id}: tokens sampled {oldest} weight versions ago would count "
            "as on-policy (importance ratio 1). Set algorithm.old_log_probs to rollout or "
            "forward, which leave such tokens out"
        )

    columns: dict[str, Any] = trajectory.columns
    if staleness is not None:
        columns["staleness"] = staleness
    if trajectory.spliced or trajectory.constrained:
        columns["is_off_policy"] = _is_off_policy(trajectory)
    # An excluded episode stays in the batch, because the mean of its group counts it. No token of
    # it is trained on.
    if trajectory.excluded:
        columns["loss_mask"] = np.zeros_like(trajectory.loss_mask)

    # Without replay, routes would only take memory.
    if config.routing_replay == "R3":
        if trajectory.routed_experts is None:
            raise ValueError(
                f"task {trajectory.task_id}: algorithm.routing_replay=R3 needs the expert routes of the "
                "engine, but the episode has none. Set routing_replay=none, or use an engine that "
                "returns routes"
            )
        columns[ROUTES] = trajectory.routed_experts
    return columns


def _staleness(trajectory: Trajectory, version: int) -> np.ndarray | None:
    """Return the policy lag of each token: int32 [tokens]. None if all are current.

    Tokens that were not sampled at their place have 0.
    """
    if all(span.version == version for span in trajectory.weight_versions):
        return None

    staleness = np.zeros(len(trajectory), dtype=np.int32)
    for span in trajectory.weight_versions:
        staleness[span.start : span.end] = version - span.version
    # A spliced token was not sampled at its place, so its log-prob has no policy lag.
    for start, end in trajectory.spliced:
        staleness[start:end] = 0
    return staleness if staleness.any() else None


def _is_off_policy(trajectory: Trajectory) -> np.ndarray:
    """Return a mask of the tokens that are not samples of the policy at their place: bool [tokens]."""
    is_off_policy = np.zeros(len(trajectory), dtype=np.bool_)
    for start, end in (*trajectory.spliced, *trajectory.constrained):
        is_off_policy[start:end] = True
    return is_off_policy


def max_staleness(samples: TrainingSamples) -> int:
    """Return the largest policy lag of a token, in weight versions."""
    if samples.staleness is None or samples.tokens == 0:
        return 0
    return max(0, int(samples.staleness.max()))
