"""Collects the episodes of each step: which tasks, with which seeds, and how far ahead of training.

Everything random comes from the run's seed and the number of a group, so a resumed run goes on as
it would have."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rl_loop.algorithms.config import AlgorithmConfig
from rl_loop.config.rollout import RolloutConfig
from rl_loop.data.rollout_batch import LengthSums, RolloutBatch, RunAhead
from rl_loop.data.trajectory import TrajectoryGroup
from rl_loop.environments import Task
from rl_loop.infrastructure import InfrastructureBreaker
from rl_loop.rollout.admission import AdmissionControl
from rl_loop.rollout.group_store import FinishedGroups
from rl_loop.rollout.group_stream import (
    EndedGroup,
    GroupRequest,
    OnEnded,
    RunsGroups,
    check_groups,
)


class TrainingTasks(Protocol):
    """Training tasks by position: a TaskSource."""

    def train(self, position: int, count: int) -> list[Task]: ...


class HeldOutTasks(Protocol):
    """The tasks that accuracy is measured on: a TaskSource."""

    def held_out(self) -> list[Task]: ...


def held_out_requests(
    tasks: HeldOutTasks, temperature: float, *, with_routes: bool = False
) -> list[GroupRequest]:
    """Ask for one episode of every held-out task, with the same seeds every time.

    ``with_routes``: for whoever compares engine and trainer on them."""
    return [
        GroupRequest(task, (i,), temperature, with_routes=with_routes)
        for i, task in enumerate(tasks.held_out())
    ]


@dataclass(frozen=True)
class TrainingRequests:
    """Makes the requests for the groups that are trained on."""

    tasks: TrainingTasks
    rollout: RolloutConfig
    seed: int
    """Of the run."""

    def of(self, block: int, place: int, task_position: int) -> GroupRequest:
        """Ask for the episodes of the task at ``task_position``, which is at ``place`` among the
        ``tasks_per_step`` of a block. A step is one block unless it samples dynamically."""
        (task,) = self.tasks.train(task_position, 1)
        # Blocks, places and samples each have room of their own, so no two seeds are equal.
        base = ((self.seed * 1_000_003 + block) * 1_000_003 + place) * 1_000
        seeds = tuple(range(base, base + self.rollout.samples_per_task))
        return GroupRequest(task, seeds, self.rollout.temperature, purify=True, with_routes=True)


@dataclass(frozen=True)
class EarlierGroups:
    """What a resumed run knows of groups that were admitted before and not trained on."""

    passed_over: list[int] = field(default_factory=list)
    """Their numbers, if later ones were already trained on."""
    finished: FinishedGroups = field(default_factory=dict)
    """Those that had ended."""


class RolloutCollector:
    """Runs groups of episodes up to ``max_staleness`` steps ahead of the step that trains on
    them, and held-out episodes between two syncs.

    ``AdmissionControl`` decides which groups begin and which a step trains on. Group n has the
    task at position n."""

    def __init__(
        self,
        runner: RunsGroups,
        tasks: TrainingTasks,
        rollout: RolloutConfig,
        algorithm: AlgorithmConfig,
        *,
        steps: int,
        seed: int,
        first_step: int = 0,
        earlier: EarlierGroups | None = None,
        abandon: Callable[[], bool] = lambda: False,
        on_ended: OnEnded = lambda ended, wanted: None,
    ) -> None:
        """``steps``: of the whole run; no group of a later one is begun. ``first_step`` and
        ``earlier``: of a resumed run. ``abandon`` says that nobody wants the episodes any more;
        RolloutsAbandoned is raised then. ``on_ended`` is told of every group that ends while a
        step waits for its own."""
        earlier = earlier or EarlierGroups()
        self._rollout = rollout
        self._requests = TrainingRequests(tasks, rollout, seed)
        # A group whose number has another task by now would be trained on in its place.
        restored = {
            number: known
            for number, known in earlier.finished.items()
            if known[1].task_id == self.request(number).task.task_id
        }
        self._abandon = abandon
        self._on_ended = on_ended
        self._stream = runner.stream()
        self._control = AdmissionControl(
            groups_per_step=rollout.tasks_per_step,
            max_staleness=algorithm.max_staleness,
            steps=steps,
            order=algorithm.order,
            first_step=first_step,
            passed_over=earlier.passed_over,
            finished={number: version for number, (version, _) in restored.items()},
        )
        self._restored = {number: group for number, (_, group) in restored.items()}

        # Groups that have ended and were not handed out, by number.
        self._train: dict[int, TrajectoryGroup] = {}
        self._held_out: dict[int, TrajectoryGroup] = {}
        self._held_out_count = 0
        self._lengths_sampled = LengthSums()
        self._lengths_trained = LengthSums()
        self._streak = self._new_streak()

    def begin(self, version: int, held_out: Sequence[GroupRequest] = ()) -> None:
        """Begin ``held_out`` and all groups that may begin, now that the engines have weights
        ``version``."""
        # Held-out episodes run among those of the step, so that no worker waits for the last of
        # them. Their numbers are below those of all groups to train on.
        self._held_out_count = len(held_out)
        for place, request in enumerate(held_out):
            self._stream.admit(place - len(held_out), request)

        self._control.synced(version)
        while (number := self._control.admit_next()) is not None:
            if number in self._restored:
                self._keep(EndedGroup(number, self._restored.pop(number)))
            else:
                self._stream.admit(number, self.request(number))

    def request(self, number: int) -> GroupRequest:
        """Ask for the episodes of group ``number``."""
        step, place = divmod(number, self._rollout.tasks_per_step)
        return self._requests.of(step, place, number)

    def collect(self, step: int) -> RolloutBatch:
        """Wait for the groups that ``step`` trains on, and for those that were held out.

        Raises RolloutsAbandoned, InfrastructureOutage if too many of these episodes failed, and
        TaskFileError if none of the tasks can be run."""
        for ended in self._stream.take_ended():
            self._note(ended)
        self._report(step)
        while (chosen := self._control.take(step)) is None:
            self._note(self._stream.take(self._abandon))
            self._report(step)
        # Held-out episodes are of one version: none goes on beyond the next sync.
        while len(self._held_out) < self._held_out_count:
            self._note(self._stream.take(self._abandon))
            self._report(step)

        train = [self._train.pop(number) for number in chosen]
        for group in train:
            self._lengths_trained = self._lengths_trained.with_group(group)
        held_out = [self._held_out[number] for number in sorted(self._held_out)]
        self._held_out = {}
        self._held_out_count = 0
        self._streak = self._new_streak()

        check_groups([*held_out, *train], self._rollout)
        return RolloutBatch(
            train=train,
            held_out=held_out,
            replaced=None,
            next_task=(step + 1) * self._rollout.tasks_per_step,
            ahead=self._run_ahead(newest=max(chosen)),
        )

    def _report(self, step: int) -> None:
        """Tell how many of the episodes that ``step`` waits for have ended."""
        groups = self._rollout.tasks_per_step
        if self._control.order == "in_order":
            ended = sum(self._control.home(number) == step for number in self._train)
        else:
            ended = min(len(self._train), groups)

        # A held-out group is one episode.
        samples = self._rollout.samples_per_task
        wanted = groups * samples + self._held_out_count
        self._on_ended(ended * samples + len(self._held_out), wanted)

    def _run_ahead(self, newest: int) -> RunAhead | None:
        """Describe how far rollouts are ahead; ``newest``: of the groups that were just taken."""
        if self._control.max_staleness == 0:
            return None
        left = self._control.untrained
        return RunAhead(
            under_way=len(left),
            ended=len(self._control.finished),
            passed_over=sum(number < newest for number in left),
            sampled=self._lengths_sampled,
            trained=self._lengths_trained,
        )

    @property
    def passed_over(self) -> list[int]:
        """Groups that have begun, of which a resumed run has to know that they were not trained
        on. In order, those are all from the next step's on."""
        return self._control.untrained if self._control.order == "ready_first" else []

    def finished_groups(self) -> FinishedGroups:
        """Return the groups that have ended and were not handed out."""
        for ended in self._stream.take_ended():
            self._keep(ended)
        versions = self._control.finished
        return {number: (version, self._train[number]) for number, version in versions.items()}

    def close(self) -> None:
        """Abandon what is under way."""
        self._stream.close()

    def _note(self, ended: EndedGroup) -> None:
        """Keep a group that has ended. Raises InfrastructureOutage if too many of them in a row
        failed."""
        self._keep(ended)
        self._streak.observe(ended.group)

    def _keep(self, ended: EndedGroup) -> None:
        if ended.number < 0:
            self._held_out[ended.number] = ended.group
        else:
            self._train[ended.number] = ended.group
            self._lengths_sampled = self._lengths_sampled.with_group(ended.group)
            self._control.finish(ended.number)

    def _new_streak(self) -> InfrastructureBreaker:
        """Return what watches for failures in a row until the step's episodes are there."""
        rollout = self._rollout
        return InfrastructureBreaker.with_streak(rollout.max_invalid_share)
