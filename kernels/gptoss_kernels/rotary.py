"""Rotary embedding of queries and keys in one Triton pass; unfused it moves eight times the bytes.

The backward pass of a rotation is the rotation by the opposite angle, so nothing but cos and sin is kept."""

# Triton reads parameter annotations as its own
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable


@triton.jit
def _rotate_kernel(
    x, cos, sin, out, stride_token, stride_head, sign, HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, BLOCK)[:, None]
    channel = tl.arange(0, HALF)[None, :]
    inside = head < HEADS
    c = tl.load(cos + token * HALF + channel).to(tl.float32)
    s = tl.load(sin + token * HALF + channel).to(tl.float32) * sign
    source = x + token * stride_token + head * stride_head + channel
    first = tl.load(source, mask=inside).to(tl.float32)
    second = tl.load(source + HALF, mask=inside).to(tl.float32)
    target = out + (token * HEADS + head) * 2 * HALF + channel
    tl.store(target, (first * c - second * s).to(out.dtype.element_ty), mask=inside)
    tl.store(target + HALF, (second * c + first * s).to(out.dtype.element_ty), mask=inside)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: float) -> torch.Tensor:
    x = x if x.stride(-1) == 1 else x.contiguous()
    tokens, heads, head_size = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if tokens:
        with torch.cuda.device(x.device):
            _rotate_kernel[(tokens,)](
                x, cos, sin, out, x.stride(0), x.stride(1), sign, heads, head_size // 2, triton.next_power_of_2(heads)
            )
    return out


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, sin, -1.0), None, None


def rotate_heads(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x: [tokens, heads, head_size] on CUDA; cos, sin: [tokens, 1, head_size / 2], a power of two -> like x."""
    return _Rotary.apply(x, cos.contiguous(), sin.contiguous())
