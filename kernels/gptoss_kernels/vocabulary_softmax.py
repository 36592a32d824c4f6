"""One block of logits at a time: what the log-probability and the entropy need of it, and its gradient, in Triton.

Both kernels read a block [tokens, columns] of fp32 logits once. They are the CUDA side of
``megatron_gptoss.log_probs``, which says what the numbers mean and has the same steps in torch."""

# Triton reads parameter annotations as its own
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


@triton.jit
def _accumulate_kernel(logits, labels, statistics, tokens, columns, first, inverse_temperature, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    source = logits + row.to(tl.int64) * columns
    peak = tl.load(statistics + row)
    total = tl.load(statistics + tokens + row)
    weighted = tl.load(statistics + 2 * tokens + row)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(source + column, mask=column < columns, other=float("-inf")) * inverse_temperature
        new_peak = tl.maximum(peak, tl.max(x, 0))
        rescale = tl.exp(peak - new_peak)
        e = tl.exp(x - new_peak)
        total = total * rescale + tl.sum(e, 0)
        # exp(-inf) * -inf would be NaN
        weighted = weighted * rescale + tl.sum(tl.where(column < columns, e * x, 0.0), 0)
        peak = new_peak
    tl.store(statistics + row, peak)
    tl.store(statistics + tokens + row, total)
    tl.store(statistics + 2 * tokens + row, weighted)
    label = tl.load(labels + row) - first
    if (label >= 0) & (label < columns):
        tl.store(statistics + 3 * tokens + row, tl.load(source + label) * inverse_temperature)


@triton.jit
def _gradient_kernel(
    logits, labels, row_statistics, out, tokens, columns, first, inverse_temperature, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    normalizer = tl.load(row_statistics + row)
    entropy = tl.load(row_statistics + tokens + row)
    to_log_prob = tl.load(row_statistics + 2 * tokens + row)
    to_entropy = tl.load(row_statistics + 3 * tokens + row)
    where = row.to(tl.int64) * columns + column
    log_p = tl.load(logits + where, mask=inside, other=0.0) * inverse_temperature - normalizer
    grad = -tl.exp(log_p) * (to_log_prob + (log_p + entropy) * to_entropy)
    grad += tl.where(column == tl.load(labels + row) - first, to_log_prob, 0.0)
    tl.store(out + where, (grad * inverse_temperature).to(out.dtype.element_ty), mask=inside)


def accumulate(logits: Tensor, labels: Tensor, statistics: Tensor, first: int, temperature: float) -> None:
    """Add a block to ``statistics`` [4, tokens] fp32 in place: peak, sum exp, sum exp * score, score of the label.

    logits: [tokens, columns] fp32, columns ``first`` to ``first + columns`` of the vocabulary; labels: int64 [tokens].
    """
    tokens, columns = logits.shape
    with torch.cuda.device(logits.device):
        _accumulate_kernel[(tokens,)](logits, labels, statistics, tokens, columns, first, 1 / temperature, BLOCK)


def gradient(
    logits: Tensor, labels: Tensor, row_statistics: Tensor, first: int, temperature: float, out: Tensor
) -> None:
    """Write the gradient of a block into ``out`` [tokens, columns]; row_statistics: [4, tokens] fp32, the log
    normalizer, the entropy and the incoming gradients of log-prob and entropy."""
    tokens, columns = logits.shape
    with torch.cuda.device(logits.device):
        _gradient_kernel[(tokens, triton.cdiv(columns, BLOCK))](
            logits, labels, row_statistics, out, tokens, columns, first, 1 / temperature, BLOCK
        )
