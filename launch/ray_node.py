"""The ``ray start`` command of each node in a job: addresses, ports and resources."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from launch.cluster import ClusterConfig
from rl_loop.cluster.placement import free_port
from rl_loop.cluster.ray_session import LOOPBACK


@dataclass(frozen=True)
class HeadAddress:
    """Addresses of the head node, which all nodes read from head.json."""

    host: str
    """Address at which other nodes reach the head node."""
    dashboard: str
    """URL of Ray's dashboard, or "off"."""
    port: int
    """Port of Ray's GCS."""
    dashboard_port: int
    check_port: int
    """Rendezvous port of the bandwidth check."""

    @classmethod
    def choose(cls, cluster: ClusterConfig) -> Self:
        """Return the addresses of this node as the head node.

        Ports start at ``cluster.ray_port``. If it is None, they are free ports.
        """

        def port_at(offset: int) -> int:
            if cluster.ray_port is None:
                return free_port()
            return cluster.ray_port + offset

        host = ray_address(cluster)
        # The ports must not be those of PART_PORTS, which every node uses.
        dashboard_port = port_at(3)
        dashboard = "off"
        if cluster.dashboard:
            dashboard = f"http://{host}:{dashboard_port}"
        return cls(
            host=host,
            dashboard=dashboard,
            port=port_at(0),
            dashboard_port=dashboard_port,
            check_port=port_at(9),
        )


@dataclass(frozen=True)
class RayNode:
    """Settings of Ray on one node."""

    cluster: ClusterConfig
    name: str
    is_head: bool
    resources: dict[str, int]
    """Custom resources that place the planned actors on this node."""
    scratch: Path
    """Ray's temporary directory, below one that denies access to other users.

    The path must be short, because Ray creates Unix sockets below it.
    """
    object_store_bytes: int
    """Size of this node's object store in bytes. It must hold the episodes of a step."""


# Ports of Ray's processes on every node, as offsets from cluster.ray_port. The head node also uses
# the offsets 0, 3 and 9 (``HeadAddress.choose``).
PORT_OFFSETS = {
    "node-manager-port": 1,
    "object-manager-port": 2,
    "dashboard-agent-listen-port": 4,
    "dashboard-agent-grpc-port": 5,
    "runtime-env-agent-port": 6,
    "metrics-export-port": 7,
}
FIRST_WORKER_PORT = 10
LAST_WORKER_PORT = 999


def ray_start_command(node: RayNode, head: HeadAddress) -> list[str]:
    """Return the ``ray start`` command of a node."""
    cluster = node.cluster
    address = ray_address(cluster)
    command = [
        sys.executable,
        "-m",
        "rl_loop.cluster.ray_session",
        "start",
        # The process lives as long as Ray, so that its end shows that Ray has ended.
        "--block",
        "--disable-usage-stats",
        f"--node-ip-address={address}",
        f"--node-name={node.name}",
        f"--num-cpus={cluster.cpus_per_node or os.cpu_count()}",
        f"--num-gpus={cluster.gpus_per_node}",
        f"--object-store-memory={node.object_store_bytes}",
        f"--resources={json.dumps(node.resources)}",
        f"--temp-dir={node.scratch}",
    ]

    if node.is_head:
        command += [
            "--head",
            f"--port={head.port}",
            f"--dashboard-host={address}",
            f"--dashboard-port={head.dashboard_port}",
            # The autoscaler has nothing to start: Slurm chooses the nodes.
            "--no-monitor",
            f"--include-dashboard={str(cluster.dashboard).lower()}",
        ]
    else:
        command.append(f"--address={head.host}:{head.port}")
    return command + _port_options(cluster.ray_port)


def _port_options(base: int | None) -> list[str]:
    """Return the port options of ``ray start``.

    Args:
        base: first port of the range; None for free ports.
    """
    if base is None:
        return ["--min-worker-port=0", "--max-worker-port=0"]
    # Use fixed ports, because a firewall between nodes may allow only a range.
    options = [f"--{name}={base + offset}" for name, offset in PORT_OFFSETS.items()]
    return [
        *options,
        f"--min-worker-port={base + FIRST_WORKER_PORT}",
        f"--max-worker-port={base + LAST_WORKER_PORT}",
    ]


def ray_address(cluster: ClusterConfig) -> str:
    """Return Ray's address on this node; loopback if no other node must reach it."""
    return LOOPBACK if cluster.kind == "local" else node_address()


def node_address() -> str:
    """Return the address at which other nodes reach this node."""
    address = socket.gethostbyname(socket.gethostname())
    if address not in ("127.0.0.1", "127.0.1.1"):
        return address

    # On many machines /etc/hosts maps the host name to a loopback address. Ask the routing table
    # instead: connecting a datagram socket selects an interface and sends no packet.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("10.255.255.255", 1))
        except OSError:
            return address
        return probe.getsockname()[0]


def has_started_or_ended(ray: subprocess.Popen[bytes], log: Path, offset: int) -> bool:
    """Return True if ``ray start`` has succeeded or ended.

    Args:
        ray: process of ``ray start``.
        log: output of the process.
        offset: position in the log where its output begins.
    """
    # `ray start --block` does not exit after the start, so its output must show it.
    return b"Ray runtime started" in log.read_bytes()[offset:] or ray.poll() is not None


def last_line(log: Path) -> str:
    """Return the last line of a log."""
    return log.read_text(errors="replace").strip().rpartition("\n")[2]
