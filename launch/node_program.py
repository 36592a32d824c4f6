"""What every node of a job does: check itself, report, join Ray, wait for the others, clean up."""

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

from launch.attempts import Attempt
from launch.cluster import ClusterConfig
from launch.job_settings import JobSettings
from launch.node_checks import NodeCheck, check_node
from launch.output import make_files_private
from launch.placement import place
from launch.ray_node import (
    HeadAddress,
    RayNode,
    has_started_or_ended,
    last_line,
    ray_start_command,
)
from rl_loop.cluster.placement import end_with_parent
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
"""Tries to start Ray: a port that was free may be taken when one of Ray's parts wants it."""
RAY_SETTLE_SECONDS = 1.5
"""Ray checks its own parts every second and ends if one of them came up too late."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""SIGTERM: the job is preempted or cancelled. SIGUSR1: its time limit is near."""


class AttemptEnded(Exception):
    """The head node has written the outcome, or is gone."""


class NodeProgram:
    """One node of one attempt; the head node and the workers extend it.

    The nodes talk through files in the directory of the attempt: each node writes nodes/NODE.json
    with its state (checking, measuring, joining or waiting, ready; bad or failed with a problem),
    the head node writes head.json when it begins and outcome.json when everybody is to leave."""

    is_head = False

    def __init__(self, settings: JobSettings, cluster: ClusterConfig, index: int) -> None:
        self.settings = settings
        self.cluster = cluster
        self.index = index

        self.name = os.environ.get("SLURMD_NODENAME", socket.gethostname())
        self.names = os.environ.get("GPTOSS_NODES", self.name).split(",")
        # Ray's workers inherit both: the first names the node in errors, the second says that
        # actors have places (rl_loop.cluster.placement).
        os.environ["SLURMD_NODENAME"] = self.name
        os.environ["GPTOSS_PLACED"] = "1"

        attempt = os.environ["GPTOSS_ATTEMPT"]
        self.run = RunDirectory(settings.directory)
        self.attempt = Attempt(self.run.path / "attempts" / attempt)
        if cluster.kind == "local":
            os.environ.update(loopback_environment())
        # Ray would take the user's own token from the environment instead of the attempt's.
        os.environ.pop("RAY_AUTH_TOKEN", None)
        # Closed to other users. Short, because Ray's Unix sockets lie below it.
        self.scratch = Path(tempfile.mkdtemp(prefix="gptoss-", dir="/tmp"))
        self.ray_directory = self.scratch / "ray"
        self.ray_log = self.attempt.path / f"{self.name}.ray.log"
        self.plan = place(settings.parallel, settings.rollout, cluster)[index]

        self.deadline = time.monotonic() + cluster.ready_seconds
        self.stop_requested = False
        self.children: list[subprocess.Popen[bytes]] = []
        self.ray: subprocess.Popen[bytes] | None = None
        """The process that ends when this node's Ray does."""

    def main(self) -> int:
        """Run the node until the attempt has ended; returns the exit status."""
        make_files_private()
        make_run_directory(self.run.path)
        self.attempt.nodes.mkdir(parents=True, exist_ok=True)
        for number in STOP_SIGNALS:
            signal.signal(number, self._request_stop)

        # From here on everything is written to the node's log; the console is for the outcome
        # alone.
        console = os.dup(1)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        log = os.open(self.attempt.path / f"{self.name}.log", flags, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        try:
            return self.run_node(console)
        finally:
            self._clean_up()

    def run_node(self, console: int) -> int:
        """Do this node's work and return the exit status.

        ``console`` is the file descriptor of the original standard output."""
        raise NotImplementedError

    def check_progress(self) -> None:
        """Raise the exception that ends the wait of ``wait_until``."""
        raise NotImplementedError

    def join_ray(self) -> None:
        """Check the node and bring it into Ray, together with all others."""
        self.report("checking")
        rollout = self.settings.rollout
        engine = rollout.engine if rollout is not None and self.plan.servers else None
        check = check_node(self.cluster, self.settings.store, engine)
        if check.problems:
            self._give_up("; ".join(check.problems), check)

        # The head writes its addresses before it checks itself, so that this wait is short.
        self.wait_until(self.attempt.head.exists)
        head = HeadAddress(**read_json(self.attempt.head))
        if self.cluster.min_bandwidth is not None:
            self.report("measuring", **asdict(check))
            self._measure_bandwidth(head)

        if self.is_head:
            self.report("joining", **asdict(check))
        else:
            # Ray gives up on a head that does not answer within 30 s.
            self.report("waiting", **asdict(check))
            self.wait_until(lambda: self.states().get(self.names[0]) == "ready")

        self.ray = self._start_ray(head)
        if self.ray is None:
            reason = last_line(self.ray_log) or "no output"
            self._give_up(f"Ray did not start: {reason}", check)
        self.report("ready", **asdict(check))

    def _start_ray(self, head: HeadAddress) -> subprocess.Popen[bytes] | None:
        """Start Ray and return its process once it runs; None if it ended at every try."""
        node = RayNode(
            cluster=self.cluster,
            name=self.name,
            is_head=self.is_head,
            resources=self.plan.resources(),
            scratch=self.ray_directory,
            object_store_bytes=store_bytes(self.settings.store),
        )
        # Ray would start an idle worker per CPU; the actors are few and start when they are
        # needed.
        environment = {
            "RAY_prestart_worker_first_driver": "0",
            **ray_environment(),
            **ray_token_environment(self.attempt.ray_token),
        }
        if not self.cluster.dashboard:
            environment |= WITHOUT_METRICS

        # Every try appends to the same log; "started" must be that of this one.
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
        """Take part in the measurement of all nodes; launch.bandwidth writes what it finds."""
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

        # Its exit status says nothing about this node: it also fails when another one does.
        self.wait_until(lambda: process.poll() is not None)

    def _give_up(self, problem: str, check: NodeCheck) -> NoReturn:
        """Report this node as bad and wait until the head node has decided about the attempt."""
        self.report("bad", problem=problem, **asdict(check))
        self.wait_forever()

    def wait_until(self, done: Callable[[], bool]) -> None:
        """Wait until ``done`` holds; raises what ``check_progress`` raises."""
        while not done():
            self.check_ray()
            self.check_progress()
            time.sleep(POLL_SECONDS)

    def wait_forever(self) -> NoReturn:
        """Wait for what ``check_progress`` raises."""
        self.wait_until(lambda: False)
        raise AssertionError("unreachable")

    def check_ray(self) -> None:
        """Report this node as failed if its Ray has ended."""
        if self.ray is not None and self.ray.poll() is not None:
            problem = f"Ray ended with status {self.ray.returncode}; see {self.ray_log}"
            self.report("failed", problem=problem, facts={})
            self.ray = None  # reported once

    def states(self) -> dict[str, str]:
        """Return the state of every node that has reported, by name."""
        return {node: report["state"] for node, report in self.attempt.reports().items()}

    def report(self, state: str, **values: Any) -> None:
        """Write this node's state, and what belongs to it, for the head node to read."""
        write_json(self.attempt.nodes / f"{self.name}.json", {"state": state, **values})

    def start_child(
        self, command: list[str], log: Path, environment: dict[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a program that Slurm's signals do not reach and that does not outlive this
        process.

        ``environment`` is added to this process's own."""

        # Slurm signals every process of the job. A blocked signal stays blocked through exec, so
        # that neither Ray nor what it starts ends before the driver has saved. SIGUSR1 is only
        # ignored: the driver sets a handler of its own for it.
        def prepare_child() -> None:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
            end_with_parent()

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
        # print is not safe in a signal handler: it may interrupt another print.
        os.write(1, f"asked to stop by {signal.Signals(number).name}\n".encode())
        self.stop_requested = True

    def _clean_up(self) -> None:
        """End everything that this node started, then keep Ray's logs."""
        for child in self.children:
            if child.poll() is None:
                kill_tree(child.pid)

        # A log is not worth the outcome: copytree raises a subclass of OSError for single files,
        # too.
        with suppress(OSError):
            logs = self.ray_directory / "session_latest" / "logs"
            shutil.copytree(logs, self.attempt.path / "ray" / self.name, dirs_exist_ok=True)
        shutil.rmtree(self.scratch, ignore_errors=True)
        if self.is_head:
            self.attempt.ray_token.unlink(missing_ok=True)
