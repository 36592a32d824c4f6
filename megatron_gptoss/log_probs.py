"""Log-probabilities and entropy of the policy straight from hidden states.

Logits [tokens, vocabulary] are never held: they are made, used and dropped a block [CHUNK_TOKENS,
CHUNK_COLUMNS] at a time, in fp32, and the backward pass makes them again. Temperature is applied
here and nowhere else.

``score`` is a logit divided by the temperature throughout.
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


def log_probs_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute log p(labels) and the entropy of softmax(hidden @ weight.T / temperature).

    Differentiable in ``hidden``, where each rank's gradient is its vocabulary's share, to be
    summed over the group, and in ``weight``, added to ``weight.main_grad`` where Megatron keeps
    one.

    Args:
        hidden: [tokens, hidden_size], the same on all ranks of ``group``.
        weight: [vocab_size / group size, hidden_size], this rank's rows.
        labels: int64 [tokens], global ids.
        temperature: of the distribution.
        group: the tensor-parallel ranks that share the vocabulary; None for one rank.

    Returns:
        Log-probabilities and entropy in nats, both [tokens], in fp32 at least.

    Raises:
        ValueError: when the temperature is not positive.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    return _LogProbsAndEntropy.apply(hidden, weight, labels, temperature, group)


class _LogProbsAndEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        temperature: float,
        group: dist.ProcessGroup | None,
    ) -> tuple[Tensor, Tensor]:
        first_id = _first_id(weight, group)
        statistics = _local_statistics(hidden, weight, labels, first_id, temperature)
        peak, total, weighted, label_score = _reduce_statistics(statistics, group)

        normalizer = peak + total.log()
        entropy = normalizer - weighted / total

        # Logits are not kept: the backward pass makes them again from these.
        ctx.save_for_backward(hidden, weight, labels, normalizer, entropy)
        ctx.temperature = temperature
        ctx.group = group
        return label_score - normalizer, entropy

    @staticmethod
    def backward(ctx: Any, grad_log_probs: Tensor, grad_entropy: Tensor) -> tuple[Any, ...]:
        # hidden [tokens, hidden_size]; all others but weight [tokens]. With vocabulary parallelism
        # the normalizer and the entropy are those of all shares, so this rank's columns need no
        # message here.
        hidden, weight, labels, normalizer, entropy = ctx.saved_tensors
        dtype = normalizer.dtype
        first_id = _first_id(weight, ctx.group)
        row_statistics = torch.stack([normalizer, entropy, grad_log_probs, grad_entropy])
        grad_hidden = torch.empty_like(hidden)

        # Under Megatron's data parallelism the product is added to the gradient buffer directly:
        # one pass, no copy.
        has_buffer = getattr(weight, "main_grad", None) is not None
        in_place = has_buffer and hasattr(weight, "grad_added_to_main_grad")
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = weight.main_grad if in_place else torch.zeros_like(weight, dtype=dtype)

        # Rows outside: the gradient of a chunk of hidden states is summed up over all columns in
        # fp32 and rounded once. The weight's has a buffer that all blocks add to.
        for rows in _spans(len(hidden), CHUNK_TOKENS):
            chunk = hidden[rows]
            chunk_statistics = row_statistics[:, rows].contiguous()
            grad_chunk = torch.zeros_like(chunk, dtype=dtype)
            for columns in _column_spans(weight):
                logits = fp32_logits(chunk, weight[columns])
                grad_logits = torch.empty_like(logits, dtype=hidden.dtype)
                _logit_gradient(
                    logits,
                    labels[rows],
                    chunk_statistics,
                    first_id + columns.start,
                    ctx.temperature,
                    out=grad_logits,
                )
                # The next block must find this memory free.
                del logits
                _add_matmul(grad_chunk, grad_logits, weight[columns])
                if grad_weight is not None:
                    _add_matmul(grad_weight[columns], grad_logits.t(), chunk)
            grad_hidden[rows] = grad_chunk

        if grad_weight is None:
            return grad_hidden, None, None, None, None
        if in_place:
            # Megatron's hooks only need to see that there is a gradient. That of a weight which is the
            # embedding, too, is added to the embedding's, and the sum to the buffer.
            weight.grad_added_to_main_grad = True
            is_shared = getattr(weight, "zero_out_wgrad", False)
            shown = torch.zeros_like(weight) if is_shared else torch.empty_like(weight)
            return grad_hidden, shown, None, None, None
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None


def _local_statistics(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    first_id: int,
    temperature: float,
) -> Tensor:
    """Reduce this rank's share of the vocabulary to four numbers per token.

    Returns:
        [4, tokens]: the largest score (peak), sum of exp(score - peak), sum of that times the
        score, and the label's score, which is 0 where another rank has the label.
    """
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    # Rows are contiguous per chunk for the kernel, which adds to them block after block.
    statistics = hidden.new_zeros(4, len(hidden), dtype=dtype)
    statistics[0] = -torch.inf
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
        statistics[:, rows] = chunk_statistics
    return statistics


def _reduce_statistics(
    statistics: Tensor,
    group: dist.ProcessGroup | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Combine the statistics of all shares of the vocabulary, in place."""
    peak = statistics[0].clone()
    sums = statistics[1:]
    if group is not None and group.size() > 1:
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)

        # Every rank took its exponentials relative to its peak. The third sum, the label's score,
        # is no exponential.
        # exp(score - own peak) * exp(own peak - peak) = exp(score - peak)
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
    """Add a block of logits to the statistics [4, tokens], in place.

    It is ``gptoss_kernels.vocabulary_softmax.accumulate`` in torch.
    """
    if logits.is_cuda and logits.dtype == torch.float32:
        from gptoss_kernels import vocabulary_softmax

        vocabulary_softmax.accumulate(logits, labels, statistics, first_id, temperature)
        return

    # scores [rows, columns of the block]; statistics are [rows] each, views into ``statistics``.
    scores = logits / temperature
    peak, total, weighted, label_score = statistics

    # Online softmax: sums relative to the old peak are rescaled to the new one.
    new_peak = torch.maximum(peak, scores.amax(dim=-1))
    rescale = (peak - new_peak).exp()
    exponentials = (scores - new_peak[:, None]).exp()
    total.mul_(rescale).add_(exponentials.sum(dim=-1))
    weighted.mul_(rescale).add_((exponentials * scores).sum(dim=-1))
    peak.copy_(new_peak)

    # A label lies in one block of one rank; all other blocks leave what is there.
    is_inside, columns = _columns_of_labels(labels, first_id, logits.shape[-1])
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
    """Write the gradient with respect to a block of logits to ``out``.

    It is ``gptoss_kernels.vocabulary_softmax.gradient`` in torch:

        d log p(label) / d score_v = [v is the label] - p_v
        d H / d score_v = -p_v (log p_v + H)

    row_statistics: [4, tokens]: log normalizer, entropy, and the incoming gradients of log-probs
        and of the entropy.
    """
    if logits.is_cuda and logits.dtype == torch.float32:
        from gptoss_kernels import vocabulary_softmax

        vocabulary_softmax.gradient(logits, labels, row_statistics, first_id, temperature, out)
        return

    # [rows, 1] each, against logits [rows, columns].
    normalizer, entropy, grad_log_prob, grad_entropy = row_statistics[:, :, None]
    log_p = logits / temperature - normalizer
    grad_scores = -log_p.exp() * (grad_log_prob + (log_p + entropy) * grad_entropy)

    is_inside, columns = _columns_of_labels(labels, first_id, logits.shape[-1])
    grad_at_labels = torch.where(is_inside[:, None], grad_log_prob, 0.0)
    grad_scores.scatter_add_(-1, columns[:, None], grad_at_labels)
    out.copy_(grad_scores / temperature)


