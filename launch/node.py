"""``python -m launch.node RUN_CONFIG CLUSTER_CONFIG COMMAND GROUP`` runs once on every node of a job: it checks the
node, brings it into Ray and, on the head node, runs ``gptoss rl`` until it ends or the time does.

The nodes talk through files in the run directory (``launch.attempts``). Only this program listens to Slurm's signals:
Ray and the driver, which would die of them before a checkpoint is saved, are started with them blocked."""

import importlib.metadata
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from launch.attempts import Attempt, Outcome, Result, decide, earlier_outcomes, first_error, saved_steps
from launch.cluster import ClusterConfig, load_cluster
from launch.node_checks import check_node, odd_ones_out, slow_ones
from launch.placement import place
from rl_loop.cluster.placement import end_with_parent, free_port
from rl_loop.cluster.ray_session import ray_environment
from rl_loop.config.load import load_config
from rl_loop.config.run import RlConfig, RunConfig, SftConfig
from rl_loop.lifecycle.interrupt import EXIT_STATUSES
from rl_loop.tracking.run_directory import RunDirectory, read_json, write_json

POLL_SECONDS = 0.5
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)  # SIGTERM: preempted or cancelled; SIGUSR1: the time limit is near
RAY_STARTS = 3  # a port that was free may be taken when one of Ray's parts wants it


class Unfit(Exception):
    """Nodes that are bad or missing: {node: reason}."""


class Stopped(Exception):
    """Slurm wants the nodes back before training has begun."""


class AttemptEnded(Exception):
    """The head node has written the outcome."""


