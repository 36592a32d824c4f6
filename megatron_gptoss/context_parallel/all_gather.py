"""All-gather scheme for full-attention layers: a rank fetches the keys and values of other ranks.

It works for any number of ranks. A few kv heads are gathered at a time while the previous ones are
computed. Only sequences that are split over ranks are sent. dK and dV return to their owner in
fp32, and the owner sums them in the order of the ranks.

Segments of sequences that share prefixes are computed like spans of split sequences: their queries
are the end of a longer range of keys. This also holds for one rank, which sends no messages.
"""

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
from megatron_gptoss.context_parallel.exchange import start_all_gather, start_all_to_all
from megatron_gptoss.context_parallel.head_groups import copied_head_groups, head_groups
from megatron_gptoss.context_parallel.key_gradients import add_in_order
from megatron_gptoss.context_parallel.layout import ContextLayout
from megatron_gptoss.context_parallel.token_order import inverse_order, row_indices


@dataclass(frozen=True)
class KeyGatherPlan:
    """Tokens that one rank sends, and tokens that it attends to."""

    contributed: int
    """Number of tokens that every rank sends, from its first token on.

    It is the maximum of ``shared`` over all ranks, because messages must have equal sizes.
    """
    shared: int
    """Number of this rank's tokens in spans that are not whole. Its other tokens attend locally."""
    split: AttentionSegments
    """Segments of the spans that are not whole.

    Queries are the tokens of a span. Keys are all tokens of the sequence up to the span's end.
    """
    keys: Tensor
    """[keys of all spans] int64: index of each key among the gathered tokens."""
    shares_prefixes: bool
    """True if any number of spans sees a key. Otherwise at most two spans see it."""
    widest_gather: int
    """Number of tokens for which a gather is sized: all gathered tokens, or all keys if these are
    more because sequences share prefixes."""
    whole: AttentionSegments
    """Segments of the sequences that only this rank holds."""


@dataclass(frozen=True)
class HeadGroup:
    """Heads that are gathered and computed together."""

    kv_heads: slice
    """Key and value heads of the group."""
    heads: slice
    """Query heads that use these kv heads."""


