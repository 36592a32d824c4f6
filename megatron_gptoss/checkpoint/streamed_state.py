"""Loading the distributed optimizer's state from a checkpoint, a part at a time.

A rank keeps a share of its parameters' state, which a checkpoint holds as whole parameters. By itself
megatron-core 0.19.2 loads these for all parameters of a rank, also for those of which it keeps
nothing, 12 bytes each, and cuts its share out of them then: 137 GB of host memory on each of two
ranks of the 20B.
"""

from collections import ChainMap
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_gptoss.checkpoint.parameter_state import parameter_state_by

type Sharded = ShardedTensor | ShardedTensorFactory
"""A tensor of a checkpoint, or what makes several of one."""

LOADED_BYTES = 8 << 30
"""Of whole parameters' state, in fp32, that a rank loads at a time, or of one parameter if it has more.
Each time all ranks plan what they read."""
PARAMETER_STATE = "param_state"
"""Under which Megatron has it in an optimizer's state."""


@dataclass(frozen=True)
class KeptState:
    """Of one parameter of which this rank keeps state."""

    optimizer: DistributedOptimizer
    parameter: torch.nn.Parameter
    share: slice
    """Elements of the flat parameter whose state this rank keeps."""
    tensors: dict[str, Sharded]
    """Master weight and moments of the whole parameter, without data, by Megatron's names."""

    @property
    def nbytes(self) -> int:
        """Bytes of the whole parameter's state."""
        return sum(sharded.data.nbytes for sharded in self.tensors.values())


def describe_without_memory(optimizer: Any) -> AbstractContextManager[None]:
    """Let the distributed optimizer's ``sharded_state_dict`` describe what there is to load.

    Its tensors are on the meta device.
    """
    return parameter_state_by(_describe_state, optimizer)


class _DescribedBuffer:
    """Stands for one tensor of the state of a buffer, of which Megatron takes parameters' slices."""

    def __getitem__(self, place: slice) -> torch.Tensor:
        return torch.empty(place.stop - place.start, dtype=torch.float32, device="meta")


def _describe_state(optimizer: DistributedOptimizer, **_: Any) -> dict[int, dict[Any, Any]]:
    """Take the place of ``get_parameter_state_dp_zero``, whose options ask for memory."""
    keys = ("param", *optimizer.optimizer_state_keys)
    return {
        index: {dtypes: {key: _DescribedBuffer() for key in keys} for dtypes in ranges}
        for index, ranges in enumerate(optimizer.gbuf_ranges)
    }


def take_out_parameter_state(optimizer: Any, state: dict[Any, Any]) -> list[KeptState]:
    """Take the parameters' state out of ``state``, which then has the rest, to be loaded first.

    Args:
        state: of ``optimizer``, as ``describe_without_memory`` lets it be made.
    """
    chained_optimizers = optimizer.chained_optimizers
    # Megatron has no numbers where there is a single optimizer.
    states = [state] if len(chained_optimizers) == 1 else list(state.values())

    kept: list[KeptState] = []
    for chained, its_state in zip(chained_optimizers, states, strict=True):
        if isinstance(chained, DistributedOptimizer):
            kept += _kept_states(chained, its_state.pop(PARAMETER_STATE))
    return kept


def _kept_states(
    optimizer: DistributedOptimizer, described: dict[int, dict[str, Sharded]]
) -> Iterator[KeptState]:
    """Find those of which this rank keeps a share, in Megatron's order of parameters."""
    number = 0
    for buffer, ranges in zip(optimizer.buffers, optimizer.gbuf_ranges, strict=True):
        for bucket_ranges in ranges.values():
            shares = ChainMap(*(bucket["param_map"] for bucket in bucket_ranges))
            for parameter in buffer.param_index_map:
                if parameter in shares:
                    share = shares[parameter]["param"]
                    tensors = described[number]
                    yield KeptState(optimizer, parameter, slice(share.start, share.end), tensors)
                number += 1


def load_parameter_state(path: Path, states: Sequence[KeptState]) -> None:
    """Load parameters' state into their optimizers, ``LOADED_BYTES`` at a time. Collective.

    The model's weights must have been loaded, of which master weights may be the other half.
    """
    parts = _parts(states)
    # Every call of Megatron's is for all ranks, which have different numbers of parts.
    numbers = [0] * dist.get_world_size()
    dist.all_gather_object(numbers, len(parts))
    parts += [[]] * (max(numbers) - len(parts))

    for part in parts:
        wanted = {
            str(number): {name: _with_memory(sharded) for name, sharded in state.tensors.items()}
            for number, state in enumerate(part)
        }
        # Not every parameter is asked for by the rank that Megatron counts as its owner.
        loaded = dist_checkpointing.load(
            {PARAMETER_STATE: wanted}, str(path), validate_access_integrity=False
        )
        for number, state in enumerate(part):
            tensors = loaded[PARAMETER_STATE].pop(str(number))
            shares = {name: tensor.flatten()[state.share] for name, tensor in tensors.items()}
            state.optimizer._set_main_param_and_optimizer_states(state.parameter, shares)


def _parts(states: Sequence[KeptState]) -> list[list[KeptState]]:
    """Collect states, in order, into parts of at most ``LOADED_BYTES``, or one that is larger."""
    parts: list[list[KeptState]] = []
    size = 0
    for state in states:
        if not parts or size + state.nbytes > LOADED_BYTES:
            parts.append([])
            size = 0
        parts[-1].append(state)
        size += state.nbytes
    return parts


def _with_memory(sharded: Sharded) -> Sharded:
    return replace(sharded, data=torch.empty_like(sharded.data, device="cpu"))
