"""Rotary position embedding (RoPE) of queries and keys as one Triton kernel.

Channel c of a head's first half and channel c of its second half form a pair (x1, x2). The token's
angle rotates it to (x1 cos - x2 sin, x2 cos + x1 sin). The unfused formula moves 8x the bytes.
"""

# Triton interprets the annotations of a kernel's parameters, so kernels have none.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable


# Grid: tokens. A program rotates all heads of one token, because they share the cos and sin that it
# loads. BLOCK is HEADS rounded up to a power of 2, which tl.arange requires.
# `sign` is 1 to rotate forward and -1 to rotate back.
@triton.jit
def _rotate_kernel(
    x,
    cos,
    sin,
    out,
    stride_token,
    stride_head,
    sign,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # 64-bit offsets: 2**19 tokens with 64 heads of size 64 are 2**31 elements.
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, BLOCK)[:, None]
    channel = tl.arange(0, HALF)[None, :]
    inside = head < HEADS

    # In fp32, so that only the result is rounded. In bf16 both products and their sum would be.
    c = tl.load(cos + token * HALF + channel).to(tl.float32)
    s = tl.load(sin + token * HALF + channel).to(tl.float32) * sign
    source = x + token * stride_token + head * stride_head + channel
    first = tl.load(source, mask=inside).to(tl.float32)
    second = tl.load(source + HALF, mask=inside).to(tl.float32)

    target = out + (token * HEADS + head) * 2 * HALF + channel
    tl.store(target, (first * c - second * s).to(out.dtype.element_ty), mask=inside)
    tl.store(target + HALF, (second * c + first * s).to(out.dtype.element_ty), mask=inside)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    """Launch the kernel: x [tokens, heads, head_size] to a contiguous tensor like it."""
    # Queries and keys are views of the fused QKV output. The kernel handles any stride of tokens
    # and heads, so such a view needs no copy. Only channels must be contiguous.
    if x.stride(-1) != 1:
        x = x.contiguous()
    tokens, heads, head_size = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if tokens == 0:
        return out

    with torch.cuda.device(x.device):
        _rotate_kernel[(tokens,)](
            x,
            cos,
            sin,
            out,
            x.stride(0),
            x.stride(1),
            sign,
            HEADS=heads,
            HALF=head_size // 2,
            BLOCK=triton.next_power_of_2(heads),
        )
    return out


class _Rotary(torch.autograd.Function):
    """Differentiable rotation.

    The gradient of a rotation is the rotation by the opposite angle. The backward pass therefore
    needs cos and sin only, and not x.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, sign=1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, sin, sign=-1.0), None, None


def rotate_heads(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate every head by the angles of its token; differentiable in x.

    Args:
        x: [tokens, heads, head_size] on CUDA.
        cos: [tokens, 1, head_size / 2] cosines; head_size / 2 is a power of 2.
        sin: [tokens, 1, head_size / 2] sines.

    Returns:
        [tokens, heads, head_size] with the dtype of x, contiguous.
    """
    return _Rotary.apply(x, cos.contiguous(), sin.contiguous())
