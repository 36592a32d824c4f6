"""Sequence <-> heads: ranks trade their tokens of all heads for all tokens of their heads.

This is done around one attention call (arXiv 2309.14509). The gathered tokens are put into the
order of the row on the way in, and back into the ranks' order on the way out.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from gptoss_kernels.sink_attention import sink_attention
from gptoss_kernels.sink_attention.functional import AttentionSettings
from megatron_gptoss.context_parallel.layout import ContextLayout
from megatron_gptoss.context_parallel.token_order import inverse_order, token_order

Exchange = Callable[[Tensor, ProcessGroup, ContextLayout], Tensor]


def all_to_all_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor,
    layout: ContextLayout,
    group: ProcessGroup,
    settings: AttentionSettings,
) -> Tensor:
    """Compute attention of this rank's tokens of all heads: O like q.

    Raises:
        ValueError: when the heads are no multiple of the ranks.
    """
    size = group.size()
    heads = q.shape[1]
    kv_heads = k.shape[1]
    if heads % size:
        raise ValueError(
            f"all-to-all needs heads that divide: {heads} heads over {size} context-parallel ranks"
        )

    # every rank needs whole kv heads: copy them when there are fewer than ranks
    # Copies are neighbours, so that a rank's query heads find theirs. autograd adds up the
    # gradients of copies.
    copies = size // math.gcd(size, kv_heads)
    k = k.repeat_interleave(copies, dim=1)
    v = v.repeat_interleave(copies, dim=1)
    q, k, v = (_Exchange.apply(x, _to_heads, _to_sequence, group, layout) for x in (q, k, v))

    # The other ranks' slices get zero gradient here; the data/context-parallel reduction adds each
    # slice once.
    own_sinks = sinks.chunk(size)[group.rank()]
    cu_seqlens = layout.cached(
        ("offsets", q.device),
        lambda: torch.tensor(layout.offsets, dtype=torch.int32, device=q.device),
    )
    o = sink_attention(
        q,
        k,
        v,
        own_sinks,
        cu_seqlens=cu_seqlens,
        max_seqlen=layout.longest,
        window=settings.window,
        scale=settings.scale,
        backend=settings.backend,
    )
    return _Exchange.apply(o, _to_sequence, _to_heads, group, layout)


class _Exchange(torch.autograd.Function):
    """Applies ``exchange`` to x and ``inverse`` to the gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        exchange: Exchange,
        inverse: Exchange,
        group: ProcessGroup,
        layout: ContextLayout,
    ) -> Tensor:
        ctx.inverse = inverse
        ctx.group = group
        ctx.layout = layout
        return exchange(x, group, layout)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return ctx.inverse(grad, ctx.group, ctx.layout), None, None, None, None


def _to_heads(x: Tensor, group: ProcessGroup, layout: ContextLayout) -> Tensor:
    """Trade [tokens / size, heads, d], rank's order, for [tokens, heads / size, d], row's."""
    tokens, _, head_size = x.shape
    # [ranks, tokens / size, heads / size, d]: one message of equal size for each rank, no counts
    # needed.
    by_rank = x.view(tokens, group.size(), -1, head_size).transpose(0, 1).contiguous()
    received = torch.empty_like(by_rank)
    dist.all_to_all_single(received, by_rank, group=group)

    _, inverse = _permutations(layout, x.device)
    return received.flatten(0, 1).index_select(0, inverse)


def _to_sequence(x: Tensor, group: ProcessGroup, layout: ContextLayout) -> Tensor:
    """Undo ``_to_heads``."""
    tokens, heads, head_size = x.shape
    order, _ = _permutations(layout, x.device)
    # [tokens, heads / size, d] in the order of the ranks -> [ranks, tokens / size, heads / size, d]
    by_rank = x.index_select(0, order).view(group.size(), -1, heads, head_size)
    received = torch.empty_like(by_rank)
    dist.all_to_all_single(received, by_rank, group=group)
    return received.transpose(0, 1).reshape(tokens // group.size(), -1, head_size)


def _permutations(layout: ContextLayout, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return ``token_order`` and ``inverse_order`` on the device."""
    return layout.cached(
        ("permutations", device),
        lambda: (token_order(layout).to(device), inverse_order(layout).to(device)),
    )