class AllGatherAttention(torch.autograd.Function):
    """Full causal attention of this rank's tokens, differentiable in q, k, v and sinks."""

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
            settings: window (None), scale and backend.
        """
        plan = _cached_plan(layout, group.rank(), q.device)
        o = torch.empty_like(q)
        # [tokens, heads]
        lse = q.new_empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))

        # The first gather overlaps with attention over this rank's own sequences.
        gathering = _GatheredHeads(q, k, v, plan, group)
        if plan.shared < len(q):
            unshared = slice(plan.shared, None)
            o[unshared], lse[unshared] = attention_forward(
                q[unshared], k[unshared], v[unshared], sinks, plan.whole, settings
            )

        for head_group, keys, values in gathering:
            # Gathers are collective, so a rank without split sequences takes part, too.
            if plan.shared == 0:
                continue
            heads = head_group.heads
            # The first tokens of a rank are those in split sequences. q[rows] is [shared tokens,
            # heads of the group, head_size]. Keys and values are [keys of all spans, kv heads of
            # the group, head_size].
            rows = (slice(0, plan.shared), heads)
            o[rows], lse[rows] = attention_forward(
                q[rows], keys, values, sinks[heads], plan.split, settings
            )

        ctx.save_for_backward(q, k, v, sinks, o, lse)
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
        q, k, v, sinks, o, lse = ctx.saved_tensors
        plan: KeyGatherPlan = ctx.plan
        group: ProcessGroup = ctx.group
        settings: AttentionSettings = ctx.settings

        dq = torch.empty_like(q)
        dk = torch.empty_like(k)
        dv = torch.empty_like(v)
        dsinks = torch.zeros_like(sinks, dtype=lse.dtype)

        # Gather the keys and values again: keeping them would cost the memory that context
        # parallelism saves.
        gathering = _GatheredHeads(q, k, v, plan, group)
        if plan.shared < len(q):
            unshared = slice(plan.shared, None)
            saved = (q[unshared], k[unshared], v[unshared], sinks, o[unshared], lse[unshared])
            dq[unshared], dk[unshared], dv[unshared], own_dsinks = attention_backward(
                saved, grad_o[unshared], plan.whole, settings
            )
            dsinks += own_dsinks

        returning: _GradientExchange | None = None
        for head_group, keys, values in gathering:
            gathered_shape = (group.size() * plan.contributed, 2, *keys.shape[1:])
            # dK and dV of all gathered keys, 0 for keys that no query of this rank sees. The full
            # size keeps all messages equal. The owner of the keys sums over ranks.
            partial = torch.zeros(gathered_shape, dtype=lse.dtype, device=q.device)
            if plan.shared:
                heads = head_group.heads
                rows = (slice(0, plan.shared), heads)
                saved = (q[rows], keys, values, sinks[heads], o[rows], lse[rows])
                dq[rows], dkeys, dvalues, group_dsinks = attention_backward(
                    saved, grad_o[rows], plan.split, settings
                )
                both = torch.stack((dkeys, dvalues), dim=1)
                if plan.shares_prefixes:
                    add_in_order(partial, plan.keys, both)
                else:
                    partial.index_add_(0, plan.keys, both.to(partial.dtype))
                dsinks[heads] += group_dsinks
                del saved, dkeys, dvalues, both

            # Bound the memory: free the keys and finish the previous group before sending more.
            del keys, values
            if returning is not None:
                returning.accumulate(dk, dv, plan)
            returning = _GradientExchange(partial, head_group.kv_heads, group)
        if returning is not None:
            returning.accumulate(dk, dv, plan)

        return dq, dk, dv, dsinks.to(sinks.dtype), None, None, None


class _GatheredHeads:
    """Iterator over groups of kv heads with their keys and values, one gather ahead.

    Construction starts the first gather. Each step waits for a gather and starts the next one. The
    iterator keeps no reference to returned keys, so that the caller can free them.
    """

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, plan: KeyGatherPlan, group: ProcessGroup
    ) -> None:
        self.k = k
        self.v = v
        self.plan = plan
        self.group = group
        self.remaining = _build_head_groups(q, k, plan, group.size())
        self.pending = self._start_next()

    def __iter__(self) -> "_GatheredHeads":
        return self

    def __next__(self) -> tuple[HeadGroup, Tensor, Tensor]:
        """Return a group with its keys and values, [keys, kv heads of the group, head_size]."""
        if self.pending is None:
            raise StopIteration

        head_group, gather = self.pending
        keys, values = gather.wait()
        self.pending = self._start_next()
        return head_group, keys, values

    def _start_next(self) -> "tuple[HeadGroup, _Gather] | None":
        """Start the next gather; None if there are no more groups."""
        if not self.remaining:
            return None

        head_group = self.remaining.pop(0)
        return head_group, _Gather(self.k, self.v, head_group.kv_heads, self.plan, self.group)


class _Gather:
    """Asynchronous gather of the keys and values of a kv head group."""

    def __init__(
        self, k: Tensor, v: Tensor, heads: slice, plan: KeyGatherPlan, group: ProcessGroup
    ) -> None:
        """Start the gather of k and v [tokens, kv_heads, head_size] for ``heads``."""
        rows = slice(0, plan.contributed)
        self.keys = plan.keys
        self.local = (k[rows, heads], v[rows, heads])
        self.exchange = None
        if group.size() > 1:
            # The message is [contributed, 2, kv heads of the group, head_size]. A rank with fewer
            # shared tokens also sends other tokens, which are not used.
            self.exchange = start_all_gather(torch.stack(self.local, dim=1), group)

    def wait(self) -> tuple[Tensor, Tensor]:
        """Return keys and values, [keys of all spans, kv heads of the group, head_size]."""
        keys, values = self.local
        if self.exchange is not None:
            keys, values = self.exchange.wait().unbind(1)
            self.exchange = None
        # Reorder from ranks to the sequence of each span. A key appears once per span that sees it.
        return keys.index_select(0, self.keys), values.index_select(0, self.keys)


class _GradientExchange:
    """Asynchronous exchange of dK and dV of a kv head group."""

    def __init__(self, partial: Tensor, kv_heads: slice, group: ProcessGroup) -> None:
        """Send dK and dV [ranks * contributed, 2, kv heads, head_size] to the keys' owners."""
        counts = [len(partial) // group.size()] * group.size()
        self.exchange = start_all_to_all(partial, counts, counts, group)
        self.kv_heads = kv_heads

    def accumulate(self, dk: Tensor, dv: Tensor, plan: KeyGatherPlan) -> None:
        """Sum the gradients of all ranks for this rank's keys.

        Args:
            dk: [tokens, kv_heads, head_size] of this rank. Receives the sum.
            dv: [tokens, kv_heads, head_size] of this rank. Receives the sum.
            plan: plan of this rank.
        """
        received = self.exchange.wait()
        # [ranks, contributed, 2, kv heads, head_size]. The order of the sum over ranks is fixed, so
        # two runs give the same bits.
        by_rank = received.view(-1, plan.contributed, *received.shape[1:])
        total = by_rank.sum(0)[: plan.shared]
        dk[: plan.shared, self.kv_heads] = total[:, 0]
        dv[: plan.shared, self.kv_heads] = total[:, 1]


def _build_head_groups(q: Tensor, k: Tensor, plan: KeyGatherPlan, ranks: int) -> list[HeadGroup]:
    """Return the groups of heads in order. There are none if all spans are whole."""
    if plan.contributed == 0:
        return []

    kv_heads, head_size = k.shape[1:]
    heads_per_kv = q.shape[1] // kv_heads
    bytes_per_token_and_head = 2 * head_size * k.element_size()
    groups = head_groups if ranks > 1 else copied_head_groups
    slices = groups(plan.widest_gather, kv_heads, bytes_per_token_and_head)
    return [
        HeadGroup(kv_heads=kv, heads=slice(kv.start * heads_per_kv, kv.stop * heads_per_kv))
        for kv in slices
    ]


def _cached_plan(layout: ContextLayout, rank: int, device: torch.device) -> KeyGatherPlan:
    """Return the plan of a rank, computed once per row and shared by all layers."""
    return layout.cached(("gather", rank, device), lambda: _plan(layout, rank, device))


def _plan(layout: ContextLayout, rank: int, device: torch.device) -> KeyGatherPlan:
    """Compute the plan of a rank."""
    contributed = max(layout.shared)
    whole = [span for span in layout.spans[rank] if layout.is_whole(span)]
    split = [span for span in layout.spans[rank] if not layout.is_whole(span)]

    # First the index of each key in `token_order`, with `tokens_per_rank` tokens per rank. Then its
    # index among the gathered tokens, with `contributed` tokens per rank.
    places = [inverse_order(layout)[row_indices(layout, span._replace(start=0))] for span in split]
    keys = torch.cat([*places, torch.empty(0, dtype=torch.int64)])
    owner = keys // layout.tokens_per_rank
    local = keys % layout.tokens_per_rank
    gathered_keys = owner * contributed + local

    gathered = layout.size * contributed
    if layout.shares_prefixes:
        # The same on all ranks, because each gather is collective.
        gathered = max(gathered, *(_key_count(layout, other) for other in range(layout.size)))

    whole_lengths = [span.tokens for span in whole]
    return KeyGatherPlan(
        contributed=contributed,
        shared=layout.shared[rank],
        split=AttentionSegments.from_lengths(
            query_lengths=[span.tokens for span in split],
            key_lengths=[span.end for span in split],
            device=device,
        ),
        keys=copy_to_device(gathered_keys, device),
        shares_prefixes=layout.shares_prefixes,
        widest_gather=gathered,
        whole=AttentionSegments.from_lengths(whole_lengths, whole_lengths, device),
    )


def _key_count(layout: ContextLayout, rank: int) -> int:
    """Return the number of keys that a rank reads for its spans that are not whole."""
    return sum(span.end for span in layout.spans[rank] if not layout.is_whole(span))
