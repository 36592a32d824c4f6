"""Products with expert weights and adapters that are not merged.

    y = x W^T + (s x A^T) B^T

Merging rounds W + s B A to bf16, which loses most of an update that is small relative to W. Here W keeps its bits, and
servers with MXFP4 experts can hold it as MXFP4. Trainer and servers round the same values: s x A^T, and the sum of both
products and the bias. In exact sums their outputs would be equal. They differ if sums in another order round
differently.

The forward pass is one GEMM: B and the bias are further columns of W, and s x A^T and 1 are further columns of x. It
needs no bias and no accumulation by cuBLAS, which does not say where it rounds if it does both.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_gptoss.layers.grouped_gemm import (
    multiply_by_transposed_weights,
    multiply_by_weights,
    outer_products,
    project,
)

ALIGNMENT = 8
"""Grouped products of bf16 on GPUs need sizes that are a multiple of this."""


def unmerged_product(
    x: Tensor,
    a: Tensor,
    b: Tensor,
    read_weights: Callable[[], Tensor],
    row_counts: Sequence[int],
    scale: float,
    biases: Tensor | None = None,
) -> Tensor:
    """Compute x W^T + (s x A^T) B^T + bias with the weight, adapter and bias of each row's expert.

    Differentiable in x, A and B. With dY the gradient of the result and U = s dY B:

        dX = dY W + U A,  dA = U^T x,  dB = dY^T (s x A^T)

    Args:
        x: [rows, in], sorted by expert.
        a: [experts, rank, in], of the dtype of x.
        b: [experts, out, rank], of the dtype of x.
        read_weights: function that returns W [experts, out, in] in the dtype of x. Called in the forward and in the
            backward pass. The result may be overwritten by the next call.
        row_counts: rows per expert.
        scale: scale s of the updates.
        biases: [experts, out], which have no gradient; None to add nothing.

    Returns:
        [rows, out] in the dtype of x.
    """
    x = x.contiguous()
    if a.shape[1] == 0:
        product: Tensor = _BaseProduct.apply(x, read_weights, row_counts, biases)
        return product

    # Padding changes no result, and autograd removes it from the gradients.
    missing = -a.shape[1] % ALIGNMENT
    if missing:
        a = torch.nn.functional.pad(a, (0, 0, 0, missing))
        b = torch.nn.functional.pad(b, (0, missing))
    product = _UnmergedProduct.apply(x, a, b, read_weights, row_counts, scale, biases)
    return product


def project_down(x: Tensor, factors: Tensor, row_counts: Sequence[int], scale: float) -> Tensor:
    """Compute s x F, rounded before and after the multiplication by s.

    Servers round at the same two points (``gptoss_adapted_moe`` of the SGLang plugin).

    Args:
        x: [rows, in], contiguous, sorted by expert.
        factors: [experts, in, rank], of the dtype of x.
        row_counts: rows per expert.
        scale: scale s.

    Returns:
        [rows, rank], of the dtype of x.
    """
    return project(x, factors, row_counts) * scale


class _UnmergedProduct(torch.autograd.Function):
    """Product of ``unmerged_product`` with adapters."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        a: Tensor,
        b: Tensor,
        read_weights: Callable[[], Tensor],
        row_counts: Sequence[int],
        scale: float,
        biases: Tensor | None,
    ) -> Tensor:
        low = project_down(x, a.mT, row_counts, scale)
        ctx.save_for_backward(x, a, b, low)
        ctx.read_weights = read_weights
        ctx.row_counts = row_counts
        ctx.scale = scale

        # A rounded base product or bias would lose every update below half of its last bit.
        inputs = [x, low]
        factors = [read_weights(), b]
        if biases is not None:
            # The bias is multiplied with the first of these columns. The others only align the
            # sizes.
            ones = x.new_zeros(len(x), ALIGNMENT)
            ones[:, 0] = 1
            inputs.append(ones)
            factors.append(torch.nn.functional.pad(biases[:, :, None], (0, ALIGNMENT - 1)))
        return multiply_by_weights(torch.cat(inputs, 1), torch.cat(factors, 2), row_counts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, a, b, low = ctx.saved_tensors
        needs_x, needs_a, needs_b, *_ = ctx.needs_input_grad
        grad = grad.contiguous()
        counts = ctx.row_counts
        grad_x = None
        grad_a = None
        grad_b = None

        # The intermediate is [rows, rank]. The gradient [out, in] of W + s B A never exists.
        grad_low = project_down(grad, b, counts, ctx.scale)
        if needs_x:
            update = project(grad_low, a, counts)
            grad_x = multiply_by_transposed_weights(grad, ctx.read_weights(), counts, sums=update)
        if needs_a:
            grad_a = outer_products(grad_low, x, counts)
        if needs_b:
            grad_b = outer_products(grad, low, counts)
        return grad_x, grad_a, grad_b, None, None, None, None


class _BaseProduct(torch.autograd.Function):
    """Product of ``unmerged_product`` without adapters."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        read_weights: Callable[[], Tensor],
        row_counts: Sequence[int],
        biases: Tensor | None,
    ) -> Tensor:
        ctx.read_weights = read_weights
        ctx.row_counts = row_counts
        return multiply_by_weights(x, read_weights(), row_counts, biases)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        weights = ctx.read_weights()
        return (
            multiply_by_transposed_weights(grad.contiguous(), weights, ctx.row_counts),
            None,
            None,
            None,
        )
