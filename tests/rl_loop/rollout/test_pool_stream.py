"""Streams of a pool of real Ray actors, with weight syncs and worker deaths at any moment."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import OutOfMemoryError, RayActorError

from rl_loop.config.run import RlConfig
from rl_loop.data.trajectory import Trajectory
from rl_loop.engines.backend import BackendContext, EngineConfig, RolloutBackend
from rl_loop.rollout.collector import TrainingRequests
from rl_loop.rollout.group_stream import GroupRequest, GroupStream
from rl_loop.rollout.pool import RolloutPool
from rl_loop.rollout.worker_actors import WorkerActors
from rl_loop.run_parts import build_tasks
from rl_loop.weight_sync.source import LoadedWeights, WeightSource
from tests.support.forked_workers import local_ray
from tests.support.rl_loop.small_config import config as small_config
from tests.support.rl_loop.timeless_engine import TimelessEngine
from tests.support.waiting import wait_until

GROUPS = 8


class TimelessBackend(RolloutBackend):
    """A timeless engine in every worker."""

    def __init__(self, context: BackendContext, engine_factory: Any) -> None:
        super().__init__(EngineConfig(), context)
        self._engine_factory = engine_factory
        self.recoveries = 0

    def engine_factory(self) -> Any:
        return self._engine_factory

    def sync_weights(self, source: WeightSource, version: int) -> None:
        assert self.workers is not None
        self.workers.set_min_version(version)

    def score(self, token_ids: list[int], temperature: float) -> list[list[float]]:
        assert self.workers is not None
        return self.workers.engine_scores(token_ids, temperature)

    def recover_engines(self) -> None:
        self.recoveries += 1

    def engine_settings(self, names: Sequence[str]) -> dict[str, Any]:
        return {}


@pytest.fixture(scope="module", autouse=True)
def one_ray() -> Iterator[None]:
    with local_ray(num_cpus=2, object_store_bytes=100 << 20):
        yield


class Running:
    """A pool with timeless engines. ``timing`` has the arguments of the engines."""

    def __init__(self, directory: Path, *overrides: str, **timing: float) -> None:
        options = ["rollout.routed_experts=false", "rollout.workers=2", *overrides]
        self.settings: RlConfig = small_config(directory, *options)
        tasks = build_tasks(self.settings)
        context = BackendContext(self.settings.model, self.settings.dtype, 0, directory)
        stop_token_ids = tuple(tasks.codec.stop_token_ids)
        self.backend = TimelessBackend(context, partial(TimelessEngine, stop_token_ids, **timing))
        self.pool = RolloutPool(self.backend, self.settings)
        self.pool.ready()
        requests = TrainingRequests(tasks, self.settings.rollout, seed=0)
        self.requests = [requests.for_group(number, number) for number in range(GROUPS)]

    def sync(self, version: int) -> None:
        self.pool.sync_weights(LoadedWeights({}), version)

    def admit_all(self) -> GroupStream:
        stream = self.pool.stream()
        for number, request in enumerate(self.requests):
            stream.admit(number, request)
        return stream

    def kill(self, index: int) -> int:
        """Kill a worker. Return its process id."""
        victim = self.pool._workers.call(index, "__ray_call__", lambda worker: os.getpid())
        os.kill(victim, signal.SIGKILL)
        return int(victim)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Any]:
    made: list[Running] = []

    def make(*overrides: str, **timing: float) -> Running:
        made.append(Running(tmp_path, *overrides, **timing))
        return made[-1]

    yield make
    for pool in made:
        pool.pool.close()


def requests_begun(worker: Any) -> int:
    return len(worker.engine.begun)


def take_all(stream: GroupStream, count: int = GROUPS) -> list[list[Trajectory]]:
    """Return all groups ordered by number. Every group has to arrive exactly once."""
    ended = [stream.take() for _ in range(count)]
    assert sorted(group.number for group in ended) == list(range(count))
    ended.sort(key=lambda group: group.number)
    return [group.group.trajectories for group in ended]


def ids(groups: list[list[Trajectory]]) -> list[list[list[int]]]:
    return [[episode.token_ids.tolist() for episode in group] for group in groups]


def versions(groups: list[list[Trajectory]]) -> list[list[int]]:
    return [[span.version for span in e.weight_versions] for group in groups for e in group]


def test_sync_interrupts_episodes_without_waiting_for_them(
    running: Any,
) -> None:
    """Each worker takes one group at a time, and no group ends before the sync."""
    slow = running("rollout.max_concurrent_tasks=1", ends_from=1)
    slow.sync(0)
    stream = slow.admit_all()
    for index in range(2):
        wait_until(lambda: slow.pool._workers.call(index, "__ray_call__", requests_begun) == 4)  # noqa: B023
    slow.sync(1)
    groups = take_all(stream)
    interrupted = [episode for episode in versions(groups) if episode[0] == 0]
    assert len(interrupted) == 2 * 4
    assert all(episode == [0, 1] for episode in interrupted)

    fast = running()
    fast.sync(0)
    assert ids(take_all(fast.admit_all())) == ids(groups), "from their exact prefixes"


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param("with no sync to come", marks=pytest.mark.slow),
        pytest.param("while groups run", marks=pytest.mark.slow),
        pytest.param("before a sync", marks=pytest.mark.slow),
        "during a sync",
    ],
)
def test_dead_worker_loses_and_repeats_no_group(running: Any, moment: str) -> None:
    mortal = running(seconds=0.5)
    mortal.sync(1)
    stream = mortal.admit_all()
    wait_until(lambda: len(mortal.pool._running) == GROUPS)
    if moment == "with no sync to come":
        mortal.kill(0)
    elif moment == "while groups run":
        mortal.kill(0)
        time.sleep(1.0)
        mortal.sync(2)
    elif moment == "before a sync":
        mortal.kill(0)
        mortal.sync(2)
    else:
        killer = threading.Timer(0.0, mortal.kill, (0,))
        killer.start()
        for version in range(2, 20):
            mortal.sync(version)
        killer.join()

    groups = take_all(stream)
    assert len(mortal.pool._workers.deaths) == 1
    assert stream._ended.empty()

    # The new worker has the newest weights.
    newest = mortal.pool._workers.last_sync[-1]
    for index in range(2):
        assert (
            mortal.pool._workers.call(index, "__ray_call__", lambda w: w.engine.version) == newest
        )
    again = take_all(mortal.admit_all())
    assert ids(again) == ids(groups)
    assert versions(again) == [[newest]] * len(versions(again))


def test_worker_killed_by_rays_memory_monitor_is_replaced(
    running: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray reports this death with another exception, which is not a RayActorError."""
    get = ray.get

    def get_with_another_name(*arguments: Any, **options: Any) -> Any:
        try:
            return get(*arguments, **options)
        except RayActorError as death:
            raise OutOfMemoryError("the node is running low on memory") from death

    mortal = running(seconds=0.5)
    mortal.sync(0)
    stream = mortal.admit_all()
    wait_until(lambda: len(mortal.pool._running) == GROUPS)
    monkeypatch.setattr(ray, "get", get_with_another_name)
    mortal.kill(0)
    mortal.sync(1)
    take_all(stream)
    assert len(mortal.pool._workers.deaths) == 1


