"""One fake cluster for all tests here, and what they need to launch on it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from rl_loop.run_directory import RunDirectory, read_json, read_json_lines
from tests.slurm.fake_cluster import FakeCluster, missing_parts

ROOT = Path(__file__).parents[2]
SMALL = [
    "initial_weights=null",
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.intermediate_size=48",
    "model.head_size=16",
    "parallel.world_size=2",
    "rollout.workers=2",
    "rollout.tasks_per_step=2",
    "rollout.samples_per_task=4",
    # untrained, it stops about every 300 tokens: some episodes end illegally, and the updates have something to do
    "rollout.max_new_tokens_per_turn=150",
    "reward.format_error=-2",
    "tasks.held_out_tasks=2",
    "evaluate_every=100",
]


class Lab:
    """A cluster, a shared directory, and the command line on them."""

    def __init__(self, cluster: FakeCluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        self.shared = folder / "shared"
        self.shared.mkdir()
        self.environment = {**os.environ, **cluster.env, "XDG_STATE_HOME": str(folder / "state")}

    def cluster_file(self, **changes: object) -> Path:
        values = {
            "kind": "slurm",
            "shared_dir": str(self.shared),
            "account": "team",
            "partition": "batch",
            "nodes": 2,
            "cpus_per_node": 2,
            "time_limit": "00:30:00",
            "stop_before_end": 60,
            "min_free_disk": 0.5,
            "ready_seconds": 300,
            "dashboard": False,
            "env": {"OMP_NUM_THREADS": "1"},
            **changes,
        }
        path = self.folder / f"cluster-{time.monotonic_ns()}.yaml"
        path.write_text(yaml.safe_dump(values))
        return path

    def gptoss(self, *arguments: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "launch", *arguments]
        return subprocess.run(
            command, cwd=ROOT, env=self.environment, capture_output=True, text=True, timeout=timeout, check=False
        )

    def launch(self, name: str, *overrides: str, **changes: object) -> RunDirectory:
        file = self.cluster_file(**changes)
        arguments = ["configs/rl/tiny_retool.yaml", f"name={name}", *SMALL, *overrides, "--cluster", str(file)]
        done = self.gptoss("launch", *arguments)
        assert done.returncode == 0, done.stderr + done.stdout
        return RunDirectory(self.shared / "runs" / name)

    def outcomes(self, run: RunDirectory) -> list[dict[str, object]]:
        files = sorted((run.path / "attempts").glob("*/outcome.json"), key=lambda path: path.stat().st_mtime)
        return [read_json(path) for path in files]

    def until(self, done: Callable[[], object], what: str, seconds: float = 240) -> None:
        deadline = time.monotonic() + seconds
        while not done():
            if time.monotonic() > deadline:
                logs = sorted((self.shared / "runs").glob("*/attempts/*/*.log"))
                tails = [f"--- {log}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-8:]) for log in logs]
                pytest.fail(f"not within {seconds:.0f} s: {what}\n{self.queue()}\n" + "\n".join(tails[-8:]))
            time.sleep(0.2)

    def queue(self) -> str:
        return self.cluster.run("squeue", "-h", "-o", "%i %j %T %N %R", check=False)

    def state(self, name: str) -> str:
        return self.cluster.run("squeue", "-h", "-n", f"gptoss.{name}", "-o", "%T", check=False)


def steps_done(run: RunDirectory) -> int:
    return len([record for record in read_json_lines(run.metrics) if "reward" in record]) if run.metrics.exists() else 0


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    if reason := missing_parts():
        pytest.skip(f"no Slurm here: {reason}")
    # a short path: unix sockets lie below it
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
