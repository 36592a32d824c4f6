"""Log-probs and entropy of the policy, computed from hidden states in blocks.

All logits [tokens, vocabulary] never exist at the same time. Blocks [CHUNK_TOKENS, CHUNK_COLUMNS]
of fp32 logits are computed, used and freed, and computed again in the backward pass. This is the
only module that applies the temperature.

A ``score`` is a logit divided by the temperature.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from gptoss_kernels.logits import fp32_logits
from megatron_gptoss.block_sizes import CHUNK_COLUMNS, CHUNK_TOKENS

OUTSIDE = -1
"""Id that no block of the vocabulary contains."""


def log_probs_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute log p(labels) and the entropy of softmax(hidden @ weight.T / temperature).

    Differentiable in ``hidden`` and ``weight``. The gradient of ``hidden`` is the part from this
    rank's vocabulary, which the caller sums over the group. The gradient of ``weight`` is added to
    ``weight.main_grad`` if Megatron keeps that buffer.

    Args:
        hidden: [tokens, hidden_size], the same on all ranks of ``group``.
        weight: [vocab_size / group size, hidden_size] rows of this rank.
        labels: [tokens] int64 ids in the whole vocabulary.
        temperature: divisor of the logits.
        group: tensor-parallel ranks that split the vocabulary; None for a single rank.

    Returns:
        Log-probs and entropy in nats, both [tokens], fp32 (fp64 for fp64 inputs).

    Raises:
        ValueError: the temperature is not positive.
    """
    no_candidates = labels.new_empty(len(labels), 0)
    log_probs, entropy, _ = log_probs_with_candidates(
        hidden, weight, labels, no_candidates, temperature, group
    )
    return log_probs, entropy


