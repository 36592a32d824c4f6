"""Sequence <-> heads: ranks trade their tokens of all heads for all tokens of their heads, around one attention call.

The gathered tokens are put into the order of the row on the way in, and back into the ranks' order on the way out."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from gptoss_kernels.sink_attention import sink_attention
from megatron_gptoss.context_parallel.layout import ContextLayout


class _Exchange(torch.autograd.Function):
    """Applies ``there`` to x, and ``back``, its inverse, to the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Callable[..., Tensor], back: Callable[..., Tensor], *where: Any) -> Tensor:
        ctx.back, ctx.where = back, where
        return there(x, *where)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return ctx.back(grad, *ctx.where), None, None, None, None


def _to_heads(x: Tensor, group: ProcessGroup, layout: ContextLayout) -> Tensor:
    """[tokens / size, heads, d] in a rank's order -> [tokens, heads / size, d] in the row's order."""
    tokens, _, head_size = x.shape
    by_rank = x.view(tokens, group.size(), -1, head_size).transpose(0, 1).contiguous()
    received = torch.empty_like(by_rank)
    dist.all_to_all_single(received, by_rank, group=group)
    return received.flatten(0, 1).index_select(0, _permutations(layout, x.device)[1])


def _to_sequence(x: Tensor, group: ProcessGroup, layout: ContextLayout) -> Tensor:
    """The inverse of ``_to_heads``."""
    tokens, heads, head_size = x.shape
    by_rank = x.index_select(0, _permutations(layout, x.device)[0]).view(group.size(), -1, heads, head_size)
    received = torch.empty_like(by_rank)
    dist.all_to_all_single(received, by_rank, group=group)
    return received.transpose(0, 1).reshape(tokens // group.size(), -1, head_size)


def _permutations(layout: ContextLayout, device: torch.device) -> tuple[Tensor, Tensor]:
    return layout.cached(("permutations", device), lambda: (layout.order.to(device), layout.inverse.to(device)))


def all_to_all_attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, layout: ContextLayout, group: ProcessGroup, *settings: Any
) -> Tensor:
    """This rank's tokens of all heads, a multiple of the ranks, -> O like q. ``settings``: window, scale, backend."""
    window, scale, backend = settings
    size = group.size()
    if q.shape[1] % size:
        raise ValueError(f"all-to-all needs heads that divide: {q.shape[1]} heads over {size} context-parallel ranks")
    # every rank needs whole kv heads: copy them when there are fewer than ranks
    copies = size // math.gcd(size, k.shape[1])
    k, v = (x.repeat_interleave(copies, dim=1) for x in (k, v))
    q, k, v = (_Exchange.apply(x, _to_heads, _to_sequence, group, layout) for x in (q, k, v))
    # the other ranks' slices get zero gradient here; the data/context-parallel reduction adds each slice once
    own = sinks.chunk(size)[group.rank()]
    key = ("offsets", q.device)
    offsets = layout.cached(key, lambda: torch.tensor(layout.offsets, dtype=torch.int32, device=q.device))
    out: Any = sink_attention(
        q, k, v, own, cu_seqlens=offsets, max_seqlen=layout.longest, window=window, scale=scale, backend=backend
    )
    return _Exchange.apply(out, _to_sequence, _to_heads, group, layout)
