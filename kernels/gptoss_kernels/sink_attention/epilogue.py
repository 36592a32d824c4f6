"""Fold a sink into any attention that returns its log-sum-exp; and the sink's gradient.

With O', LSE' of plain attention and sink logit s: LSE = log(exp(LSE') + exp(s)) and
O = O' * exp(LSE' - LSE). The plain backward pass called with that O and LSE gives the exact dQ, dK
and dV, since the sink carries no value. Both functions are one Triton kernel each.
"""

# Triton reads parameter annotations as its own
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import torch
import triton
import triton.language as tl
from torch import Tensor

TOKENS_PER_BLOCK = 64


# Grid of both kernels: blocks of TOKENS tokens, heads.


@triton.jit
def _fold_kernel(o, lse, sinks, tokens, HEADS: tl.constexpr, D: tl.constexpr, TOKENS: tl.constexpr):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1)
    inside = token < tokens

    # log(exp(a) + exp(b)) relative to the larger one, which cannot overflow
    sink = tl.load(sinks + head).to(tl.float32)
    lse_row = lse + head.to(tl.int64) * tokens + token
    plain = tl.load(lse_row, mask=inside, other=0.0)
    top = tl.maximum(plain, sink)
    folded = top + tl.log(tl.exp(plain - top) + tl.exp(sink - top))

    column = tl.arange(0, D)
    where = o + token[:, None].to(tl.int64) * (HEADS * D) + head * D + column[None, :]
    values = tl.load(where, mask=inside[:, None], other=0.0).to(tl.float32)
    values = values * tl.exp(plain - folded)[:, None]
    tl.store(where, values.to(o.dtype.element_ty), mask=inside[:, None])
    tl.store(lse_row, folded, mask=inside)


@triton.jit
def _sink_gradient_kernel(
    o,
    grad_o,
    lse,
    sinks,
    shares,
    tokens,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    TOKENS: tl.constexpr,
):
    block = tl.program_id(0)
    token = block * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1)
    inside = token < tokens

    where = token[:, None].to(tl.int64) * (HEADS * D) + head * D + tl.arange(0, D)[None, :]
    out = tl.load(o + where, mask=inside[:, None], other=0.0).to(tl.float32)
    grad = tl.load(grad_o + where, mask=inside[:, None], other=0.0).to(tl.float32)

    # an infinite LSE: rows beyond the tokens give the sink no probability
    lse_row = lse + head.to(tl.int64) * tokens + token
    row_lse = tl.load(lse_row, mask=inside, other=float("inf"))
    sink = tl.load(sinks + head).to(tl.float32)
    share = tl.sum(tl.exp(sink - row_lse) * tl.sum(out * grad, 1))
    tl.store(shares + block * HEADS + head, -share)


def fold_sink(o: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Fold the sinks into plain attention's results, in place.

    Args:
        o: [tokens, heads, head_size], contiguous.
        lse: [heads, tokens] fp32, contiguous, natural logarithm.
        sinks: [heads]
    """
    tokens, heads, head_size = o.shape
    if tokens == 0:
        return

    grid = (triton.cdiv(tokens, TOKENS_PER_BLOCK), heads)
    with torch.cuda.device(o.device):
        _fold_kernel[grid](o, lse, sinks, tokens, heads, head_size, TOKENS_PER_BLOCK)


def sink_gradient(o: Tensor, grad_o: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Compute -sum_i exp(s - LSE_i) (dO_i . O_i) per head, from the sink-aware O and LSE.

    Summed in a fixed order: deterministic.

    Args:
        o, grad_o: [tokens, heads, head_size], contiguous.
        lse: [heads, tokens] fp32, contiguous.
        sinks: [heads]

    Returns:
        [heads] like sinks.
    """
    tokens, heads, head_size = o.shape
    blocks = triton.cdiv(tokens, TOKENS_PER_BLOCK)
    shares = torch.empty(blocks, heads, dtype=torch.float32, device=o.device)
    if tokens:
        with torch.cuda.device(o.device):
            _sink_gradient_kernel[(blocks, heads)](
                o, grad_o, lse, sinks, shares, tokens, heads, head_size, TOKENS_PER_BLOCK
            )
    return shares.sum(0).to(sinks.dtype)
