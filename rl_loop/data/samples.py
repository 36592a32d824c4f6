"""From groups of trajectories to training samples. Pure functions."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatron_gptoss.samples import Sample, TrainingSamples
from rl_loop.algorithms.config import AlgorithmConfig
from rl_loop.data.trajectory import EPISODE_COLUMNS, Trajectory, TrajectoryGroup


class OffPolicyError(RuntimeError):
    """Tokens of older weights are about to be trained on as if they were sampled
    with the current ones."""


def to_samples(
    groups: Sequence[TrajectoryGroup], config: AlgorithmConfig, version: int
) -> TrainingSamples:
    """Lay the sequences of all trajectories end to end, in order, without advantages.

    ``version``: of the trainer's weights. Raises OffPolicyError if the configuration says
    on-policy and a token was sampled with older weights, and if one was with weights that do not
    exist yet; ValueError naming a task whose trajectory cannot be trained on."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    sequences = [sequence for trajectory in trajectories for sequence in trajectory.sequences]
    samples = TrainingSamples.join(
        [_to_sample(sequence, config, version) for sequence in sequences]
    )
    counts = [len(trajectory.sequences) for trajectory in trajectories]
    return replace(samples, episodes=np.repeat(np.arange(len(counts), dtype=np.int64), counts))


def _to_sample(trajectory: Trajectory, config: AlgorithmConfig, version: int) -> Sample:
    trajectory.validate()
    newest = max((span.version for span in trajectory.weight_versions), default=version)
    if newest > version:
        raise OffPolicyError(
            f"task {trajectory.task_id}: the engine says that weights {newest} sampled it, and the "
            f"newest that there are is {version}"
        )
    staleness = _staleness(trajectory, version)
    oldest = 0 if staleness is None else int(staleness.max())
    if oldest > 0 and config.old_log_probs_from == "detach":
        raise OffPolicyError(
            f"task {trajectory.task_id}: tokens sampled {oldest} weight versions ago would count as on-policy "
            "(importance ratio 1). With algorithm.old_log_probs rollout or forward they would be left out"
        )

    replays_engine_routes = config.routing_replay == "R3"
    if replays_engine_routes and trajectory.routed_experts is None:
        raise ValueError(
            f"task {trajectory.task_id}: routing_replay R3, and the episode has no routes"
        )

    # An excluded episode stays in the batch, so that its group's mean counts it, but no token
    # learns.
    columns = {name: getattr(trajectory, name) for name in EPISODE_COLUMNS}
    if trajectory.excluded:
        columns["loss_mask"] = np.zeros_like(trajectory.loss_mask)
    columns["staleness"] = staleness
    columns["is_grafted"] = _is_grafted(trajectory)

    return Sample(
        **columns,
        routed_experts=trajectory.routed_experts if replays_engine_routes else None,
        name=trajectory.task_id,
    )


def _staleness(trajectory: Trajectory, version: int) -> np.ndarray | None:
    """Return how many versions older than ``version`` the weights were that sampled each token:
    int32 [tokens], 0 where a token was not sampled at its place. None if all are current."""
    if all(span.version == version for span in trajectory.weight_versions):
        return None

    staleness = np.zeros(len(trajectory), dtype=np.int32)
    for span in trajectory.weight_versions:
        staleness[span.start : span.end] = version - span.version
    # No weights sampled a grafted token where it stands, so its log-prob has no age.
    for start, end in trajectory.grafted:
        staleness[start:end] = 0
    return staleness if staleness.any() else None


def _is_grafted(trajectory: Trajectory) -> np.ndarray | None:
    """Mark the tokens that were sampled in another context: bool [tokens]; None if none was."""
    if not trajectory.grafted:
        return None
    is_grafted = np.zeros(len(trajectory), dtype=np.bool_)
    for start, end in trajectory.grafted:
        is_grafted[start:end] = True
    return is_grafted


def max_staleness(samples: TrainingSamples) -> int:
    """Return the age in weight versions of the oldest token."""
    if samples.staleness is None or samples.tokens == 0:
        return 0
    return max(0, int(samples.staleness.max()))
