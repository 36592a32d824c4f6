"""A directory in which tests launch runs on the fake cluster."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
import yaml

from rl_loop.tracking.run_directory import RunDirectory, read_json, read_json_lines
from tests.support.slurm.fake_cluster import FakeCluster

ROOT = Path(__file__).parents[3]
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
    # An untrained policy samples a stop token about every 300 tokens. Some episodes end with a
    # format error, so updates have a gradient.
    "rollout.max_sampled_tokens_per_turn=150",
    "reward.format_error=-2",
    "tasks.held_out_tasks=2",
    "evaluate_every=100",
]


class Lab:
    """A cluster, a shared directory, and the command line for them."""

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
            "stop_before_end": 100,
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
            command,
            cwd=ROOT,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def launch(self, name: str, *overrides: str, **changes: object) -> RunDirectory:
        file = self.cluster_file(**changes)
        arguments = [
            "configs/rl/tiny_retool.yaml",
            f"name={name}",
            *SMALL,
            *overrides,
            "--cluster",
            str(file),
        ]
        done = self.gptoss("launch", *arguments)
        assert done.returncode == 0, done.stderr + done.stdout
        return RunDirectory(self.shared / "runs" / name)

    def outcomes(self, run: RunDirectory) -> list[dict[str, object]]:
        files = sorted(
            (run.path / "attempts").glob("*/outcome.json"),
            key=lambda path: path.stat().st_mtime,
        )
        return [read_json(path) for path in files]

    def until(
        self,
        done: Callable[[], object],
        what: str,
        seconds: float = 180,
        run: RunDirectory | None = None,
    ) -> None:
        """Wait for ``done``.

        A failure of an attempt of ``run`` ends the wait. Errors show ``what`` was expected and the
        status of ``run``.
        """
        deadline = time.monotonic() + seconds
        while not done():
            failed = run and any(
                outcome["result"] in ("failed", "bad nodes") for outcome in self.outcomes(run)
            )
            if failed or time.monotonic() > deadline:
                tails = [f"not within {seconds:.0f} s: {what}", self.queue()]
                if run:
                    tails += map(str, self.outcomes(run))
                    for log in sorted(
                        (run.path / "attempts").glob("*/*.log"),
                        key=lambda log: log.stat().st_mtime,
                    ):
                        tails += [f"--- {log}", *log.read_text(errors="replace").splitlines()[-8:]]
                pytest.fail("\n".join(tails))
            time.sleep(0.2)

    @contextmanager
    def frozen(self, run: RunDirectory) -> Iterator[None]:
        """Stop all rollout workers of ``run`` in the context, so that no step ends.

        They continue when the head node is told to stop.
        """
        workers = ray_actors("RolloutWorker", run)
        assert workers
        for worker in workers:
            worker.suspend()
        told = len(self.notices(run))
        yield
        self.until(lambda: len(self.notices(run)) > told, "Slurm's notice", run=run)
        for worker in workers:
            with suppress(psutil.NoSuchProcess):
                worker.resume()

    def notices(self, run: RunDirectory) -> list[str]:
        """Return the head nodes' messages about Slurm's signals, of all attempts."""
        logs = [log.read_text() for log in run.path.glob("attempts/*/n1.log")]
        return [line for log in logs for line in log.splitlines() if "stop requested" in line]

    def queue(self) -> str:
        return self.cluster.run("squeue", "-h", "-o", "%i %j %T %N %R", check=False)

    def state(self, name: str) -> str:
        names = ",".join(
            f"gptoss.{name}{part}" for part in ("", "-0", "-1")
        )  # heterogeneous jobs have parts
        return self.cluster.run("squeue", "-h", "-n", names, "-o", "%T", check=False)


def ray_actors(kind: str, run: RunDirectory, node: str | None = None) -> list[psutil.Process]:
    """Return the processes of ``run`` with actors of a class, on all nodes or on one node."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        with suppress(psutil.NoSuchProcess):
            if process.info["cmdline"] and process.info["cmdline"][0].startswith(f"ray::{kind}"):
                environment = process.environ()
                if environment.get("GPTOSS_RUN_DIR") == str(run.path) and environment[
                    "SLURMD_NODENAME"
                ] == (node or environment["SLURMD_NODENAME"]):
                    found.append(process)
    return found


def find_processes(run: RunDirectory) -> list[psutil.Process]:
    """Return the processes of the job of ``run`` on all nodes."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.environ().get("GPTOSS_RUN_DIR") == str(run.path):
                found.append(process)
    return found


def steps_done(run: RunDirectory) -> int:
    return (
        len([record for record in read_json_lines(run.metrics) if "reward" in record])
        if run.metrics.exists()
        else 0
    )
