"""A Slurm cluster of fake nodes for all tests here, and fixtures to launch on it."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.slurm.fake_cluster import FakeCluster, missing_parts
from tests.support.slurm.lab import Lab


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    if reason := missing_parts():
        pytest.skip(f"no Slurm here: {reason}")
    # a short path, because Unix sockets are in this directory
    with tempfile.TemporaryDirectory(prefix="gptoss-slurm-", dir="/tmp") as folder:
        cluster = FakeCluster(Path(folder) / "cluster")
        try:
            cluster.start()
            yield Lab(cluster, Path(folder))
        finally:
            cluster.run("scancel", "-u", "root", check=False)
            time.sleep(1)
            cluster.stop()


@pytest.fixture(autouse=True)
def leaves_no_job(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "lab" in request.fixturenames:
        lab: Lab = request.getfixturevalue("lab")
        lab.cluster.run("scancel", "-u", "root", check=False)
        lab.until(lambda: not lab.queue(), "the queue to become empty", seconds=30)
