"""Progress shown while a step waits for its episodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_loop.data.trajectory import TrajectoryGroup
from rl_loop.environments import Task
from rl_loop.rollout.collector import RolloutCollector, TrainingRequests, held_out_requests
from rl_loop.rollout.group_stream import AdmittedGroup, GroupStream
from tests.support.rl_loop.small_config import config


class EndsAtOnce:
    """A runner whose groups end as soon as they begin, without an episode to train on."""

    def stream(self) -> GroupStream:
        return GroupStream(self._end)

    def _end(self, admitted: AdmittedGroup) -> None:
        admitted.end(TrajectoryGroup(admitted.request.task.task_id, []))


class AnyTasks:
    """An endless source of tasks."""

    def select(self, position: int, count: int, step: int) -> list[int]:
        return list(range(position, position + count))

    def train(self, position: int, count: int) -> list[Task]:
        return [Task(str(position + i), [], "truth") for i in range(count)]

    def held_out(self) -> list[Task]:
        return self.train(100, 3)


def collected(tmp_path: Path, *overrides: str) -> list[tuple[int, int]]:
    """Collect one step of 4 x 2 episodes and 3 held-out ones. Return the reported progress."""
    sizes = ["rollout.tasks_per_step=4", "rollout.samples_per_task=2", "tasks.held_out_tasks=3"]
    settings = config(tmp_path, *sizes, *overrides)
    told: list[tuple[int, int]] = []
    collector = RolloutCollector(
        EndsAtOnce(),
        TrainingRequests(AnyTasks(), settings.rollout, seed=0),
        settings.algorithm,
        steps=3,
        on_ended=lambda ended, wanted: told.append((ended, wanted)),
    )
    collector.begin(0, held_out_requests(AnyTasks(), 1.0))
    collector.collect(0)
    collector.close()
    return told


@pytest.mark.parametrize("staleness", [0, 2])
def test_progress_counts_only_episodes_of_the_current_step(staleness: int, tmp_path: Path) -> None:
    told = collected(tmp_path, f"algorithm.max_staleness={staleness}")
    assert told == sorted(told)
    assert told[-1] == (4 * 2 + 3, 4 * 2 + 3)
    assert all(wanted == 11 for _, wanted in told)


def test_progress_counts_episodes_of_dynamic_sampling_rounds(tmp_path: Path) -> None:
    rounds = "algorithm.dynamic_sampling_rounds=2"
    told = collected(tmp_path, rounds)
    # No group has a signal, so a second round begins.
    assert told == sorted(told)
    assert told[-1] == (2 * 4 * 2 + 3, 2 * 4 * 2 + 3)
    assert {wanted for _, wanted in told} <= {11, 19}
