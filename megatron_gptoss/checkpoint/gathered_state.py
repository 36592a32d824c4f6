"""Gathering of the distributed optimizer's state on the ranks that write a checkpoint.

The distributed optimizer splits the state over data-parallel ranks. A checkpoint contains the
whole state of each parameter ("fully_reshardable"), so that other layouts can load it, if both or
neither have expert or tensor parallelism. The first rank of a data-parallel group writes the state
of the group. The other ranks are replicas, for which Megatron needs only shapes.

megatron-core 0.19.2 gathers each buffer on all ranks, at 12 bytes per parameter, and copies the
written part again. This module gathers on the writing ranks only, one tensor at a time.
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

from megatron_gptoss.checkpoint.parameter_state import override_parameter_state


def gather_on_writing_ranks(optimizer: Any) -> AbstractContextManager[None]:
    """Return a context in which ``sharded_state_dict`` gathers state on writing ranks only.

    For saving only. ``optimizer`` is a chain of Megatron optimizers.
    """
    return override_parameter_state(_gather_state, optimizer)


def separate_tensors(state: dict[str, Any]) -> None:
    """Split gathered tensors into the tensors of the checkpoint, in place, each in separate memory.

    Args:
        state: sharded state of an optimizer, made within ``gather_on_writing_ranks``.

    Raises:
        RuntimeError: this rank must write a tensor that it has not gathered. The message names it.
    """
    # A checkpoint stores the gate and up projections of one parameter as two tensors, which are
    # views. Before writing, Megatron would clone all views at the same time, so most of the state
    # would exist twice. Cloning here holds one extra parameter at a time.

    def separate(value: Any) -> Any:
        """Return the tensors of a factory as copies, and other values unchanged."""
        if not isinstance(value, ShardedTensorFactory):
            return value

        parts = value.build()
        for part in nested_values(parts):
            part.data = part.data.clone()
        return parts

    dict_list_map_inplace(separate, state)

    # The layers of the model decide which rank writes a tensor: the replica with number 0. Check
    # that this is a rank that has gathered, because writing a meta tensor fails much later.
    for sharded in nested_values(state):
        if not isinstance(sharded, ShardedTensor) or sharded.data is None:
            continue
        if sharded.data.is_meta and is_main_replica(sharded.replica_id):
            raise RuntimeError(
                f"{sharded.key}: rank {dist.get_rank()} must write it but has not gathered it, "
                "because it is not the first rank of its data-parallel group"
            )


class _GatheredBuffer:
    """Substitute for a state tensor of a buffer, from which Megatron slices each parameter.

    A slice returns a separate tensor instead of a view, so that one parameter can be freed alone.
    """

    def __init__(self) -> None:
        self.tensors: dict[tuple[int, int], torch.Tensor] = {}
        """State of each parameter by its first element and end in the buffer."""

    def __getitem__(self, place: slice) -> torch.Tensor:
        return self.tensors[place.start, place.stop]


def _gather_state(optimizer: DistributedOptimizer, **_: Any) -> dict[int, dict[Any, Any]]:
    """Gather master weights and moments of all parameters, fp32, on the host. Collective.

    Replaces ``get_parameter_state_dp_zero`` of Megatron and ignores its options.

    Returns:
        State tensors by index of the buffer, by its dtypes. On the first rank of the data-parallel
        group they hold data. On other ranks they are on the meta device.
    """
    # The nesting is that of Megatron's own result: buffer, dtypes, state tensor.
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
    """Gather the state of one buffer, one tensor of one bucket at a time.

    Args:
        optimizer: owner of the buffer.
        buffer: Megatron's buffer of parameters and gradients.
        bucket_ranges: elements of each parameter on this rank, one mapping per bucket.
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
            # pop: the shard is freed as soon as it has been sent.
            tensors = _gather_parameters(shards.pop(key), bucket, group)
            for parameter, tensor in tensors.items():
                # Megatron slices the buffer at the position of the parameter.
                start, end, _ = buffer.param_index_map[parameter]
                gathered[key].tensors[start, end] = tensor
    return gathered


def _local_shards(
    optimizer: DistributedOptimizer,
    keys: tuple[str, ...],
    elements: int,
    parameter_ranges: dict[torch.nn.Parameter, dict[str, Any]],
) -> dict[str, torch.Tensor]:
    """Copy this rank's part of a bucket to the host.

    Returns:
        [elements] fp32 for each of ``keys``.
    """
    # Zeros, because a rank's part may include padding, which belongs to no parameter.
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
    """Gather one state tensor of a bucket on the first rank of ``group``.

    Args:
        shard: [elements] part of this rank, on the host. All ranks have the same length.
        bucket: Megatron's bucket.
        group: data-parallel group.

    Returns:
        1-D state of each parameter, on the host of the first rank and on the meta device elsewhere.
    """
    device = torch.cuda.current_device()
    if group.rank() != 0:
        dist.gather(shard.to(device), group=group, group_dst=0)
        return {
            parameter: torch.empty(end - start, dtype=shard.dtype, device="meta")
            for parameter, (start, end) in bucket.param_to_index.items()
        }

    # NCCL communicates between GPUs only. One bucket at a time bounds the GPU memory.
    ranks = group.size()
    gathered = torch.empty(ranks * len(shard), dtype=shard.dtype, device=device)
    dist.gather(shard.to(device), list(gathered.chunk(ranks)), group=group, group_dst=0)
    # copy=True: with Gloo the tensor is on the host already, and a view would keep the bucket.
    return {
        parameter: gathered[start:end].to("cpu", copy=True)
        for parameter, (start, end) in bucket.param_to_index.items()
    }