class NodeProgram:
    """One node of one attempt. The head is the first node of group 0."""

    def __init__(self, config: RunConfig, cluster: ClusterConfig, group: int) -> None:
        self.config, self.cluster = config, cluster
        environment = os.environ
        self.name = environment.get("SLURMD_NODENAME", socket.gethostname())
        environment |= {"SLURMD_NODENAME": self.name, "GPTOSS_PLACED": "1"}  # Ray's workers inherit both
        self.index = int(environment.get("SLURM_NODEID", 0)) + (cluster.nodes if group else 0)
        self.is_head = self.index == 0
        self.names = environment.get("GPTOSS_NODES", self.name).split(",")
        self.run = RunDirectory(config.directory)
        self.attempt = Attempt(self.run.path / "attempts" / environment["GPTOSS_ATTEMPT"])
        self.plan = place(config, cluster, isinstance(config, RlConfig))[self.index]
        self.deadline = time.monotonic() + cluster.ready_seconds
        self.scratch = Path("/tmp") / f"gptoss-ray-{environment['GPTOSS_ATTEMPT']}-{self.index}"
        self.stop_requested = False
        self.lost = ""  # what is known of a node that ended while the driver ran
        self.children: list[subprocess.Popen[bytes]] = []
        self.ray: subprocess.Popen[bytes] | None = None

    def main(self) -> int:
        """Exit status of this node."""
        self.attempt.nodes.mkdir(parents=True, exist_ok=True)
        for number in STOP_SIGNALS:
            signal.signal(number, self._stop)
        console = os.dup(1)
        log = os.open(self.attempt.path / f"{self.name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        try:
            if not self.is_head:
                self._serve()
                return 0
            outcome = self._lead()
            lines = [f"{outcome.result}: {outcome.error}" if outcome.error else str(outcome.result), outcome.why]
            os.write(console, ("\n".join(lines) + "\n").encode())
            return 0 if outcome.result is Result.FINISHED else 1
        finally:
            self._clean_up()

    # -- every node -----------------------------------------------------------------------------------------------

    def _join(self) -> None:
        """Check the node and bring it into Ray; ``ray`` is the process that ends when this node's Ray does."""
        self._report("checking")
        check = check_node(self.cluster)
        if check["problems"]:
            self._report("bad", problem="; ".join(check["problems"]), **check)
            self._wait(lambda: False)
        self._wait(self.attempt.head.exists)
        head = read_json(self.attempt.head)
        if self.cluster.min_bandwidth is not None:
            self._report("measuring", **check)
            self._measure(head)
        self._report("joining" if self.is_head else "waiting", **check)
        if not self.is_head:  # Ray gives up on a head that does not answer within 30 s
            self._wait(lambda: self._states().get(self.names[0]) == "ready")
        log = self.attempt.path / f"{self.name}.ray.log"
        for _ in range(RAY_STARTS):
            log.touch()
            before = log.stat().st_size
            # no idle workers, one per CPU: the actors are few and start when they are needed
            settings = {"RAY_prestart_worker_first_driver": "0", **ray_environment()}
            ray = self._start(ray_command(self, head), log, **settings)
            self._wait(partial(started_or_ended, ray, log, before))
            time.sleep(1.5)  # it looks after its own parts every second, and ends if one of them came up too late
            if ray.poll() is None:
                self.ray = ray
                self._report("ready", **check)
                return
        said = log.read_text(errors="replace").strip().rpartition("\n")[2] or "no output"
        self._report("bad", problem=f"Ray did not start: {said}", **check)
        self._wait(lambda: False)

    def _measure(self, head: dict[str, Any]) -> None:
        command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(self.names)}",
                   f"--node-rank={self.index}", f"--nproc-per-node={max(1, self.cluster.gpus_per_node)}",
                   f"--master-addr={head['host']}", f"--master-port={head['check_port']}",
                   "-m", "launch.bandwidth", str(self.attempt.path / "bandwidth.json")]  # fmt: skip
        process = self._start(command, self.attempt.path / f"{self.name}.bandwidth.log")
        self._wait(lambda: process.poll() is not None)

    def _wait(self, done: Callable[[], bool]) -> None:
        """Until ``done``. Raises what ends the wait before: AttemptEnded, Stopped, and on the head Unfit."""
        while not done():
            self._look_after_ray()
            if self.is_head:
                if self.stop_requested:
                    raise Stopped
                self._judge()
            elif self.attempt.outcome.exists() or time.monotonic() > self.deadline + 60:
                raise AttemptEnded  # if the head has not decided by now, it is gone
            time.sleep(POLL_SECONDS)

    def _look_after_ray(self) -> None:
        if self.ray is not None and self.ray.poll() is not None:
            log = self.attempt.path / f"{self.name}.ray.log"
            self._report("failed", problem=f"Ray ended with status {self.ray.returncode}; see {log}", facts={})
            self.ray = None

    def _states(self) -> dict[str, str]:
        return {node: report["state"] for node, report in self.attempt.reports().items()}

    def _report(self, state: str, **values: Any) -> None:
        write_json(self.attempt.nodes / f"{self.name}.json", {"state": state, **values})

    def _start(self, command: list[str], log: Path, **environment: str) -> subprocess.Popen[bytes]:
        """A child that Slurm's signals do not reach and that does not outlive this process."""

        def in_child() -> None:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
            end_with_parent()

        with open(log, "ab") as output:
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, preexec_fn=in_child,
                env={**os.environ, **environment},
            )  # fmt: skip
        self.children.append(child)
        return child

    def _stop(self, number: int, frame: FrameType | None) -> None:
        os.write(1, f"asked to stop by {signal.Signals(number).name}\n".encode())  # print is not safe in a handler
        self.stop_requested = True

    def _clean_up(self) -> None:
        """End everything this node started, then keep Ray's logs."""
        for child in self.children:
            if child.poll() is None:
                parent = psutil.Process(child.pid)
                for process in [*parent.children(recursive=True), parent]:
                    with suppress(psutil.NoSuchProcess):
                        process.kill()
        logs = self.scratch / "session_latest" / "logs"
        with suppress(OSError):  # also what copytree raises for single files; a log is not worth the outcome
            shutil.copytree(logs, self.attempt.path / "ray" / self.name, dirs_exist_ok=True)
        shutil.rmtree(self.scratch, ignore_errors=True)

    # -- all but the head -----------------------------------------------------------------------------------------

    def _serve(self) -> None:
        with suppress(AttemptEnded):
            self._join()
            self.deadline = float("inf")
            self._wait(lambda: False)

    # -- the head -------------------------------------------------------------------------------------------------

    def _lead(self) -> Outcome:
        first = saved_steps(self.run)
        outcome = Outcome(Result.FAILED, first_step=first)
        try:
            address = node_address()
            base = self.cluster.ray_port
            ports = [base, base + 3, base + 9, base + 8] if base else [free_port() for _ in range(4)]
            names = ("port", "dashboard_port", "check_port", "client_port")
            shown = f"http://{address}:{ports[1]}" if self.cluster.dashboard else "is switched off"
            head = {"host": address, "dashboard": shown} | dict(zip(names, ports, strict=True))
            write_json(self.attempt.head, head)
            packages = sorted(f"{d.name}=={d.version}" for d in importlib.metadata.distributions())
            (self.attempt.path / "environment.txt").write_text("\n".join(packages) + "\n")
            self._join()
            self._wait(lambda: set(self._states()) >= set(self.names) and set(self._states().values()) == {"ready"})
            self._judge(complete=True)
            status = self._drive(f"{address}:{ports[0]}")
            if status == 0:
                outcome.result = Result.FINISHED
            elif status in EXIT_STATUSES or self.stop_requested:
                outcome.result = Result.INTERRUPTED
            else:
                outcome.error = self._why_failed(status)
        except Stopped:
            outcome.result = Result.INTERRUPTED
        except Unfit as unfit:
            reasons = unfit.args[0]
            outcome.result, outcome.exclude = Result.BAD_NODES, sorted(reasons)
            outcome.error = "; ".join(f"{node}: {reason}" for node, reason in sorted(reasons.items()))
        except Exception as error:  # a fault of this program must not leave the other nodes waiting
            outcome.error = f"{self.name}: {type(error).__name__}: {error}"
        outcome.last_step = saved_steps(self.run)
        decide(outcome, earlier_outcomes(self.attempt), self.cluster.retries)
        if outcome.requeue and self.cluster.kind == "local":
            outcome.requeue, outcome.why = False, "launch it again to go on"
        self.attempt.write_outcome(outcome)
        return outcome

    def _judge(self, complete: bool = False) -> None:
        """Raise Unfit once it is certain which nodes cannot take part."""
        reports = self.attempt.reports()
        missing = [name for name in self.names if name not in reports]
        reasons = {node: report["problem"] for node, report in reports.items() if "problem" in report}
        if time.monotonic() > self.deadline:
            late = f"did not come up within {self.cluster.ready_seconds} s (cluster.ready_seconds)"
            states = {node: state for node, state in self._states().items() if state != "ready"}
            busy = {node: state for node, state in states.items() if state == "checking"} or states
            slow = {node: f"still {state} after {self.cluster.ready_seconds} s" for node, state in busy.items()}
            reasons |= dict.fromkeys(missing, late) or slow
        elif missing:
            return
        if complete and self.cluster.gpus_per_node:
            reasons |= odd_ones_out(reports)
        if complete and self.cluster.min_bandwidth is not None:
            reasons |= slow_ones(read_json(self.attempt.path / "bandwidth.json"), self.cluster.min_bandwidth)
        if reasons:
            raise Unfit(reasons)

    def _drive(self, address: str) -> int:
        """Run the training command; its exit status."""
        command = [sys.executable, "-m", "launch", self.config.command, sys.argv[1], "--resume-or-new"]
        # the traceback is to be Python's own, which first_error reads
        driver = self._start(command, self.attempt.driver_log, RAY_ADDRESS=address, TYPER_STANDARD_TRACEBACK="1")
        discovery = self.scratch / "prom_metrics_service_discovery.json"  # Ray keeps it up to date
        while driver.poll() is None:
            self._look_after_ray()
            if discovery.exists():
                shutil.copyfile(discovery, self.attempt.path / "prometheus.json")
            if self.stop_requested:
                driver.send_signal(signal.SIGUSR1)  # again and again: it may not listen yet
            for node, report in self.attempt.reports().items():
                if report["state"] == "failed":
                    time.sleep(5)  # the driver may know more
                    self.lost = f"{node}: {report['problem']}"
                    driver.kill()
            time.sleep(POLL_SECONDS)
        return driver.returncode

    def _why_failed(self, status: int) -> str:
        ending = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        unknown = f"the driver on {self.name} {ending}; see {self.attempt.driver_log}"
        return first_error(self.attempt.driver_log.read_text(errors="replace")) or self.lost or unknown


