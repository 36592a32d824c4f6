"""Base program of every node in a job: checks, reports, Ray, waiting, cleanup."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from launch.attempts import RunAttempt
from launch.cluster import ClusterConfig
from launch.job_settings import JobSettings
from launch.node_checks import NodeCheck, check_node
from launch.output import make_files_private
from launch.placement import plan_nodes
from launch.ray_node import (
    HeadAddress,
    RayNode,
    has_started_or_ended,
    last_line,
    ray_start_command,
)
from rl_loop.cluster.placement import exit_with_parent, shield_from_slurm
from rl_loop.cluster.processes import kill_tree
from rl_loop.cluster.ray_session import WITHOUT_METRICS, loopback_environment, ray_environment
from rl_loop.cluster.tokens import ray_token_environment
from rl_loop.lifecycle.store_size import store_bytes
from rl_loop.tracking.run_directory import (
    RunDirectory,
    make_run_directory,
    read_json,
    write_json,
)

POLL_SECONDS = 0.5
RAY_STARTS = 3
"""Attempts to start Ray. Another process may take a free port before Ray uses it."""
RAY_SETTLE_SECONDS = 1.5
"""Seconds to wait for Ray's health check, which runs every second and may end Ray."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""SIGTERM: the job is preempted or cancelled. SIGUSR1: the time limit is near."""


class AttemptEnded(Exception):  # noqa: N818 - control flow, not an error
    """The head node has written the outcome, or has exited."""


