"""Episodes of one training step, and the results of training on them. Plain data."""

from dataclasses import dataclass, field

from megatron_gptoss.step_results import SharedTokens, StepStatistics
from rl_loop.data.response_check import TrainedTokens
from rl_loop.data.trajectory import Trajectory, TrajectoryGroup


@dataclass(frozen=True)
class AsyncGroups:
    """Progress of later steps at the time when a step's groups were collected."""

    groups: int
    """Number of groups that have begun."""
    ended: int
    """Number of these groups that have ended."""


@dataclass(frozen=True)
class RolloutBatch:
    """The episodes of one step."""

    train: list[TrajectoryGroup]
    """``rollout.tasks_per_step`` groups to train on."""
    held_out: list[TrajectoryGroup]
    """Groups of the evaluation. Empty without an evaluation in this step."""
    replaced: list[TrajectoryGroup] | None
    """Groups with equal rewards that dynamic sampling replaced, without their routes. None without
    dynamic sampling."""
    next_task: int
    """Position of the next training task."""
    skipped_tasks: int = 0
    """Number of tasks that the step left out because of their pass rates in earlier steps."""
    async_groups: AsyncGroups | None = None
    """Groups of later steps. None without asynchronous rollouts."""

    @property
    def episodes(self) -> list[Trajectory]:
        """Episodes to train on, ordered by group."""
        return [trajectory for group in self.train for trajectory in group.trajectories]

    @property
    def sequences(self) -> list[Trajectory]:
        """Token sequences to train on. An episode has one or more."""
        return [sequence for group in self.train for sequence in group.sequences]


@dataclass
class RlUpdates:
    """Optimizer steps of one training step. While the critic warms up, the policy has none."""

    policy: list[StepStatistics] = field(default_factory=list)
    """Statistics of the policy for every mini-batch with a token in the loss."""
    critic: list[StepStatistics] = field(default_factory=list)
    """Statistics of the critic for the same mini-batches."""
    skipped: int = 0
    """Number of mini-batches without a token in the loss, which change no weights."""
    tokens: TrainedTokens | None = None
    """Per-token results. None without updates of the policy."""
    shared_tokens: SharedTokens | None = None
    """Tokens that were saved. None if sequences share no prefixes."""
