"""All-to-all scheme: ranks exchange tokens for heads around one attention call.

Before attention a rank has a part of the tokens and all heads. For attention it has all tokens, in
the order of the row, and a part of the heads (arXiv 2309.14509).
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
"""(tensor, group, layout) -> exchanged tensor."""


def all_to_all_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor,
    layout: ContextLayout,
    group: ProcessGroup,
    settings: AttentionSettings,
) -> Tensor:
    """Compute attention of this rank's tokens.

    Args:
        q: [tokens / size, heads, head_size] in the order of this rank.
        k: [tokens / size, kv_heads, head_size].
        v: [tokens / size, kv_heads, head_size].
        sinks: [heads].
        layout: the rank of each token.
        group: context-parallel group.
        settings: window, scale and backend.

    Returns:
        O [tokens / size, heads, head_size] with the dtype of q.

    Raises:
        ValueError: the heads cannot be divided equally among the ranks.
    """
    size = group.size()
    heads = q.shape[1]
    if heads % size:
        raise ValueError(
            f"all_to_all cannot divide {heads} heads over {size} context-parallel ranks"
        )

    k = _with_copies(k, size)
    v = _with_copies(v, size)
    q, k, v = (_Exchange.apply(x, _to_heads, _to_sequence, group, layout) for x in (q, k, v))

    # The gradient of the other ranks' sinks is 0 here. The reduction over data- and
    # context-parallel ranks therefore counts each sink once.
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


def _with_copies(x: Tensor, size: int) -> Tensor:
    """Return x [tokens, kv_heads, head_size] with heads that ``size`` ranks can share equally."""
    # Every rank needs whole kv heads, so copy them if there are fewer heads than ranks. Copies are
    # adjacent, so that each rank gets the kv heads of its query heads. Autograd sums the gradients
    # of the copies.
    copies = size // math.gcd(size, x.shape[1])
    return x.repeat_interleave(copies, dim=1)


class _Exchange(torch.autograd.Function):
    """Exchange of x in the forward pass, and inverse exchange of the gradient."""

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
    """Exchange [tokens / size, heads, d] in the order of ranks for [tokens, heads / size, d].

    The result is in the order of the row.
    """
    tokens, _, head_size = x.shape
    # [ranks, tokens / size, heads / size, d]: messages of equal size, which need no counts.
    by_rank = x.view(tokens, group.size(), -1, head_size).transpose(0, 1).contiguous()
    received = torch.empty_like(by_rank)
    dist.all_to_all_single(received, by_rank, group=group)

    _, inverse = _permutations(layout, x.device)
    return received.flatten(0, 1).index_select(0, inverse)


def _to_sequence(x: Tensor, group: ProcessGroup, layout: ContextLayout) -> Tensor:
    """Exchange [tokens, heads / size, d] for [tokens / size, heads, d], as before ``_to_heads``."""
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