def ray_command(node: NodeProgram, head: dict[str, Any]) -> list[str]:
    """``ray start`` for this node."""
    cluster, address = node.cluster, node_address()
    command = [
        sys.executable, "-m", "rl_loop.cluster.ray_session", "start", "--block", "--disable-usage-stats",
        f"--node-ip-address={address}", f"--node-name={node.name}",
        f"--num-cpus={cluster.cpus_per_node or os.cpu_count()}", f"--num-gpus={cluster.gpus_per_node}",
        f"--resources={json.dumps(node.plan.resources())}", f"--temp-dir={node.scratch}",
    ]  # fmt: skip
    if node.is_head:
        command += [
            "--head", f"--port={head['port']}", f"--dashboard-host={address}",
            f"--dashboard-port={head['dashboard_port']}", f"--ray-client-server-port={head['client_port']}",
            "--no-monitor", f"--include-dashboard={str(cluster.dashboard).lower()}",
        ]  # fmt: skip
    else:
        command.append(f"--address={head['host']}:{head['port']}")
    if cluster.ray_port is None:
        return [*command, "--min-worker-port=0", "--max-worker-port=0"]
    names = ["node-manager-port", "object-manager-port", "", "dashboard-agent-listen-port", "dashboard-agent-grpc-port",
             "runtime-env-agent-port", "metrics-export-port"]  # fmt: skip
    command += [f"--{name}={cluster.ray_port + 1 + i}" for i, name in enumerate(names) if name]
    return [*command, f"--min-worker-port={cluster.ray_port + 10}", f"--max-worker-port={cluster.ray_port + 999}"]


def node_address() -> str:
    """The address under which the other nodes reach this one."""
    address = socket.gethostbyname(socket.gethostname())
    if address not in ("127.0.0.1", "127.0.1.1"):  # what /etc/hosts says about itself on many machines
        return address
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("10.255.255.255", 1))  # sends nothing: asks which interface would be used
        except OSError:
            return address
        return probe.getsockname()[0]


def started_or_ended(ray: subprocess.Popen[bytes], log: Path, offset: int) -> bool:
    return b"Ray runtime started" in log.read_bytes()[offset:] or ray.poll() is not None


def main() -> None:
    config_path, cluster_path, command, group = sys.argv[1:]
    kind = RlConfig if command == RlConfig.command else SftConfig
    config = load_config(Path(config_path), kind)
    sys.exit(NodeProgram(config, load_cluster(cluster_path), int(group)).main())


if __name__ == "__main__":
    main()
