"""A number that tells one frozen base from another, the same in every layout and number format."""

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
from megatron_gptoss.layers.packed_weight import PackedWeight
from megatron_gptoss.model import chunks_of
from megatron_gptoss.tensor_hash import as_digits, digest_of_values


def base_digest(model: torch.nn.Module) -> str:
    """Compute 16 hexadecimal digits of all frozen weights of ``model``. Collective.

    Every value is mixed with the number of its layer, and the results are added up modulo 2**64,
    which needs no order: ranks may share weights in any way, and a base in MXFP4 has the digest of
    the same values in bf16. Values that change places within a layer are not noticed.
    """
    total = local_digest(model).clone()
    # Always: another rank may have had to compute its part again.
    dist.all_reduce(total)
    return as_digits(total)


# -- this rank's part --------------------------------------------------------------------------


@dataclass(frozen=True)
class _Digest:
    """A digest and what it was computed from."""

    writes: tuple[int, ...]
    """How often each tensor of the base had been written to."""
    total: Tensor


_digests: WeakKeyDictionary[torch.nn.Module, _Digest] = WeakKeyDictionary()
"""By model. Reading tens of gigabytes for every checkpoint would take longer than writing it."""


@torch.no_grad()
def local_digest(model: torch.nn.Module) -> Tensor:
    """Sum up the mixed values that this rank counts, int64 []. Not collective.

    The base is read once, and again only after something wrote to it: torch counts the writes to
    every tensor, but for those through ``.data``, which nothing does to a base.
    """
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
    """A frozen weight that this rank counts."""

    layer: int
    """That it belongs to, from 1 on; 0 outside layers."""
    storage: tuple[Tensor, ...]
    """The tensors that hold it."""
    read: Callable[[], Tensor]
    """Returns its values."""


def _local_base(model: torch.nn.Module) -> Iterator[_BaseWeight]:
    for chunk in chunks_of(model):
        layers = {f"decoder.layers.{i}": layer for i, layer in enumerate(chunk.decoder.layers)}
        for name, module in chunk.named_modules():
            if isinstance(module, LowRank | PackedWeight):
                continue
            layer = layers.get(".".join(name.split(".")[:3]))
            number = 0 if layer is None else layer.layer_number

            for parameter in module.parameters(recurse=False):
                # A critic's value head is trained, and no part of the base.
                if not parameter.requires_grad and _is_counted_here(parameter):
                    yield _BaseWeight(number, (parameter,), parameter.detach)
            # A packed weight is no parameter, and lies where its layer's bias lies.
            if isinstance(module, AdaptedLinear) and isinstance(module.weight, PackedWeight):
                packed = module.weight
                bias: Any = module.bias
                if _is_counted_here(bias):
                    yield _BaseWeight(number, (packed.blocks, packed.scales), packed.read)


def _is_counted_here(parameter: torch.nn.Parameter) -> bool:
    """Return whether this rank is the one of all that hold these values that counts them."""
    if not getattr(parameter, "allreduce", True):
        return parallel_state.get_expert_data_parallel_rank() == 0
    if parallel_state.get_data_parallel_rank(with_context_parallel=True) > 0:
        return False

    is_split = getattr(parameter, "tensor_model_parallel", False)
    return is_split or parallel_state.get_tensor_model_parallel_rank() == 0
