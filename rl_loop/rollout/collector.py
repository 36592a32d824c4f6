"""Collects the episodes of each step: which tasks, with which seeds, with dynamic sampling, and
ahead of training."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Protocol

from rl_loop.algorithms.config import AlgorithmConfig
from rl_loop.config.rollout import RolloutConfig
from rl_loop.data.credit import has_signal
from rl_loop.data.rollout_batch import RolloutBatch
from rl_loop.data.trajectory import TrajectoryGroup
from rl_loop.environments import Task
from rl_loop.rollout.pool import GroupRequest


class EpisodeRunner(Protocol):
    """Runs episodes: a RolloutPool."""

    def run(
        self, requests: Sequence[GroupRequest], abandon: Callable[[], bool] = ...
    ) -> list[TrajectoryGroup]: ...


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
class PlacedGroup:
    """A group of episodes and the position of its task."""

    position: int
    group: TrajectoryGroup


class RolloutCollector:
    """Runs the episodes that a step trains on, and beside them those of its evaluation.

    Everything random comes from ``seed`` and the number of the step, so a resumed run
    goes on as it would have."""

    def __init__(
        self,
        runner: EpisodeRunner,
        tasks: TrainingTasks,
        rollout: RolloutConfig,
        algorithm: AlgorithmConfig,
        *,
        seed: int,
        abandon: Callable[[], bool] = lambda: False,
    ) -> None:
        """``abandon`` says that nobody wants the episodes any more;
        RolloutsAbandoned is raised then."""
        self._runner = runner
        self._tasks = tasks
        self._rollout = rollout
        self._algorithm = algorithm
        self._seed = seed
        self._abandon = abandon
        self._thread = ThreadPoolExecutor(1, "rollouts")
        self._prefetched: Future[RolloutBatch] | None = None
        self._is_closed = False

    # -- ahead of training ------------------------------------------------------------------------

    def prefetch(self, step: int, first_task: int) -> None:
        """Begin the episodes of a later step; the next ``collect`` returns them."""
        self._prefetched = self._thread.submit(self._collect_now, step, first_task, ())

    def finish_prefetch(self) -> None:
        """Wait for the episodes that were begun ahead, so that the engines
        can take other weights."""
        if self._prefetched is not None:
            self._prefetched.result()

    def close(self) -> None:
        """Abandon what was begun ahead."""
        self._is_closed = True
        self._thread.shutdown()

    # -- collecting -------------------------------------------------------------------------------

    def collect(
        self, step: int, first_task: int, held_out: Sequence[GroupRequest] = ()
    ) -> RolloutBatch:
        """Return the episodes of one training step, on tasks from position ``first_task`` on, and
        of ``held_out``."""
        if self._prefetched is None:
            return self._collect_now(step, first_task, held_out)

        batch = self._prefetched.result()
        self._prefetched = None
        if held_out:
            batch = replace(batch, held_out=self._run(held_out))
        return batch

    def _collect_now(
        self, step: int, first_task: int, held_out: Sequence[GroupRequest]
    ) -> RolloutBatch:
        """Run rounds of ``tasks_per_step`` tasks until enough groups have a signal.

        Without dynamic sampling there is one round, and every group counts. With it, groups
        without signal make room for those of further tasks; what is still missing after the last
        round is filled up with them. Every task is used in its turn: one whose episodes were not
        needed, because enough came before it, is the first of the next step, with new episodes."""
        rounds = self._algorithm.dynamic_sampling_rounds
        count = self._rollout.tasks_per_step
        evaluated: list[TrajectoryGroup] = []
        with_signal: list[PlacedGroup] = []
        silent: list[PlacedGroup] = []
        next_task = first_task
        for number in range(rounds):
            requests = self.requests(step * rounds + number, next_task)
            if number == 0:
                # Held-out episodes run among those of the step, so that no worker waits for the
                # last of them.
                groups = self._run([*held_out, *requests])
                evaluated = groups[: len(held_out)]
                groups = groups[len(held_out) :]
            else:
                groups = self._run(requests)

            for position, group in enumerate(groups, start=next_task):
                counts = rounds == 1 or has_signal(group, self._algorithm)
                (with_signal if counts else silent).append(PlacedGroup(position, group))
            next_task += count
            if len(with_signal) >= count:
                break

        # The position after the last task that was used: tasks behind it come again in the next
        # step.
        chosen = (with_signal + silent)[:count]
        if len(with_signal) >= count:
            next_task = chosen[-1].position + 1
        used = {placed.position for placed in chosen}
        left_out = [
            placed
            for placed in silent
            if placed.position < next_task and placed.position not in used
        ]
        return RolloutBatch(
            train=[placed.group for placed in chosen],
            held_out=evaluated,
            replaced=len(left_out) if rounds > 1 else None,
            next_task=next_task,
        )

    def requests(self, block: int, first_task: int) -> list[GroupRequest]:
        """Ask for the episodes of ``tasks_per_step`` tasks from position ``first_task`` on.

        ``block`` seeds them: a step is one block unless it samples dynamically."""
        tasks = self._tasks.train(first_task, self._rollout.tasks_per_step)
        requests = []
        for position, task in enumerate(tasks):
            # Blocks, positions and samples each have room of their own, so no two seeds are equal.
            base = ((self._seed * 1_000_003 + block) * 1_000_003 + position) * 1_000
            seeds = tuple(range(base, base + self._rollout.samples_per_task))
            requests.append(
                GroupRequest(task, seeds, self._rollout.temperature, purify=True, with_routes=True)
            )
        return requests

    def _run(self, requests: Sequence[GroupRequest]) -> list[TrajectoryGroup]:
        return self._runner.run(requests, lambda: self._is_closed or self._abandon())
