"""``python -m launch.node RUN_CONFIG CLUSTER_CONFIG COMMAND GROUP``: the program of a job's node.

It runs once on every node. It checks the node, joins Ray and, on the head node, runs ``gptoss
COMMAND`` until the command ends or the time limit is near. GROUP is the number of the node's part
in a heterogeneous job, else 0.

Only this program handles Slurm's signals. They are blocked in Ray and in the training command,
which would otherwise end before a checkpoint is saved.
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

RESTARTED = "GPTOSS_NODE_RESTARTED"
"""Environment variable that is set once this program has the variables of the cluster's file."""

HEAD_GRACE_SECONDS = 60
"""Seconds after the deadline during which a worker waits for the head node's decision."""


class WorkerNode(NodeProgram):
    """Any node but the head. It offers its resources to Ray until the attempt has ended."""

    def run_node(self, console: int) -> int:
        with suppress(AttemptEnded):
            self._run_worker()
        return 0

    def check_progress(self) -> None:
        # The head decides at the deadline. Without a decision 60 s later, it has exited.
        head_is_gone = time.monotonic() > self.deadline + HEAD_GRACE_SECONDS
        if self.attempt.outcome.exists() or head_is_gone:
            raise AttemptEnded

    def _run_worker(self) -> None:
        self.join_ray()

        # Training has no deadline: only the outcome ends this node.
        self.deadline = float("inf")
        self.wait_forever()


def run_node(config_file: str, cluster_file: str, command: str, group: int) -> int:
    """Run this node until the attempt has ended.

    Args:
        config_file: configuration of the run.
        cluster_file: configuration of the cluster.
        command: training command, ``rl`` or ``sft``.
        group: number of the node's part in a heterogeneous job, else 0.

    Returns:
        Exit status.
    """
    cluster = load_cluster(cluster_file)
    # The configuration of the snapshot, in which all paths are resolved.
    settings = job_settings(load_run_config(Path(config_file), command))

    # Slurm numbers the nodes in each part of a heterogeneous job from 0.
    index = int(os.environ.get("SLURM_NODEID", 0))
    # The rollout nodes follow the trainer's nodes.
    if group > 0:
        index += cluster.nodes

    if index == 0:
        return HeadNode(settings, cluster, config_file).main()
    return WorkerNode(settings, cluster, index).main()


def enter_environment(cluster: ClusterConfig) -> None:
    """Restart this program once with the variables of the cluster's file.

    Some variables are read at the start of a program, such as LD_LIBRARY_PATH.
    """
    # The variable must not reach children, which would skip their own restart.
    has_started_again = os.environ.pop(RESTARTED, None) is not None
    if has_started_again or not cluster.env:
        return
    command = [sys.executable, "-m", "launch.node", *sys.argv[1:]]
    os.execve(sys.executable, command, {**os.environ, **cluster.env, RESTARTED: "1"})


if __name__ == "__main__":
    config_file, cluster_file, command, group = sys.argv[1:]
    enter_environment(load_cluster(cluster_file))
    sys.exit(run_node(config_file, cluster_file, command, int(group)))
