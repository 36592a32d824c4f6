"""Full layers at any number of ranks: each fetches the keys and values before its tokens.

A few kv heads are gathered at a time, while the ones before them are computed. Only sequences that
several ranks hold travel. dK and dV go home in fp32, to be summed there in the order of the ranks.
"""

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
from megatron_gptoss.context_parallel.head_groups import head_groups
from megatron_gptoss.context_parallel.layout import ContextLayout
from megatron_gptoss.context_parallel.token_order import inverse_order, row_indices


@dataclass(frozen=True)
class GatherPlan:
    """What one rank contributes and attends to."""

    contributed: int
    """Tokens that each rank sends, its first ones: the most that any rank shares."""
    shared: int
    """This rank's tokens of sequences that others hold too; its other tokens attend locally."""
    split: Segments
    """Per span of those: its tokens, and all tokens of the sequence up to its end."""
    keys: Tensor
    """int64: where these are among the gathered tokens."""
    whole: Segments
    """The sequences that this rank holds alone."""


@dataclass(frozen=True)
class HeadGroup:
    """Heads that are gathered and computed together."""

    kv_heads: slice
    heads: slice
    """The query heads that share these kv heads."""


class AllGatherAttention(torch.autograd.Function):
    """Computes full causal attention of this rank's tokens: O like q."""

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
        plan = _cached_plan(layout, group.rank(), q.device)
        o = torch.empty_like(q)
        # [tokens, heads]
        lse = q.new_empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))

        # The first keys and values are under way while this rank's own sequences are computed.
        gathering = _GatheredHeads(q, k, v, plan, group)
        if plan.shared < len(q):
            own = slice(plan.shared, None)
            o[own], lse[own] = attention_forward(
                q[own], k[own], v[own], sinks, plan.whole, settings
            )

        for head_group, keys, values in gathering:
            # A rank that shares nothing still takes part in the gathers.
            if plan.shared == 0:
                continue
            heads = head_group.heads
            # A rank's shared tokens are its first ones. q[rows] is [shared tokens, heads of the
            # group, head_size]; keys and values are [keys of all its spans, kv heads of the group,
            # head_size].
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
        q, k, v, sinks, o, lse = ctx.saved_tensors
        plan: GatherPlan = ctx.plan
        group: ProcessGroup = ctx.group
        settings: AttentionSettings = ctx.settings

        dq = torch.empty_like(q)
        dk = torch.empty_like(k)
        dv = torch.empty_like(v)
        dsinks = torch.zeros_like(sinks, dtype=lse.dtype)

        gathering = _GatheredHeads(q, k, v, plan, group)
        if plan.shared < len(q):
            own = slice(plan.shared, None)
            saved = (q[own], k[own], v[own], sinks, o[own], lse[own])
            dq[own], dk[own], dv[own], own_dsinks = attention_backward(
                saved, grad_o[own], plan.whole, settings
            )
            dsinks += own_dsinks

        returning: _ReturningGradients | None = None
        for head_group, keys, values in gathering:
            gathered_shape = (group.size() * plan.contributed, 2, *keys.shape[1:])
            # dK and dV of all gathered keys, 0 where no query of this rank sees them; what the
            # ranks send must have the same size, and the sum over ranks is taken where it arrives.
            partial = torch.zeros(gathered_shape, dtype=lse.dtype, device=q.device)
            if plan.shared:
                heads = head_group.heads
                rows = (slice(0, plan.shared), heads)
                saved = (q[rows], keys, values, sinks[heads], o[rows], lse[rows])
                dq[rows], dkeys, dvalues, group_dsinks = attention_backward(
                    saved, grad_o[rows], plan.split, settings
                )
                # at most two spans of a rank see a key: the sum does not depend on the order
                both = torch.stack((dkeys, dvalues), dim=1).to(partial.dtype)
                partial.index_add_(0, plan.keys, both)
                dsinks[heads] += group_dsinks
                del saved, dkeys, dvalues, both

            # Before more is sent, free the keys and take in the gradients of the group before.
            del keys, values
            if returning is not None:
                returning.add_up(dk, dv, plan)
            returning = _ReturningGradients(partial, head_group.kv_heads, group)
        if returning is not None:
            returning.add_up(dk, dv, plan)

        return dq, dk, dv, dsinks.to(sinks.dtype), None, None, None


class _GatheredHeads:
    """Iterates over the groups of kv heads with their keys and values, one gather ahead.

    Creating it starts the first gather; asking for a group waits for it and starts the next one.
    It holds no keys that it has given out, so that the caller can free them.
    """

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, plan: GatherPlan, group: ProcessGroup
    ) -> None:
        self.k = k
        self.v = v
        self.plan = plan
        self.group = group
        self.remaining = _head_groups_of(q, k, plan, group)
        self.pending = self._start_next()

    def __iter__(self) -> "_GatheredHeads":
        return self

    def __next__(self) -> tuple[HeadGroup, Tensor, Tensor]:
        """Return a group, its keys and its values, [keys, kv heads, head_size] as plan.split."""
        if self.pending is None:
            raise StopIteration

        head_group, gather = self.pending
        keys, values = gather.wait()
        self.pending = self._start_next()
        return head_group, keys, values

    def _start_next(self) -> "tuple[HeadGroup, _Gather] | None":
        if not self.remaining:
            return None

        head_group = self.remaining.pop(0)
        return head_group, _Gather(self.k, self.v, head_group.kv_heads, self.plan, self.group)


