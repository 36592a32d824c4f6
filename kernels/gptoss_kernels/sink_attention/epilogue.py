"""Triton kernels that add a sink to the results of plain attention, and compute its gradient.

Let O' and LSE' be the results of plain attention and s the sink logit. Then
LSE = log(exp(LSE') + exp(s)) and O = O' * exp(LSE' - LSE). The plain backward pass with this O and
LSE gives the exact dQ, dK and dV, because the sink has no value.
"""

# Triton interprets the annotations of a kernel's parameters, so kernels have none.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import torch
import triton
import triton.language as tl
from torch import Tensor

TOKENS_PER_BLOCK = 64
"""Tokens per program of both kernels."""


# Grid of both kernels: blocks of TOKENS tokens, heads.


@triton.jit
def _add_sink_kernel(
    o, lse, sinks, tokens, HEADS: tl.constexpr, D: tl.constexpr, TOKENS: tl.constexpr
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1)
    inside = token < tokens

    # log(exp(a) + exp(b)) relative to the larger one, which avoids overflow.
    sink = tl.load(sinks + head).to(tl.float32)
    lse_row = lse + head.to(tl.int64) * tokens + token
    plain = tl.load(lse_row, mask=inside, other=0.0)
    top = tl.maximum(plain, sink)
    combined = top + tl.log(tl.exp(plain - top) + tl.exp(sink - top))

    # Scale O in place: the caller needs no copy of plain attention's O. 64-bit offsets: 2**19
    # tokens with 64 heads of size 64 are 2**31 elements.
    column = tl.arange(0, D)
    where = o + token[:, None].to(tl.int64) * (HEADS * D) + head * D + column[None, :]
    values = tl.load(where, mask=inside[:, None], other=0.0).to(tl.float32)
    values = values * tl.exp(plain - combined)[:, None]
    tl.store(where, values.to(o.dtype.element_ty), mask=inside[:, None])
    tl.store(lse_row, combined, mask=inside)


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
    # O has been rounded to bf16, which gives this gradient a relative error of about 3e-3. The
    # kernels in cuda/ sum P dP in fp32 instead. FlashAttention does not return P.
    out = tl.load(o + where, mask=inside[:, None], other=0.0).to(tl.float32)
    grad = tl.load(grad_o + where, mask=inside[:, None], other=0.0).to(tl.float32)

    # An infinite LSE makes the sink's probability 0 in rows beyond the last token.
    lse_row = lse + head.to(tl.int64) * tokens + token
    row_lse = tl.load(lse_row, mask=inside, other=float("inf"))
    sink = tl.load(sinks + head).to(tl.float32)
    # Each program writes its own partial sum. Atomic additions would sum in a random order.
    share = tl.sum(tl.exp(sink - row_lse) * tl.sum(out * grad, 1))
    tl.store(shares + block * HEADS + head, -share)


def add_sink(o: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Add the sinks to the results of plain attention, in place.

    Args:
        o: [tokens, heads, head_size] output, contiguous.
        lse: [heads, tokens] fp32 natural log-sum-exp, contiguous.
        sinks: [heads] logits.
    """
    tokens, heads, head_size = o.shape
    if tokens == 0:
        return

    grid = (triton.cdiv(tokens, TOKENS_PER_BLOCK), heads)
    with torch.cuda.device(o.device):
        _add_sink_kernel[grid](o, lse, sinks, tokens, heads, head_size, TOKENS_PER_BLOCK)


def sink_gradient(o: Tensor, grad_o: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Compute the gradient of the sinks: -sum_i exp(s - LSE_i) (dO_i . O_i) per head.

    The order of the sum is fixed, so the result is deterministic.

    Args:
        o: [tokens, heads, head_size] output with the sink included, contiguous.
        grad_o: [tokens, heads, head_size] gradient of ``o``, contiguous.
        lse: [heads, tokens] fp32 natural log-sum-exp with the sink included, contiguous.
        sinks: [heads] logits.

    Returns:
        [heads] with the dtype of ``sinks``.
    """
    tokens, heads, head_size = o.shape
    blocks = triton.cdiv(tokens, TOKENS_PER_BLOCK)
    shares = torch.empty(blocks, heads, dtype=torch.float32, device=o.device)
    if tokens:
        with torch.cuda.device(o.device):
            _sink_gradient_kernel[(blocks, heads)](
                o, grad_o, lse, sinks, shares, tokens, heads, head_size, TOKENS_PER_BLOCK
            )
    # A pack without tokens has no blocks, and the sum over them is 0.
    return shares.sum(0).to(sinks.dtype)
