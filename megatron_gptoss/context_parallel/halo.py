"""Halo scheme for window layers: a rank fetches the window - 1 tokens before each of its spans.

These tokens are the *halo* of a span. They are the only tokens of other ranks that its rows see.
The halo of a segment that continues another one is in its ancestors, also on the same rank.

1. Every span is computed without its halo, so that this pass does not wait for messages.
2. The first window - 1 rows of each span lack keys. They are computed again together with the halo
   (the *border*) and replace the rows of the first pass.

docs/architecture.md describes the passes. In the backward pass, rows have O and LSE over all of
their keys, so each of the two passes gives exact gradients for the keys that it sees. The gradient
of the sinks comes from the pass over all spans only.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from gptoss_kernels.device_copies import copy_to_device
from gptoss_kernels.sink_attention.functional import (
    AttentionSettings,
    attention_backward,
    attention_forward,
)
from gptoss_kernels.sink_attention.layout import AttentionSegments
from megatron_gptoss.context_parallel.exchange import Exchange, start_all_to_all
from megatron_gptoss.context_parallel.key_gradients import add_in_order
from megatron_gptoss.context_parallel.layout import ContextLayout
from megatron_gptoss.context_parallel.token_order import inverse_order, row_indices


@dataclass(frozen=True)
class HaloPlan:
    """Tokens that one rank sends, receives and computes again.

    All index tensors are one-dimensional int64 on the device.
    """

    spans: AttentionSegments
    """Segments of all spans, without halos."""
    border: AttentionSegments
    """Segments of the border: for each span with a halo, the halo and the first window - 1 rows."""
    border_sources: Tensor
    """Local token of each border token. Tokens of halos have the placeholder 0."""
    border_rows: Tensor
    """Indices of the border's tokens that belong to a span instead of a halo."""
    local_rows: Tensor
    """Local token of each of ``border_rows``."""
    halo: Tensor
    """Index in the border of each received token."""
    sent: Tensor
    """Local tokens to send, sorted by receiving rank."""
    shares_prefixes: bool
    """True if a token is in any number of halos. Gradients are then summed in fp32, in the order of
    ``sent``."""
    send_counts: list[int]
    """Number of tokens to send to each rank."""
    receive_counts: list[int]
    """Number of tokens to receive from each rank."""

    @property
    def has_border(self) -> bool:
        """True if a span of this rank has a halo."""
        return len(self.local_rows) > 0


class HaloAttention(torch.autograd.Function):
    """Sliding-window attention of this rank's tokens, differentiable in q, k, v and sinks."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor,
        layout: ContextLayout,
        group: ProcessGroup,
        settings: AttentionSettings,
    ) -> Tensor:
        """Compute O [tokens, heads, head_size], of the dtype of q, k and v.

        Args:
            ctx: context of autograd.
            q: [tokens, heads, head_size] of this rank.
            k: [tokens, kv_heads, head_size] of this rank.
            v: [tokens, kv_heads, head_size] of this rank.
            sinks: [heads].
            layout: the rank of each token.
            group: context-parallel group.
            settings: window, scale and backend.

        Raises:
            ValueError: there is no window.
        """
        if settings.window is None:
            raise ValueError("the halo scheme supports only layers with a window")
        plan = _cached_plan(layout, group.rank(), settings.window, q.device)

        exchange = _start_exchange(k, v, plan, group)

        # Queue the large pass over all spans first. The small border waits for the halo on a second
        # stream.
        border_stream = _forked_stream(q.device)
        o, lse = attention_forward(q, k, v, sinks, plan.spans, settings)
        border: tuple[Tensor, ...] = ()
        with torch.cuda.stream(border_stream):
            received = exchange.wait()
            if plan.has_border:
                inputs = _border_inputs(q, k, v, received, plan)
                border_o, border_lse = attention_forward(*inputs, sinks, plan.border, settings)
                border = (*inputs, border_o, border_lse)
        _join(border_stream)

        # After the join, because the first pass writes incomplete results to the same rows.
        if border:
            o.index_copy_(0, plan.local_rows, border_o[plan.border_rows])
            lse.index_copy_(0, plan.local_rows, border_lse[plan.border_rows])

        ctx.save_for_backward(q, k, v, sinks, o, lse, *border)
        ctx.plan = plan
        ctx.group = group
        ctx.settings = settings
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_o: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients of q, k, v and sinks, of their dtypes.

        ``grad_o`` is dO [tokens, heads, head_size], of the dtype of O.
        """
        q, k, v, sinks, o, lse, *border = ctx.saved_tensors
        plan: HaloPlan = ctx.plan
        settings: AttentionSettings = ctx.settings
        grad_o = grad_o.contiguous()

        # The counts of the forward message are swapped: gradients of received keys are sent back.
        # The border runs first, on a second stream, so that its message overlaps with the large
        # pass.
        border_dq = None
        border_stream = _forked_stream(q.device)
        with torch.cuda.stream(border_stream):
            halo_grads = q.new_empty(0, 2, *k.shape[1:])
            if border:
                border_dq, halo_grads = _border_backward(border, sinks, grad_o, plan, settings)
            exchange = start_all_to_all(
                halo_grads, plan.receive_counts, plan.send_counts, ctx.group
            )

        saved = (q, k, v, sinks, o, lse)
        dq, dk, dv, dsinks = attention_backward(saved, grad_o, plan.spans, settings)

        # The border pass saw all keys of its rows, so its dQ replaces the other dQ. Rows of the
        # owner also see the keys of a halo, so their gradients are added.
        _join(border_stream)
        if border_dq is not None:
            dq.index_copy_(0, plan.local_rows, border_dq[plan.border_rows])
        returned = exchange.wait()
        dk = _with_halo_gradients(dk, returned[:, 0], plan)
        dv = _with_halo_gradients(dv, returned[:, 1], plan)
        return dq, dk, dv, dsinks, None, None, None


