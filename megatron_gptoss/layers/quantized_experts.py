"""Experts with quantization-aware training in MXFP4.

Products use Q(W), the MXFP4 values nearest to the weight. Weight sync and exports use the same
quantizer Q, so trainer, engines and exports have the same quantized values. The backward pass
treats rounding as the identity (straight-through estimator, arXiv 1308.3432):

    Y = X Q(W)^T,  dX = dY Q(W),  dW = dY^T X

The optimizer updates the unrounded W. Each pass computes Q(W) in memory that all layers share.
"""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.transformer.mlp import MLPSubmodules
from torch import Tensor

from gptoss_kernels import mxfp4
from megatron_gptoss.layers.adapted_experts import has_separate_reduction
from megatron_gptoss.layers.adapted_linears import sharded_state
from megatron_gptoss.layers.grouped_gemm import (
    add_outer_products,
    multiply_by_transposed_weights,
    multiply_by_weights,
    outer_products,
)
from megatron_gptoss.layers.scratch_memory import BufferLease, scratch_memory
from megatron_gptoss.layers.stacked_experts import StackedExperts
from megatron_gptoss.transformer_config import (
    PolicyTransformerConfig,
    parameter_device,
    set_distribution,
)


class QuantizedExpertLinear(torch.nn.Module):
    """One matrix of one expert, with unrounded weights. Products use its MXFP4 values.

    Ranks hold whole experts, so this layer does not communicate.
    """

    weight: torch.nn.Parameter
    """[out, in] unrounded weight, which the optimizer updates."""
    bias: torch.nn.Parameter
    """[out] bias, which is not quantized."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: PolicyTransformerConfig,
        tp_group: Any,
        **unused: Any,
    ) -> None:
        """Allocate the layer, uninitialized, with the interface of Megatron's linear layers.

        Args:
            input_size: columns of the weight.
            output_size: rows of the weight.
            config: configuration of the model.
            tp_group: group of the expert tensor-parallel ranks. It has one rank.
            unused: options of Megatron's layers for initialization and splitting.
        """
        super().__init__()
        self.config = config
        self.tp_group = tp_group
        place: Any = {"dtype": config.params_dtype, "device": parameter_device(config)}
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, **place))
        self.bias = torch.nn.Parameter(torch.empty(output_size, **place))

        for parameter in (self.weight, self.bias):
            set_distribution(parameter, allreduce=not has_separate_reduction(config))

        # Like Megatron's linear layers: a checkpoint may lack the entry of ``get_extra_state``.
        self._register_load_state_dict_pre_hook(
            lambda state_dict, prefix, *args: state_dict.setdefault(f"{prefix}_extra_state")
        )

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return weight [out, in] and bias [out], in the model's dtype.

        Read them through this call: Megatron's distributed optimizer gathers a module's parameters
        when the module is called.
        """
        return self.weight, self.bias

    @torch.no_grad()
    def quantized_weight(self) -> Tensor:
        """Return the rounded weight [out, in] in the model's dtype, as a new tensor."""
        rounded = torch.empty_like(self.weight)
        mxfp4.fake_quantize([self.weight], rounded[None])
        return rounded

    @torch.no_grad()
    def mxfp4_weight(self) -> tuple[Tensor, Tensor]:
        """Return the weight in MXFP4.

        Returns:
            Blocks [out, in / 32, 16] uint8 and scales [out, in / 32] uint8.
        """
        return mxfp4.quantize(self.weight.to(torch.bfloat16))

    def get_extra_state(self) -> None:
        """Return None, so that checkpoints have the same entries as with Megatron's layers."""
        return None

    def set_extra_state(self, state: Any) -> None:
        """Ignore the state that other layers save for low-precision training."""

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the sharded tensors of weight and bias."""
        return sharded_state(self, {}, prefix, sharded_offsets, metadata)


QUANTIZED_EXPERT_LINEARS = MLPSubmodules(
    linear_fc1=QuantizedExpertLinear,
    linear_fc2=QuantizedExpertLinear,
)
"""Layers of an expert with quantization-aware training."""


class QuantizedExperts(StackedExperts):
    """All experts of this rank, with quantization-aware training in MXFP4."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gate_up = QuantizedStack("gate_up", self.named_linears("linear_fc1"))
        self.down = QuantizedStack("down", self.named_linears("linear_fc2"))


