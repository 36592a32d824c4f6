"""Gathering the distributed optimizer's state for a checkpoint, on the ranks that write it only.

Data-parallel ranks share the state out, and a checkpoint holds every parameter's as a whole
("fully_reshardable"), so that another layout finds it. The first rank of a data-parallel group
writes what the group has; the others are replicas, of which Megatron wants a description only.

By itself megatron-core 0.19.2 gathers every buffer whole on all ranks, 12 bytes for each of their
parameters, and copies what a rank writes out of it once more.
"""

from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
)
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_gptoss.checkpoint.parameter_state import parameter_state_by


def gather_on_writing_ranks(optimizer: Any) -> AbstractContextManager[None]:
    """Let the distributed optimizer's ``sharded_state_dict`` gather on the ranks that write.

    For saving only.
    """
    return parameter_state_by(_gather_state, optimizer)


def separate_tensors(state: dict[str, Any]) -> None:
    """Cut gathered tensors where the checkpoint does, in place, each part in memory of its own.

    A checkpoint has gate and up projections apart, which are one parameter. Megatron copies a
    tensor on the host that is a part of another before it writes it, all of them at once: there
    would be most of the state twice. Here it is one parameter's at a time.

    Args:
        state: sharded state of an optimizer, as ``gather_on_writing_ranks`` makes it.

    Raises:
        RuntimeError: naming a tensor that this rank is to write and did not gather.
    """

    def separate(value: Any) -> Any:
        if not isinstance(value, ShardedTensorFactory):
            return value

        parts = value.build()
        for part in nested_values(parts):
            part.data = part.data.clone()
        return parts

    dict_list_map_inplace(separate, state)

    # Which rank writes a tensor is said by the model's layers: the replica with number 0.
    for sharded in nested_values(state):
        if not isinstance(sharded, ShardedTensor) or sharded.data is None:
            continue
        if sharded.data.is_meta and is_main_replica(sharded.replica_id):
            raise RuntimeError(
                f"{sharded.key} is to be written by rank {dist.get_rank()}, which has not gathered "
                "it: it is not the first of its data-parallel group"
            )


class _GatheredBuffer:
    """Stands for one tensor of the state of a buffer.

    Megatron takes a slice of it for each parameter; each is a tensor with memory of its own.
    """

    def __init__(self) -> None:
        self.tensors: dict[tuple[int, int], torch.Tensor] = {}
        """By first element and end of a parameter in the buffer."""

    def __getitem__(self, place: slice) -> torch.Tensor:
        return self.tensors[place.start, place.stop]


def _gather_state(optimizer: DistributedOptimizer, **_: Any) -> dict[int, dict[Any, Any]]:
    """Gather master weights and moments of all parameters, fp32, on the host. Collective.

    Takes the place of ``get_parameter_state_dp_zero``, whose options say for what it is called.

    Returns:
        For each buffer, by its dtypes, what stands for its tensors. Except on the first rank of
        the data-parallel group all tensors are on the meta device: they have shapes only.
    """
    state: dict[int, dict[Any, Any]] = {}
    for index, ranges in enumerate(optimizer.gbuf_ranges):
        state[index] = {
            dtypes: _gather_buffer(optimizer, optimizer.buffers[index], bucket_ranges)
            for dtypes, bucket_ranges in ranges.items()
        }
    return state


def _gather_buffer(
    optimizer: DistributedOptimizer, buffer: Any, bucket_ranges: list[dict[str, Any]]
) -> dict[str, _GatheredBuffer]:
    """Gather the state of one buffer, a tensor of a bucket at a time.

    Args:
        bucket_ranges: of each bucket, which elements of which parameters this rank has.
    """
    group = optimizer.data_parallel_group
    keys = ("param", *optimizer.optimizer_state_keys)
    gathered = {key: _GatheredBuffer() for key in keys}
    for bucket, ranges in zip(buffer.buckets, bucket_ranges, strict=True):
        shards = _local_shards(
            optimizer,
            keys,
            elements=bucket.grad_data.numel() // group.size(),
            parameter_ranges=ranges["param_map"],
        )
        for key in keys:
            # Taken out, so that it is freed when it has been sent.
            tensors = _gather_parameters(shards.pop(key), bucket, group)
            for parameter, tensor in tensors.items():
                # Megatron looks a parameter up by its place in the buffer.
                start, end, _ = buffer.param_index_map[parameter]
                gathered[key].tensors[start, end] = tensor
    return gathered


def _local_shards(
    optimizer: DistributedOptimizer,
    keys: tuple[str, ...],
    elements: int,
    parameter_ranges: dict[torch.nn.Parameter, dict[str, Any]],
) -> dict[str, torch.Tensor]:
    """Copy this rank's share of a bucket to the host, as one tensor of fp32 for each of ``keys``."""
    shards = {key: torch.zeros(elements, dtype=torch.float32) for key in keys}
    for parameter, ranges in parameter_ranges.items():
        place = ranges["gbuf_local"]
        tensors = optimizer._get_main_param_and_optimizer_states(parameter)
        for key, shard in shards.items():
            shard[place.start : place.end].copy_(tensors[key].detach())
    return shards


def _gather_parameters(
    shard: torch.Tensor, bucket: Any, group: dist.ProcessGroup
) -> dict[torch.nn.Parameter, torch.Tensor]:
    """Gather one tensor of a bucket's state on the first rank of ``group``.

    Args:
        shard: this rank's share, 1-D, on the host; equally long on all ranks.

    Returns:
        Of each parameter its elements, 1-D: on the host, or without data on all other ranks.
    """
    device = torch.cuda.current_device()
    if group.rank() != 0:
        dist.gather(shard.to(device), group=group, group_dst=0)
        return {
            parameter: torch.empty(end - start, dtype=shard.dtype, device="meta")
            for parameter, (start, end) in bucket.param_to_index.items()
        }

    # On the GPU, where NCCL puts it.
    ranks = group.size()
    whole = torch.empty(ranks * len(shard), dtype=shard.dtype, device=device)
    dist.gather(shard.to(device), list(whole.chunk(ranks)), group=group, group_dst=0)
    return {
        parameter: whole[start:end].to("cpu", copy=True)
        for parameter, (start, end) in bucket.param_to_index.items()
    }