def test_groups_of_two_callers_and_a_closed_stream_do_not_mix(
    running: Any,
) -> None:
    both = running("rollout.max_concurrent_tasks=1", seconds=0.2)
    both.sync(0)
    forgotten = both.admit_all()
    forgotten.close()
    mine = both.pool.stream()
    for number in range(2):
        mine.admit(number, both.requests[number])
    assert both.pool.run(both.requests[4:6])[0].task_id == both.requests[4].task.task_id
    groups = take_all(mine, count=2)
    assert [group[0].task_id for group in groups] == [r.task.task_id for r in both.requests[:2]]


def test_recovery_pauses_from_an_update_to_the_next_sync(running: Any) -> None:
    recovered = running(seconds=60.0)
    recovered.sync(0)
    recovered.admit_all()
    wait_until(lambda: recovered.backend.recoveries > 0)
    with recovered.pool.updating_weights(1):
        before = recovered.backend.recoveries
        time.sleep(1.5)
    time.sleep(1.5)
    assert recovered.backend.recoveries == before
    recovered.sync(1)
    wait_until(lambda: recovered.backend.recoveries > before)


def test_broken_pool_raises_in_every_waiting_call(
    running: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WorkerActors, "MAX_RESTARTS", 0)
    broken = running(seconds=60.0)
    broken.sync(0)
    stream = broken.admit_all()
    broken.kill(0)
    with pytest.raises(RuntimeError, match="rollout workers died 1 times within 3600 s"):
        stream.take()
    with pytest.raises(RuntimeError, match="rollout workers died 1 times within 3600 s"):
        broken.pool.run([GroupRequest(broken.requests[0].task, (1,), 1.0)])
