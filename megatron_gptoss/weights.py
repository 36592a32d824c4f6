"""The weights of a model as the outside sees them: to be loaded, and to be read as they multiply.

The two differ with adapters, where what is loaded is the frozen base and what engines and exports get
is the base merged with its adapter, and for experts that are trained through MXFP4, where these get
the rounded values.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron_gptoss.layers.adapted_linears import AdaptedLinear
from megatron_gptoss.layers.adapters import LowRank
from megatron_gptoss.layers.packed_weight import PackedWeight
from megatron_gptoss.layers.quantized_experts import QuantizedExpertLinear


class Weight(Protocol):
    """One weight of this rank."""

    @property
    def shape(self) -> torch.Size:
        """On this rank."""

    @property
    def dtype(self) -> torch.dtype:
        """Of what ``read`` returns."""

    def load(self, tensor: Tensor) -> None:
        """Set the weight, of a model with adapters its base. Raises ValueError if it does not fit."""

    def read(self) -> Tensor:
        """Return what the model multiplies with; it may share memory with a parameter."""


@dataclass(frozen=True)
class ParameterWeight:
    """A weight without an adapter."""

    parameter: torch.nn.Parameter

    @property
    def shape(self) -> torch.Size:
        return self.parameter.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.parameter.dtype

    @torch.no_grad()
    def load(self, tensor: Tensor) -> None:
        self.parameter.copy_(tensor)

    def read(self) -> Tensor:
        return self.parameter.detach()


@dataclass(frozen=True)
class QuantizedWeight:
    """The weight of an expert that is trained through MXFP4."""

    layer: QuantizedExpertLinear

    @property
    def shape(self) -> torch.Size:
        return self.layer.weight.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.layer.weight.dtype

    @torch.no_grad()
    def load(self, tensor: Tensor) -> None:
        self.layer.weight.copy_(tensor)

    def read(self) -> Tensor:
        return self.layer.quantized_weight()

    def unrounded(self) -> Tensor:
        """Return what the optimizer changes, [out, in]; it is the parameter's memory."""
        return self.layer.weight.detach()

    def read_packed(self) -> tuple[Tensor, Tensor]:
        """Return ``read`` as MXFP4: blocks [out, in / 32, 16] and scales [out, in / 32]."""
        return self.layer.packed_weight()


@dataclass(frozen=True)
class AdaptedWeight:
    """The weight of a layer whose base is frozen: merged, or dequantised, whenever it is read."""

    layer: AdaptedLinear

    @property
    def shape(self) -> torch.Size:
        return self.layer.weight.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.layer.config.params_dtype

    @torch.no_grad()
    def load(self, tensor: Tensor) -> None:
        if isinstance(self.layer.weight, PackedWeight):
            self.layer.weight.load(tensor)
        else:
            self.layer.weight.copy_(tensor)

    def read(self) -> Tensor:
        return self.layer.merged_weight()


def named_weights(chunk: torch.nn.Module) -> Iterator[tuple[str, Weight]]:
    """Yield the weights of a model chunk under their names without adapters.

    Names are those of ``named_parameters`` of the same chunk without adapters.
    """
    for prefix, module in chunk.named_modules():
        if isinstance(module, LowRank | PackedWeight):
            continue
        if isinstance(module, AdaptedLinear):
            yield f"{prefix}.weight", AdaptedWeight(module)
        if isinstance(module, QuantizedExpertLinear):
            yield f"{prefix}.weight", QuantizedWeight(module)

        for name, parameter in module.named_parameters(recurse=False):
            is_named = name == "weight" and isinstance(
                module, AdaptedLinear | QuantizedExpertLinear
            )
            if not is_named:
                yield f"{prefix}.{name}", ParameterWeight(parameter)
