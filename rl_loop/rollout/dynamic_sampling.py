"""Collects the episodes of each step by dynamic sampling (DAPO): groups in which everything that
the advantage compares is equal make room for those of further tasks.

How many tasks a step uses is known only when its last round has ended, so the next step is begun
then and not before: at most one step ahead of its training."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

from rl_loop.algorithms.config import AlgorithmConfig
from rl_loop.config.rollout import RolloutConfig
from rl_loop.data.credit import has_signal
from rl_loop.data.rollout_batch import RolloutBatch
from rl_loop.data.trajectory import TrajectoryGroup
from rl_loop.rollout.collector import TrainingRequests, TrainingTasks
from rl_loop.rollout.group_store import FinishedGroups
from rl_loop.rollout.group_stream import GroupRequest, OnEnded, RunsGroups, run_groups


@dataclass(frozen=True)
class PlacedGroup:
    """A group of episodes and the position of its task."""

    position: int
    group: TrajectoryGroup


class DynamicCollector:
    """Runs the rounds of each step, and of the next one while the trainer learns if
    ``max_staleness`` is 1."""

    def __init__(
        self,
        runner: RunsGroups,
        tasks: TrainingTasks,
        rollout: RolloutConfig,
        algorithm: AlgorithmConfig,
        *,
        steps: int,
        seed: int,
        first_task: int,
        abandon: Callable[[], bool] = lambda: False,
        on_ended: OnEnded = lambda ended, wanted: None,
    ) -> None:
        """``steps``: of the whole run. ``first_task``: position of the first task that is still
        to be used. ``abandon`` says that nobody wants the episodes any more; RolloutsAbandoned is
        raised then. ``on_ended`` is told of every group of a round that ends, from any thread."""
        self._runner = runner
        self._rollout = rollout
        self._algorithm = algorithm
        self._steps = steps
        self._requests = TrainingRequests(tasks, rollout, seed)
        self._next_task = first_task
        self._held_out: Sequence[GroupRequest] = ()
        self._abandon = abandon
        self._on_ended = on_ended
        self._thread = ThreadPoolExecutor(1, "dynamic-sampling")
        self._ahead: Future[RolloutBatch] | None = None
        self._is_closed = False

    def begin(self, version: int, held_out: Sequence[GroupRequest] = ()) -> None:
        """Note that the engines have weights ``version``, with which ``held_out`` is to run."""
        self._held_out = held_out

    def collect(self, step: int) -> RolloutBatch:
        """Return the groups that ``step`` trains on, and those that were held out; begin the next
        step if it may be sampled ahead."""
        if self._ahead is None:
            batch = self._sample(step, self._next_task, self._held_out)
        else:
            held_out = self._run(self._held_out) if self._held_out else []
            batch = replace(self._ahead.result(), held_out=held_out)
            self._ahead = None

        self._held_out = ()
        self._next_task = batch.next_task
        if self._algorithm.max_staleness > 0 and step + 1 < self._steps:
            self._ahead = self._thread.submit(self._sample, step + 1, batch.next_task, ())
        return batch

    @property
    def passed_over(self) -> list[int]:
        """No task is passed over: a resumed run goes on with the next one."""
        return []

    def finished_groups(self) -> FinishedGroups:
        """Return nothing: a step that was begun ahead begins anew after a resume."""
        return {}

    def close(self) -> None:
        """Abandon what was begun ahead."""
        self._is_closed = True
        self._thread.shutdown()

    def _sample(self, step: int, first_task: int, held_out: Sequence[GroupRequest]) -> RolloutBatch:
        """Run rounds of ``tasks_per_step`` tasks until enough groups have a signal.

        Groups without signal make room for those of further tasks; what is still missing after
        the last round is filled up with them. Every task is used in its turn: one whose episodes
        were not needed, because enough came before it, is the first of the next step, with new
        episodes."""
        rounds = self._algorithm.dynamic_sampling_rounds
        count = self._rollout.tasks_per_step
        evaluated: list[TrajectoryGroup] = []
        with_signal: list[PlacedGroup] = []
        silent: list[PlacedGroup] = []
        next_task = first_task
        for number in range(rounds):
            block = step * rounds + number
            requests = [self._requests.of(block, i, next_task + i) for i in range(count)]
            if number == 0:
                # Held-out episodes run among those of the step, so that no worker waits for the
                # last of them.
                groups = self._run([*held_out, *requests])
                evaluated = groups[: len(held_out)]
                groups = groups[len(held_out) :]
            else:
                groups = self._run(requests)

            for position, group in enumerate(groups, start=next_task):
                kind = with_signal if has_signal(group, self._algorithm) else silent
                kind.append(PlacedGroup(position, group))
            next_task += count
            if len(with_signal) >= count:
                break

        chosen = (with_signal + silent)[:count]
        if len(with_signal) >= count:
            # Tasks behind the last one that was used come again in the next step.
            next_task = chosen[-1].position + 1
        return RolloutBatch(
            train=[placed.group for placed in chosen],
            held_out=evaluated,
            replaced=_replaced_groups(silent, chosen, next_task),
            next_task=next_task,
        )

    def _run(self, requests: Sequence[GroupRequest]) -> list[TrajectoryGroup]:
        def is_abandoned() -> bool:
            return self._is_closed or self._abandon()

        return run_groups(self._runner, requests, self._rollout, is_abandoned, self._on_ended)


def _replaced_groups(
    silent: Sequence[PlacedGroup], chosen: Sequence[PlacedGroup], next_task: int
) -> list[TrajectoryGroup]:
    """Return the groups without signal whose tasks are over and that nothing is trained on."""
    used = {placed.position for placed in chosen}
    replaced = []
    for placed in silent:
        if placed.position < next_task and placed.position not in used:
            # Their routes would stay in Ray's store until the step is recorded.
            replaced.append(placed.group.without_routes())
    return replaced
