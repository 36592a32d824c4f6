"""All-reduce bandwidth within each node and between neighbouring nodes, under torchrun: one process per GPU, or one
per node (gloo) without GPUs.

A slow pair of neighbours says little, but a node that is slow with both of its neighbours is the slow one. Rank 0
writes {node: {"within": GB/s or null, "between": GB/s of the better pair or null}}.
The figure is the bus bandwidth of nccl-tests: 2 (n - 1) / n x bytes / seconds."""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

ROUNDS = 5


def bus_bandwidth(group: dist.ProcessGroup, buffer: torch.Tensor) -> float:
    """GB/s of an all-reduce of ``buffer``; the first one, which sets up connections, is not counted."""

    def seconds(rounds: int) -> float:
        began = time.monotonic()
        for _ in range(rounds):
            dist.all_reduce(buffer, group=group)
        if buffer.is_cuda:
            torch.cuda.synchronize()
        return (time.monotonic() - began) / rounds

    seconds(1)
    ranks = dist.get_world_size(group)
    return 2 * (ranks - 1) / ranks * buffer.nbytes / seconds(ROUNDS) / 1e9


def main(output: Path) -> None:
    cuda = torch.cuda.is_available()
    local, per_node = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if cuda:
        torch.cuda.set_device(local)
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, nodes = dist.get_rank(), dist.get_world_size() // per_node
    own = rank // per_node
    buffer = torch.zeros((1 << 29) if cuda else (1 << 22), dtype=torch.bfloat16, device="cuda" if cuda else "cpu")
    # every process takes part in making every group, also of those it is not in
    on_node = [dist.new_group(list(range(i * per_node, (i + 1) * per_node))) for i in range(nodes)]
    within = bus_bandwidth(on_node[own], buffer) if per_node > 1 else None
    between: float | None = None
    for first in (0, 1):  # pairs (0, 1), (2, 3), ... then (1, 2), (3, 4), ...
        for left in range(first, nodes - 1, 2):
            pair = dist.new_group(list(range(left * per_node, (left + 2) * per_node)))
            if own in (left, left + 1):
                between = max(between or 0.0, bus_bandwidth(pair, buffer))
        dist.barrier()
    everyone: list[tuple[str, float | None, float | None]] = [("", None, None)] * dist.get_world_size()
    dist.all_gather_object(everyone, (os.environ["SLURMD_NODENAME"], within, between))
    if rank == 0:
        firsts = everyone[::per_node]
        output.write_text(json.dumps({node: {"within": a, "between": b} for node, a, b in firsts}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