class QuantizedStack:
    """One of a layer's two expert matrices, for all experts. Their layers own the parameters."""

    def __init__(self, target: str, linears: Sequence[QuantizedExpertLinear]) -> None:
        """Create the stack.

        Args:
            target: "gate_up" or "down". Stacks of a target share the memory of rounded weights.
            linears: this rank's expert layers.
        """
        self.target = target
        self.linears = linears

    def multiply(self, x: Tensor, row_counts: Sequence[int], with_bias: bool = False) -> Tensor:
        """Compute x Q(W)^T with the weight of each row's expert.

        Differentiable in x, the weights, and the biases if they are added. Gradients of weights are
        accumulated in Megatron's buffers if these exist.

        Args:
            x: [rows, in] in the model's dtype, sorted by expert.
            row_counts: rows per expert.
            with_bias: whether to add the biases.

        Returns:
            [rows, out] in the dtype of x.
        """
        # The parameters are arguments of the function, because autograd tracks only these.
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
        """Return the biases of all experts, [experts, out] in the model's dtype."""
        return torch.stack([linear()[1] for linear in self.linears])

    def round(self, weights: Sequence[Tensor]) -> BufferLease:
        """Round weights to MXFP4 values in scratch memory.

        Args:
            weights: unrounded weight [out, in] of each expert, in the model's dtype.

        Returns:
            Rounded weights [experts, out, in], valid until another layer rounds.
        """
        # The two matrices of a layer use separate memory. After recomputation of a layer, its
        # backward pass finds both.
        first = weights[0]
        memory = scratch_memory(f"quantized {self.target}", first.device, first.dtype)
        lease = memory.lease(torch.Size((len(weights), *first.shape)))
        mxfp4.fake_quantize(weights, out=lease.tensor)
        return lease


class _QuantizedProduct(torch.autograd.Function):
    """Product x Q(W)^T, with or without biases. ``parameters`` are all weights, then all biases."""

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
        # Save the unrounded weights, which exist anyway. The backward pass rounds them again unless
        # the scratch memory still holds them, as for a layer that has just been recomputed.
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
    """Compute dW = dY^T X for each expert, and return the gradients for autograd.

    Args:
        grad: [rows, out] gradient of the product.
        x: [rows, in].
        weights: parameter [out, in] of each expert.
        row_counts: rows per expert.

    Returns:
        [out, in] per expert: dW, or a placeholder if dW was added to Megatron's buffers.
    """
    buffers = [_gradient_buffer(weight) for weight in weights]
    if any(buffer is None for buffer in buffers):
        return list(outer_products(grad, x, row_counts).unbind())

    add_outer_products(grad, x, row_counts, buffers)
    # Megatron's hooks need a gradient to exist, but do not read it. All placeholders share memory.
    # Each is detached, which makes it a separate tensor object, so autograd does not copy it.
    placeholder = torch.empty_like(weights[0])
    for weight in weights:
        set_distribution(weight, grad_added_to_main_grad=True)
    return [placeholder.detach() for _ in weights]


def _gradient_buffer(weight: Tensor) -> Tensor | None:
    """Return the buffer in which Megatron accumulates the gradient of a weight; None if none."""
    # Megatron sets the attribute on the parameters of models that it wraps for training.
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    return getattr(weight, "main_grad", None)


def _bias_gradients(grad: Tensor, row_counts: Sequence[int]) -> list[Tensor]:
    """Return each expert's sum of rows of ``grad`` [rows, out], as [out] tensors."""
    # A grouped product needs rows whose bytes are a multiple of 16, so use 8 equal columns of ones.
    ones = grad.new_ones(len(grad), 8)
    return list(outer_products(ones, grad, row_counts)[:, 0].unbind())
