"""Loading of the distributed optimizer's state from a checkpoint, one part at a time.

A rank keeps a part of the state of its parameters. A checkpoint contains the state of whole
parameters. Before slicing, megatron-core 0.19.2 loads the whole state of all parameters on a rank,
also of those without a part on this rank. That takes 12 bytes per parameter: 137 GB of host memory
on each of two ranks of the 20B model.
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

from megatron_gptoss.checkpoint.parameter_state import override_parameter_state

type Sharded = ShardedTensor | ShardedTensorFactory
"""Tensor of a checkpoint, or a parameter that a checkpoint stores as several tensors."""

# Each part costs a planning step among all ranks, so parts are as large as hosts can afford.
LOADED_BYTES = 8 << 30
"""Maximum size of the fp32 state that a rank loads at a time. One whole parameter may exceed it."""
PARAMETER_STATE = "param_state"
"""Megatron's key for the state of parameters in an optimizer's state."""


@dataclass(frozen=True)
class StateShard:
    """State of a parameter that this rank keeps in part."""

    optimizer: DistributedOptimizer
    """Optimizer that holds the state."""
    parameter: torch.nn.Parameter
    """The parameter."""
    share: slice
    """Elements of the flattened parameter whose state this rank keeps."""
    tensors: dict[str, Sharded]
    """Master weight and moments of the whole parameter, without data, by Megatron's names."""

    @property
    def nbytes(self) -> int:
        """Bytes of the whole parameter's state."""
        return sum(sharded.data.nbytes for sharded in self.tensors.values())


def describe_without_memory(optimizer: Any) -> AbstractContextManager[None]:
    """Return a context in which ``sharded_state_dict`` makes state tensors on the meta device.

    For loading. ``optimizer`` is a chain of Megatron optimizers.
    """
    return override_parameter_state(_describe_state, optimizer)


class _DescribedBuffer:
    """Substitute for a state tensor of a buffer. Its slices have a shape and no data."""

    def __getitem__(self, place: slice) -> torch.Tensor:
        return torch.empty(place.stop - place.start, dtype=torch.float32, device="meta")


def _describe_state(optimizer: DistributedOptimizer, **_: Any) -> dict[int, dict[Any, Any]]:
    """Return state without data. Replaces Megatron's ``get_parameter_state_dp_zero``."""
    keys = ("param", *optimizer.optimizer_state_keys)
    return {
        index: {dtypes: {key: _DescribedBuffer() for key in keys} for dtypes in ranges}
        for index, ranges in enumerate(optimizer.gbuf_ranges)
    }


def take_out_parameter_state(optimizer: Any, state: dict[Any, Any]) -> list[StateShard]:
    """Remove the state of parameters from ``state`` and return it.

    The caller loads the rest first.

    Args:
        optimizer: chain of Megatron optimizers.
        state: sharded state of ``optimizer``, made within ``describe_without_memory``.

    Returns:
        The state of each parameter that this rank keeps in part.
    """
    chained_optimizers = optimizer.chained_optimizers
    # With a single optimizer Megatron's state has no level of numbers.
    states = [state] if len(chained_optimizers) == 1 else list(state.values())

    kept: list[StateShard] = []
    for chained, its_state in zip(chained_optimizers, states, strict=True):
        if isinstance(chained, DistributedOptimizer):
            kept += _kept_states(chained, its_state.pop(PARAMETER_STATE))
    return kept


def _kept_states(
    optimizer: DistributedOptimizer, described: dict[int, dict[str, Sharded]]
) -> Iterator[StateShard]:
    """Yield the state of each parameter that this rank keeps in part."""
    # The keys of `described` are numbers: Megatron counts the parameters of all buffers in this
    # order, also those without a part on this rank.
    number = 0
    for buffer, ranges in zip(optimizer.buffers, optimizer.gbuf_ranges, strict=True):
        for bucket_ranges in ranges.values():
            shares = ChainMap(*(bucket["param_map"] for bucket in bucket_ranges))
            for parameter in buffer.param_index_map:
                if parameter in shares:
                    share = shares[parameter]["param"]
                    tensors = described[number]
                    yield StateShard(optimizer, parameter, slice(share.start, share.end), tensors)
                number += 1


def load_parameter_state(path: Path, states: Sequence[StateShard]) -> None:
    """Load the state of parameters into their optimizers, in parts. Collective.

    The weights of the model must be loaded already, because they may be the upper half of master
    weights.

    Args:
        path: checkpoint.
        states: result of ``take_out_parameter_state``.
    """
    parts = _parts(states)
    # Loading is collective, and ranks have different numbers of parts. Add empty parts.
    numbers = [0] * dist.get_world_size()
    dist.all_gather_object(numbers, len(parts))
    parts += [[]] * (max(numbers) - len(parts))

    for part in parts:
        requested = {
            str(number): {name: _with_memory(sharded) for name, sharded in state.tensors.items()}
            for number, state in enumerate(part)
        }
        # Megatron checks that the owner of each tensor loads it. A part lacks most owners.
        loaded = dist_checkpointing.load(
            {PARAMETER_STATE: requested}, str(path), validate_access_integrity=False
        )
        # pop: the whole parameter is freed as soon as this rank's part has been copied.
        for number, state in enumerate(part):
            tensors = loaded[PARAMETER_STATE].pop(str(number))
            shares = {name: tensor.flatten()[state.share] for name, tensor in tensors.items()}
            state.optimizer._set_main_param_and_optimizer_states(state.parameter, shares)


def _parts(states: Sequence[StateShard]) -> list[list[StateShard]]:
    """Divide states, in order, into parts of at most ``LOADED_BYTES``, or of one larger state."""
    # Greedy in the given order, which is the order in the files. A better fit would save little.
    parts: list[list[StateShard]] = []
    size = 0
    for state in states:
        if not parts or size + state.nbytes > LOADED_BYTES:
            parts.append([])
            size = 0
        parts[-1].append(state)
        size += state.nbytes
    return parts


def _with_memory(sharded: Sharded) -> Sharded:
    """Return a copy of the description with uninitialized memory on the host."""
    return replace(sharded, data=torch.empty_like(sharded.data, device="cpu"))
