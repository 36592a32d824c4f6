"""Triton kernels for log-probs and entropy over blocks of the vocabulary, and their gradient.

Both kernels read a block [tokens, columns] of fp32 logits once. They are the CUDA version of the
steps in ``megatron_gptoss.logit_blocks``. ``megatron_gptoss.log_probs`` defines the quantities.
"""

# Triton interprets the annotations of a kernel's parameters, so kernels have none.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048
"""Columns that a program computes at a time."""

# In both kernels the block holds columns `first` to `first + columns` of the vocabulary. A score is
# a logit times the inverse temperature.


# Grid: tokens. `statistics` is [4, tokens]: peak, sum of exp(score - peak), sum of
# exp(score - peak) * score, score of the label.
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

    # Online softmax (arXiv 1805.02867): both sums are relative to the peak so far, which avoids
    # overflow without a first pass for the maximum.
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        x = tl.load(source + column, mask=inside, other=float("-inf")) * inverse_temperature
        # The first block starts from a peak of -inf, for which `rescale` is 0.
        new_peak = tl.maximum(peak, tl.max(x, 0))
        rescale = tl.exp(peak - new_peak)
        e = tl.exp(x - new_peak)
        total = total * rescale + tl.sum(e, 0)
        # Masked columns have score -inf, and exp(-inf) * -inf would be NaN.
        weighted = weighted * rescale + tl.sum(tl.where(inside, e * x, 0.0), 0)
        peak = new_peak
    tl.store(statistics + row, peak)
    tl.store(statistics + tokens + row, total)
    tl.store(statistics + 2 * tokens + row, weighted)

    # Exactly one block of the vocabulary contains the label.
    label = tl.load(labels + row) - first
    if (label >= 0) & (label < columns):
        label_score = statistics + 3 * tokens + row
        tl.store(label_score, tl.load(source + label) * inverse_temperature)


# Grid: tokens, blocks of BLOCK columns. The columns are independent here, so they are in the grid.
# `row_statistics` is [4, tokens]: log normalizer, entropy, and the incoming gradients of log-prob
# and entropy.
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


def accumulate_statistics(
    logits: Tensor, labels: Tensor, statistics: Tensor, first: int, temperature: float
) -> None:
    """Add a block of logits to the statistics, in place.

    Args:
        logits: [tokens, columns] fp32, contiguous.
        labels: [tokens] int64 indices in the whole vocabulary.
        statistics: [4, tokens] fp32, contiguous: peak, sum of exp(score - peak), sum of
            exp(score - peak) * score, score of the label.
        first: first column of the block in the vocabulary.
        temperature: divisor of the logits; the quotient is the score.
    """
    # The kernel computes addresses without strides. Labels may be a column of a matrix.
    labels = labels.contiguous()
    tokens, columns = logits.shape
    with torch.cuda.device(logits.device):
        _accumulate_kernel[(tokens,)](
            logits, labels, statistics, tokens, columns, first, 1 / temperature, BLOCK
        )


def logit_gradient(
    logits: Tensor,
    labels: Tensor,
    row_statistics: Tensor,
    first: int,
    temperature: float,
    out: Tensor,
) -> None:
    """Write the gradient for a block of logits.

    Args:
        logits: [tokens, columns] fp32, contiguous.
        labels: [tokens] int64 indices in the whole vocabulary.
        row_statistics: [4, tokens] fp32, contiguous: log normalizer, entropy, and the incoming
            gradients of log-prob and entropy.
        first: first column of the block in the vocabulary.
        temperature: divisor of the logits; the quotient is the score.
        out: [tokens, columns], any floating dtype, contiguous. Receives the gradient.
    """
    labels = labels.contiguous()
    tokens, columns = logits.shape
    grid = (tokens, triton.cdiv(columns, BLOCK))
    with torch.cuda.device(logits.device):
        _gradient_kernel[grid](
            logits, labels, row_statistics, out, tokens, columns, first, 1 / temperature, BLOCK
        )