def _start_exchange(k: Tensor, v: Tensor, plan: HaloPlan, group: ProcessGroup) -> Exchange:
    """Start to exchange the keys and values of halos.

    Returns:
        Exchange of the received keys and values, [halo tokens, 2, kv_heads, head_size].
    """
    # Keys and values share one message. Received tokens are sorted by sending rank, like the halo's
    # indices.
    sent = torch.stack((k[plan.sent], v[plan.sent]), dim=1)
    # Collective, so ranks without a halo take part, too.
    return start_all_to_all(sent, plan.send_counts, plan.receive_counts, group)


def _with_halo_gradients(grad: Tensor, returned: Tensor, plan: HaloPlan) -> Tensor:
    """Add the gradients of halos to dK or dV of this rank's tokens.

    Args:
        grad: [tokens, kv_heads, head_size] gradient from the pass over all spans.
        returned: [sent tokens, kv_heads, head_size] gradients from the halos.
        plan: plan of this rank.

    Returns:
        The sum, of the shape and dtype of ``grad``.
    """
    if not plan.shares_prefixes:
        # A token may be in several halos and thus several times in ``sent``.
        return grad.index_add_(0, plan.sent, returned)

    total = grad.to(torch.promote_types(grad.dtype, torch.float32))
    add_in_order(total, plan.sent, returned)
    return total.to(grad.dtype)


