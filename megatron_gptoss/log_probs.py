"""Log-probabilities and entropy of the policy, over a vocabulary that may be split over tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class _LogProbsAndEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, temperature: float, group: dist.ProcessGroup | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        size = group.size() if group is not None else 1
        scores = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
        first = group.rank() * scores.shape[-1] if group is not None else 0
        local = labels - first
        here = (local >= 0) & (local < scores.shape[-1])
        local = local.clamp(0, scores.shape[-1] - 1)

        def reduced(x: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
            if size > 1:
                dist.all_reduce(x, op=op, group=group)
            return x

        peak = reduced(scores.max(dim=-1).values, dist.ReduceOp.MAX)
        exp = (scores - peak[:, None]).exp()
        total = reduced(exp.sum(dim=-1))
        chosen = reduced(torch.where(here, scores.gather(-1, local[:, None])[:, 0], 0.0))
        log_normalizer = peak + total.log()
        probs = exp.div_(total[:, None])
        entropy = log_normalizer - reduced((probs * scores).sum(dim=-1))
        ctx.save_for_backward(probs, scores - log_normalizer[:, None], entropy, local, here)
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        return chosen - log_normalizer, entropy

    @staticmethod
    def backward(ctx: Any, grad_log_probs: torch.Tensor, grad_entropy: torch.Tensor) -> tuple[Any, ...]:
        probs, all_log_probs, entropy, local, here = ctx.saved_tensors
        # d log p(label) / d score_v = [v is the label] - p_v;  d H / d score_v = -p_v (log p_v + H)
        grad = -probs * (grad_log_probs[:, None] + (all_log_probs + entropy[:, None]) * grad_entropy[:, None])
        grad.scatter_add_(-1, local[:, None], torch.where(here, grad_log_probs, 0.0)[:, None].to(grad.dtype))
        return (grad / ctx.temperature).to(ctx.dtype), None, None, None


def log_probs_and_entropy(
    logits: torch.Tensor, labels: torch.Tensor, temperature: float = 1.0, group: dist.ProcessGroup | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of softmax(logits / temperature): log p(labels) and the entropy in nats. Both [tokens], >= fp32, differentiable.

    logits: [tokens, vocab_size / tensor_parallel_size] of this rank of ``group``; labels: int64 [tokens], global ids.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    return _LogProbsAndEntropy.apply(logits, labels, temperature, group)


def vocab_parallel_argmax(logits: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Global ids of the largest logits, int64 [tokens]; of equal ones the smallest id. logits as above."""
    best, ids = logits.max(dim=-1)
    if group is None or group.size() == 1:
        return ids
    pair = torch.stack([best.double(), (ids + group.rank() * logits.shape[-1]).double()])  # ids are exact in fp64
    pairs = [torch.empty_like(pair) for _ in range(group.size())]
    dist.all_gather(pairs, pair, group=group)
    values, candidates = torch.stack(pairs).unbind(1)
    return candidates.gather(0, values.argmax(dim=0, keepdim=True))[0].long()
