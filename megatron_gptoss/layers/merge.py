"""Merging of adapters into weights, and products with merged weights.

W' = dtype(W + s (B A)), with A [rank, in], B [out, rank] and scale s. Training layers, weight sync
and converters all use ``merge`` or ``merge_mxfp4``, so engines have the same bits as the trainer.
The unmerged product W x + s B (A x) gives other numbers: rounding W + s B A to bf16 loses most of
an update that is small relative to W.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gptoss_kernels import mxfp4

PIECE = 1 << 20
"""Number of values that ``merge_in_pieces`` merges at a time."""


def merge(
    weight: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Compute W + scale * (B A) in fp32 or wider, and round it once.

    The result has the same bits for a part of the rows, columns or experts as for the whole, so it
    does not depend on the layout.

    Args:
        weight: [..., out, in].
        a: [..., rank, in].
        b: [..., out, rank].
        scale: scale of the update.
        dtype: data type of the result; None: the dtype of ``weight``.
        out: [..., out, in] of that dtype, contiguous. Receives the result; None to allocate it.

    Returns:
        [..., out, in]. Elements without an update keep their bits, including negative zeros.
    """
    # B A is accumulated rank by rank, and each multiplication and addition is rounded separately. A
    # matrix product would sum in an order that depends on the shape. For bf16 weights on a GPU, a
    # kernel computes the same bits.
    if out is None:
        out = torch.empty(weight.shape, dtype=dtype or weight.dtype, device=weight.device)
    if _has_dense_kernel(weight, a, b, out):
        from gptoss_kernels import adapter_merge

        adapter_merge.merge_dense(weight, a, b, scale, out)
        return out

    compute_dtype = torch.promote_types(weight.dtype, torch.float32)
    a = a.to(compute_dtype)
    b = b.to(compute_dtype)

    # Do not use a fused multiply-add such as addcmul: whether it rounds once or twice depends on
    # the device, and on a CPU on the position in the tensor.
    update = torch.zeros(weight.shape, dtype=compute_dtype, device=weight.device)
    term = torch.empty_like(update)
    for i in range(a.shape[-2]):
        # [..., out, 1] * [..., 1, in]: the outer product of column i of B and row i of A.
        torch.mul(b[..., :, i, None], a[..., i, None, :], out=term)
        update += term
    update *= scale

    # Keep the weight where the update is 0, because -0 + 0 would be +0.
    wide_weight = weight.to(compute_dtype)
    return out.copy_(torch.where(update == 0, wide_weight, wide_weight + update))


def merge_mxfp4(
    blocks: Tensor,
    scales: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float,
    out: Tensor,
) -> Tensor:
    """Merge an update into the bf16 values of an MXFP4 weight. See ``merge``.

    Args:
        blocks: [..., out, in / 32, 16] uint8, see ``mxfp4.dequantize``.
        scales: [..., out, in / 32] uint8.
        a: [..., rank, in].
        b: [..., out, rank].
        scale: scale of the update.
        out: [..., out, in], contiguous. Receives the result.

    Returns:
        ``out``.
    """
    if _has_kernel(a, b, out):
        from gptoss_kernels import adapter_merge

        adapter_merge.merge_mxfp4(blocks, scales, a, b, scale, out)
        return out
    return merge(mxfp4.dequantize(blocks, scales), a, b, scale, out=out)


def _has_dense_kernel(weight: Tensor, a: Tensor, b: Tensor, out: Tensor) -> bool:
    """Return True if the GPU kernel supports this dense base."""
    return weight.dtype == torch.bfloat16 and _has_kernel(a, b, out)


def _has_kernel(a: Tensor, b: Tensor, out: Tensor) -> bool:
    """Return True if the GPU kernel supports these factors and this result."""
    # The import loads the kernel's module, which CPUs do not need.
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
    """Merge an update into a large weight in groups of rows, which bounds the fp32 memory.

    The bits are those of ``merge``.

    Args:
        weight: [out, in].
        a: [rank, in].
        b: [out, rank].
        scale: scale of the update.
        dtype: data type of the result; None: the dtype of ``weight``.

    Returns:
        [out, in].
    """
    # The GPU kernel needs no fp32 memory, so it merges the whole weight. In pieces the output layer
    # would take 550 launches.
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

    Differentiable in x, A and B. The gradient treats rounding as the identity. With dY the gradient
    of the result:

        dX = dY W',  dB = scale * dY^T (x A^T),  dA = scale * (dY B)^T x

    W' is not kept. The backward pass computes it again.

    Args:
        x: [..., in].
        read_weight: function that returns W [out, in]. Called in the forward and in the backward
            pass. The result may be overwritten by the next call.
        a: [rank, in].
        b: [out, rank].
        scale: scale of the update.

    Returns:
        [..., out] with the dtype of x.
    """
    product: Tensor = _MergedLinear.apply(x.reshape(-1, x.shape[-1]), a, b, read_weight, scale)
    return product.unflatten(0, x.shape[:-1])


class _MergedLinear(torch.autograd.Function):
    """Product of ``merged_linear``."""

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
        # The intermediate is [rows, rank]. The gradient [out, in] of W' never exists.
        if needs_a:
            grad_a = ctx.scale * ((grad @ b).t() @ x)
        if needs_b:
            grad_b = ctx.scale * (grad.t() @ (x @ a.t()))
        return grad_x, grad_a, grad_b, None, None


def merged_weight(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Compute the merged weight W', differentiable in A and B.

    For uses other than ``merged_linear``. The backward pass needs the gradient [out, in] of W'.

    Args:
        weight: [out, in], of any float dtype.
        a: [rank, in].
        b: [out, rank].
        scale: scale of the update.

    Returns:
        [out, in], of the dtype of ``weight``, with the bits of ``merge``.
    """
    merged: Tensor = _MergedWeight.apply(weight, a, b, scale)
    return merged


class _MergedWeight(torch.autograd.Function):
    """Merge of ``merged_weight``."""

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
