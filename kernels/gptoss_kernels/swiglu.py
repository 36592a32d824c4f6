"""Activation of a GPT-OSS expert: clamped SwiGLU times the router's probability.

    out = p * gate * sigmoid(1.702 gate) * (up + 1)
    gate = min(x_gate, limit),  up = clamp(x_up, -limit, limit)

On CUDA it is one Triton kernel forward and one backward, computed in fp32. Unfused, the clamps, the
gate and the product with an fp32 probability write 7x the bytes. Other devices use torch.
"""

# Triton interprets the annotations of a kernel's parameters, so kernels have none.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

ALPHA = 1.702
"""Slope of the gate's sigmoid: z * sigmoid(ALPHA z) approximates GELU (arXiv 1606.08415)."""
BLOCK = 1024
"""Columns that a program computes at a time."""

# Grid of both kernels: tokens. A row of x holds WIDTH gates, then WIDTH ups. A row of out holds
# WIDTH values. The clamps are comparisons, because min and max would replace NaN by a number and
# hide a diverged model.


@triton.jit
def _forward_kernel(
    x, probs, out, limit, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ALPHA: tl.constexpr
):
    # 64-bit offsets: 373,000 rows of 5,760 columns are 2**31 elements.
    row = tl.program_id(0).to(tl.int64)
    p = tl.load(probs + row).to(tl.float32)
    for start in tl.static_range(0, WIDTH, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < WIDTH
        gate = tl.load(x + row * 2 * WIDTH + column, mask=inside).to(tl.float32)
        up = tl.load(x + row * 2 * WIDTH + WIDTH + column, mask=inside).to(tl.float32)

        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        value = gate * tl.sigmoid(ALPHA * gate) * (up + 1.0) * p
        tl.store(out + row * WIDTH + column, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(
    x,
    probs,
    grad,
    grad_x,
    grad_probs,
    limit,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ALPHA: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    p = tl.load(probs + row).to(tl.float32)
    # Partial sums of the probability's gradient, one per column, reduced once at the end.
    share = tl.zeros([BLOCK], tl.float32)
    for start in tl.static_range(0, WIDTH, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < WIDTH
        # Unlike in the forward pass, columns outside need a value: the sum at the end includes all
        # lanes of `share`, and a gradient of 0 makes theirs 0.
        x_gate = tl.load(x + row * 2 * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
        x_up = tl.load(x + row * 2 * WIDTH + WIDTH + column, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(grad + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)

        gate = tl.where(x_gate > limit, limit, x_gate)
        up = tl.where(x_up > limit, limit, tl.where(x_up < -limit, -limit, x_up))
        sigmoid = tl.sigmoid(ALPHA * gate)
        swish = gate * sigmoid
        share += g * swish * (up + 1.0)

        # d/dz (z s(a z)) = s + a z s (1 - s), with s the sigmoid and swish = z s.
        # A clamped input has no gradient.
        to_gate = g * p * (up + 1.0) * (sigmoid + ALPHA * swish * (1.0 - sigmoid))
        # At the limit itself the gradient passes, as in torch.clamp, which other devices use.
        to_gate = tl.where(x_gate > limit, 0.0, to_gate)
        to_up = tl.where((x_up > limit) | (x_up < -limit), 0.0, g * p * swish)

        gate_target = grad_x + row * 2 * WIDTH + column
        tl.store(gate_target, to_gate.to(grad_x.dtype.element_ty), mask=inside)
        tl.store(gate_target + WIDTH, to_up.to(grad_x.dtype.element_ty), mask=inside)
    tl.store(grad_probs + row, tl.sum(share, 0).to(grad_probs.dtype.element_ty))


class _ClampedSwiGLU(torch.autograd.Function):
    """Differentiable activation on CUDA.

    The backward pass computes gate and up again from x, so only the inputs are kept.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, probs: Tensor, limit: float) -> Tensor:
        x = x.contiguous()
        probs = probs.contiguous()
        rows = x.shape[0]
        width = x.shape[1] // 2
        out = x.new_empty(rows, width)
        # The experts of a rank may get no token.
        if rows:
            with torch.cuda.device(x.device):
                _forward_kernel[(rows,)](x, probs, out, limit, width, BLOCK, ALPHA)

        ctx.save_for_backward(x, probs)
        ctx.limit = limit
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, probs = ctx.saved_tensors
        rows = x.shape[0]
        width = x.shape[1] // 2
        grad = grad.contiguous()
        grad_x = torch.empty_like(x)
        grad_probs = torch.empty_like(probs)
        if rows:
            with torch.cuda.device(x.device):
                _backward_kernel[(rows,)](
                    x, probs, grad, grad_x, grad_probs, ctx.limit, width, BLOCK, ALPHA
                )
        return grad_x, grad_probs, None


def clamped_swiglu(x: Tensor, probs: Tensor, limit: float) -> Tensor:
    """Compute the activation; differentiable in x and probs.

    Args:
        x: [tokens, 2 * width] gates, then ups, with biases added.
        probs: [tokens] router probabilities.
        limit: bound of the clamps.

    Returns:
        [tokens, width] with the dtype of x.

    Example:
        >>> # One token of width 2. The gates are 100 and 0, the ups 1 and 1.
        >>> x = torch.tensor([[100.0, 0.0, 1.0, 1.0]])
        >>> clamped_swiglu(x, probs=torch.tensor([0.5]), limit=7.0).round(decimals=2).tolist()
        [[7.0, 0.0]]
    """
    if x.is_cuda:
        return _ClampedSwiGLU.apply(x, probs, limit)

    # Same precision as the kernels: fp32 inside, fp64 for fp64 inputs, one rounding at the end.
    compute = torch.promote_types(x.dtype, torch.float32)
    gate, up = x.to(compute).chunk(2, dim=-1)
    gate = gate.clamp(max=limit)
    up = up.clamp(-limit, limit)
    return (gate * torch.sigmoid(ALPHA * gate) * (up + 1.0) * probs[:, None]).to(x.dtype)
