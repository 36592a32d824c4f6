"""Sequence <-> heads: ranks trade their tokens of all heads for all tokens of their heads, around one attention call.

The gathered tokens are put into the order of the row on the way in, and back into the ranks' order on the way out.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from gptoss_kernels.sink_attention import sink_attention
from megatron_gptoss.context_parallel.layout import ContextLayout


class _SequenceToHeads(torch.autograd.Function):
    """[tokens / size, heads, d] in a rank's order -> [tokens, heads / size, d] in the row's order."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, layout: ContextLayout) -> torch.Tensor:
        ctx.args = group, layout
        return _to_heads(x, group, layout)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _to_sequence(grad, *ctx.args), None, None


class _HeadsToSequence(torch.autograd.Function):
    """The inverse of ``_SequenceToHeads``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, layout: ContextLayout) -> torch.Tensor:
        ctx.args = group, layout
        return _to_sequence(x, group, layout)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _to_heads(grad, *ctx.args), None, None


def _to_heads(x: torch.Tensor, group: dist.ProcessGroup, layout: ContextLayout) -> torch.Tensor:
    tokens, _, head_size = x.shape
    by_rank = x.view(tokens, group.size(), -1, head_size).transpose(0, 1).contiguous()
    received = torch.empty_like(by_rank)
    dist.all_to_all_single(received, by_rank, group=group)
    return received.flatten(0, 1).index_select(0, _permutations(layout, x.device)[1])


def _to_sequence(x: torch.Tensor, group: dist.ProcessGroup, layout: ContextLayout) -> torch.Tensor:
    tokens, heads, head_size = x.shape
    by_rank = x.index_select(0, _permutations(layout, x.device)[0]).view(group.size(), -1, heads, head_size)
    received = torch.empty_like(by_rank)
    dist.all_to_all_single(received, by_rank, group=group)
    return received.transpose(0, 1).reshape(tokens // group.size(), -1, head_size)


def _permutations(layout: ContextLayout, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    return layout.cached(("permutations", device), lambda: (layout.order.to(device), layout.inverse.to(device)))


def all_to_all_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor,
    layout: ContextLayout,
    group: dist.ProcessGroup,
    window: int | None,
    scale: float,
    backend: str = "auto",
) -> torch.Tensor:
    """This rank's tokens of all heads -> O like q. The number of heads must be a multiple of the ranks."""
    size = group.size()
    if q.shape[1] % size:
        raise ValueError(f"all-to-all needs heads that divide: {q.shape[1]} heads over {size} context-parallel ranks")
    # every rank needs whole kv heads: copy them when there are fewer than ranks
    copies = size // math.gcd(size, k.shape[1])
    k, v = (x.repeat_interleave(copies, dim=1) for x in (k, v))
    q, k, v = (_SequenceToHeads.apply(x, group, layout) for x in (q, k, v))
    out: Any = sink_attention(
        q,
        k,
        v,
        # the other ranks' slices get zero gradient here; the data/context-parallel reduction adds each slice once
        sinks.chunk(size)[group.rank()],
        cu_seqlens=layout.cached(
            ("offsets", q.device), lambda: torch.tensor(layout.offsets, dtype=torch.int32, device=q.device)
        ),
        max_seqlen=layout.longest,
        window=window,
        scale=scale,
        backend=backend,
    )
    return _HeadsToSequence.apply(out, group, layout)
