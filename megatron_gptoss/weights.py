"""Access to the weights of a model for loading, weight sync and export.

Loaded and read values differ in two cases. With adapters, loading sets the frozen base and reading
returns the merged weight. With quantization-aware training, reading returns the rounded weight.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_gptoss.layers.adapted_experts import AdaptedExpertLinear
from megatron_gptoss.layers.adapted_linears import AdaptedLinear
from megatron_gptoss.layers.adapters import LowRank
from megatron_gptoss.layers.mxfp4_weight import Mxfp4Weight
from megatron_gptoss.layers.quantized_experts import QuantizedExpertLinear


class LocalWeight(Protocol):
    """Weight of this rank."""

    @property
    def shape(self) -> torch.Size:
        """Shape on this rank."""

    @property
    def dtype(self) -> torch.dtype:
        """Data type of ``read``'s result."""

    def load(self, tensor: Tensor) -> None:
        """Set the weight, or the base of an adapter, from a tensor [*shape] of any float dtype.

        Raises:
            ValueError: a value cannot be represented, for example in an MXFP4 base.
        """

    def read(self) -> Tensor:
        """Return the weight [*shape] of the model's products, of dtype ``dtype``.

        It may be the parameter's memory.
        """


@dataclass(frozen=True)
class ParameterWeight:
    """Weight without an adapter."""

    parameter: torch.nn.Parameter
    """The parameter."""

    @property
    def shape(self) -> torch.Size:
        """Shape on this rank."""
        return self.parameter.shape

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the parameter."""
        return self.parameter.dtype

    @torch.no_grad()
    def load(self, tensor: Tensor) -> None:
        """Copy a tensor [*shape] of any float dtype to the parameter."""
        self.parameter.copy_(tensor)

    def read(self) -> Tensor:
        """Return the parameter [*shape], in its own memory and dtype."""
        return self.parameter.detach()


@dataclass(frozen=True)
class QuantizedWeight:
    """Weight of an expert with quantization-aware training."""

    layer: QuantizedExpertLinear
    """Layer that owns the weight."""

    @property
    def shape(self) -> torch.Size:
        """Shape on this rank."""
        return self.layer.weight.shape

    @property
    def dtype(self) -> torch.dtype:
        """Data type of unrounded and rounded weight."""
        return self.layer.weight.dtype

    @torch.no_grad()
    def load(self, tensor: Tensor) -> None:
        """Copy a tensor [out, in] of any float dtype to the unrounded weight."""
        self.layer.weight.copy_(tensor)

    def read(self) -> Tensor:
        """Return the rounded weight [out, in] of dtype ``dtype``, as a new tensor."""
        return self.layer.quantized_weight()

    def without_rounding(self) -> Tensor:
        """Return the unrounded weight [out, in], in the memory and dtype of the parameter."""
        return self.layer.weight.detach()

    def read_mxfp4(self) -> tuple[Tensor, Tensor]:
        """Return the rounded weight in MXFP4.

        Returns:
            Blocks [out, in / 32, 16] uint8 and scales [out, in / 32] uint8.
        """
        return self.layer.mxfp4_weight()


@dataclass(frozen=True)
class AdaptedWeight:
    """Weight of a layer with a frozen base. Each read merges or dequantizes it."""

    layer: AdaptedLinear
    """Layer that owns the weight."""

    @property
    def shape(self) -> torch.Size:
        """Shape on this rank."""
        return self.layer.weight.shape

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the merged weight."""
        return self.layer.config.params_dtype

    @torch.no_grad()
    def load(self, tensor: Tensor) -> None:
        """Set the base from a tensor [out, in] of any float dtype.

        Raises:
            ValueError: the base is MXFP4 and a value is not an MXFP4 value.
        """
        if isinstance(self.layer.weight, Mxfp4Weight):
            self.layer.weight.load(tensor)
        else:
            self.layer.weight.copy_(tensor)

    def read(self) -> Tensor:
        """Return the merged weight [out, in] of dtype ``dtype``, as a new tensor."""
        return self.layer.merged_weight()


@dataclass(frozen=True)
class UnmergedWeight(AdaptedWeight):
    """Weight of an expert whose base and adapter are multiplied separately. ``read`` merges both."""

    def read_mxfp4(self) -> tuple[Tensor, Tensor]:
        """Return the base in MXFP4.

        Returns:
            Blocks [out, in / 32, 16] uint8 and scales [out, in / 32] uint8, in the memory of the base.
        """
        base = self.layer.weight
        assert isinstance(base, Mxfp4Weight)
        return base.blocks, base.scales


@dataclass(frozen=True)
class ExpertFactor:
    """Factor of one expert's unmerged adapter."""

    layer: AdaptedExpertLinear
    """Layer of the expert."""
    name: str
    """``a`` or ``b``."""

    @torch.no_grad()
    def read(self) -> Tensor:
        """Return A [rank, in] or B [out, rank], in the memory and dtype of the parameter."""
        a, b = self.layer.factors()
        return a if self.name == "a" else b


def named_expert_factors(chunk: torch.nn.Module) -> Iterator[tuple[str, ExpertFactor]]:
    """Yield the factors of unmerged adapters in a model chunk, by the name of their layer and factor."""
    for prefix, module in chunk.named_modules():
        if isinstance(module, AdaptedExpertLinear) and not module.is_merged:
            for name in ("a", "b"):
                yield f"{prefix}.{name}", ExpertFactor(module, name)


@torch.no_grad()
def lost_by_merging(model: torch.nn.Module) -> float:
    """Return the share of unmerged expert updates that rounded merged weights lose. Collective.

    The share is the norm of the error divided by the norm of all updates; 0 without updates.

    Args:
        model: model of any parallel layout.
    """
    # In fp64, because the squares of billions of small values are summed.
    sums = torch.zeros(2, dtype=torch.float64, device=next(model.parameters()).device)
    for module in model.modules():
        if isinstance(module, AdaptedExpertLinear) and not module.is_merged:
            a, b = module.factors()
            update = module.scale * (b.float() @ a.float())
            # ``float`` copies the base, whose memory the merge overwrites.
            base = module.read_base().float()
            error = module.merged_weight().float() - base - update
            sums += torch.stack([error.square().sum(), update.square().sum()])
    # Each expert is on the same number of ranks, so replicas do not change the ratio.
    dist.all_reduce(sums)
    error_sum, update_sum = sums.tolist()
    return float((error_sum / update_sum) ** 0.5) if update_sum else 0.0


def named_weights(chunk: torch.nn.Module) -> Iterator[tuple[str, LocalWeight]]:
    """Yield the weights of a model chunk with their names.

    The names are those of ``named_parameters`` for the same chunk without adapters. Converters and
    weight sync therefore need no names for adapted or MXFP4 layers.
    """
    for prefix, module in chunk.named_modules():
        if isinstance(module, LowRank | Mxfp4Weight):
            continue
        # An MXFP4 weight is not a parameter, so these weights are found by their layer.
        if isinstance(module, AdaptedExpertLinear) and not module.is_merged:
            yield f"{prefix}.weight", UnmergedWeight(module)
        elif isinstance(module, AdaptedLinear):
            yield f"{prefix}.weight", AdaptedWeight(module)
        if isinstance(module, QuantizedExpertLinear):
            yield f"{prefix}.weight", QuantizedWeight(module)

        for name, parameter in module.named_parameters(recurse=False):
            is_named = name == "weight" and isinstance(
                module, AdaptedLinear | QuantizedExpertLinear
            )
            if not is_named:
                yield f"{prefix}.{name}", ParameterWeight(parameter)