class _Gather:
    """Keys and values of one group of kv heads on their way from all ranks."""

    def __init__(
        self, k: Tensor, v: Tensor, heads: slice, plan: GatherPlan, group: ProcessGroup
    ) -> None:
        rows = slice(0, plan.contributed)
        # [contributed, 2, kv heads of the group, head_size] of this rank, then of all ranks below
        # one another. A rank that shares less than ``contributed`` sends other tokens of its own
        # besides, which nobody reads.
        local = torch.stack((k[rows, heads], v[rows, heads]), dim=1)
        self.everyone = local.new_empty(group.size() * len(local), *local.shape[1:])
        self.work = dist.all_gather_into_tensor(self.everyone, local, group=group, async_op=True)
        self.keys = plan.keys

    def wait(self) -> tuple[Tensor, Tensor]:
        """Return keys and values, [keys, group's kv heads, head_size] as in ``plan.split``."""
        self.work.wait()
        # From the order of the ranks to that of each span's sequence; a key is there once per span
        # that sees it.
        keys = self.everyone[:, 0].index_select(0, self.keys)
        values = self.everyone[:, 1].index_select(0, self.keys)
        del self.everyone
        return keys, values


class _ReturningGradients:
    """Gradients of one group of kv heads on their way to the ranks whose keys they are."""

    def __init__(self, partial: Tensor, kv_heads: slice, group: ProcessGroup) -> None:
        """Send dK and dV, [ranks * contributed, 2, kv heads, head_size], to the keys' owners."""
        self.received = torch.empty_like(partial)
        self.kv_heads = kv_heads
        self.work = dist.all_to_all_single(self.received, partial, group=group, async_op=True)

    def add_up(self, dk: Tensor, dv: Tensor, plan: GatherPlan) -> None:
        """Add up what all ranks computed for this rank's keys, in the order of the ranks."""
        self.work.wait()
        # [ranks, contributed, 2, kv heads, head_size]; summed over the first in a fixed order, so
        # that two runs give the same bits.
        by_rank = self.received.view(-1, plan.contributed, *self.received.shape[1:])
        total = by_rank.sum(0)[: plan.shared]
        dk[: plan.shared, self.kv_heads] = total[:, 0]
        dv[: plan.shared, self.kv_heads] = total[:, 1]


def _head_groups_of(q: Tensor, k: Tensor, plan: GatherPlan, group: ProcessGroup) -> list[HeadGroup]:
    """Return the groups of heads in order; none when no sequence is shared."""
    if plan.contributed == 0:
        return []

    kv_heads, head_size = k.shape[1:]
    heads_per_kv = q.shape[1] // kv_heads
    bytes_per_token_and_head = 2 * head_size * k.element_size()
    slices = head_groups(group.size() * plan.contributed, kv_heads, bytes_per_token_and_head)
    return [
        HeadGroup(kv_heads=kv, heads=slice(kv.start * heads_per_kv, kv.stop * heads_per_kv))
        for kv in slices
    ]


def _cached_plan(layout: ContextLayout, rank: int, device: torch.device) -> GatherPlan:
    return layout.cached(("gather", rank, device), lambda: _plan(layout, rank, device))


def _plan(layout: ContextLayout, rank: int, device: torch.device) -> GatherPlan:
    contributed = max(layout.shared)
    whole = [span for span in layout.spans[rank] if layout.is_whole(span)]
    split = [span for span in layout.spans[rank] if not layout.is_whole(span)]

    # Where the keys of each split span are: in `token_order`, and from there among the gathered tokens,
    # of which each rank's first are `contributed` apart and not `tokens_per_rank`.
    places = [inverse_order(layout)[row_indices(layout, span._replace(start=0))] for span in split]
    keys = torch.cat([*places, torch.empty(0, dtype=torch.int64)])
    owner = keys // layout.tokens_per_rank
    local = keys % layout.tokens_per_rank
    gathered_keys = owner * contributed + local

    whole_lengths = [span.tokens for span in whole]
    return GatherPlan(
        contributed=contributed,
        shared=layout.shared[rank],
        split=Segments.from_lengths(
            query_lengths=[span.tokens for span in split],
            key_lengths=[span.end for span in split],
            device=device,
        ),
        keys=gathered_keys.to(device),
        whole=Segments.from_lengths(whole_lengths, whole_lengths, device),
    )
