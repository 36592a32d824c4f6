"""Digest of a frozen base model, independent of the parallel layout and the number format.

A checkpoint of adapters stores it. Loading compares it with the base at hand.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megatron_gptoss.layers.adapted_linears import AdaptedLinear
from megatron_gptoss.layers.adapters import LowRank
from megatron_gptoss.layers.mxfp4_weight import Mxfp4Weight
from megatron_gptoss.model import list_chunks
from megatron_gptoss.tensor_hash import as_digits, digest_of_values


def base_digest(model: torch.nn.Module) -> str:
    """Return 16 hexadecimal digits that identify all frozen weights of ``model``. Collective.

    Each value is hashed together with the number of its layer. The hashes are summed modulo 2**64,
    so the order does not matter: the digest is the same in any parallel layout, and the same for
    MXFP4 weights and their bf16 values. Values that swap places within a layer are not detected.
    """
    total = local_digest(model).clone()
    # Even if this rank's part is cached, another rank may have computed its part again.
    dist.all_reduce(total)
    return as_digits(total)


# -- the part of one rank ----------------------------------------------------------------------


@dataclass(frozen=True)
class _Digest:
    """Digest of one rank's base weights, and their state at that time."""

    writes: tuple[int, ...]
    """Version counter of each base tensor."""
    total: Tensor
    """int64 []: sum of the hashes."""


# The base has tens of gigabytes. Hashing it for every checkpoint of adapters would take longer than
# writing the checkpoint.
_digests: WeakKeyDictionary[torch.nn.Module, _Digest] = WeakKeyDictionary()
"""Digests by model."""


@torch.no_grad()
def local_digest(model: torch.nn.Module) -> Tensor:
    """Return the sum of this rank's weight hashes, int64 []. Not collective.

    The result is cached until a weight changes.
    """
    # torch increments `_version` with every in-place operation, except through ``.data``. No code
    # writes to a base through ``.data``.
    base = list(_local_base(model))
    writes = tuple(tensor._version for weight in base for tensor in weight.storage)
    known = _digests.get(model)
    if known is not None and known.writes == writes:
        return known.total

    total = torch.zeros((), dtype=torch.int64, device=next(model.parameters()).device)
    for weight in base:
        total += digest_of_values(weight.read(), weight.layer)
    _digests[model] = _Digest(writes, total)
    return total


@dataclass(frozen=True)
class _BaseWeight:
    """Frozen weight that this rank includes in its sum."""

    layer: int
    """Number of its layer, from 1; 0 for weights outside of layers."""
    storage: tuple[Tensor, ...]
    """Tensors that hold the weight: one, or blocks and scales of MXFP4."""
    read: Callable[[], Tensor]
    """Function that returns the values."""


def _local_base(model: torch.nn.Module) -> Iterator[_BaseWeight]:
    """Yield each frozen weight that this rank must count."""
    # Parameter names number the layers within a chunk. The digest needs the number within the
    # model, which Megatron keeps in `layer_number`, because chunks depend on the layout.
    for chunk in list_chunks(model):
        layers = {f"decoder.layers.{i}": layer for i, layer in enumerate(chunk.decoder.layers)}
        for name, module in chunk.named_modules():
            if isinstance(module, LowRank | Mxfp4Weight):
                continue
            layer = layers.get(".".join(name.split(".")[:3]))
            number = 0 if layer is None else layer.layer_number

            for parameter in module.parameters(recurse=False):
                # The value head of a critic is trained, so it is not part of the base.
                if not parameter.requires_grad and _is_counted_here(parameter):
                    yield _BaseWeight(number, (parameter,), parameter.detach)
            # An MXFP4 weight is not a parameter. It is split over ranks like the bias of its layer,
            # so the bias decides who counts it.
            if isinstance(module, AdaptedLinear) and isinstance(module.weight, Mxfp4Weight):
                packed = module.weight
                bias: Any = module.bias
                if _is_counted_here(bias):
                    yield _BaseWeight(number, (packed.blocks, packed.scales), packed.read)


def _is_counted_here(parameter: torch.nn.Parameter) -> bool:
    """Return True if this rank is the first of all ranks that hold the same values."""
    # Megatron marks parameters of experts under expert or tensor parallelism with allreduce=False.
    if not getattr(parameter, "allreduce", True):
        return parallel_state.get_expert_data_parallel_rank() == 0
    if parallel_state.get_data_parallel_rank(with_context_parallel=True) > 0:
        return False

    # Tensor-parallel ranks hold different parts of a split weight and copies of other weights.
    is_split = getattr(parameter, "tensor_model_parallel", False)
    return is_split or parallel_state.get_tensor_model_parallel_rank() == 0
