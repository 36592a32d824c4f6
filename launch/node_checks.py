"""Checks of nodes before Ray starts on them: one bad GPU slows or stops the whole job."""

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
from rl_loop.config.errors import CannotStart
from rl_loop.engines.backend import EngineConfig, EngineUnavailable
from rl_loop.lifecycle.store_size import StoreNeed, check_local_store

IDLE_BYTES = 1 << 30
"""Memory in use above which a GPU counts as busy; a driver alone takes a few hundred MiB."""
RAY_PORTS = 10
"""Ports from cluster.ray_port on that Ray's own parts use. Those of workers follow, of which Ray
takes free ones."""
GPU_FACTS = {"GPU": "name", "driver": "driver_version", "SM clock": "clocks.max.sm"}
"""Fields of nvidia-smi that must be the same on all nodes; the clock is the highest one, in MHz."""


@dataclass
class NodeCheck:
    """Result of the checks of one node."""

    facts: dict[str, str] = field(default_factory=dict)
    """Values that must be the same on all nodes: "GPU", "driver" and "SM clock"."""
    problems: list[str] = field(default_factory=list)
    """Why this node cannot take part, whatever the others say."""


def check_node(
    cluster: ClusterConfig, store: StoreNeed, engine: EngineConfig | None = None
) -> NodeCheck:
    """Check this node's disks, ports and GPUs, and its room for Ray's object store.

    ``engine``: of the servers that are to run here; its interpreter is tried."""
    check = NodeCheck()
    if engine is not None:
        try:
            engine.check_machine()
        except (EngineUnavailable, OSError, subprocess.SubprocessError) as error:
            check.problems.append(str(error))
    try:
        check_local_store(store)
    except CannotStart as too_small:
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

    # More GPUs than the job asked for are no problem: not every cluster hides them.
    if len(gpus) < cluster.gpus_per_node:
        check.problems.append(
            f"{len(gpus)} GPUs visible, cluster.gpus_per_node is {cluster.gpus_per_node}",
        )
    for gpu in gpus:
        used = memory_bytes(gpu["memory.used"])
        if used is not None and used > IDLE_BYTES:
            check.problems.append(f"GPU {gpu['index']} holds {used >> 20} MiB of another job")

    # One slow GPU is enough to make the node differ from the others.
    for fact, field_name in GPU_FACTS.items():
        check.facts[fact] = "/".join(sorted({gpu[field_name] for gpu in gpus}))
    return check


def full_disks(cluster: ClusterConfig) -> list[str]:
    """Return a problem for shared_dir and /tmp each, if less than min_free_disk is free there."""
    problems = []
    for path in (cluster.shared_dir, Path("/tmp")):
        free = shutil.disk_usage(path).free / 1e9
        if free < cluster.min_free_disk:
            problems.append(
                f"{free:.1f} GB free in {path}, cluster.min_free_disk is {cluster.min_free_disk:g}",
            )
    return problems


def busy_ports(cluster: ClusterConfig) -> list[str]:
    """Return a problem if something listens on the ports that Ray's own parts will use."""
    if cluster.ray_port is None:
        return []

    busy = []
    for port in range(cluster.ray_port, cluster.ray_port + RAY_PORTS):
        with socket.socket() as probe:
            # A port that was given up a moment ago counts as free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError:
                busy.append(str(port))
    if not busy:
        return []
    return [f"port {', '.join(busy)} is in use, cluster.ray_port is {cluster.ray_port}"]


def find_outlier_nodes(reports: Mapping[str, dict[str, Any]]) -> dict[str, str]:
    """Return the nodes whose facts differ from those of the majority, and how.

    ``reports`` holds what each node reported, with its ``NodeCheck.facts`` under "facts"."""
    differences: dict[str, list[str]] = {}
    facts = {name for report in reports.values() for name in report["facts"]}
    for fact in facts:
        # A node without this fact, whose nvidia-smi did not answer, counts as another value.
        values = {node: report["facts"].get(fact) for node, report in reports.items()}
        usual = Counter(values.values()).most_common(1)[0][0]
        for node, value in values.items():
            if value != usual:
                differences.setdefault(node, []).append(f"{fact} is {value}, elsewhere {usual}")
    return {node: "; ".join(sorted(how)) for node, how in differences.items()}


def find_slow_nodes(
    bandwidths: Mapping[str, dict[str, float | None]],
    minimum: float,
) -> dict[str, str]:
    """Return the nodes below ``minimum`` GB/s, within themselves or with every neighbour, and how
    slow they are.

    ``bandwidths`` is what ``launch.bandwidth`` writes."""
    slow: dict[str, str] = {}
    for node, measured in bandwidths.items():
        for where, value in measured.items():
            # None: one GPU per node has nothing to measure within it, a single node no neighbour.
            if value is not None and value < minimum:
                slow[node] = (
                    f"all-reduce {where} nodes at {value:.2f} GB/s, cluster.min_bandwidth is {minimum:g}"
                )
    return slow
