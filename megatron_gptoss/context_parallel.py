"""All-to-all context parallelism: ranks trade sequence shards for head shards around one attention call."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def _exchange(x: torch.Tensor, group: dist.ProcessGroup, split_dim: int, cat_dim: int) -> torch.Tensor:
    parts = [part.contiguous() for part in x.chunk(group.size(), dim=split_dim)]
    received = [torch.empty_like(parts[0]) for _ in parts]
    if x.is_cuda:
        dist.all_to_all(received, parts, group=group)
    else:  # gloo has no list all_to_all
        packed = torch.empty_like(torch.stack(parts))
        dist.all_to_all_single(packed, torch.stack(parts), group=group)
        received = list(packed)
    return torch.cat(received, dim=cat_dim)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, split_dim: int, cat_dim: int) -> torch.Tensor:
        ctx.args = (group, split_dim, cat_dim)
        return _exchange(x, group, split_dim, cat_dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        group, split_dim, cat_dim = ctx.args
        return _exchange(grad, group, cat_dim, split_dim), None, None, None


def sequence_to_heads(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[tokens / cp, heads, head_size] -> [tokens, heads / cp, head_size]: all tokens, this rank's heads."""
    return _AllToAll.apply(x, group, 1, 0)


def heads_to_sequence(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The inverse of ``sequence_to_heads``."""
    return _AllToAll.apply(x, group, 0, 1)
