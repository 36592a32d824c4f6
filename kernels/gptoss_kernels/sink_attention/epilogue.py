"""Fold a sink into the output of any attention that returns its log-sum-exp, and the sink's gradient, in Triton.

With O', LSE' of plain attention and sink logit s: LSE = log(exp(LSE') + exp(s)), O = O' * exp(LSE' - LSE). The plain
backward pass called with that O and LSE gives the exact dQ, dK, dV, since the sink carries no value."""

# Triton reads parameter annotations as its own
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import torch
import triton
import triton.language as tl

TOKENS = 64


@triton.jit
def _fold_kernel(o, lse, sinks, tokens, HEADS: tl.constexpr, D: tl.constexpr, TOKENS: tl.constexpr):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1)
    inside = token < tokens
    sink = tl.load(sinks + head).to(tl.float32)
    plain = tl.load(lse + head.to(tl.int64) * tokens + token, mask=inside, other=0.0)
    top = tl.maximum(plain, sink)
    folded = top + tl.log(tl.exp(plain - top) + tl.exp(sink - top))
    column = tl.arange(0, D)
    where = o + token[:, None].to(tl.int64) * (HEADS * D) + head * D + column[None, :]
    values = tl.load(where, mask=inside[:, None], other=0.0).to(tl.float32)
    tl.store(where, (values * tl.exp(plain - folded)[:, None]).to(o.dtype.element_ty), mask=inside[:, None])
    tl.store(lse + head.to(tl.int64) * tokens + token, folded, mask=inside)


@triton.jit
def _sink_gradient_kernel(
    o, grad_o, lse, sinks, shares, tokens, HEADS: tl.constexpr, D: tl.constexpr, TOKENS: tl.constexpr
):
    block = tl.program_id(0)
    token = block * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1)
    inside = token < tokens
    where = token[:, None].to(tl.int64) * (HEADS * D) + head * D + tl.arange(0, D)[None, :]
    out = tl.load(o + where, mask=inside[:, None], other=0.0).to(tl.float32)
    grad = tl.load(grad_o + where, mask=inside[:, None], other=0.0).to(tl.float32)
    row_lse = tl.load(lse + head.to(tl.int64) * tokens + token, mask=inside, other=float("inf"))
    sink = tl.load(sinks + head).to(tl.float32)
    share = tl.sum(tl.exp(sink - row_lse) * tl.sum(out * grad, 1))
    tl.store(shares + block * HEADS + head, -share)


def fold_sink(o: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> None:
    """In place: o [tokens, heads, head_size] contiguous, lse [heads, tokens] fp32 contiguous, natural logarithm."""
    tokens, heads, head_size = o.shape
    if tokens:
        with torch.cuda.device(o.device):
            _fold_kernel[(triton.cdiv(tokens, TOKENS), heads)](o, lse, sinks, tokens, heads, head_size, TOKENS)


def sink_gradient(o: torch.Tensor, grad_o: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """-sum_i exp(s - LSE_i) (dO_i . O_i) per head, from the sink-aware o and lse [heads, tokens]; like sinks.

    Summed in a fixed order: deterministic."""
    tokens, heads, head_size = o.shape
    blocks = triton.cdiv(tokens, TOKENS)
    shares = torch.empty(blocks, heads, dtype=torch.float32, device=o.device)
    if tokens:
        with torch.cuda.device(o.device):
            _sink_gradient_kernel[(blocks, heads)](o, grad_o, lse, sinks, shares, tokens, heads, head_size, TOKENS)
    return shares.sum(0).to(sinks.dtype)