class NodeProgram:
    """One node of one attempt. Subclasses are the head node and the workers.

    The nodes communicate through files in the directory of the attempt. Each node writes
    nodes/NODE.json with its state: checking, measuring, joining or waiting, ready; bad or failed
    with a problem. The head node writes head.json at its start and outcome.json when all nodes must
    exit.
    """

    is_head = False

    def __init__(self, settings: JobSettings, cluster: ClusterConfig, index: int) -> None:
        self.settings = settings
        self.cluster = cluster
        self.index = index

        # Outside of Slurm there is only this machine.
        self.name = os.environ.get("SLURMD_NODENAME", socket.gethostname())
        self.names = os.environ.get("GPTOSS_NODES", self.name).split(",")
        # Ray's workers inherit both. The first names the node in errors, the second tells the
        # driver to place actors by node (rl_loop.cluster.placement).
        os.environ["SLURMD_NODENAME"] = self.name
        os.environ["GPTOSS_PLACED"] = "1"

        attempt = os.environ["GPTOSS_ATTEMPT"]
        self.run = RunDirectory(settings.directory)
        self.attempt = RunAttempt(self.run.path / "attempts" / attempt)
        if cluster.kind == "local":
            os.environ.update(loopback_environment())
        # Ray would prefer the user's token in the environment to the attempt's token.
        os.environ.pop("RAY_AUTH_TOKEN", None)
        # mkdtemp denies access to other users. The path is short because of Ray's Unix sockets.
        self.scratch = Path(tempfile.mkdtemp(prefix="gptoss-", dir="/tmp"))
        self.ray_directory = self.scratch / "ray"
        self.ray_log = self.attempt.path / f"{self.name}.ray.log"
        self.plan = plan_nodes(settings.parallel, settings.rollout, cluster)[index]

        self.deadline = time.monotonic() + cluster.ready_seconds
        self.stop_requested = False
        self.children: list[subprocess.Popen[bytes]] = []
        self.ray: subprocess.Popen[bytes] | None = None
        """Process that ends when this node's Ray ends; None while Ray does not run."""

    def main(self) -> int:
        """Run the node until the attempt has ended, and return the exit status."""
        make_files_private()
        make_run_directory(self.run.path)
        self.attempt.nodes.mkdir(parents=True, exist_ok=True)
        # Before the first long step: Slurm may send a signal at any time.
        for number in STOP_SIGNALS:
            signal.signal(number, self._request_stop)

        # All output goes to the node's log. The console only gets the outcome.
        console = os.dup(1)
        # O_APPEND, because child processes write to the same log.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        log = os.open(self.attempt.path / f"{self.name}.log", flags, 0o600)
        # At the level of descriptors, so that child processes inherit it.
        os.dup2(log, 1)
        os.dup2(log, 2)
        try:
            return self.run_node(console)
        finally:
            self._clean_up()

    def run_node(self, console: int) -> int:
        """Do this node's work and return the exit status.

        Args:
            console: file descriptor of the original standard output.
        """
        raise NotImplementedError

    def check_progress(self) -> None:
        """Raise the exception that ends ``wait_until``, if there is a reason."""
        raise NotImplementedError

    def join_ray(self) -> None:
        """Check the node and join Ray together with all other nodes."""
        self.report("checking")
        rollout = self.settings.rollout
        engine = rollout.engine if rollout is not None and self.plan.servers else None
        check = check_node(self.cluster, self.settings.store, engine)
        if check.problems:
            self._report_unfit("; ".join(check.problems), check)

        # The head writes its addresses before it checks itself, so this wait is short.
        self.wait_until(self.attempt.head.exists)
        head = HeadAddress(**read_json(self.attempt.head))
        if self.cluster.min_bandwidth is not None:
            self.report("measuring", **asdict(check))
            self._measure_bandwidth(head)

        if self.is_head:
            self.report("joining", **asdict(check))
        else:
            # Ray gives up if the head does not respond within 30 s.
            self.report("waiting", **asdict(check))
            self.wait_until(lambda: self.states().get(self.names[0]) == "ready")

        self.ray = self._start_ray(head)
        if self.ray is None:
            reason = last_line(self.ray_log) or "no output"
            self._report_unfit(f"Ray did not start: {reason}", check)
        self.report("ready", **asdict(check))

    def _start_ray(self, head: HeadAddress) -> subprocess.Popen[bytes] | None:
        """Start Ray and return its process; return None if it ended at every attempt."""
        node = RayNode(
            cluster=self.cluster,
            name=self.name,
            is_head=self.is_head,
            resources=self.plan.resources(),
            scratch=self.ray_directory,
            object_store_bytes=store_bytes(self.settings.store),
        )
        # Ray would start an idle worker per CPU. The few actors start on demand.
        environment = {
            "RAY_prestart_worker_first_driver": "0",
            **ray_environment(),
            **ray_token_environment(self.attempt.ray_token),
        }
        if not self.cluster.dashboard:
            environment |= WITHOUT_METRICS

        # Every attempt appends to the same log. Search for "started" only in the new part.
        for _ in range(RAY_STARTS):
            self.ray_log.touch()
            offset = self.ray_log.stat().st_size
            ray = self.start_child(ray_start_command(node, head), self.ray_log, environment)
            self._wait_for_ray(ray, offset)
            time.sleep(RAY_SETTLE_SECONDS)
            if ray.poll() is None:
                return ray
        return None

    def _wait_for_ray(self, ray: subprocess.Popen[bytes], offset: int) -> None:
        self.wait_until(lambda: has_started_or_ended(ray, self.ray_log, offset))

    def _measure_bandwidth(self, head: HeadAddress) -> None:
        """Take part in the bandwidth measurement of all nodes. Rank 0 writes the results."""
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            f"--nnodes={len(self.names)}",
            f"--node-rank={self.index}",
            f"--nproc-per-node={max(1, self.cluster.gpus_per_node)}",
            f"--master-addr={head.host}",
            f"--master-port={head.check_port}",
            "-m",
            "launch.bandwidth",
            str(self.attempt.bandwidth),
        ]
        log = self.attempt.path / f"{self.name}.bandwidth.log"
        token = ray_token_environment(self.attempt.ray_token)
        process = self.start_child(command, log, token | ray_environment())

        # The exit status is ignored: it is nonzero if any node fails.
        self.wait_until(lambda: process.poll() is not None)

    def _report_unfit(self, problem: str, check: NodeCheck) -> NoReturn:
        """Report this node as bad, and wait for the head node's decision about the attempt."""
        self.report("bad", problem=problem, **asdict(check))
        self.wait_forever()

    def wait_until(self, done: Callable[[], bool]) -> None:
        """Wait until ``done`` returns True, or until ``check_progress`` raises."""
        while not done():
            self.check_ray()
            self.check_progress()
            time.sleep(POLL_SECONDS)

    def wait_forever(self) -> NoReturn:
        """Wait until ``check_progress`` raises."""
        self.wait_until(lambda: False)
        raise AssertionError("unreachable")

    def check_ray(self) -> None:
        """Report this node as failed if its Ray has ended."""
        if self.ray is not None and self.ray.poll() is not None:
            problem = f"Ray ended with status {self.ray.returncode}; see {self.ray_log}"
            self.report("failed", problem=problem, facts={})
            self.ray = None  # report it once

    def states(self) -> dict[str, str]:
        """Return the state of every node that has reported, by node name."""
        return {node: report["state"] for node, report in self.attempt.reports().items()}

    def report(self, state: str, **values: Any) -> None:
        """Write this node's state and its details to its report, which the head node reads."""
        write_json(self.attempt.nodes / f"{self.name}.json", {"state": state, **values})

    def start_child(
        self, command: list[str], log: Path, environment: dict[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a program that Slurm's signals do not reach and that ends with this process.

        Args:
            command: program and arguments.
            log: file that receives the output.
            environment: variables in addition to those of this process.
        """

        def prepare_child() -> None:
            shield_from_slurm()
            exit_with_parent()

        with open(log, "ab") as output:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                preexec_fn=prepare_child,
                env={**os.environ, **(environment or {})},
            )
        self.children.append(child)
        return child

    def _request_stop(self, number: int, frame: FrameType | None) -> None:
        # os.write instead of print, because a signal may interrupt another print.
        os.write(1, f"stop requested by {signal.Signals(number).name}\n".encode())
        self.stop_requested = True

    def _clean_up(self) -> None:
        """End all child processes, and keep Ray's logs."""
        for child in self.children:
            if child.poll() is None:
                kill_tree(child.pid)

        # A missing log must not change the outcome. copytree collects errors of single files in a
        # subclass of OSError.
        with suppress(OSError):
            logs = self.ray_directory / "session_latest" / "logs"
            shutil.copytree(logs, self.attempt.path / "ray" / self.name, dirs_exist_ok=True)
        shutil.rmtree(self.scratch, ignore_errors=True)
        # The token is worthless after the attempt, but must not stay on a shared disk.
        if self.is_head:
            self.attempt.ray_token.unlink(missing_ok=True)
