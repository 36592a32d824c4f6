"""Log-probs and entropy of the policy, computed from hidden states in blocks.

All logits [tokens, vocabulary] never exist at the same time. Blocks [CHUNK_TOKENS, CHUNK_COLUMNS]
of fp32 logits are computed, used and freed, and computed again in the backward pass.

A ``score`` is a logit divided by the temperature.
"""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from gptoss_kernels.logits import fp32_logits
from megatron_gptoss.block_sizes import CHUNK_TOKENS
from megatron_gptoss.logit_blocks import (
    add_matmul,
    add_to_statistics,
    block_gradient,
    column_spans,
    first_local_id,
    local_columns,
    spans,
)

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
        first_id = first_local_id(weight, group)
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
        first_id = first_local_id(weight, ctx.group)
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
        for rows in spans(len(hidden), CHUNK_TOKENS):
            chunk = hidden[rows]
            chunk_statistics = row_statistics[:, rows].contiguous()
            grad_chunk = torch.zeros_like(chunk, dtype=dtype)
            for columns in column_spans(weight):
                grad_logits = block_gradient(
                    fp32_logits(chunk, weight[columns]),
                    labels[rows],
                    None if targets is None else (targets[0][rows], targets[1][rows]),
                    chunk_statistics,
                    first_id + columns.start,
                    ctx.temperature,
                    dtype=hidden.dtype,
                )
                add_matmul(grad_chunk, grad_logits, weight[columns])
                if grad_weight is not None:
                    add_matmul(grad_weight[columns], grad_logits.t(), chunk)
            grad_hidden[rows] = grad_chunk

        if grad_weight is not None:
            grad_weight = _returned_gradient(weight, grad_weight)
        return grad_hidden, grad_weight, None, None, None, None


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

    for rows in spans(len(hidden), CHUNK_TOKENS):
        chunk_statistics = statistics[:, rows].contiguous()
        for columns in column_spans(weight):
            logits = fp32_logits(hidden[rows], weight[columns])
            add_to_statistics(
                logits,
                labels[rows],
                chunk_statistics,
                first_id + columns.start,
                temperature,
            )
            if candidates.shape[1] > 0:
                is_inside, local = local_columns(
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


def gather_hidden_states(hidden_states: Tensor, output_layer: Any) -> Tensor:
    """Convert the output of the last layer to the shape that functions of hidden states take.

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
