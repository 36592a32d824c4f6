"""The episodes of one training step, and what the trainer says of them. Plain data."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from megatron_gptoss.packing import Sample
from megatron_gptoss.trainer import StepStatistics
from rl_loop.data.trajectory import Trajectory, TrajectoryGroup


@dataclass(frozen=True)
class RolloutBatch:
    """The episodes of one step."""

    train: list[TrajectoryGroup]
    """``rollout.tasks_per_step`` groups to train on."""
    held_out: list[TrajectoryGroup]
    """Groups of the evaluation, where one was asked for."""
    replaced: int | None
    """Groups without signal that dynamic sampling left out; None without dynamic sampling."""
    next_task: int
    """Position of the first training task that is still to be used."""

    @property
    def episodes(self) -> list[Trajectory]:
        """All episodes to train on, group by group."""
        return [trajectory for group in self.train for trajectory in group.trajectories]


@dataclass(frozen=True)
class TokenEstimates:
    """What advantages need besides rewards: one list per sample, one number per
    token, 0.0 for the first."""

    values: list[list[float]] | None = None
    """The critic's; None without a critic."""
    reference_log_probs: list[list[float]] | None = None
    """The reference policy's, in nats; None without a KL penalty."""

    def attach(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return the samples with these columns."""
        attached = list(samples)
        if self.values is not None:
            attached = [
                replace(sample, values=row)
                for sample, row in zip(attached, self.values, strict=True)
            ]
        if self.reference_log_probs is not None:
            rows = self.reference_log_probs
            attached = [
                replace(sample, reference_log_probs=row)
                for sample, row in zip(attached, rows, strict=True)
            ]
        return attached


@dataclass
class RlUpdates:
    """The optimizer steps of one training step; none of the policy while the critic warms up."""

    policy: list[StepStatistics] = field(default_factory=list)
    """One for every mini-batch that had a token to learn from."""
    critic: list[StepStatistics] = field(default_factory=list)
    """The same of the critic, if there is one."""
    skipped: int = 0
    """Mini-batches without a token to learn from: nothing was changed."""
