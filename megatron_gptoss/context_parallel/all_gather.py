"""Full layers at any number of ranks: each fetches the keys and values before its tokens, a few kv heads at a time.

Only sequences that several ranks hold travel, while the kv heads before them are computed; dK and dV go home in fp32,
to be summed there in the order of the ranks."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from gptoss_kernels.sink_attention.passes import Segments, attention_backward, attention_forward
from megatron_gptoss.context_parallel.layout import ContextLayout

GATHERED_BYTES = 34 << 20
"""Keys and values that a rank gathers at a time: one kv head of 131,072 tokens in bf16."""


@dataclass(frozen=True)
class GatherPlan:
    """What one rank contributes and attends to."""

    contributed: int
    """Tokens that each rank sends, its first ones: the most that any rank shares."""
    shared: int
    """This rank's tokens of sequences that others hold too; its other tokens attend locally."""
    split: Segments
    """Per run of those: its tokens, and all tokens of the sequence up to its end."""
    keys: Tensor
    """int64: where these stand among the gathered tokens."""
    whole: Segments
    """The sequences that this rank holds alone."""


def _plan(layout: ContextLayout, rank: int, device: torch.device) -> GatherPlan:
    share, contributed, shared = layout.tokens_per_rank, max(layout.shared), layout.shared[rank]
    whole = [run for run in layout.runs[rank] if layout.is_whole(run)]
    split = [run for run in layout.runs[rank] if not layout.is_whole(run)]
    places = [layout.inverse[layout.row_indices(run._replace(start=0))] for run in split]
    keys = torch.cat([*places, torch.empty(0, dtype=torch.int64)])
    lengths = [run.end for run in whole]
    return GatherPlan(
        contributed=contributed,
        shared=shared,
        split=Segments.of([run.end - run.start for run in split], [run.end for run in split], device),
        keys=(keys // share * contributed + keys % share).to(device),
        whole=Segments.of(lengths, lengths, device),
    )


def head_groups(tokens: int, kv_heads: int, bytes_per_token_and_head: int) -> list[slice]:
    """Which kv heads are gathered together: at least two groups, so that there is something to overlap with."""
    most = max(1, GATHERED_BYTES // max(1, tokens * bytes_per_token_and_head))
    width = max(d for d in range(1, kv_heads + 1) if kv_heads % d == 0 and (d == 1 or d <= min(most, kv_heads // 2)))
    return [slice(i, i + width) for i in range(0, kv_heads, width)]


class _Gathered:
    """Keys and values of one group of kv heads on their way from all ranks."""

    def __init__(self, k: Tensor, v: Tensor, heads: slice, plan: GatherPlan, group: Any) -> None:
        local = torch.stack((k[: plan.contributed, heads], v[: plan.contributed, heads]), dim=1)
        self.everyone = local.new_empty(group.size() * len(local), *local.shape[1:])
        self.work = dist.all_gather_into_tensor(self.everyone, local, group=group, async_op=True)
        self.keys = plan.keys

    def wait(self) -> tuple[Tensor, Tensor]:
        """[keys, group's kv heads, head_size] each, in the order of ``plan.split``."""
        self.work.wait()
        picked_k, picked_v = (self.everyone[:, i].index_select(0, self.keys) for i in (0, 1))
        del self.everyone
        return picked_k, picked_v


class AllGatherAttention(torch.autograd.Function):
    """Full causal attention of this rank's tokens: O like q. ``settings``: window (None), scale and backend."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, layout: ContextLayout, group: Any, *settings: Any
    ) -> Tensor:
        where = layout, group.rank(), q.device
        plan = layout.cached(("gather", *where[1:]), lambda: _plan(*where))
        o = torch.empty_like(q)
        lse = q.new_empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))
        groups = _groups(q, k, plan, group)
        coming = _Gathered(k, v, groups[0][0], plan, group) if groups else None
        if plan.shared < len(q):
            own = slice(plan.shared, None)
            o[own], lse[own] = attention_forward(q[own], k[own], v[own], sinks, plan.whole, *settings)
        for i, (_, heads) in enumerate(groups):
            keys, values = coming.wait()  # type: ignore[union-attr]
            coming = _Gathered(k, v, groups[i + 1][0], plan, group) if i + 1 < len(groups) else None
            if plan.shared:
                part = slice(0, plan.shared), heads
                o[part], lse[part] = attention_forward(q[part], keys, values, sinks[heads], plan.split, *settings)
        ctx.save_for_backward(q, k, v, sinks, o, lse)
        ctx.arguments = plan, group, settings
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_o: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, o, lse = ctx.saved_tensors
        plan, group, settings = ctx.arguments
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        dsinks = torch.zeros_like(sinks, dtype=lse.dtype)
        groups = _groups(q, k, plan, group)
        coming = _Gathered(k, v, groups[0][0], plan, group) if groups else None
        if plan.shared < len(q):
            own = slice(plan.shared, None)
            saved = q[own], k[own], v[own], sinks, o[own], lse[own]
            grads = attention_backward(saved, grad_o[own], plan.whole, *settings)
            dq[own], dk[own], dv[own] = grads[:3]
            dsinks += grads[3]
        leaving: tuple[Any, Tensor, slice] | None = None
        for i, (kv_heads, heads) in enumerate(groups):
            keys, values = coming.wait()  # type: ignore[union-attr]
            coming = _Gathered(k, v, groups[i + 1][0], plan, group) if i + 1 < len(groups) else None
            home = torch.zeros(group.size() * plan.contributed, 2, *keys.shape[1:], dtype=lse.dtype, device=q.device)
            if plan.shared:
                part = slice(0, plan.shared), heads
                saved = q[part], keys, values, sinks[heads], o[part], lse[part]
                grads = attention_backward(saved, grad_o[part], plan.split, *settings)
                dq[part] = grads[0]
                # at most two runs of a rank see a key: the sum does not depend on the order
                home.index_add_(0, plan.keys, torch.stack(grads[1:3], dim=1).to(home.dtype))
                dsinks[heads] += grads[3]
                del saved
            del keys, values
            if leaving is not None:
                _arrive(*leaving, dk, dv, plan)
            received = torch.empty_like(home)
            leaving = dist.all_to_all_single(received, home, group=group, async_op=True), received, kv_heads
        if leaving is not None:
            _arrive(*leaving, dk, dv, plan)
        return dq, dk, dv, dsinks.to(sinks.dtype), None, None, None, None, None


def _groups(q: Tensor, k: Tensor, plan: GatherPlan, group: Any) -> list[tuple[slice, slice]]:
    """The groups of kv heads and the query heads that go with each; none when no sequence is shared."""
    if not plan.contributed:
        return []
    per_kv = q.shape[1] // k.shape[1]
    row_bytes = 2 * k.shape[2] * k.element_size()
    found = head_groups(group.size() * plan.contributed, k.shape[1], row_bytes)
    return [(heads, slice(heads.start * per_kv, heads.stop * per_kv)) for heads in found]


def _arrive(work: Any, received: Tensor, heads: slice, dk: Tensor, dv: Tensor, plan: GatherPlan) -> None:
    """Add up what all ranks computed for this rank's keys and values."""
    work.wait()
    total = received.view(-1, plan.contributed, *received.shape[1:]).sum(0)[: plan.shared]
    dk[: plan.shared, heads], dv[: plan.shared, heads] = total[:, 0], total[:, 1]
