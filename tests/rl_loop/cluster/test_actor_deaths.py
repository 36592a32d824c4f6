"""Deaths of actors, as reported by Ray."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from ray.exceptions import RayActorError

from rl_loop.cluster.actor_deaths import RecentDeaths, process_died
from tests.support.waiting import PATIENCE_SECONDS

ROOT = Path(__file__).parents[3]
PROGRAM = """
import time
import ray
from rl_loop.cluster.actor_deaths import ACTOR_DEATHS, process_died
from rl_loop.cluster.ray_session import start_local_ray

@ray.remote
class Sleeper:
    def sleep(self):
        time.sleep(600)

start_local_ray(num_cpus=1, object_store_bytes=100 << 20)
try:
    ray.get(Sleeper.remote().sleep.remote())
except ACTOR_DEATHS as death:
    print(type(death).__name__, process_died(death))
"""


def test_kill_by_rays_memory_monitor_counts_as_a_death() -> None:
    """With a threshold of 1% of the machine's memory, the monitor kills any actor."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=ROOT,
        env={
            **os.environ,
            "RAY_memory_usage_threshold": "0.01",
            "RAY_memory_monitor_refresh_ms": "100",
        },
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.stdout.split() == ["OutOfMemoryError", "True"], done.stderr[-2000:]


def test_exception_in_a_constructor_is_not_a_death() -> None:
    assert process_died(RayActorError())
    assert not process_died(RayActorError(actor_init_failed=True))
    assert not process_died(ValueError("a mistake"))


def test_recent_deaths_exclude_earlier_ones() -> None:
    """11 deaths within weeks are normal. 11 deaths within an hour suggest a broken machine."""
    deaths = RecentDeaths(3600)
    assert [deaths.add(day * 86_400.0) for day in range(20)] == [1] * 20
    assert [deaths.add(20 * 86_400.0 + minute * 60) for minute in range(11)] == list(range(1, 12))