@torch.no_grad()
def greedy_tokens(
    hidden: Tensor,
    weight: Tensor,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Return the ids of the largest logits, int64 [tokens]; of equal ones the smallest id.

    Arguments as for ``log_probs_and_entropy``.
    """
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    best = hidden.new_full((len(hidden),), -torch.inf, dtype=dtype)
    ids = torch.zeros(len(hidden), dtype=torch.int64, device=hidden.device)
    for rows in _spans(len(hidden), CHUNK_TOKENS):
        for columns in _column_spans(weight):
            # Greater, not greater or equal: of equal logits the earlier block keeps the token.
            block_best, index = fp32_logits(hidden[rows], weight[columns]).max(dim=-1)
            is_better = block_best > best[rows]
            best[rows] = torch.where(is_better, block_best, best[rows])
            ids[rows] = torch.where(is_better, index + columns.start, ids[rows])

    if group is None or group.size() == 1:
        return ids

    # One message for both: ids are exact in fp64.
    global_ids = ids + _first_id(weight, group)
    local = torch.stack([best.double(), global_ids.double()])
    everyone = [torch.empty_like(local) for _ in range(group.size())]
    dist.all_gather(everyone, local, group=group)
    # [ranks, 2, tokens] -> two of [ranks, tokens]. argmax takes the first of equal values, and
    # ranks come in the order of the vocabulary.
    values, candidates = torch.stack(everyone).unbind(1)
    winner = values.argmax(dim=0, keepdim=True)
    return candidates.gather(0, winner)[0].long()


def gather_hidden_states(hidden_states: Tensor, output_layer: Any) -> Tensor:
    """Bring what the last layer leaves into the shape that the functions above take.

    The gradient of the way back is summed over tensor-parallel ranks.

    Args:
        hidden_states: [tokens / tensor, 1, hidden_size] under sequence parallelism, else
            [tokens, 1, hidden_size].
        output_layer: the model's; says whether sequence parallelism is on, and the group.

    Returns:
        [tokens, hidden_size].
    """
    group = output_layer.tp_group
    if output_layer.sequence_parallel:
        hidden_states = gather_from_sequence_parallel_region(hidden_states, group=group)
    else:
        hidden_states = copy_to_tensor_model_parallel_region(hidden_states, group=group)
    return hidden_states.squeeze(1)


def _add_matmul(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to ``total`` in place, accumulated in fp32 at least."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


def _columns_of_labels(labels: Tensor, first_id: int, columns: int) -> tuple[Tensor, Tensor]:
    """Return which labels a block of columns has, and in which of its columns."""
    local = labels - first_id
    is_inside = (local >= 0) & (local < columns)
    return is_inside, local.clamp(0, columns - 1)


def _first_id(weight: Tensor, group: dist.ProcessGroup | None) -> int:
    """Return the id of this rank's first row of the vocabulary."""
    if group is None:
        return 0
    return group.rank() * weight.shape[0]


def _column_spans(weight: Tensor) -> Iterator[slice]:
    return _spans(weight.shape[0], CHUNK_COLUMNS, align=128)


def _spans(length: int, size: int, align: int = 1) -> Iterator[slice]:
    """Yield nearly equal slices of at most about ``size``, at multiples of ``align``."""
    count = max(1, -(-length // size))
    step = -(-length // count // align) * align
    for start in range(0, length, max(1, step)):
        yield slice(start, min(length, start + step))