def _border_inputs(
    q: Tensor, k: Tensor, v: Tensor, received: Tensor, plan: HaloPlan
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values of the border: for each span its halo, then its first rows.

    Returns:
        Three tensors [border tokens, heads or kv_heads, head_size].
    """
    # Kernels need a query for every key, so halos have placeholder queries (token 0), whose results
    # are discarded.
    queries, keys, values = (x.index_select(0, plan.border_sources) for x in (q, k, v))
    keys.index_copy_(0, plan.halo, received[:, 0])
    values.index_copy_(0, plan.halo, received[:, 1])
    return queries, keys, values


def _border_backward(
    border: list[Tensor],
    sinks: Tensor,
    grad_o: Tensor,
    plan: HaloPlan,
    settings: AttentionSettings,
) -> tuple[Tensor, Tensor]:
    """Return dQ of the border, and dK and dV of the halo.

    Args:
        border: queries, keys, values, O and LSE of the border.
        sinks: [heads].
        grad_o: [tokens, heads, head_size] gradient of this rank's O.
        plan: plan of this rank.
        settings: window, scale and backend.

    Returns:
        dQ [border tokens, heads, head_size], and dK and dV [halo tokens, 2, kv_heads, head_size].
    """
    # The border's other keys get no gradient here, because the pass over all spans computes it.
    queries, keys, values, border_o, border_lse = border

    # The gradient of placeholder rows is 0, so they contribute nothing.
    border_grad = torch.zeros_like(border_o)
    border_grad.index_copy_(0, plan.border_rows, grad_o[plan.local_rows])

    saved = (queries, keys, values, sinks, border_o, border_lse)
    dq, dk, dv, _ = attention_backward(saved, border_grad, plan.border, settings)
    return dq, torch.stack((dk[plan.halo], dv[plan.halo]), dim=1)


def _cached_plan(layout: ContextLayout, rank: int, window: int, device: torch.device) -> HaloPlan:
    """Return the plan of a rank, computed once per row and shared by all layers."""
    key = ("halo", rank, window, device)
    return layout.cached(key, lambda: _plan(layout, rank, window, device))


def _plan(layout: ContextLayout, rank: int, window: int, device: torch.device) -> HaloPlan:
    """Compute the plan of a rank."""
    share = layout.tokens_per_rank
    lengths = [span.tokens for span in layout.spans[rank]]

    # Tokens that each rank needs, as positions in `token_order`. position // share is the owner.
    # Every rank derives them from the layout, so no messages about sizes are necessary.
    halos = [_halos(layout, other, window) for other in range(layout.size)]
    needed = [_concatenate(rank_halos) for rank_halos in halos]
    sent = [tokens[tokens // share == rank] - rank * share for tokens in needed]
    owners = needed[rank] // share

    sources: list[Tensor] = []  # of the border's tokens, among the local ones
    halo_places: list[Tensor] = []  # in the border
    row_places: list[Tensor] = []  # in the border
    border_lengths: list[int] = []
    first = 0  # local token of the span
    for span in layout.spans[rank]:
        halo = min(span.start, window - 1)
        recomputed = min(span.tokens, window - 1)
        if halo:
            border_start = sum(border_lengths)
            sources.append(torch.zeros(halo, dtype=torch.int64))
            sources.append(torch.arange(first, first + recomputed))
            halo_places.append(border_start + torch.arange(halo))
            row_places.append(border_start + halo + torch.arange(recomputed))
            border_lengths.append(halo + recomputed)
        first += span.tokens

    # Received tokens are sorted by owner, and for each owner by span.
    arrival_order = torch.argsort(owners, stable=True)
    border_sources = _concatenate(sources)
    border_rows = _concatenate(row_places)
    return HaloPlan(
        spans=AttentionSegments.from_lengths(lengths, lengths, device),
        border=AttentionSegments.from_lengths(border_lengths, border_lengths, device),
        border_sources=copy_to_device(border_sources, device),
        border_rows=copy_to_device(border_rows, device),
        local_rows=copy_to_device(border_sources[border_rows], device),
        halo=copy_to_device(_concatenate(halo_places)[arrival_order], device),
        sent=copy_to_device(torch.cat(sent), device),
        shares_prefixes=layout.shares_prefixes,
        send_counts=[len(tokens) for tokens in sent],
        receive_counts=torch.bincount(owners, minlength=layout.size).tolist(),
    )


def _halos(layout: ContextLayout, rank: int, window: int) -> list[Tensor]:
    """Return the ``token_order`` positions of the tokens in each halo of a rank, span by span."""
    halos = []
    for span in layout.spans[rank]:
        halo = span._replace(start=max(0, span.start - window + 1), end=span.start)
        if halo.tokens > 0:
            halos.append(inverse_order(layout)[row_indices(layout, halo)])
    return halos


def _concatenate(indices: list[Tensor]) -> Tensor:
    """Concatenate int64 tensors; an empty list gives an empty tensor."""
    return torch.cat([torch.empty(0, dtype=torch.int64), *indices])


def _forked_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Return a second stream for small kernels that must not wait for large ones; None on a CPU."""
    if device.type != "cuda":
        return None

    # Memory allocated on the second stream is safe: each later fork waits for the current stream,
    # so no memory is reused too early.
    stream = _second_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream


def _join(stream: torch.cuda.Stream | None) -> None:
    """Make the current stream wait for a forked stream."""
    if stream is not None:
        torch.cuda.current_stream(stream.device).wait_stream(stream)


@functools.cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the second stream of a device, with high priority so that small kernels start soon."""
    return torch.cuda.Stream(device, priority=-1)
