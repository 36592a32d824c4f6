"""The head node of a job: checks the other nodes, runs training, decides about another attempt."""

import importlib.metadata
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict

from launch.attempts import (
    AttemptOutcome,
    AttemptResult,
    count_saved_steps,
    decide_requeue,
    earlier_outcomes,
    first_error,
)
from launch.cluster import ClusterConfig
from launch.job_settings import JobSettings
from launch.node_checks import find_outlier_nodes, find_slow_nodes
from launch.node_program import POLL_SECONDS, NodeProgram
from launch.ray_node import HeadAddress
from rl_loop.cluster.tokens import ray_token_environment, write_token
from rl_loop.lifecycle.interrupt import EXIT_STATUSES
from rl_loop.tracking.run_directory import read_json, write_json

LOST_NODE_GRACE_SECONDS = 5
"""Seconds during which the driver may report more about a failed node before it is killed."""


class UnfitNodesError(Exception):
    """Some nodes are unfit or missing."""

    def __init__(self, reasons: dict[str, str]) -> None:
        super().__init__(reasons)
        self.reasons = reasons
        """Reason by node name."""


class StopRequested(Exception):  # noqa: N818 - control flow, not an error
    """Slurm requested the nodes back before training began."""


class HeadNode(NodeProgram):
    """The first node of the job's first group."""

    is_head = True

    def __init__(self, settings: JobSettings, cluster: ClusterConfig, config_file: str) -> None:
        super().__init__(settings, cluster, index=0)
        self.config_file = config_file
        """Configuration file for the training command."""
        self.lost_node = ""
        """Name and problem of a node that failed while the driver ran; "" if none."""

    def run_node(self, console: int) -> int:
        outcome = self._run_head()
        # Slurm's own log gets the outcome, too, because users look there first.
        summary = str(outcome.result)
        if outcome.error:
            summary += f": {outcome.error}"
        os.write(console, f"{summary}\n{outcome.why}\n".encode())
        return 0 if outcome.result is AttemptResult.FINISHED else 1

    def check_progress(self) -> None:
        # Before training there is nothing to save, so stop at once.
        if self.stop_requested:
            raise StopRequested
        self._check_nodes()

    def _run_head(self) -> AttemptOutcome:
        """Run the attempt, write its outcome and return it."""
        # The default result, until the attempt has another one.
        outcome = AttemptOutcome(AttemptResult.FAILED, first_step=count_saved_steps(self.run))
        try:
            self._train(outcome)
        except StopRequested:
            outcome.result = AttemptResult.INTERRUPTED
        except UnfitNodesError as unfit:
            outcome.result = AttemptResult.BAD_NODES
            # Slurm gives the next attempt other nodes.
            outcome.exclude = sorted(unfit.reasons)
            reasons = sorted(unfit.reasons.items())
            outcome.error = "; ".join(f"{node}: {reason}" for node, reason in reasons)
        except Exception as error:
            # The other nodes wait for an outcome, even if this program has a bug.
            outcome.error = f"{self.name}: {type(error).__name__}: {error}"

        # Counted from the checkpoints, because the driver may have been killed.
        outcome.last_step = count_saved_steps(self.run)
        # On a single machine no scheduler starts the job again.
        decide_requeue(outcome, earlier_outcomes(self.attempt), self.cluster.retries)
        if outcome.requeue and self.cluster.kind == "local":
            outcome.requeue = False
            outcome.why = "launch it again to continue"
        self.attempt.write_outcome(outcome)
        return outcome

    def _train(self, outcome: AttemptOutcome) -> None:
        """Bring all nodes into Ray, run the training command and fill in the result.

        Args:
            outcome: receives result and error.
        """
        # The other nodes read the token as soon as head.json exists, so write it first.
        write_token(self.attempt.ray_token)
        head = HeadAddress.choose(self.cluster)
        write_json(self.attempt.head, asdict(head))
        self._write_environment()

        self.join_ray()
        # Ranks are placed by node resources, so every node must be in Ray before the driver
        # starts.
        self.wait_until(self._all_nodes_are_ready)
        self._check_nodes(complete=True)

        # A driver that is stopped during its start may exit with any status. That is no failure.
        status = self._run_driver(f"{head.host}:{head.port}")
        if status == 0:
            outcome.result = AttemptResult.FINISHED
        elif status in EXIT_STATUSES or self.stop_requested:
            outcome.result = AttemptResult.INTERRUPTED
        else:
            outcome.error = self._explain_failure(status)

    def _write_environment(self) -> None:
        """Record the installed packages, to make the run reproducible."""
        packages = importlib.metadata.distributions()
        lines = sorted(f"{package.name}=={package.version}\n" for package in packages)
        (self.attempt.path / "environment.txt").write_text("".join(lines))

    def _all_nodes_are_ready(self) -> bool:
        states = self.states()
        return set(states) >= set(self.names) and set(states.values()) == {"ready"}

    def _check_nodes(self, complete: bool = False) -> None:
        """Raise UnfitNodesError once it is certain which nodes cannot take part.

        Args:
            complete: whether every node has reported, so that nodes can be compared.
        """
        reports = self.attempt.reports()
        reasons = {}
        for node, report in reports.items():
            if "problem" in report:
                reasons[node] = report["problem"]

        if time.monotonic() > self.deadline:
            reasons |= self._explain_delay()
        elif set(self.names) - set(reports):
            return  # another unfit node may still report, and all are excluded together

        # Comparisons need the reports of all nodes.
        if complete and self.cluster.gpus_per_node:
            reasons |= find_outlier_nodes(reports)
        if complete and self.cluster.min_bandwidth is not None:
            reasons |= find_slow_nodes(
                read_json(self.attempt.bandwidth),
                self.cluster.min_bandwidth,
            )
        if reasons:
            raise UnfitNodesError(reasons)

    def _explain_delay(self) -> dict[str, str]:
        """Return the nodes that delay the others beyond cluster.ready_seconds, and the reason."""
        seconds = self.cluster.ready_seconds
        states = self.states()
        # Nodes without any report are the certain cause. Others may only wait for them.
        missing = [node for node in self.names if node not in states]
        if missing:
            return dict.fromkeys(
                missing,
                f"did not come up within {seconds} s (cluster.ready_seconds)",
            )

        # Nodes in a later state may only be waiting for nodes that are still checking.
        late = {node: state for node, state in states.items() if state != "ready"}
        checking = {node: state for node, state in late.items() if state == "checking"}
        unfinished = checking or late
        return {node: f"still {state} after {seconds} s" for node, state in unfinished.items()}

    def _run_driver(self, ray_address: str) -> int:
        """Run the training command until it ends, and return its exit status."""
        command = [
            sys.executable,
            "-m",
            "launch",
            self.settings.command,
            self.config_file,
            # The same command starts the run and continues it in later attempts.
            "--resume-or-new",
        ]
        environment = {
            "RAY_ADDRESS": ray_address,
            **ray_token_environment(self.attempt.ray_token),
            "TYPER_STANDARD_TRACEBACK": "1",  # first_error reads Python's own tracebacks
        }
        driver = self.start_child(command, self.attempt.driver_log, environment)

        while driver.poll() is None:
            self.check_ray()
            self._copy_metric_addresses()
            if self.stop_requested:
                driver.send_signal(signal.SIGUSR1)  # repeatedly: its handler may not be set yet
            self._end_with_lost_node(driver)
            time.sleep(POLL_SECONDS)
        return driver.returncode

    def _copy_metric_addresses(self) -> None:
        """Copy the addresses for Prometheus, which Ray updates in its own directory."""
        discovery = self.ray_directory / "prom_metrics_service_discovery.json"
        # Prometheus reads the copy, because the scratch directory is local to this node and is
        # deleted at the end of the run.
        if discovery.exists():
            shutil.copyfile(discovery, self.attempt.path / "prometheus.json")

    def _end_with_lost_node(self, driver: subprocess.Popen[bytes]) -> None:
        """Kill the driver if a node has failed, because it would wait for that node's actors."""
        for node, report in self.attempt.reports().items():
            if report["state"] == "failed":
                time.sleep(LOST_NODE_GRACE_SECONDS)
                self.lost_node = f"{node}: {report['problem']}"
                driver.kill()

    def _explain_failure(self, status: int) -> str:
        """Return the most precise known reason for a failed training command."""
        # The driver knows the rank and its exception. It sees a lost node only as dead actors.
        error = first_error(self.attempt.driver_log.read_text(errors="replace"))
        if error:
            return error
        if self.lost_node:
            return self.lost_node

        ending = f"ended with status {status}"
        if status < 0:
            ending = f"was killed by {signal.Signals(-status).name}"
        return f"the driver on {self.name} {ending}; see {self.attempt.driver_log}"
