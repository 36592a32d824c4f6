"""Experts that are trained through MXFP4: quantization-aware training.

Every product is with Q(W), the values of MXFP4 nearest to the weight, and not with W. Q is the one
quantizer that weight sync and exports have, so that what is trained, sampled and shipped are the
same bits. The backward pass takes rounding for the identity (straight-through, arXiv 1308.3432):

    Y = X Q(W)^T,  dX = dY Q(W),  dW = dY^T X

The optimizer changes W, which keeps all its digits. Q(W) is made anew for every pass, in memory that
the layers share.
"""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.transformer.mlp import MLPSubmodules
from torch import Tensor

from gptoss_kernels import mxfp4
from megatron_gptoss.layers.adapted_experts import is_spread
from megatron_gptoss.layers.adapted_linears import sharded_state
from megatron_gptoss.layers.grouped_products import (
    add_outer_products,
    multiply_by_transposed_weights,
    multiply_by_weights,
    outer_products,
)
from megatron_gptoss.layers.shared_memory import Loan, shared_memory
from megatron_gptoss.layers.stacked_experts import StackedExperts
from megatron_gptoss.transformer_config import PolicyTransformerConfig, mark, parameter_device


class QuantizedExpertLinear(torch.nn.Module):
    """One matrix of one expert: all digits of its weight, of which products see MXFP4 values.

    Experts are spread over ranks whole, so there is nothing to communicate here.
    """

    weight: torch.nn.Parameter
    """[out, in], what the optimizer changes."""
    bias: torch.nn.Parameter
    """[out], not quantized."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: PolicyTransformerConfig,
        tp_group: Any,
        **unused: Any,
    ) -> None:
        """Allocate the layer, uninitialised, with the interface of Megatron's linear layers.

        Args:
            input_size: columns of the weight.
            output_size: its rows.
            config: of the model.
            tp_group: the expert tensor-parallel ranks, one.
            unused: how Megatron's layers would be initialised and split.
        """
        super().__init__()
        self.config = config
        self.tp_group = tp_group
        place: Any = {"dtype": config.params_dtype, "device": parameter_device(config)}
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, **place))
        self.bias = torch.nn.Parameter(torch.empty(output_size, **place))

        for parameter in (self.weight, self.bias):
            mark(parameter, allreduce=not is_spread(config))

        # As Megatron's linear layers: a checkpoint may lack the entry of ``get_extra_state``.
        self._register_load_state_dict_pre_hook(
            lambda state_dict, prefix, *args: state_dict.setdefault(f"{prefix}_extra_state")
        )

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return weight and bias.

        Reading them goes through a call, because Megatron's distributed optimizer gathers a
        module's parameters when the module is called.
        """
        return self.weight, self.bias

    @torch.no_grad()
    def quantized_weight(self) -> Tensor:
        """Return what the layer multiplies with, [out, in], as a new tensor."""
        rounded = torch.empty_like(self.weight)
        mxfp4.fake_quantize([self.weight], rounded[None])
        return rounded

    @torch.no_grad()
    def packed_weight(self) -> tuple[Tensor, Tensor]:
        """Return the same as MXFP4: blocks uint8 [out, in / 32, 16], scales uint8 [out, in / 32]."""
        return mxfp4.quantize(self.weight.to(torch.bfloat16))

    def get_extra_state(self) -> None:
        """Return nothing: Megatron's linear layers have this entry in checkpoints, and so do others."""
        return None

    def set_extra_state(self, state: Any) -> None:
        """Ignore what other layers keep of low-precision training."""

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Describe weight and bias for checkpoints."""
        return sharded_state(self, {}, prefix, sharded_offsets, metadata)


QUANTIZED_EXPERT_LINEARS = MLPSubmodules(
    linear_fc1=QuantizedExpertLinear,
    linear_fc2=QuantizedExpertLinear,
)
"""The two matrices of an expert that is trained through MXFP4."""


class QuantizedExperts(StackedExperts):
    """All experts of this rank, trained through MXFP4."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gate_up = QuantizedStack("gate_up", self.named_linears("linear_fc1"))
        self.down = QuantizedStack("down", self.named_linears("linear_fc2"))


