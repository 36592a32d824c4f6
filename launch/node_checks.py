"""Is this node fit for the job? Asked on every node before Ray starts, because one bad GPU slows or stops them all."""

import shutil
import socket
import subprocess
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launch.cluster import ClusterConfig

IDLE_MIB = 1024  # memory in use above which a GPU is not idle; a driver alone takes a few hundred MiB
RAY_PORTS = 10  # from cluster.ray_port on; those of workers follow, of which Ray takes what is free
QUERY = "index,name,driver_version,clocks.max.sm,memory.used"


def check_node(cluster: ClusterConfig) -> dict[str, Any]:
    """Facts that are compared between nodes, and under "problems" what is wrong with this one by itself."""
    facts: dict[str, Any] = {}
    problems: list[str] = []
    for path in (cluster.shared_dir, Path("/tmp")):
        free = shutil.disk_usage(path).free / 1e9
        if free < cluster.min_free_disk:
            problems.append(f"{free:.1f} GB free in {path}, cluster.min_free_disk is {cluster.min_free_disk:g}")
    problems += busy_ports(cluster)
    if cluster.gpus_per_node:
        try:
            query = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"]
            output = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout
        except (OSError, subprocess.SubprocessError) as error:
            problems.append(f"nvidia-smi does not work: {error}")
        else:
            gpus = [[field.strip() for field in line.split(",")] for line in output.strip().splitlines()]
            if len(gpus) < cluster.gpus_per_node:
                problems.append(f"{len(gpus)} GPUs visible, cluster.gpus_per_node is {cluster.gpus_per_node}")
            busy = [(index, memory) for index, *_, memory in gpus if int(memory) > IDLE_MIB]
            problems += [f"GPU {index} holds {memory} MiB of another job" for index, memory in busy]
            for name, column in (("GPU", 1), ("driver", 2), ("SM clock", 3)):
                facts[name] = "/".join(sorted({gpu[column] for gpu in gpus}))
    return {"facts": facts, "problems": problems}


def busy_ports(cluster: ClusterConfig) -> list[str]:
    """Of the ports that Ray's own parts will listen on, those that something else has."""
    if cluster.ray_port is None:
        return []
    busy = []
    for port in range(cluster.ray_port, cluster.ray_port + RAY_PORTS):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # one that was just given up counts as free
            try:
                probe.bind(("", port))
            except OSError:
                busy.append(str(port))
    return [f"port {', '.join(busy)} is in use, cluster.ray_port is {cluster.ray_port}"] if busy else []


def odd_ones_out(reports: Mapping[str, dict[str, Any]]) -> dict[str, str]:
    """Nodes whose facts differ from those of the majority -> how."""
    odd: dict[str, list[str]] = {}
    for fact in {name for report in reports.values() for name in report["facts"]}:
        values = {node: report["facts"].get(fact) for node, report in reports.items()}
        usual = Counter(values.values()).most_common(1)[0][0]
        for node, value in values.items():
            if value != usual:
                odd.setdefault(node, []).append(f"{fact} is {value}, elsewhere {usual}")
    return {node: "; ".join(sorted(differences)) for node, differences in odd.items()}


def slow_ones(bandwidths: Mapping[str, dict[str, float | None]], minimum: float) -> dict[str, str]:
    """Nodes below ``minimum`` GB/s, within themselves or with every neighbour -> how; see ``launch.bandwidth``."""
    slow: dict[str, str] = {}
    for node, measured in bandwidths.items():
        for where, value in measured.items():
            if value is not None and value < minimum:
                slow[node] = f"all-reduce {where} nodes at {value:.2f} GB/s, cluster.min_bandwidth is {minimum:g}"
    return slow