def log_probs_with_candidates(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    candidates: Tensor,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``log_probs_and_entropy``, and every token's log-probs of further ids.

    Args:
        hidden: as in ``log_probs_and_entropy``, like the other arguments.
        weight: output weight of this rank.
        labels: ids of the labels.
        candidates: [tokens, k] int64 ids in the whole vocabulary. The ids of a token differ.
        temperature: divisor of the logits.
        group: tensor-parallel ranks.

    Returns:
        Log-probs of the labels and entropy, [tokens] each, and log-probs of the candidates
        [tokens, k].

    Raises:
        ValueError: the temperature is not positive.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    return _LogProbsAndEntropy.apply(hidden, weight, labels, candidates, temperature, group)


class _LogProbsAndEntropy(torch.autograd.Function):
    """Computation of ``log_probs_with_candidates``."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        candidates: Tensor,
        temperature: float,
        group: dist.ProcessGroup | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        first_id = _first_id(weight, group)
        statistics, candidate_scores = _local_statistics(
            hidden, weight, labels, candidates, first_id, temperature
        )
        peak, total, weighted, label_score = _reduce_statistics(statistics, group)
        if group is not None and group.size() > 1 and candidates.shape[1] > 0:
            dist.all_reduce(candidate_scores, group=group)

        normalizer = peak + total.log()
        entropy = normalizer - weighted / total

        # The backward pass computes the logits again from these tensors.
        ctx.save_for_backward(hidden, weight, labels, candidates, normalizer, entropy)
        ctx.temperature = temperature
        ctx.group = group
        return label_score - normalizer, entropy, candidate_scores - normalizer[:, None]

    @staticmethod
    def backward(
        ctx: Any, grad_log_probs: Tensor, grad_entropy: Tensor, grad_candidates: Tensor
    ) -> tuple[Any, ...]:
        # hidden is [tokens, hidden_size]; candidates is [tokens, k]; labels, normalizer and entropy
        # are [tokens]. The normalizer and the entropy cover the whole vocabulary, so no
        # communication is necessary.
        hidden, weight, labels, candidates, normalizer, entropy = ctx.saved_tensors
        dtype = normalizer.dtype
        first_id = _first_id(weight, ctx.group)
        targets = None
        from_normalizer = grad_log_probs
        if candidates.shape[1] > 0:
            from_normalizer = grad_log_probs + grad_candidates.sum(-1)
            targets = _merge_targets(labels, candidates, grad_log_probs, grad_candidates)
            # The gradients of labels and candidates are written together, so the block's gradient
            # must not contain that of the labels.
            labels = torch.full_like(labels, OUTSIDE)
        row_statistics = torch.stack([normalizer, entropy, from_normalizer, grad_entropy])
        grad_hidden = torch.empty_like(hidden)

        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = _gradient_buffer(weight, dtype)

        # Rows are the outer loop: a hidden-state chunk's gradient is accumulated over all
        # columns in fp32 and rounded once. The weight's gradient has a buffer for all blocks.
        for rows in _spans(len(hidden), CHUNK_TOKENS):
            chunk = hidden[rows]
            chunk_statistics = row_statistics[:, rows].contiguous()
            grad_chunk = torch.zeros_like(chunk, dtype=dtype)
            for columns in _column_spans(weight):
                grad_logits = _block_gradient(
                    fp32_logits(chunk, weight[columns]),
                    labels[rows],
                    None if targets is None else (targets[0][rows], targets[1][rows]),
                    chunk_statistics,
                    first_id + columns.start,
                    ctx.temperature,
                    dtype=hidden.dtype,
                )
                _add_matmul(grad_chunk, grad_logits, weight[columns])
                if grad_weight is not None:
                    _add_matmul(grad_weight[columns], grad_logits.t(), chunk)
            grad_hidden[rows] = grad_chunk

        if grad_weight is not None:
            grad_weight = _returned_gradient(weight, grad_weight)
        return grad_hidden, grad_weight, None, None, None, None


def _block_gradient(
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


def _accumulates_in_place(weight: Any) -> bool:
    """Return True if Megatron's data parallelism has a gradient buffer for the weight."""
    has_buffer = getattr(weight, "main_grad", None) is not None
    return has_buffer and hasattr(weight, "grad_added_to_main_grad")


def _gradient_buffer(weight: Any, dtype: torch.dtype) -> Tensor:
    """Return the buffer to which products are added: [ids, hidden_size] in ``dtype``.

    It is Megatron's own buffer if there is one, which saves a copy of the gradient.
    """
    if _accumulates_in_place(weight):
        buffer: Tensor = weight.main_grad
        return buffer
    return torch.zeros_like(weight, dtype=dtype)


def _returned_gradient(weight: Any, buffer: Tensor) -> Tensor:
    """Return what autograd gets as the weight's gradient, from its filled buffer."""
    if not _accumulates_in_place(weight):
        return buffer.to(weight.dtype)

    # Megatron's hooks need a gradient to exist, but do not read it. A tied weight is an exception:
    # its gradient is added to that of the embedding, so it must be 0.
    weight.grad_added_to_main_grad = True
    if getattr(weight, "zero_out_wgrad", False):
        return torch.zeros_like(weight)
    return torch.empty_like(weight)


def _local_statistics(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    candidates: Tensor,
    first_id: int,
    temperature: float,
) -> tuple[Tensor, Tensor]:
    """Reduce the logits of this rank's vocabulary to a few numbers per token.

    Returns:
        [4, tokens]: largest score (peak), sum of exp(score - peak), sum of
        exp(score - peak) * score, and score of the label. And the scores of the candidates,
        [tokens, k]. An id of another rank has score 0.
    """
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    # The kernel updates the statistics of a chunk in place, block after block, and needs them
    # contiguous.
    statistics = hidden.new_zeros(4, len(hidden), dtype=dtype)
    statistics[0] = -torch.inf
    candidate_scores = statistics.new_zeros(candidates.shape)

    for rows in _spans(len(hidden), CHUNK_TOKENS):
        chunk_statistics = statistics[:, rows].contiguous()
        for columns in _column_spans(weight):
            logits = fp32_logits(hidden[rows], weight[columns])
            _accumulate(
                logits,
                labels[rows],
                chunk_statistics,
                first_id + columns.start,
                temperature,
            )
            if candidates.shape[1] > 0:
                is_inside, local = _local_columns(
                    candidates[rows], first_id + columns.start, logits.shape[-1]
                )
                scores = logits.gather(-1, local) / temperature
                candidate_scores[rows] = torch.where(is_inside, scores, candidate_scores[rows])
        statistics[:, rows] = chunk_statistics
    return statistics, candidate_scores


def _reduce_statistics(
    statistics: Tensor,
    group: dist.ProcessGroup | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Combine the statistics of all ranks, in place.

    Returns:
        Peak, sum of exp(score - peak), sum of exp(score - peak) * score, and score of the label,
        each [tokens].
    """
    peak = statistics[0].clone()
    sums = statistics[1:]
    if group is not None and group.size() > 1:
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)

        # Each rank computed exponentials relative to its own peak. Convert the first two sums:
        # exp(score - own peak) * exp(own peak - peak) = exp(score - peak).
        # The third is the label's score, which only one rank has.
        sums[:2] *= (statistics[0] - peak).exp()
        dist.all_reduce(sums, group=group)

    total, weighted, label_score = sums
    return peak, total, weighted, label_score


def _accumulate(
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
    is_inside, columns = _local_columns(labels, first_id, logits.shape[-1])
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

    is_inside, columns = _local_columns(labels, first_id, logits.shape[-1])
    grad_at_labels = torch.where(is_inside[:, None], grad_log_prob, 0.0)
    grad_scores.scatter_add_(-1, columns[:, None], grad_at_labels)
    out.copy_(grad_scores / temperature)


def _merge_targets(
    labels: Tensor, candidates: Tensor, grad_log_probs: Tensor, grad_candidates: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the labels and candidates as one list of ids, and the gradients of their log-probs.

    Returns:
        Ids and gradients, [tokens, 1 + k]. If the label is a candidate, both of its entries have
        the sum of the two gradients.
    """
    is_label = candidates == labels[:, None]
    of_label = grad_log_probs + (is_label * grad_candidates).sum(-1)
    of_candidates = grad_candidates + is_label * grad_log_probs[:, None]
    targets = torch.cat([labels[:, None], candidates], dim=1)
    return targets, torch.cat([of_label[:, None], of_candidates], dim=1)


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
    is_inside, local = _local_columns(targets, first_id, logits.shape[-1])
    rows, entries = is_inside.nonzero(as_tuple=True)
    columns = local[rows, entries]

    # Written, not added to ``out``: p - p_teacher is small, and ``out`` has p rounded to bf16.
    normalizer, entropy, from_normalizer, grad_entropy = row_statistics[:, rows]
    log_p = logits[rows, columns] / temperature - normalizer
    grad = grad_targets[rows, entries]
    grad = grad - log_p.exp() * (from_normalizer + (log_p + entropy) * grad_entropy)
    out[rows, columns] = (grad / temperature).to(out.dtype)


@torch.no_grad()
def top_log_probs(
    hidden: Tensor,
    weight: Tensor,
    k: int,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the k most likely ids of each token, and their log-probs.

    Args:
        hidden: [tokens, hidden_size], the same on all ranks of ``group``.
        weight: [vocab_size / group size, hidden_size] rows of this rank.
        k: number of ids, at most the size of the vocabulary.
        temperature: divisor of the logits.
        group: tensor-parallel ranks that split the vocabulary; None for a single rank.

    Returns:
        Ids [tokens, k] int64, most likely first, and log-probs [tokens, k].
    """
    first_id = _first_id(weight, group)
    ranks = 1 if group is None else group.size()
    best, ids = [], []
    for rows in _spans(len(hidden), CHUNK_TOKENS):
        block_scores, block_ids = [], []
        for columns in _column_spans(weight):
            logits = fp32_logits(hidden[rows], weight[columns])
            # The k best ids of all are among the k best of each block, so no more need to be kept.
            scores, index = logits.topk(min(k, logits.shape[-1]), dim=-1)
            block_scores.append(scores / temperature)
            block_ids.append(index + first_id + columns.start)
        scores, kept = torch.cat(block_scores, dim=-1), torch.cat(block_ids, dim=-1)
        scores, index = scores.topk(min(k, scores.shape[-1]), dim=-1)
        best.append(scores)
        ids.append(kept.gather(-1, index))

    scores, kept = torch.cat(best), torch.cat(ids)
    if group is not None and ranks > 1:
        scores, kept = _gather_columns(scores, group), _gather_columns(kept, group)
        scores, index = scores.topk(k, dim=-1)
        kept = kept.gather(-1, index)

    # The label is one of the ids, so its log-prob gives the normalizer.
    log_probs, _ = log_probs_and_entropy(hidden, weight, kept[:, 0], temperature, group)
    return kept, scores - scores[:, :1] + log_probs[:, None]


def _gather_columns(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Join [tokens, columns] of all ranks to [tokens, ranks * columns]."""
    gathered = [torch.empty_like(values) for _ in range(group.size())]
    dist.all_gather(gathered, values.contiguous(), group=group)
    return torch.cat(gathered, dim=-1)


@torch.no_grad()
def greedy_tokens(
    hidden: Tensor,
    weight: Tensor,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Return each token's id with the largest logit; among equal logits the smallest id.

    Args:
        hidden: [tokens, hidden_size], the same on all ranks of ``group``.
        weight: [vocab_size / group size, hidden_size] rows of this rank.
        group: tensor-parallel ranks that split the vocabulary; None for a single rank.

    Returns:
        [tokens] int64.
    """
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    best = hidden.new_full((len(hidden),), -torch.inf, dtype=dtype)
    ids = torch.zeros(len(hidden), dtype=torch.int64, device=hidden.device)
    for rows in _spans(len(hidden), CHUNK_TOKENS):
        for columns in _column_spans(weight):
            # Strictly greater: among equal logits the earlier block wins.
            block_best, index = fp32_logits(hidden[rows], weight[columns]).max(dim=-1)
            is_better = block_best > best[rows]
            best[rows] = torch.where(is_better, block_best, best[rows])
            ids[rows] = torch.where(is_better, index + columns.start, ids[rows])

    if group is None or group.size() == 1:
        return ids

    # One message for values and ids, because ids are exact in fp64.
    global_ids = ids + _first_id(weight, group)
    local = torch.stack([best.double(), global_ids.double()])
    gathered = [torch.empty_like(local) for _ in range(group.size())]
    dist.all_gather(gathered, local, group=group)
    # [ranks, 2, tokens] -> two tensors [ranks, tokens]. argmax returns the first of equal values,
    # and ranks are in the order of the vocabulary.
    values, candidates = torch.stack(gathered).unbind(1)
    winner = values.argmax(dim=0, keepdim=True)
    return candidates.gather(0, winner)[0].long()


def gather_hidden_states(hidden_states: Tensor, output_layer: Any) -> Tensor:
    """Convert the output of the last layer to the shape that the functions above take.

    In the backward pass the gradient is summed over tensor-parallel ranks.

    Args:
        hidden_states: [tokens, 1, hidden_size], or with sequence parallelism
            [tokens / tensor, 1, hidden_size].
        output_layer: output layer of the model, which defines sequence parallelism and the group.

    Returns:
        [tokens, hidden_size], of the dtype of the input.
    """
    group = output_layer.tp_group
    if output_layer.sequence_parallel:
        hidden_states = gather_from_sequence_parallel_region(hidden_states, group=group)
    else:
        hidden_states = copy_to_tensor_model_parallel_region(hidden_states, group=group)
    return hidden_states.squeeze(1)


def _add_matmul(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a [m, k] @ b [k, n] to ``total`` [m, n] in place, in fp32 or wider."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


def _local_columns(ids: Tensor, first_id: int, columns: int) -> tuple[Tensor, Tensor]:
    """Return which ids are in a block of columns, as bool, and their columns, in the same shape."""
    local = ids - first_id
    is_inside = (local >= 0) & (local < columns)
    return is_inside, local.clamp(0, columns - 1)


def _first_id(weight: Tensor, group: dist.ProcessGroup | None) -> int:
    """Return the id of this rank's first row of the vocabulary."""
    if group is None:
        return 0
    return group.rank() * weight.shape[0]


def _column_spans(weight: Tensor) -> Iterator[slice]:
    """Yield the blocks of this rank's vocabulary."""
    # Multiples of 128 columns keep matrix products efficient.
    return _spans(weight.shape[0], CHUNK_COLUMNS, align=128)


def _spans(length: int, size: int, align: int = 1) -> Iterator[slice]:
    """Yield nearly equal slices of at most about ``size``, at multiples of ``align``."""
    # Equal slices instead of full ones and a rest, which may be too small to use the device well.
    count = max(1, -(-length // size))
    step = -(-length // count // align) * align
    for start in range(0, length, max(1, step)):
        yield slice(start, min(length, start + step))
