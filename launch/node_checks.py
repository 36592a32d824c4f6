"""Checks of a node before Ray starts. One bad GPU slows or stops the whole job."""

import shutil
import socket
import subprocess
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch.cluster import ClusterConfig
from megatron_gptoss.nvidia_smi import memory_bytes, query_gpus
from rl_loop.config.errors import StartError
from rl_loop.engines.backend import EngineConfig, EngineUnavailableError
from rl_loop.lifecycle.store_size import StoreNeed, check_local_store

IDLE_BYTES = 1 << 30
"""Used memory above which a GPU counts as busy. A driver alone uses a few hundred MiB."""
RAY_PORTS = 10
"""Number of ports, from cluster.ray_port on, of Ray's own processes.

The ports of workers follow. Ray chooses free ones among them.
"""
GPU_FACTS = {"GPU": "name", "driver": "driver_version", "SM clock": "clocks.max.sm"}
"""nvidia-smi field of each fact that must be equal on all nodes. Clock: maximum in MHz."""


@dataclass
class NodeCheck:
    """Result of one node's checks."""

    facts: dict[str, str] = field(default_factory=dict)
    """Values that must be equal on all nodes: "GPU", "driver" and "SM clock"."""
    problems: list[str] = field(default_factory=list)
    """Reasons why this node cannot take part, independent of other nodes."""


def check_node(
    cluster: ClusterConfig, store: StoreNeed, engine: EngineConfig | None = None
) -> NodeCheck:
    """Check this node's disks, ports, GPUs and memory for Ray's object store.

    Args:
        cluster: settings of the cluster.
        store: object-store memory that the run needs.
        engine: engine whose servers run here, whose interpreter is checked; None for no servers.
    """
    check = NodeCheck()
    # Collect all problems, so that one repair of the node can remove them.
    if engine is not None:
        try:
            engine.check_machine()
        except (EngineUnavailableError, OSError, subprocess.SubprocessError) as error:
            check.problems.append(str(error))
    try:
        check_local_store(store)
    except StartError as too_small:
        check.problems.append(str(too_small))
    check.problems.extend(full_disks(cluster))
    check.problems.extend(busy_ports(cluster))
    if not cluster.gpus_per_node:
        return check

    try:
        gpus = query_gpus(*GPU_FACTS.values(), "index", "memory.used")
    except OSError as error:
        check.problems.append(str(error))
        return check

    # More GPUs than requested are allowed, because not every cluster hides the others.
    if len(gpus) < cluster.gpus_per_node:
        check.problems.append(
            f"{len(gpus)} GPUs visible, but cluster.gpus_per_node is {cluster.gpus_per_node}",
        )
    for gpu in gpus:
        used = memory_bytes(gpu["memory.used"])
        if used is not None and used > IDLE_BYTES:
            check.problems.append(f"GPU {gpu['index']}: another job uses {used >> 20} MiB")

    # Join distinct values: one different GPU makes the node differ from the others.
    for fact, field_name in GPU_FACTS.items():
        check.facts[fact] = "/".join(sorted({gpu[field_name] for gpu in gpus}))
    return check


def full_disks(cluster: ClusterConfig) -> list[str]:
    """Return a problem for shared_dir and for /tmp if less than min_free_disk is free."""
    problems = []
    # Ray's files are in /tmp, checkpoints in shared_dir.
    for path in (cluster.shared_dir, Path("/tmp")):
        free = shutil.disk_usage(path).free / 1e9
        if free < cluster.min_free_disk:
            problems.append(
                f"{free:.1f} GB free in {path}, but cluster.min_free_disk is "
                f"{cluster.min_free_disk:g}",
            )
    return problems


def busy_ports(cluster: ClusterConfig) -> list[str]:
    """Return a problem if the ports of Ray's own processes are in use."""
    if cluster.ray_port is None:
        return []

    busy = []
    for port in range(cluster.ray_port, cluster.ray_port + RAY_PORTS):
        with socket.socket() as probe:
            # A port that was just released counts as free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError:
                busy.append(str(port))
    if not busy:
        return []
    return [f"port {', '.join(busy)} is in use, but cluster.ray_port is {cluster.ray_port}"]


def find_outlier_nodes(reports: Mapping[str, dict[str, Any]]) -> dict[str, str]:
    """Return the nodes whose facts differ from the majority, and their differences.

    Args:
        reports: report of each node, with its ``NodeCheck.facts`` under "facts".
    """
    differences: dict[str, list[str]] = {}
    facts = {name for report in reports.values() for name in report["facts"]}
    for fact in facts:
        # A missing fact (nvidia-smi did not respond) counts as a different value.
        values = {node: report["facts"].get(fact) for node, report in reports.items()}
        # The majority, because no reference says which value is right.
        usual = Counter(values.values()).most_common(1)[0][0]
        for node, value in values.items():
            if value != usual:
                differences.setdefault(node, []).append(
                    f"{fact} is {value}, on other nodes {usual}"
                )
    return {node: "; ".join(sorted(how)) for node, how in differences.items()}


def find_slow_nodes(
    bandwidths: Mapping[str, dict[str, float | None]],
    minimum: float,
) -> dict[str, str]:
    """Return the nodes whose bandwidth is too low, and their bandwidth.

    Args:
        bandwidths: output of ``launch.bandwidth``, per node: "within" the node and "between" it and
            the faster neighbor, in GB/s.
        minimum: minimum bandwidth in GB/s.
    """
    slow: dict[str, str] = {}
    for node, measured in bandwidths.items():
        for where, value in measured.items():
            # None: one GPU per node has no bandwidth within, a single node has no neighbor.
            if value is not None and value < minimum:
                slow[node] = (
                    f"all-reduce {where} nodes at {value:.2f} GB/s, but cluster.min_bandwidth is "
                    f"{minimum:g}"
                )
    return slow
