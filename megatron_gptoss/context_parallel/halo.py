"""Window layers: a rank fetches only the window - 1 tokens before each of its spans.

However long the spans are, that is all that their rows see of other ranks' tokens (the *halo*).
Every span is computed by itself, without waiting; then its first window - 1 rows, which lack keys,
are computed once more together with their halo (the *border*), and replace the rows of the first
pass. docs/architecture.md describes the passes.

In the backward pass the rows hold O and LSE over all of their keys, so each of the two passes
gives the exact share of the keys that it is given. The sink enters every row's softmax once, and
its gradient comes from the one backward pass over all rows.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from gptoss_kernels.sink_attention.functional import (
    AttentionSettings,
    attention_backward,
    attention_forward,
)
from gptoss_kernels.sink_attention.layout import Segments
from megatron_gptoss.context_parallel.layout import ContextLayout
from megatron_gptoss.context_parallel.token_order import inverse_order, row_indices


@dataclass(frozen=True)
class HaloPlan:
    """What one rank sends, receives and recomputes. All index tensors are int64 on the device."""

    spans: Segments
    """Every span by itself."""
    border: Segments
    """Per span with a halo: the halo and the span's first window - 1 rows."""
    border_sources: Tensor
    """Which local tokens the border's tokens are; token 0 stands in where the halo's go."""
    border_rows: Tensor
    """Which of the border's tokens are rows of a span."""
    local_rows: Tensor
    """The local tokens that these are."""
    halo: Tensor
    """Which of the border's tokens each received token is."""
    sent: Tensor
    """The local tokens that other ranks' halos consist of, by receiving rank."""
    send_counts: list[int]
    """Tokens sent to each rank."""
    receive_counts: list[int]
    """Tokens received from each rank."""

    @property
    def has_border(self) -> bool:
        """Whether any span of this rank has a halo."""
        return len(self.local_rows) > 0


class HaloAttention(torch.autograd.Function):
    """Computes sliding-window attention of this rank's tokens: O like q."""

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
        if settings.window is None:
            raise ValueError("the halo scheme serves layers with a window only")
        plan = _cached_plan(layout, group.rank(), settings.window, q.device)

        # [tokens, 2, kv_heads, head_size], keys and values in one message; what arrives is sorted
        # by the rank that sent it, as ``plan.halo`` is. All ranks take part, also those that need
        # nothing.
        received = q.new_empty(len(plan.halo), 2, *k.shape[1:])
        sent = torch.stack((k[plan.sent], v[plan.sent]), dim=1)
        work = dist.all_to_all_single(
            received, sent, plan.receive_counts, plan.send_counts, group=group, async_op=True
        )

        # The large pass over all spans is queued before the small border, which waits for the halo
        # on a stream of its own.
        border_stream = _forked_stream(q.device)
        o, lse = attention_forward(q, k, v, sinks, plan.spans, settings)
        border: tuple[Tensor, ...] = ()
        with torch.cuda.stream(border_stream):
            work.wait()
            if plan.has_border:
                # [border tokens, heads, head_size]: per span its halo, then its first rows. The
                # halo's queries are stand-ins (token 0) whose results nobody reads; a query for
                # every key is what the kernels take.
                queries, keys, values = (x.index_select(0, plan.border_sources) for x in (q, k, v))
                keys.index_copy_(0, plan.halo, received[:, 0])
                values.index_copy_(0, plan.halo, received[:, 1])
                border_o, border_lse = attention_forward(
                    queries, keys, values, sinks, plan.border, settings
                )
                border = (queries, keys, values, border_o, border_lse)
        _join(border_stream)

        # After the join, because the first pass writes these rows, too, without the halo's keys.
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
        q, k, v, sinks, o, lse, *border = ctx.saved_tensors
        plan: HaloPlan = ctx.plan
        settings: AttentionSettings = ctx.settings
        grad_o = grad_o.contiguous()

        # The counts of the forward message, exchanged: gradients of what was received are sent
        # back.
        # The border first, on a stream of its own: its gradients have the way home before them
        # while the large pass runs.
        returned = q.new_empty(len(plan.sent), 2, *k.shape[1:])
        border_dq = None
        border_stream = _forked_stream(q.device)
        with torch.cuda.stream(border_stream):
            halo_grads = q.new_empty(0, 2, *k.shape[1:])
            if border:
                border_dq, halo_grads = _border_backward(border, sinks, grad_o, plan, settings)
            work = dist.all_to_all_single(
                returned,
                halo_grads,
                plan.send_counts,
                plan.receive_counts,
                group=ctx.group,
                async_op=True,
            )

        saved = (q, k, v, sinks, o, lse)
        dq, dk, dv, dsinks = attention_backward(saved, grad_o, plan.spans, settings)

        # The border's pass saw all keys of its rows, so its dQ replaces the other's. The halo's
        # keys were also seen by other rows of their own rank, so their gradients are added.
        _join(border_stream)
        if border_dq is not None:
            dq.index_copy_(0, plan.local_rows, border_dq[plan.border_rows])
        work.wait()
        # A token may be in the halos of several ranks, so ``sent`` may name it more than once.
        dk.index_add_(0, plan.sent, returned[:, 0])
        dv.index_add_(0, plan.sent, returned[:, 1])
        return dq, dk, dv, dsinks, None, None, None