class QuantizedStack:
    """One of the two matrices of all experts of a layer. It owns nothing: their linear layers do."""

    def __init__(self, target: str, linears: Sequence[QuantizedExpertLinear]) -> None:
        """Prepare to multiply.

        Args:
            target: "gate_up" or "down"; stacks of one target share the rounded weights' memory.
            linears: of the experts of this rank.
        """
        self.target = target
        self.linears = linears

    def multiply(self, x: Tensor, row_counts: Sequence[int], with_bias: bool = False) -> Tensor:
        """Compute x Q(W)^T with the weight of every row's expert.

        Differentiable in x, weights and, where they are added, biases. Gradients of weights are
        added to Megatron's buffers where it keeps some.

        Args:
            x: [rows, in], sorted by expert.
            row_counts: rows of each expert.
            with_bias: add each expert's bias.

        Returns:
            [rows, out].
        """
        weights = []
        biases = []
        for linear in self.linears:
            weight, bias = linear()
            weights.append(weight)
            if with_bias:
                biases.append(bias)
        product: Tensor = _QuantizedProduct.apply(x, self, row_counts, *weights, *biases)
        return product

    def biases(self) -> Tensor:
        """Return the biases of all experts, [experts, out]."""
        return torch.stack([linear()[1] for linear in self.linears])

    def round(self, weights: Sequence[Tensor]) -> Loan:
        """Round all weights in shared memory: [experts, out, in], until another layer does."""
        # The two matrices of a layer have memory of their own: the backward pass of a layer that was
        # just computed again finds both.
        first = weights[0]
        memory = shared_memory(f"quantized {self.target}", first.device, first.dtype)
        loan = memory.lend(torch.Size((len(weights), *first.shape)))
        mxfp4.fake_quantize(weights, out=loan.tensor)
        return loan


class _QuantizedProduct(torch.autograd.Function):
    """x Q(W)^T, with a bias or without; the parameters are all weights, then all biases."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        stack: QuantizedStack,
        row_counts: Sequence[int],
        *parameters: Tensor,
    ) -> Tensor:
        x = x.contiguous()
        weights = parameters[: len(row_counts)]
        biases = parameters[len(row_counts) :]
        # The weights themselves are saved, not their rounded copies: these are made again for the
        # backward pass unless the memory still holds them, which it does for a layer that was
        # recomputed just before.
        rounded = stack.round(weights)

        ctx.save_for_backward(x, *weights)
        ctx.stack = stack
        ctx.row_counts = row_counts
        ctx.rounded = rounded
        stacked_biases = torch.stack(biases) if biases else None
        return multiply_by_weights(x, rounded.tensor, row_counts, stacked_biases)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        needs_x, _, _, *needs_parameters = ctx.needs_input_grad
        experts = len(weights)
        grad = grad.contiguous()

        grad_x = None
        if needs_x:
            rounded = ctx.rounded.read()
            if rounded is None:
                rounded = ctx.stack.round(weights).tensor
            grad_x = multiply_by_transposed_weights(grad, rounded, ctx.row_counts)

        gradients: list[Tensor | None] = [None] * len(needs_parameters)
        if any(needs_parameters[:experts]):
            gradients[:experts] = _weight_gradients(grad, x, weights, ctx.row_counts)
        if any(needs_parameters[experts:]):
            gradients[experts:] = _bias_gradients(grad, ctx.row_counts)
        return grad_x, None, None, *gradients


def _weight_gradients(
    grad: Tensor, x: Tensor, weights: Sequence[Any], row_counts: Sequence[int]
) -> list[Tensor]:
    """Return what autograd is to see of dW = dY^T X, for each expert.

    Args:
        grad: [rows, out], of the product.
        x: [rows, in].
        weights: the parameter [out, in] of each expert.
        row_counts: rows of each expert.
    """
    buffers = [_gradient_buffer(weight) for weight in weights]
    if any(buffer is None for buffer in buffers):
        return list(outer_products(grad, x, row_counts).unbind())

    add_outer_products(grad, x, row_counts, buffers)
    # Megatron's hooks only need to see that there is a gradient: all share memory that nobody
    # reads. Detached, each is a tensor of its own, which autograd takes as it is instead of a copy.
    unread = torch.empty_like(weights[0])
    for weight in weights:
        mark(weight, grad_added_to_main_grad=True)
    return [unread.detach() for _ in weights]


def _gradient_buffer(weight: Tensor) -> Tensor | None:
    """Return where Megatron's data parallelism adds up the gradient of a weight, if it does."""
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    return getattr(weight, "main_grad", None)


def _bias_gradients(grad: Tensor, row_counts: Sequence[int]) -> list[Tensor]:
    """Return the sum of the rows of ``grad`` [rows, out] of each expert, [out] each."""
    # A grouped product wants rows of 16 bytes; all eight columns of ones give the same sum.
    ones = grad.new_ones(len(grad), 8)
    return list(outer_products(ones, grad, row_counts)[:, 0].unbind())
