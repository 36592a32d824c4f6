"""Merging an adapter into the weight that it changes, and products with the merged weight.

W' = dtype(W + s (B A)), with A [rank, in], B [out, rank] and the scale s. Whoever needs a merged
weight takes it from ``merge`` or ``merge_packed``: the layers that train, the weights that engines
get, the converters. So an engine holds the very bits that were trained with. An unmerged product,
W x + s B (A x), is another number: rounding W + s B A to bf16 loses most of an update that is small
beside W.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gptoss_kernels import mxfp4

PIECE = 1 << 20
"""Values that ``merge_in_pieces`` merges at a time."""


def merge(
    weight: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Compute W + scale * (B A), in fp32 at least, and round it once.

    B A is summed up rank by rank, with every multiplication and every addition rounded by itself.
    A matrix product may take any order, another one for every shape; this one gives the same bits
    for a part of the rows, columns or experts as for all of them, so that no layout changes them.
    On a GPU a kernel gives the bits of the sum below for bf16 weights.

    Args:
        weight: [..., out, in].
        a: [..., rank, in].
        b: [..., out, rank].
        scale: of the update.
        dtype: of the result; by default the weight's.
        out: [..., out, in] of that dtype, contiguous, to write into.

    Returns:
        [..., out, in], a new tensor or ``out``. Where the update is 0, the weight itself, a
        negative zero included.
    """
    if out is None:
        out = torch.empty(weight.shape, dtype=dtype or weight.dtype, device=weight.device)
    if _has_dense_kernel(weight, a, b, out):
        from gptoss_kernels import adapter_merge

        adapter_merge.merge_dense(weight, a, b, scale, out)
        return out

    compute_dtype = torch.promote_types(weight.dtype, torch.float32)
    a = a.to(compute_dtype)
    b = b.to(compute_dtype)

    # No operation that multiplies and adds: whether such a one rounds once or twice depends on the
    # device, and on a CPU on where in the tensor a value lies.
    update = torch.zeros(weight.shape, dtype=compute_dtype, device=weight.device)
    term = torch.empty_like(update)
    for i in range(a.shape[-2]):
        # [..., out, 1] * [..., 1, in]: the outer product of column i of B and row i of A.
        torch.mul(b[..., :, i, None], a[..., i, None, :], out=term)
        update += term
    update *= scale

    # Where nothing is added the weight is kept as it is: -0 + 0 would be +0, another bit.
    wide_weight = weight.to(compute_dtype)
    return out.copy_(torch.where(update == 0, wide_weight, wide_weight + update))


def merge_packed(
    blocks: Tensor,
    scales: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float,
    out: Tensor,
) -> Tensor:
    """Compute what ``merge`` computes for the bf16 values of an MXFP4 weight.

    Args:
        blocks: [..., out, in / 32, 16] uint8, see ``mxfp4.dequantize``.
        scales: [..., out, in / 32] uint8.
        a: [..., rank, in].
        b: [..., out, rank].
        scale: of the update.
        out: [..., out, in], contiguous, to write into.

    Returns:
        ``out``.
    """
    if _has_kernel(a, b, out):
        from gptoss_kernels import adapter_merge

        adapter_merge.merge_packed(blocks, scales, a, b, scale, out)
        return out
    return merge(mxfp4.dequantize(blocks, scales), a, b, scale, out=out)


def _has_dense_kernel(weight: Tensor, a: Tensor, b: Tensor, out: Tensor) -> bool:
    """Return whether the GPU's kernel takes this dense base."""
    return weight.dtype == torch.bfloat16 and _has_kernel(a, b, out)


def _has_kernel(a: Tensor, b: Tensor, out: Tensor) -> bool:
    """Return whether the GPU's kernel takes these: bf16 throughout, eight columns at a time."""
    if not out.is_cuda:
        return False
    from gptoss_kernels.adapter_merge import ALIGNMENT, COLUMNS

    is_bf16 = all(tensor.dtype == torch.bfloat16 for tensor in (a, b, out))
    return is_bf16 and out.shape[-1] % COLUMNS == 0 and out.data_ptr() % ALIGNMENT == 0


def merge_in_pieces(
    weight: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute ``merge`` of a large weight [out, in], some rows at a time: the same bits.

    What it computes in fp32 is as large as those rows, not as the weight. The GPU's kernel computes
    nothing in memory: it takes the weight whole, where the output layer would be 550 launches.
    """
    merged = weight.new_empty(weight.shape, dtype=dtype or weight.dtype)
    if _has_dense_kernel(weight, a, b, merged):
        return merge(weight, a, b, scale, out=merged)

    rows = max(1, PIECE // weight.shape[1])
    for first in range(0, len(weight), rows):
        piece = slice(first, first + rows)
        merged[piece] = merge(weight[piece], a, b[piece], scale, dtype)
    return merged


def merged_linear(
    x: Tensor,
    read_weight: Callable[[], Tensor],
    a: Tensor,
    b: Tensor,
    scale: float,
) -> Tensor:
    """Compute x W'^T, where W' is the weight merged with an adapter.

    Differentiable in x, A and B; rounding counts as the identity. With dY the gradient of the
    result:

        dX = dY W',  dB = scale * dY^T (x A^T),  dA = scale * (dY B)^T x

    These are the gradients of a product with the explicit W'. W' itself is not kept: the backward
    pass makes it again.

    Args:
        x: [..., in].
        read_weight: returns W [out, in], in the forward and again in the backward pass; it is not
            read after the next call.
        a: [rank, in].
        b: [out, rank].
        scale: of the update.

    Returns:
        [..., out], in the dtype of x.
    """
    product: Tensor = _MergedLinear.apply(x.reshape(-1, x.shape[-1]), a, b, read_weight, scale)
    return product.unflatten(0, x.shape[:-1])


class _MergedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        a: Tensor,
        b: Tensor,
        read_weight: Callable[[], Tensor],
        scale: float,
    ) -> Tensor:
        ctx.save_for_backward(x, a, b)
        ctx.read_weight = read_weight
        ctx.scale = scale
        return x @ merge(read_weight(), a, b, scale, dtype=x.dtype).t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, a, b = ctx.saved_tensors
        needs_x, needs_a, needs_b, _, _ = ctx.needs_input_grad
        grad_x = None
        grad_a = None
        grad_b = None

        if needs_x:
            grad_x = grad @ merge(ctx.read_weight(), a, b, ctx.scale, dtype=x.dtype)
        # Through the narrow side: [rows, rank] in between, never a gradient [out, in] of W'.
        if needs_a:
            grad_a = ctx.scale * ((grad @ b).t() @ x)
        if needs_b:
            grad_b = ctx.scale * (grad.t() @ (x @ a.t()))
        return grad_x, grad_a, grad_b, None, None


def merged_weight(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Compute W' [out, in] as ``merge`` does, differentiable in A and B.

    For a weight that is used in another way than ``merged_linear`` does: its gradient
    [out, in] is made, and that of A and B from it.
    """
    merged: Tensor = _MergedWeight.apply(weight, a, b, scale)
    return merged


class _MergedWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.scale = scale
        return merge_in_pieces(weight, a, b, scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        a, b = ctx.saved_tensors
        grad_a = ctx.scale * (b.t() @ grad)
        grad_b = ctx.scale * (grad @ a.t())
        return None, grad_a, grad_b, None