def _border_backward(
    border: list[Tensor],
    sinks: Tensor,
    grad_o: Tensor,
    plan: HaloPlan,
    settings: AttentionSettings,
) -> tuple[Tensor, Tensor]:
    """Return the border's dQ, and dK and dV of the halo, [halo tokens, 2, kv_heads, head_size].

    The border's own keys get no gradient here: the pass over all spans gives it.
    """
    queries, keys, values, border_o, border_lse = border

    # no gradient comes in through the halo's stand-in rows, so nothing goes out through them
    border_grad = torch.zeros_like(border_o)
    border_grad.index_copy_(0, plan.border_rows, grad_o[plan.local_rows])

    saved = (queries, keys, values, sinks, border_o, border_lse)
    dq, dk, dv, _ = attention_backward(saved, border_grad, plan.border, settings)
    return dq, torch.stack((dk[plan.halo], dv[plan.halo]), dim=1)


def _cached_plan(layout: ContextLayout, rank: int, window: int, device: torch.device) -> HaloPlan:
    key = ("halo", rank, window, device)
    return layout.cached(key, lambda: _plan(layout, rank, window, device))


def _plan(layout: ContextLayout, rank: int, window: int, device: torch.device) -> HaloPlan:
    share = layout.tokens_per_rank
    lengths = [span.tokens for span in layout.spans[rank]]

    # What each rank needs, as places in `token_order`; place // share is the rank that holds it.
    # Every rank derives this from the layout alone: who needs what is never asked for.
    needed = [_halo_tokens(layout, other, window) for other in range(layout.size)]
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

    # The halo's tokens arrive by owner, and of each owner in the order of the spans.
    arrival_order = torch.argsort(owners, stable=True)
    border_sources = _concatenate(sources)
    border_rows = _concatenate(row_places)
    return HaloPlan(
        spans=Segments.from_lengths(lengths, lengths, device),
        border=Segments.from_lengths(border_lengths, border_lengths, device),
        border_sources=border_sources.to(device),
        border_rows=border_rows.to(device),
        local_rows=border_sources[border_rows].to(device),
        halo=_concatenate(halo_places)[arrival_order].to(device),
        sent=torch.cat(sent).to(device),
        send_counts=[len(tokens) for tokens in sent],
        receive_counts=torch.bincount(owners, minlength=layout.size).tolist(),
    )


def _halo_tokens(layout: ContextLayout, rank: int, window: int) -> Tensor:
    """Return where the halos of a rank's spans are in ``token_order``, int64, span after span."""
    halos = []
    for span in layout.spans[rank]:
        halo = span._replace(start=max(0, span.start - window + 1), end=span.start)
        if halo.tokens > 0:
            halos.append(inverse_order(layout)[row_indices(layout, halo)])
    return _concatenate(halos)


def _concatenate(indices: list[Tensor]) -> Tensor:
    """Concatenate int64 tensors, of which there may be none."""
    return torch.cat([torch.empty(0, dtype=torch.int64), *indices])


def _forked_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Return a second stream for small kernels that must not queue behind large ones.

    None on a CPU, where nothing waits. What is allocated within belongs to that stream; every
    later fork waits for the first stream, so nothing is reused too early.
    """
    if device.type != "cuda":
        return None

    stream = _second_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream


def _join(stream: torch.cuda.Stream | None) -> None:
    """Let the current stream wait for a forked one."""
    if stream is not None:
        torch.cuda.current_stream(stream.device).wait_stream(stream)


@functools.cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)
