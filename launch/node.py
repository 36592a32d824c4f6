"""``python -m launch.node RUN_CONFIG CLUSTER_CONFIG COMMAND GROUP`` runs once on every node of a
job.

It checks the node, brings it into Ray and, on the head node, runs ``gptoss COMMAND`` until it ends
or the time does. GROUP is the number of the node's part in a heterogeneous job, 0 in any other.

Only this program listens to Slurm's signals. Ray and the training command, which would die of them
before a checkpoint is saved, are started with them blocked.
"""

import os
import sys
import time
from contextlib import suppress
from pathlib import Path

from launch.cluster import ClusterConfig, load_cluster
from launch.head_node import HeadNode
from launch.node_program import AttemptEnded, NodeProgram
from launch.submit import job_settings
from rl_loop.config.load import load_run_config

STARTED_AGAIN = "GPTOSS_NODE_STARTED_AGAIN"
"""In the environment of this program once it has the variables of the cluster's file."""

HEAD_GRACE_SECONDS = 60
"""How long after the deadline a worker still waits for the head node's decision."""


class WorkerNode(NodeProgram):
    """Any node but the head: it offers its resources to Ray until the attempt has ended."""

    def run_node(self, console: int) -> int:
        with suppress(AttemptEnded):
            self._run_worker()
        return 0

    def check_progress(self) -> None:
        # The head decides at the deadline. If it has not by a minute later, it is gone itself.
        head_is_gone = time.monotonic() > self.deadline + HEAD_GRACE_SECONDS
        if self.attempt.outcome.exists() or head_is_gone:
            raise AttemptEnded

    def _run_worker(self) -> None:
        self.join_ray()

        # From now on only the outcome ends this node: training takes as long as it takes.
        self.deadline = float("inf")
        self.wait_forever()


def run_node(config_file: str, cluster_file: str, command: str, group: int) -> int:
    """Run this node until the attempt has ended; returns the exit status."""
    cluster = load_cluster(cluster_file)
    settings = job_settings(load_run_config(Path(config_file), command))

    # Slurm numbers the nodes of each part of a heterogeneous job from 0.
    index = int(os.environ.get("SLURM_NODEID", 0))
    if group > 0:
        index += cluster.nodes

    if index == 0:
        return HeadNode(settings, cluster, config_file).main()
    return WorkerNode(settings, cluster, index).main()


def enter_environment(cluster: ClusterConfig) -> None:
    """Start this program again, once, with the variables of the cluster's file.

    Some are read when a program starts, such as LD_LIBRARY_PATH."""
    has_started_again = os.environ.pop(STARTED_AGAIN, None) is not None
    if has_started_again or not cluster.env:
        return
    command = [sys.executable, "-m", "launch.node", *sys.argv[1:]]
    os.execve(sys.executable, command, {**os.environ, **cluster.env, STARTED_AGAIN: "1"})


if __name__ == "__main__":
    config_file, cluster_file, command, group = sys.argv[1:]
    enter_environment(load_cluster(cluster_file))
    sys.exit(run_node(config_file, cluster_file, command, int(group)))
