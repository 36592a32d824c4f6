"""Collects the groups of episodes that each step trains on.

A step trains on ``rollout.tasks_per_step`` groups. They are always groups of this step's tasks:

- **Asynchronous rollouts.** The groups of step s begin when the engines have weights of version s - k or
  later, where k is ``algorithm.max_staleness``. Therefore no token is older than k versions. If an
  episode is not complete after these k steps, the trainer waits for it.
- **Selection by pass rate.** A step skips tasks whose pass rates in earlier steps were outside of limits
  (``rl_loop.tasks.pass_rates``).
- **Dynamic sampling** (DAPO, arXiv 2503.14476). Groups that a filter rejects are replaced by groups
  of further tasks, in rounds of ``tasks_per_step`` tasks. The number of tasks that a step uses is
  known when its last round has ended. The next step begins only then.

All seeds follow from the run's seed and the number of a group. Therefore a resumed run samples the
same groups as an uninterrupted run.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Condition, Thread
from typing import Protocol

from rl_loop.algorithms.config import AlgorithmConfig
from rl_loop.config.rollout import RolloutConfig
from rl_loop.data.credit import rewards_differ
from rl_loop.data.rollout_batch import AsyncGroups, RolloutBatch
from rl_loop.data.trajectory import TrajectoryGroup
from rl_loop.environments import Task
from rl_loop.infrastructure import CircuitBreaker
from rl_loop.rollout.group_store import FinishedGroups
from rl_loop.rollout.group_stream import (
    POLL_SECONDS,
    GroupRequest,
    GroupRunner,
    OnEnded,
    RolloutsAbandoned,
    check_groups,
)


class TrainingTasks(Protocol):
    """Training tasks by position: a TaskMixture."""

    def select(self, position: int, count: int, step: int) -> list[int]: ...

    def train(self, position: int, count: int) -> list[Task]: ...


class HeldOutTasks(Protocol):
    """Tasks of the evaluation: a TaskMixture."""

    def held_out(self) -> list[Task]: ...


def held_out_requests(
    tasks: HeldOutTasks, temperature: float, *, with_routes: bool = False
) -> list[GroupRequest]:
    """Request one episode of every held-out task. The seeds are the same in every call.

    Args:
        tasks: source of the tasks.
        temperature: sampling temperature.
        with_routes: whether to return the experts that the engine chose.
    """
    return [
        GroupRequest(task, (i,), temperature, with_routes=with_routes)
        for i, task in enumerate(tasks.held_out())
    ]


@dataclass(frozen=True)
class TrainingRequests:
    """Requests for groups to train on."""

    tasks: TrainingTasks
    rollout: RolloutConfig
    """Numbers of tasks and samples, and limits for invalid episodes."""
    seed: int
    """Seed of the run."""

    def for_group(self, number: int, position: int) -> GroupRequest:
        """Request the episodes of a group.

        Args:
            number: number of the group, from which the seeds follow.
            position: position of the task.
        """
        (task,) = self.tasks.train(position, 1)
        # The factors exceed the numbers of places and samples, so that all seeds differ.
        block, place = divmod(number, self.rollout.tasks_per_step)
        base = ((self.seed * 1_000_003 + block) * 1_000_003 + place) * 1_000
        seeds = tuple(range(base, base + self.rollout.samples_per_task))
        return GroupRequest(task, seeds, self.rollout.temperature, purify=True, with_routes=True)


@dataclass
class StepGroups:
    """The groups of one step while they run."""

    step: int
    """Number of the step, from 0."""
    first_task: int
    """Position from which on the step takes tasks."""
    first_number: int
    """Number of the step's first group."""
    groups_per_round: int
    max_rounds: int
    keep: Callable[[TrajectoryGroup], bool]
    """Filter: returns True for a group that is worth training on."""
    positions: list[int] = field(default_factory=list)
    """Positions of the tasks. The n-th group of a step has its n-th task."""
    start_versions: dict[int, int] = field(default_factory=dict)
    """Version of the engines' weights when a group began, by its number."""
    ended: dict[int, TrajectoryGroup] = field(default_factory=dict)
    """Ended groups by number."""

    @property
    def round_is_over(self) -> bool:
        """True if all groups that have begun have ended."""
        return len(self.ended) == len(self.start_versions)

    @property
    def kept(self) -> list[int]:
        """Numbers of the ended groups that the filter keeps, in the order of their tasks."""
        return [number for number in sorted(self.ended) if self.keep(self.ended[number])]

    @property
    def needs_another_round(self) -> bool:
        """True if too few groups were kept and a further round is allowed."""
        rounds = len(self.start_versions) // self.groups_per_round
        return (
            self.round_is_over
            and rounds < self.max_rounds
            and len(self.kept) < self.groups_per_round
        )

    @property
    def is_complete(self) -> bool:
        """True if the step can train."""
        return bool(self.start_versions) and self.round_is_over and not self.needs_another_round

    @property
    def used(self) -> int | None:
        """Number of tasks that the step uses. None while it is unknown."""
        if self.max_rounds == 1:
            return self.groups_per_round
        if not self.is_complete:
            return None
        # If the filter kept enough groups, tasks after the last used one come again in the next
        # step, with new episodes.
        if len(self.kept) >= self.groups_per_round:
            return self.chosen[-1] - self.first_number + 1
        return len(self.ended)

    @property
    def next_task(self) -> int | None:
        """Position of the next step's first task. None while it is unknown."""
        return None if self.used is None else self.positions[self.used - 1] + 1

    @property
    def skipped_tasks(self) -> int:
        """Number of tasks before the next step's first task that the step left out."""
        assert self.used is not None, "the step is not complete"
        return self.positions[self.used - 1] + 1 - self.first_task - self.used

    @property
    def chosen(self) -> list[int]:
        """Numbers of the groups to train on.

        After the last round, rejected groups replace missing ones.
        """
        kept = self.kept
        rejected = [number for number in sorted(self.ended) if number not in kept]
        return (kept + rejected)[: self.groups_per_round]

    @property
    def replaced(self) -> list[TrajectoryGroup]:
        """Rejected groups that are not trained on, because others replace them. Without routes."""
        assert self.used is not None, "the step is not complete"
        # Groups after the next step's first task are left out: their tasks come again there.
        end = self.first_number + self.used
        left_out = set(self.ended) - set(self.chosen) - set(self.kept)
        # Ray's store would hold the routes until the step is recorded.
        return [self.ended[number].without_routes() for number in sorted(left_out) if number < end]


