"""Long-running stability test: its requests to Ray, and its table."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from rl_loop.cluster.ray_session import start_local_ray
from tests.faults.stability import (
    NAMED,
    STEPS,
    own_memory,
    ray_objects,
    report,
    slopes,
    thread_names,
)


def test_ray_objects_are_counted_without_dashboard() -> None:
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


def test_unanswered_ray_request_gives_unknown_values() -> None:
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


MAPS_AND_WRITES = """
import mmap, sys
size, path = int(sys.argv[1]), sys.argv[2]
print("began", flush=True)
input()
file = open(path, "rb")
library = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
assert sum(library[::mmap.PAGESIZE]) == 0  # every page is there
print("mapped", flush=True)
input()
written = bytearray(b"1") * size
print("written", flush=True)
input()
"""


def test_own_memory_excludes_pages_of_files(tmp_path: Path) -> None:
    size = 64 << 20
    (tmp_path / "library").write_bytes(bytes(size))
    # Use a separate process, because this one may free garbage of other tests concurrently.
    command = [sys.executable, "-c", MAPS_AND_WRITES, str(size), str(tmp_path / "library")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        memory = []
        for state in ("began", "mapped", "written"):
            assert process.stdout.readline() == f"{state}\n"
            memory.append(own_memory(process.pid))
            process.stdin.write("\n")
            process.stdin.flush()
    assert process.returncode == 0
    assert memory[1] - memory[0] < 8 << 20
    assert size <= memory[2] - memory[0] < size + (8 << 20)


def test_threads_are_listed_by_name_only_if_they_grow() -> None:
    stop = threading.Event()
    threads = [threading.Thread(target=stop.wait) for _ in range(3)]
    count = len(thread_names(os.getpid()))
    for thread in threads:
        thread.start()
    assert len(thread_names(os.getpid())) == count + 3
    stop.set()

    hours = np.linspace(0, 1, 80)
    samples = [
        {f"driver: {NAMED}grpc#": 4 + 2 * hour, f"driver: {NAMED}python": 3.0, STEPS: hour}
        for hour in hours
    ]
    table = report(slopes(list(hours), samples), 0.01)
    assert "driver: threads named grpc#" in table and "python" not in table
