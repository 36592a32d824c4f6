"""Measurement of the all-reduce bandwidth within each node and between neighboring nodes.

Runs under torchrun with one process per GPU, or one process per node (gloo) without GPUs. Rank 0
writes {node: {"within": GB/s or null, "between": GB/s of the faster pair or null}}. A slow pair
does not show which of its nodes is slow, but a node that is slow with both neighbors is slow
itself.

The figure is the bus bandwidth of nccl-tests: 2 (n - 1) / n x bytes / seconds.
"""

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from rl_loop.cluster.group_authentication import authenticate_groups

ROUNDS = 5
GPU_BUFFER_ELEMENTS = 1 << 29
CPU_BUFFER_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class NodeRanks:
    """Layout of the process group's ranks over nodes."""

    per_node: int
    """Number of processes per node."""
    nodes: int
    node: int
    """Index of this process's node."""

    def on_nodes(self, first: int, count: int = 1) -> list[int]:
        """Return the ranks on ``count`` adjacent nodes, starting at node ``first``."""
        return list(range(first * self.per_node, (first + count) * self.per_node))


def measure_bandwidth(group: dist.ProcessGroup, buffer: torch.Tensor) -> float:
    """Return the bus bandwidth of an all-reduce in GB/s.

    Args:
        group: ranks to measure.
        buffer: tensor to reduce, [elements] of any dtype, on the device of the backend.
    """

    def seconds_per_call(rounds: int) -> float:
        started = time.monotonic()
        for _ in range(rounds):
            dist.all_reduce(buffer, group=group)
        if buffer.is_cuda:
            torch.cuda.synchronize()
        return (time.monotonic() - started) / rounds

    seconds_per_call(1)  # the first call sets up the connections
    ranks = dist.get_world_size(group)
    return 2 * (ranks - 1) / ranks * buffer.nbytes / seconds_per_call(ROUNDS) / 1e9


def measure_within(ranks: NodeRanks, buffer: torch.Tensor) -> float | None:
    """Measure all processes of this node with ``buffer`` [elements]; None if there is only one."""
    # new_group is collective: every process must create every group.
    groups = [dist.new_group(ranks.on_nodes(node)) for node in range(ranks.nodes)]
    if ranks.per_node == 1:
        return None
    return measure_bandwidth(groups[ranks.node], buffer)


def measure_between(ranks: NodeRanks, buffer: torch.Tensor) -> float | None:
    """Measure this node and each neighbor with ``buffer`` [elements], and return the faster pair.

    Returns:
        GB/s; None for a single node.
    """
    # The faster pair counts, because a slow pair may be the neighbor's fault.
    fastest: float | None = None

    # The pairs (0, 1), (2, 3), ... share no node and run concurrently. The pairs (1, 2), (3, 4),
    # ... follow in a second round.
    for first in (0, 1):
        for left in range(first, ranks.nodes - 1, 2):
            # Collective, too: also processes outside of the pair create it.
            pair = dist.new_group(ranks.on_nodes(left, count=2))
            if ranks.node in (left, left + 1):
                fastest = max(fastest or 0.0, measure_bandwidth(pair, buffer))
        dist.barrier()  # a node must not begin the second round while its neighbor measures
    return fastest


def main(output: Path) -> None:
    """Measure and, on rank 0, write ``output``."""
    # A group opens ports, to which other users of the node could connect.
    authenticate_groups()
    # torchrun sets both.
    local_rank = int(os.environ["LOCAL_RANK"])
    per_node = int(os.environ["LOCAL_WORLD_SIZE"])

    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
        dist.init_process_group("nccl")
        # 1 GiB: large enough that latency does not count.
        buffer = torch.zeros(GPU_BUFFER_ELEMENTS, dtype=torch.bfloat16, device="cuda")
    else:
        dist.init_process_group("gloo")
        # 8 MiB, because gloo over TCP is slow.
        buffer = torch.zeros(CPU_BUFFER_ELEMENTS, dtype=torch.bfloat16)

    rank = dist.get_rank()
    world_size = dist.get_world_size()
    ranks = NodeRanks(per_node=per_node, nodes=world_size // per_node, node=rank // per_node)
    within = measure_within(ranks, buffer)
    between = measure_between(ranks, buffer)

    # All processes of a node have the same results, so the first one represents the node.
    measured: list[tuple[str, float | None, float | None]] = [("", None, None)] * world_size
    dist.all_gather_object(measured, (os.environ["SLURMD_NODENAME"], within, between))
    if rank == 0:
        report = {}
        for node, within, between in measured[::per_node]:
            report[node] = {"within": within, "between": between}
        output.write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
