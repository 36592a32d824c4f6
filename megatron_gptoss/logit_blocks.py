"""Arithmetic on a block of fp32 logits [rows, columns]: its spans, statistics and gradient.

A ``score`` is a logit divided by the temperature. Only this module and its callers ``log_probs``
and ``likely_tokens`` apply the temperature.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_gptoss.block_sizes import CHUNK_COLUMNS


def block_gradient(
    logits: Tensor,
    labels: Tensor,
    targets: tuple[Tensor, Tensor] | None,
    statistics: Tensor,
    first_id: int,
    temperature: float,
    *,
    dtype: torch.dtype,
) -> Tensor:
    """Return the gradient of a block of logits, [rows, columns].

    Args:
        logits: fp32 [rows, columns].
        labels: [rows] ids. OUTSIDE if ``targets`` has them.
        targets: ids of labels and candidates and their gradients, [rows, 1 + k] each. None without
            candidates.
        statistics: [4, rows], see ``_logit_gradient``.
        first_id: id of the first column.
        temperature: divisor of the logits.
        dtype: dtype of the model, because the gradient is an operand of two products, which
            accumulate in fp32.
    """
    grad_logits = torch.empty_like(logits, dtype=dtype)
    _logit_gradient(logits, labels, statistics, first_id, temperature, out=grad_logits)
    if targets is not None:
        _write_target_gradient(logits, *targets, statistics, first_id, temperature, out=grad_logits)
    return grad_logits


def add_to_statistics(
    logits: Tensor,
    labels: Tensor,
    statistics: Tensor,
    first_id: int,
    temperature: float,
) -> None:
    """Add a block of logits [rows, columns] to the statistics [4, rows], in place.

    On a CPU and in fp64 it is the torch version of ``vocabulary_softmax.accumulate_statistics``.
    """
    if logits.is_cuda and logits.dtype == torch.float32:
        from gptoss_kernels.vocabulary_softmax import accumulate_statistics

        accumulate_statistics(logits, labels, statistics, first_id, temperature)
        return

    # Each of the four is a view [rows] into ``statistics``.
    scores = logits / temperature
    peak, total, weighted, label_score = statistics

    # Online softmax: rescale the sums from the old peak to the new one.
    new_peak = torch.maximum(peak, scores.amax(dim=-1))
    rescale = (peak - new_peak).exp()
    exponentials = (scores - new_peak[:, None]).exp()
    total.mul_(rescale).add_(exponentials.sum(dim=-1))
    weighted.mul_(rescale).add_((exponentials * scores).sum(dim=-1))
    peak.copy_(new_peak)

    # Exactly one block of one rank contains a label. Other blocks keep the value.
    is_inside, columns = local_columns(labels, first_id, logits.shape[-1])
    scores_at_labels = scores.gather(-1, columns[:, None])[:, 0]
    label_score.copy_(torch.where(is_inside, scores_at_labels, label_score))


def _logit_gradient(
    logits: Tensor,
    labels: Tensor,
    row_statistics: Tensor,
    first_id: int,
    temperature: float,
    out: Tensor,
) -> None:
    """Write the gradient with respect to a block of logits [rows, columns] to ``out``.

    On a CPU and in fp64 it is the torch version of ``vocabulary_softmax.logit_gradient``:

        d log p(label) / d score_v = [v is the label] - p_v
        d H / d score_v = -p_v (log p_v + H)

    ``row_statistics`` is [4, rows]: log normalizer, entropy, and the incoming gradients of
    log-probs and entropy.
    """
    if logits.is_cuda and logits.dtype == torch.float32:
        from gptoss_kernels.vocabulary_softmax import logit_gradient

        logit_gradient(logits, labels, row_statistics, first_id, temperature, out)
        return

    # Each of the four is [rows, 1], to broadcast over columns.
    normalizer, entropy, grad_log_prob, grad_entropy = row_statistics[:, :, None]
    log_p = logits / temperature - normalizer
    grad_scores = -log_p.exp() * (grad_log_prob + (log_p + entropy) * grad_entropy)

    is_inside, columns = local_columns(labels, first_id, logits.shape[-1])
    grad_at_labels = torch.where(is_inside[:, None], grad_log_prob, 0.0)
    grad_scores.scatter_add_(-1, columns[:, None], grad_at_labels)
    out.copy_(grad_scores / temperature)


def _write_target_gradient(
    logits: Tensor,
    targets: Tensor,
    grad_targets: Tensor,
    row_statistics: Tensor,
    first_id: int,
    temperature: float,
    out: Tensor,
) -> None:
    """Write the gradient with respect to the logits of ``targets`` to a block.

    Args:
        logits: [rows, columns] of the block.
        targets: [rows, n] ids in the whole vocabulary.
        grad_targets: [rows, n] gradients of their log-probs.
        row_statistics: [4, rows] as in ``_logit_gradient``.
        first_id: id of the first column.
        temperature: divisor of the logits.
        out: [rows, columns] gradient of the block, without that of the targets.
    """
    is_inside, local = local_columns(targets, first_id, logits.shape[-1])
    rows, entries = is_inside.nonzero(as_tuple=True)
    columns = local[rows, entries]

    # Written, not added to ``out``: p - p_teacher is small, and ``out`` has p rounded to bf16.
    normalizer, entropy, from_normalizer, grad_entropy = row_statistics[:, rows]
    log_p = logits[rows, columns] / temperature - normalizer
    grad = grad_targets[rows, entries]
    grad = grad - log_p.exp() * (from_normalizer + (log_p + entropy) * grad_entropy)
    out[rows, columns] = (grad / temperature).to(out.dtype)


def add_matmul(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a [m, k] @ b [k, n] to ``total`` [m, n] in place, in fp32 or wider."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


def local_columns(ids: Tensor, first_id: int, columns: int) -> tuple[Tensor, Tensor]:
    """Return which ids are in a block of columns, as bool, and their columns, in the same shape."""
    local = ids - first_id
    is_inside = (local >= 0) & (local < columns)
    return is_inside, local.clamp(0, columns - 1)


def first_local_id(weight: Tensor, group: dist.ProcessGroup | None) -> int:
    """Return the id of this rank's first row of the vocabulary."""
    if group is None:
        return 0
    return group.rank() * weight.shape[0]


def column_spans(weight: Tensor) -> Iterator[slice]:
    """Yield the blocks of this rank's vocabulary."""
    # Multiples of 128 columns keep matrix products efficient.
    return spans(weight.shape[0], CHUNK_COLUMNS, align=128)


def spans(length: int, size: int, align: int = 1) -> Iterator[slice]:
    """Yield nearly equal slices of at most about ``size``, at multiples of ``align``."""
    # Equal slices instead of full ones and a rest, which may be too small to use the device well.
    count = max(1, -(-length // size))
    step = -(-length // count // align) * align
    for start in range(0, length, max(1, step)):
        yield slice(start, min(length, start + step))
