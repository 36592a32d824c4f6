"""Log-probabilities and entropy of the policy straight from hidden states, without ever holding [tokens, vocabulary].

The logits are made, used and dropped a block [CHUNK_TOKENS, CHUNK_COLUMNS] at a time, in fp32; the backward pass makes
them again. Temperature is applied here and nowhere else."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from torch import Tensor

CHUNK_TOKENS, CHUNK_COLUMNS = 8192, 12_800
"""Large enough that adding to the gradients of hidden states and weights costs little beside the products, small
enough for 0.4 GB of fp32 logits."""


def _matmul(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b accumulated and returned in ``dtype``, at least the inputs' precision."""
    if a.dtype == dtype:
        return a @ b
    return torch.mm(a, b, out_dtype=dtype) if a.is_cuda else a.to(dtype) @ b.to(dtype)


def _add_matmul(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, accumulated in fp32 at least."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


def _accumulate(logits: Tensor, labels: Tensor, statistics: Tensor, first: int, temperature: float) -> None:
    """``gptoss_kernels.vocabulary_softmax.accumulate`` in torch."""
    if logits.is_cuda and logits.dtype == torch.float32:
        from gptoss_kernels import vocabulary_softmax

        return vocabulary_softmax.accumulate(logits, labels, statistics, first, temperature)
    scores = logits / temperature
    peak, total, weighted, chosen = statistics
    new_peak = torch.maximum(peak, scores.amax(dim=-1))
    rescale, e = (peak - new_peak).exp(), (scores - new_peak[:, None]).exp()
    total.mul_(rescale).add_(e.sum(dim=-1))
    weighted.mul_(rescale).add_((e * scores).sum(dim=-1))
    peak.copy_(new_peak)
    here, local = _within(labels, first, logits.shape[-1])
    chosen.copy_(torch.where(here, scores.gather(-1, local[:, None])[:, 0], chosen))


def _gradient(
    logits: Tensor, labels: Tensor, row_statistics: Tensor, first: int, temperature: float, out: Tensor
) -> None:
    """``gptoss_kernels.vocabulary_softmax.gradient`` in torch.

    d log p(label) / d score_v = [v is the label] - p_v;  d H / d score_v = -p_v (log p_v + H)"""
    if logits.is_cuda and logits.dtype == torch.float32:
        from gptoss_kernels import vocabulary_softmax

        return vocabulary_softmax.gradient(logits, labels, row_statistics, first, temperature, out)
    normalizer, entropy, to_log_prob, to_entropy = row_statistics[:, :, None]
    log_p = logits / temperature - normalizer
    grad = -log_p.exp() * (to_log_prob + (log_p + entropy) * to_entropy)
    here, local = _within(labels, first, logits.shape[-1])
    grad.scatter_add_(-1, local[:, None], torch.where(here[:, None], to_log_prob, 0.0))
    out.copy_(grad / temperature)


def _within(labels: Tensor, first: int, columns: int) -> tuple[Tensor, Tensor]:
    local = labels - first
    return (local >= 0) & (local < columns), local.clamp(0, columns - 1)


def _spans(length: int, size: int, align: int = 1) -> Iterator[slice]:
    """Nearly equal consecutive slices of at most about ``size``, beginning at multiples of ``align``."""
    count = -(-length // size)
    step = -(-length // max(1, count) // align) * align
    return (slice(start, min(length, start + step)) for start in range(0, length, max(1, step)))


def _columns(weight: Tensor) -> Iterator[slice]:
    return _spans(weight.shape[0], CHUNK_COLUMNS, align=128)


def _first(weight: Tensor, group: dist.ProcessGroup | None) -> int:
    return group.rank() * weight.shape[0] if group is not None else 0


class _LogProbsAndEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float, group: dist.ProcessGroup | None
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        first = _first(weight, group)
        statistics = hidden.new_zeros(4, len(hidden), dtype=dtype)
        statistics[0] = -torch.inf
        for rows in _spans(len(hidden), CHUNK_TOKENS):
            chunk = statistics[:, rows].contiguous()
            for columns in _columns(weight):
                logits = _matmul(hidden[rows], weight[columns].t(), dtype)
                _accumulate(logits, labels[rows], chunk, first + columns.start, temperature)
            statistics[:, rows] = chunk
        peak, sums = statistics[0].clone(), statistics[1:]
        if group is not None and group.size() > 1:
            dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
            sums[:2] *= (statistics[0] - peak).exp()
            dist.all_reduce(sums, group=group)
        total, weighted, chosen = sums
        normalizer = peak + total.log()
        entropy = normalizer - weighted / total
        ctx.save_for_backward(hidden, weight, labels, normalizer, entropy)
        ctx.temperature, ctx.group = temperature, group
        return chosen - normalizer, entropy

    @staticmethod
    def backward(ctx: Any, grad_log_probs: Tensor, grad_entropy: Tensor) -> tuple[Any, ...]:
        hidden, weight, labels, normalizer, entropy = ctx.saved_tensors
        first = _first(weight, ctx.group)
        row_statistics = torch.stack([normalizer, entropy, grad_log_probs, grad_entropy])
        grad_hidden = torch.empty_like(hidden)
        # under Megatron's data parallelism the product is added to the gradient buffer directly: one pass, no copy
        in_place = getattr(weight, "main_grad", None) is not None and hasattr(weight, "grad_added_to_main_grad")
        grad_weight = weight.main_grad if in_place else torch.zeros_like(weight, dtype=normalizer.dtype)
        for rows in _spans(len(hidden), CHUNK_TOKENS):
            chunk, chunk_statistics = hidden[rows], row_statistics[:, rows].contiguous()
            total = torch.zeros_like(chunk, dtype=normalizer.dtype)
            for columns in _columns(weight):
                logits = _matmul(chunk, weight[columns].t(), normalizer.dtype)
                grad = torch.empty_like(logits, dtype=hidden.dtype)
                _gradient(logits, labels[rows], chunk_statistics, first + columns.start, ctx.temperature, grad)
                del logits
                _add_matmul(total, grad, weight[columns])
                _add_matmul(grad_weight[columns], grad.t(), chunk)
            grad_hidden[rows] = total
        if in_place:
            weight.grad_added_to_main_grad = True
            return grad_hidden, torch.empty_like(weight), None, None, None  # the hooks only need to see a gradient
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None


def log_probs_and_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float = 1.0, group: dist.ProcessGroup | None = None
) -> tuple[Tensor, Tensor]:
    """Of softmax(hidden @ weight.T / temperature): log p(labels) and the entropy in nats, both [tokens], >= fp32.

    hidden: [tokens, hidden_size], the same on all ranks of ``group``; weight: [vocab_size / group size, hidden_size] of
    this rank; labels: int64 [tokens], global ids. Differentiable in hidden (each rank's gradient is its vocabulary's
    share, to be summed over the group) and weight (added to ``weight.main_grad`` where Megatron keeps one)."""
    if temperature <= 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    return _LogProbsAndEntropy.apply(hidden, weight, labels, temperature, group)


@torch.no_grad()
def most_likely_tokens(hidden: Tensor, weight: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Global ids of the largest logits, int64 [tokens]; of equal ones the smallest id. Arguments as above."""
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    best = hidden.new_full((len(hidden),), -torch.inf, dtype=dtype)
    ids = torch.zeros(len(hidden), dtype=torch.int64, device=hidden.device)
    for rows in _spans(len(hidden), CHUNK_TOKENS):
        for columns in _columns(weight):
            value, index = _matmul(hidden[rows], weight[columns].t(), dtype).max(dim=-1)
            better = value > best[rows]
            best[rows] = torch.where(better, value, best[rows])
            ids[rows] = torch.where(better, index + columns.start, ids[rows])
    if group is None or group.size() == 1:
        return ids
    pair = torch.stack([best.double(), (ids + _first(weight, group)).double()])  # ids are exact in fp64
    pairs = [torch.empty_like(pair) for _ in range(group.size())]
    dist.all_gather(pairs, pair, group=group)
    values, candidates = torch.stack(pairs).unbind(1)
    return candidates.gather(0, values.argmax(dim=0, keepdim=True))[0].long()


def whole_hidden_states(hidden_states: Tensor, output_layer: Any) -> Tensor:
    """[tokens / tensor, 1, hidden_size] as the last layer leaves them -> [tokens, hidden_size] as the functions above
    take them; the gradient of the way back is summed over tensor-parallel ranks."""
    if output_layer.sequence_parallel:
        hidden_states = gather_from_sequence_parallel_region(hidden_states, group=output_layer.tp_group)
    else:
        hidden_states = copy_to_tensor_model_parallel_region(hidden_states, group=output_layer.tp_group)
    return hidden_states.squeeze(1)
