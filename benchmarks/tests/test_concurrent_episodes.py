"""Small run of the benchmark of concurrent episodes with failing workers, servers and tools."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.rollouts.concurrent import EpisodeLog, Load, Outcome, configuration, report, run
from benchmarks.rollouts.slow_tools import draw_call_count
from rl_loop.data.trajectory import InvalidReason, Trajectory, TrajectoryGroup, WeightVersionSpan
from rl_loop.run_parts import build_tasks
from tests.support.forked_workers import local_ray

LOAD = Load(
    tasks=8,
    samples=4,
    steps=3,
    max_staleness=2,
    gap_scale=0.01,
    token_seconds=0.1,
    training_seconds=1.0,
    faults=0.2,
)


@pytest.fixture
def one_ray() -> Iterator[None]:
    with local_ray(num_cpus=2, object_store_bytes=100 << 20):
        yield


@pytest.mark.slow
def test_episodes_are_trained_once_or_invalid_despite_failures(
    one_ray: None, tmp_path: Path
) -> None:
    outcome = run(LOAD, tmp_path)
    assert outcome.trained + outcome.invalid == 8 * 4 * 3
    assert outcome.invalid > 0
    faults = outcome.faults
    assert faults.workers_killed >= 1
    assert faults.servers_killed >= 1
    assert faults.syncs_broken == 1
    assert faults.malformed_answers.total() > 0
    assert faults.tool_failures > 0
    assert outcome.in_flight_max > 32, "no step was asynchronous"
    assert "of one core per 100 episodes in flight" in report(LOAD, outcome)


# ---- rejected records


@pytest.fixture
def episode_log(tmp_path: Path) -> EpisodeLog:
    load = replace(LOAD, tasks=2, samples=2, faults=0.0)
    tasks = build_tasks(configuration(load, tmp_path))
    return EpisodeLog(load, tasks, seeds_of=lambda number: (10 * number, 10 * number + 1))


def episode(name: str, version: int = 0, began: float = 0.0, ended: float = 1.0) -> Trajectory:
    parts = {"correct": 1.0, "began": began, "ended": ended, "tool_failures": 0.0}
    spans = [WeightVersionSpan(1, 2, version)]
    return Trajectory(
        "t",
        token_ids=[1, 2],
        loss_mask=[0, 1],
        rollout_log_probs=[0.0, -1.0],
        answer=name,
        reward_parts=parts,
        weight_versions=spans,
    )


def build_groups(episode_log: EpisodeLog, step: int, version: int = 0) -> list[TrajectoryGroup]:
    tasks = episode_log._tasks.train(2 * step, 2)
    return [
        TrajectoryGroup(task.task_id, [episode(f"{task.task_id}/{i}", version) for i in range(2)])
        for task in tasks
    ]


def test_episode_check_accepts_complete_groups_in_their_step(episode_log: EpisodeLog) -> None:
    for step in range(3):
        episode_log.enter(step, build_groups(episode_log, step))
    assert len(episode_log.trained) == 12
    assert episode_log.invalid == 0


@pytest.mark.parametrize("fault", ["double", "lost", "other step", "too old", "invalid"])
def test_episode_check_rejects_impossible_records(episode_log: EpisodeLog, fault: str) -> None:
    episode_log.enter(0, build_groups(episode_log, 0))
    step, groups = 1, build_groups(episode_log, 1)
    if fault == "double":
        groups[0].trajectories[0] = groups[0].trajectories[1]
    elif fault == "lost":
        groups[0].trajectories.pop()
    elif fault == "other step":
        groups = build_groups(episode_log, 2)
    elif fault == "too old":
        episode_log.enter(1, groups)
        episode_log.enter(2, build_groups(episode_log, 2))
        step, groups = 3, build_groups(episode_log, 3)
    else:
        lost = groups[0].trajectories.pop()
        lost.invalid = InvalidReason("engine", "a fault that another try would have mended")
        groups[0].invalid.append(lost)
    with pytest.raises(AssertionError):
        episode_log.enter(step, groups)


def test_episodes_in_flight_are_counted_by_time(episode_log: EpisodeLog) -> None:
    spans = [(0.0, 4.0), (1.0, 2.0), (1.5, 3.0), (3.0, 4.0)]
    for number, (began, ended) in enumerate(spans):
        episode_log._enter_episode(0, episode(str(number), began=began, ended=ended))
    assert episode_log.in_flight(0.0, 5.0) == (7.5 / 5.0, 3)
    share = Outcome(
        faults=None,  # type: ignore[arg-type]
        trained=4,
        invalid=0,
        wall_seconds=10.0,
        driver_seconds=2.0,
        in_flight_mean=200.0,
        in_flight_max=300,
    ).driver_share
    assert share == pytest.approx(0.1), "0.2 of a core for 200 episodes"


def test_scripted_episodes_have_the_published_number_of_calls() -> None:
    calls = [draw_call_count(f"task/{i}") for i in range(4000)]
    assert max(calls) == 6
    assert sum(count == 0 for count in calls) / 4000 == pytest.approx(0.375, abs=0.03)
