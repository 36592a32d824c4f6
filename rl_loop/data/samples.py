"""From groups of trajectories to training samples. Pure functions."""

from collections.abc import Sequence

from megatron_gptoss.packing import GRAFTED, Sample
from rl_loop.algorithms.config import AlgorithmConfig
from rl_loop.data.trajectory import Trajectory, TrajectoryGroup


class OffPolicyError(RuntimeError):
    """Tokens of older weights are about to be trained on as if they were sampled
    with the current ones."""


def to_samples(
    groups: Sequence[TrajectoryGroup], config: AlgorithmConfig, version: int
) -> list[Sample]:
    """Make one sample of every trajectory, in order, without advantages.

    ``version``: of the trainer's weights. Raises OffPolicyError if the configuration says
    on-policy and a token was sampled with older weights."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    return [_to_sample(trajectory, config, version) for trajectory in trajectories]


def _to_sample(trajectory: Trajectory, config: AlgorithmConfig, version: int) -> Sample:
    trajectory.validate()
    staleness = _staleness(trajectory, version)
    oldest = max(staleness, default=0)
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
    mask = trajectory.loss_mask
    if trajectory.excluded:
        mask = [0] * len(trajectory)

    sample = Sample(trajectory.token_ids, mask, rollout_log_probs=trajectory.rollout_log_probs)
    if any(staleness):
        sample.staleness = staleness
    if replays_engine_routes:
        sample.routed_experts = trajectory.routed_experts
    return sample


def _staleness(trajectory: Trajectory, version: int) -> list[int]:
    """How many versions older than ``version`` the weights were that sampled each token; GRAFTED
    where a token was not sampled at its place, 0 where it was not sampled."""
    staleness = [0] * len(trajectory)
    for span in trajectory.weight_versions:
        staleness[span.start : span.end] = [version - span.version] * (span.end - span.start)
    for start, end in trajectory.grafted:
        staleness[start:end] = [GRAFTED] * (end - start)
    return staleness


def max_staleness(samples: Sequence[Sample]) -> int:
    """Return the age in weight versions of the oldest token."""
    ages = [max(sample.staleness) for sample in samples if sample.staleness]
    return max(ages, default=0)
