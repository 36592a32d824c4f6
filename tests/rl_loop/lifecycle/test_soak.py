"""The soak: what it asks of Ray, and its table."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.soak import STEPS, ray_objects, report, slopes
from rl_loop.cluster.ray_session import start_local_ray


def test_rays_objects_are_counted_without_its_dashboard() -> None:
    ray = pytest.importorskip("ray")
    start_local_ray(num_cpus=1, object_store_bytes=100 << 20)
    try:
        address = ray.get_runtime_context().gcs_address
        before = ray_objects(address)
        kept = [ray.put(np.zeros(1_000_000, np.uint8)) for _ in range(5)]
        after = ray_objects(address)
    finally:
        ray.shutdown()
    assert after["ray: objects in its store"] - before["ray: objects in its store"] == len(kept)
    assert after["ray: references to objects"] - before["ray: references to objects"] == len(kept)
    assert 5 <= after["ray: bytes in its store, MB"] - before["ray: bytes in its store, MB"] < 6


def test_a_ray_that_does_not_answer_is_unknown_and_not_empty() -> None:
    hours = list(np.linspace(0, 1, 80))
    samples = [{"ray: objects owned": 7.0} if i % 2 else {"other": 1.0} for i in range(80)]
    assert slopes(hours, samples)["ray: objects owned"].mean == 7.0


def test_the_table_has_slopes_per_hour_and_per_step() -> None:
    hours = np.linspace(0, 1, 80)
    samples = [{"memory": 100 + 10 * hour, STEPS: 2000 * hour} for hour in hours]
    fitted = slopes(list(hours), samples)
    assert STEPS not in fitted and math.isclose(fitted["memory"].per_hour, 10, rel_tol=1e-6)
    (row,) = report(fitted, 0.01, steps_per_hour=2000).splitlines()[2:]
    assert row == "| memory | 106.3 | +10.00 | ± 0.00 | +5.000 | **grows** |"
    (row,) = report(fitted, 0.01).splitlines()[2:]
    assert row == "| memory | 106.3 | +10.00 | ± 0.00 | **grows** |"