class RolloutCollector:
    """Runs groups of a step and of the next ``max_staleness`` steps.

    Held-out episodes begin and end between two syncs. A thread of the collector takes ended groups
    and begins further ones, so that rollouts continue while the trainer works.
    """

    def __init__(
        self,
        runner: GroupRunner,
        requests: TrainingRequests,
        algorithm: AlgorithmConfig,
        *,
        steps: int,
        first_step: int = 0,
        first_task: int = 0,
        finished: FinishedGroups | None = None,
        abandon: Callable[[], bool] = lambda: False,
        on_ended: OnEnded = lambda ended, wanted: None,
    ) -> None:
        """Collect the groups of a run from a step on.

        Args:
            runner: runs the groups.
            requests: requests for training groups.
            algorithm: ``max_staleness``, ``dynamic_sampling_rounds`` and the advantage.
            steps: steps in the whole run. No group of a later step begins.
            first_step: step that is collected first.
            first_task: position of this step's first task.
            finished: groups from a checkpoint that need not run again.
            abandon: returns True if the episodes are not needed. ``collect`` then raises
                RolloutsAbandoned.
            on_ended: called while a step waits, with the numbers of ended and wanted episodes.
        """
        self._requests = requests
        self._rollout = requests.rollout
        self._max_staleness = algorithm.max_staleness
        self._max_rounds = algorithm.dynamic_sampling_rounds
        self._is_filtered = self._max_rounds > 1
        # Without further rounds nothing could replace a rejected group.
        self._keep = lambda group: not self._is_filtered or rewards_differ(group, algorithm)
        self._steps = steps
        self._abandon = abandon
        self._on_ended = on_ended

        # The condition guards everything below.
        self._changed = Condition()
        self._version = first_step
        self._next_step = first_step
        """Step that begins next."""
        self._next_task: int | None = first_task
        """Position of that step's first task. None while the step before may need more rounds."""
        self._open: dict[int, StepGroups] = {}
        """Groups of the steps that have begun and were not collected, by step."""
        self._restored = dict(finished or {})
        self._held_out: dict[int, TrajectoryGroup] = {}
        """Ended held-out groups. Their numbers are negative."""
        self._held_out_count = 0
        self._streak = self._new_streak()
        self._error: BaseException | None = None

        self._stream = runner.stream()
        self._thread = Thread(target=self._take_groups, name="collector", daemon=True)
        self._thread.start()

    def begin(self, version: int, held_out: Sequence[GroupRequest] = ()) -> None:
        """Begin held-out groups and all steps that may begin with these weights.

        Args:
            version: version of the engines' weights.
            held_out: groups of an evaluation, which ``collect`` waits for.
        """
        with self._changed:
            # Held-out episodes run together with the episodes of the step. If they ran alone, most
            # workers would wait for the last ones.
            self._held_out_count = len(held_out)
            for place, request in enumerate(held_out):
                self._stream.admit(place - len(held_out), request)
            self._version = version
            self._begin_steps()

    def collect(self, step: int) -> RolloutBatch:
        """Wait for the groups that a step trains on, and for held-out groups.

        Raises:
            RolloutsAbandoned: the episodes are not needed.
            InfrastructureOutageError: infrastructure failures ended too many episodes.
            TaskFileError: none of the tasks can be run.
        """
        with self._changed:
            groups = self._open[step]
            self._report(groups)
            # Held-out episodes end before the next sync, so that an evaluation has one version.
            while not (groups.is_complete and len(self._held_out) == self._held_out_count):
                if self._error is not None:
                    raise self._error
                if self._abandon():
                    raise RolloutsAbandoned
                # With a timeout, because no message arrives when a reason to abandon occurs.
                self._changed.wait(POLL_SECONDS)
                self._report(groups)

            held_out = [self._held_out[number] for number in sorted(self._held_out)]
            self._held_out = {}
            self._held_out_count = 0
            # Every step counts its failures from 0, so that single failures in a long run do not
            # add up.
            self._streak = self._new_streak()
            check_groups([*held_out, *groups.ended.values()], self._rollout)

            next_task = groups.next_task
            assert next_task is not None, "a complete step knows its tasks"
            del self._open[step]
            # If no later step has begun, the next step starts after the tasks of this step.
            if self._next_step == step + 1:
                self._next_task = next_task
            return RolloutBatch(
                train=[groups.ended[number] for number in groups.chosen],
                held_out=held_out,
                replaced=groups.replaced if self._is_filtered else None,
                next_task=next_task,
                skipped_tasks=groups.skipped_tasks,
                async_groups=self._count_async_groups(),
            )

    def finished_groups(self) -> FinishedGroups:
        """Return the groups that have ended and were not collected."""
        with self._changed:
            return {
                number: (groups.start_versions[number], group)
                for groups in self._open.values()
                for number, group in groups.ended.items()
            }

    def close(self) -> None:
        """Abandon all groups that run."""
        self._stream.close()
        self._thread.join()

    # -- the collector's thread -------------------------------------------------------------------

    def _take_groups(self) -> None:
        """Take ended groups until the stream is closed or fails."""
        try:
            while True:
                self._take_group()
        except RolloutsAbandoned:
            return
        except BaseException as error:
            # `collect` raises the error, because no caller joins this thread before `close`.
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _take_group(self) -> None:
        """Wait for one group and record it."""
        # In a separate method, because in the caller's loop this variable would keep the group's
        # routes alive while it waits for the next one.
        ended = self._stream.take()
        with self._changed:
            self._note(ended.number, ended.group)
            self._streak.observe(ended.group)
            self._begin_steps()
            self._changed.notify_all()

    # -- the caller holds the condition -----------------------------------------------------------

    def _note(self, number: int, group: TrajectoryGroup) -> None:
        """Keep an ended group, and begin the next round of its step if one is needed."""
        # Held-out groups have negative numbers, which training groups cannot have.
        if number < 0:
            self._held_out[number] = group
            return

        for groups in self._open.values():
            if number in groups.start_versions:
                groups.ended[number] = group
                # Check before a round begins: while the infrastructure is down, every further round
                # would fail, too.
                if groups.needs_another_round:
                    check_groups(list(groups.ended.values()), self._rollout)
                    self._begin_round(groups)

    def _begin_steps(self) -> None:
        """Begin the steps that the bound on staleness allows."""
        # The update of step s starts from weights s. Therefore tokens that weights `version` sample
        # for this step are at most k versions old in the update.
        last_step = min(self._steps - 1, self._version + self._max_staleness)
        while self._next_step <= last_step:
            before = self._open.get(self._next_step - 1)
            # The step before is still open. Its `next_task` is None until its tasks are final.
            if before is not None:
                self._next_task = before.next_task
            if self._next_task is None:
                return

            count = self._rollout.tasks_per_step
            groups = StepGroups(
                step=self._next_step,
                first_task=self._next_task,
                # Numbers are reserved for all rounds, so that seeds do not depend on the rounds of
                # earlier steps.
                first_number=self._next_step * self._max_rounds * count,
                groups_per_round=count,
                max_rounds=self._max_rounds,
                keep=self._keep,
            )
            self._open[self._next_step] = groups
            self._next_step += 1
            self._begin_round(groups)
            self._next_task = groups.next_task

    def _begin_round(self, groups: StepGroups) -> None:
        """Begin the next ``tasks_per_step`` groups of a step."""
        started = len(groups.positions)
        following = groups.positions[-1] + 1 if started else groups.first_task
        count = groups.groups_per_round
        groups.positions += self._requests.tasks.select(following, count, groups.step)
        requests = {
            number: self._requests.for_group(number, groups.positions[number - groups.first_number])
            for number in range(
                groups.first_number + started, groups.first_number + started + count
            )
        }
        restored = self._take_restored(requests)
        for number in requests:
            groups.start_versions[number] = (
                restored[number][0] if number in restored else self._version
            )

        # A restored group may complete the round, so register the whole round before any group.
        for number, request in requests.items():
            if number not in restored:
                self._stream.admit(number, request)
        for number, (_, group) in restored.items():
            self._note(number, group)

    def _take_restored(self, requests: Mapping[int, GroupRequest]) -> FinishedGroups:
        """Return the groups from a checkpoint that answer these requests.

        A group with another task than the request is dropped.
        """
        restored = {}
        for number, request in requests.items():
            known = self._restored.pop(number, None)
            # The task differs if the data has changed.
            if known is not None and known[1].task_id == request.task.task_id:
                restored[number] = known
        return restored

    def _report(self, groups: StepGroups) -> None:
        """Report the numbers of ended and wanted episodes of a step that waits."""
        samples = self._rollout.samples_per_task
        # A held-out group is one episode.
        ended = len(groups.ended) * samples + len(self._held_out)
        total = len(groups.start_versions) * samples + self._held_out_count
        self._on_ended(ended, total)

    def _count_async_groups(self) -> AsyncGroups | None:
        """Return the progress of later steps. None without staleness."""
        if self._max_staleness == 0:
            return None
        return AsyncGroups(
            groups=sum(len(groups.start_versions) for groups in self._open.values()),
            ended=sum(len(groups.ended) for groups in self._open.values()),
        )

    def _new_streak(self) -> CircuitBreaker:
        """Return the counter of consecutive failures in the next step."""
        rollout = self._rollout
        return CircuitBreaker.with_streak(rollout.max_invalid_fraction)
