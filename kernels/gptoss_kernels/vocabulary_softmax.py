"""One block of logits at a time: what log-probability and entropy need of it, and its gradient.

Both Triton kernels read a block [tokens, columns] of fp32 logits once. They are the CUDA side of
``megatron_gptoss.log_probs``, which says what the numbers mean and has the same steps in torch.
"""

# Triton reads parameter annotations as its own
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048
"""Columns that a program takes at a time."""

# In both kernels the block holds columns `first` to `first + columns` of the vocabulary, and a
# score is a logit times the inverse temperature.


# Grid: tokens. `statistics` is [4, tokens]: peak, sum of exp(score - peak), sum of that times
# score, score of the label.
@triton.jit
def _accumulate_kernel(
    logits,
    labels,
    statistics,
    tokens,
    columns,
    first,
    inverse_temperature,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    source = logits + row.to(tl.int64) * columns
    peak = tl.load(statistics + row)
    total = tl.load(statistics + tokens + row)
    weighted = tl.load(statistics + 2 * tokens + row)

    # an online softmax: both sums are relative to the peak and follow it
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        x = tl.load(source + column, mask=inside, other=float("-inf")) * inverse_temperature
        new_peak = tl.maximum(peak, tl.max(x, 0))
        rescale = tl.exp(peak - new_peak)
        e = tl.exp(x - new_peak)
        total = total * rescale + tl.sum(e, 0)
        # exp(-inf) * -inf would be NaN
        weighted = weighted * rescale + tl.sum(tl.where(inside, e * x, 0.0), 0)
        peak = new_peak
    tl.store(statistics + row, peak)
    tl.store(statistics + tokens + row, total)
    tl.store(statistics + 2 * tokens + row, weighted)

    label = tl.load(labels + row) - first
    if (label >= 0) & (label < columns):
        label_score = statistics + 3 * tokens + row
        tl.store(label_score, tl.load(source + label) * inverse_temperature)


# Grid: tokens, blocks of BLOCK columns. `row_statistics` is [4, tokens]: log normalizer, entropy,
# and the incoming gradients of the log-probability and the entropy.
@triton.jit
def _gradient_kernel(
    logits,
    labels,
    row_statistics,
    out,
    tokens,
    columns,
    first,
    inverse_temperature,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    normalizer = tl.load(row_statistics + row)
    entropy = tl.load(row_statistics + tokens + row)
    to_log_prob = tl.load(row_statistics + 2 * tokens + row)
    to_entropy = tl.load(row_statistics + 3 * tokens + row)

    # With p = exp(score - normalizer): d log_prob / d score = [is the label] - p,
    # d entropy / d score = -p (log p + entropy).
    where = row.to(tl.int64) * columns + column
    log_p = tl.load(logits + where, mask=inside, other=0.0) * inverse_temperature - normalizer
    grad = -tl.exp(log_p) * (to_log_prob + (log_p + entropy) * to_entropy)
    grad += tl.where(column == tl.load(labels + row) - first, to_log_prob, 0.0)
    tl.store(out + where, (grad * inverse_temperature).to(out.dtype.element_ty), mask=inside)


def accumulate(
    logits: Tensor, labels: Tensor, statistics: Tensor, first: int, temperature: float
) -> None:
    """Add a block of logits to the statistics, in place.

    Args:
        logits: [tokens, columns] fp32.
        labels: [tokens] int64, in the whole vocabulary.
        statistics: [4, tokens] fp32: peak, sum exp, sum exp * score, score of the label.
        first: the block's first column in the vocabulary.
        temperature: a score is a logit divided by it.
    """
    tokens, columns = logits.shape
    with torch.cuda.device(logits.device):
        _accumulate_kernel[(tokens,)](
            logits, labels, statistics, tokens, columns, first, 1 / temperature, BLOCK
        )


def gradient(
    logits: Tensor,
    labels: Tensor,
    row_statistics: Tensor,
    first: int,
    temperature: float,
    out: Tensor,
) -> None:
    """Write the gradient of a block of logits.

    Args:
        logits: [tokens, columns] fp32.
        labels: [tokens] int64, in the whole vocabulary.
        row_statistics: [4, tokens] fp32: the log normalizer, the entropy, and the incoming
            gradients of log-prob and entropy.
        first: the block's first column in the vocabulary.
        temperature: a score is a logit divided by it.
        out: [tokens, columns], of any floating dtype.
    """
    tokens, columns = logits.shape
    grid = (tokens, triton.cdiv(columns, BLOCK))
    with torch.cuda.device(logits.device):
        _gradient_kernel[grid](
            logits, labels, row_statistics, out, tokens, columns, first, 1 / temperature, BLOCK
        )
