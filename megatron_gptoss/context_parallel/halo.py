"""Window layers: a rank fetches only the window - 1 tokens before each of its runs, however long the runs are.

docs/architecture.md describes the passes. The sink enters every row's softmax once, and its gradient comes from the one
backward pass over all rows."""

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from gptoss_kernels.sink_attention.passes import Segments, attention_backward, attention_forward
from megatron_gptoss.context_parallel.layout import ContextLayout


@dataclass(frozen=True)
class HaloPlan:
    """What one rank sends, receives and recomputes. All index tensors are int64 on the device."""

    runs: Segments
    """Every run by itself."""
    border: Segments
    """Per run with a halo: the halo and the run's first window - 1 rows."""
    border_rows: Tensor
    """Which local tokens the border's tokens are; token 0 stands in where the halo's go."""
    inside: Tensor
    """Which of the border's tokens are rows of a run."""
    rows: Tensor
    """The local tokens that these are."""
    halo: Tensor
    """Which of the border's tokens each received token is."""
    sent: Tensor
    """The local tokens that other ranks' halos consist of, by receiving rank."""
    send_counts: list[int]
    receive_counts: list[int]


def _halo_tokens(layout: ContextLayout, rank: int, window: int) -> list[Tensor]:
    """Per run of a rank that has one: where its halo's tokens stand in ``layout.order``."""
    return [
        layout.inverse[layout.row_indices(run._replace(start=max(0, run.start - window + 1), end=run.start))]
        for run in layout.runs[rank]
        if run.start > 0 and window > 1
    ]


def _plan(layout: ContextLayout, rank: int, window: int, device: torch.device) -> HaloPlan:
    share, size = layout.tokens_per_rank, layout.size
    lengths = [run.end - run.start for run in layout.runs[rank]]
    empty = [torch.empty(0, dtype=torch.int64)]
    wanted = [torch.cat(_halo_tokens(layout, r, window) or empty) for r in range(size)]
    sent = [tokens[tokens // share == rank] - rank * share for tokens in wanted]
    mine = wanted[rank]
    rows, places, inside = list(empty), list(empty), list(empty)
    border: list[int] = []
    first = 0
    for run, length in zip(layout.runs[rank], lengths, strict=True):
        halo, redone = min(run.start, window - 1), min(length, window - 1)
        if halo:
            rows += [torch.zeros(halo, dtype=torch.int64), torch.arange(first, first + redone)]
            places.append(torch.arange(halo) + sum(border))
            inside.append(torch.arange(redone) + sum(border) + halo)
            border.append(halo + redone)
        first += length
    row_index, inside_index = torch.cat(rows), torch.cat(inside)
    return HaloPlan(
        runs=Segments.of(lengths, lengths, device),
        border=Segments.of(border, border, device),
        border_rows=row_index.to(device),
        inside=inside_index.to(device),
        rows=row_index[inside_index].to(device),
        halo=torch.cat(places)[torch.argsort(mine // share, stable=True)].to(device),  # they arrive by owner
        sent=torch.cat(sent).to(device),
        send_counts=[len(tokens) for tokens in sent],
        receive_counts=torch.bincount(mine // share, minlength=size).tolist(),
    )


def _forked_stream(device: torch.device) -> torch.cuda.Stream | None:
    """A second stream for small kernels that must not queue behind large ones; None on a CPU, where nothing waits.

    What is allocated within belongs to that stream; every later fork waits for the first stream, so nothing is reused
    too early."""
    if device.type != "cuda":
        return None
    stream = _second_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream


def _join(stream: torch.cuda.Stream | None) -> None:
    if stream is not None:
        torch.cuda.current_stream(stream.device).wait_stream(stream)


@functools.cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)


class HaloAttention(torch.autograd.Function):
    """Sliding-window attention of this rank's tokens: O like q. ``settings``: window, scale and backend."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, layout: ContextLayout, group: Any, *settings: Any
    ) -> Tensor:
        where = layout, group.rank(), settings[0], q.device
        plan = layout.cached(("halo", *where[1:]), lambda: _plan(*where))
        received = q.new_empty(len(plan.halo), 2, *k.shape[1:])
        sent = torch.stack((k[plan.sent], v[plan.sent]), dim=1)
        work = dist.all_to_all_single(received, sent, plan.receive_counts, plan.send_counts, group=group, async_op=True)
        border: tuple[Tensor, ...] = ()
        beside = _forked_stream(q.device)
        o, lse = attention_forward(q, k, v, sinks, plan.runs, *settings)
        with torch.cuda.stream(beside):
            work.wait()
            if len(plan.rows):
                queries, keys, values = (x.index_select(0, plan.border_rows) for x in (q, k, v))
                keys.index_copy_(0, plan.halo, received[:, 0])
                values.index_copy_(0, plan.halo, received[:, 1])
                border_o, border_lse = attention_forward(queries, keys, values, sinks, plan.border, *settings)
                border = queries, keys, values, border_o, border_lse
        _join(beside)
        if border:
            o.index_copy_(0, plan.rows, border_o[plan.inside])
            lse.index_copy_(0, plan.rows, border_lse[plan.inside])
        ctx.save_for_backward(q, k, v, sinks, o, lse, *border)
        ctx.arguments = plan, group, settings
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_o: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, o, lse, *border = ctx.saved_tensors
        plan, group, settings = ctx.arguments
        grad_o = grad_o.contiguous()
        returned = q.new_empty(len(plan.sent), 2, *k.shape[1:])
        border_dq = None
        beside = _forked_stream(q.device)
        with torch.cuda.stream(beside):
            home = q.new_empty(0, 2, *k.shape[1:])
            if border:
                queries, keys, values, border_o, border_lse = border
                saved = queries, keys, values, sinks, border_o, border_lse
                # no gradient comes in through the halo's stand-in rows, so nothing goes out through them
                border_grad = torch.zeros_like(border_o).index_copy_(0, plan.inside, grad_o[plan.rows])
                border_dq, *halo_grads, _ = attention_backward(saved, border_grad, plan.border, *settings)
                home = torch.stack([x[plan.halo] for x in halo_grads], dim=1)
            work = dist.all_to_all_single(
                returned, home, plan.send_counts, plan.receive_counts, group=group, async_op=True
            )
        dq, dk, dv, dsinks = attention_backward((q, k, v, sinks, o, lse), grad_o, plan.runs, *settings)
        _join(beside)
        if border_dq is not None:
            dq.index_copy_(0, plan.rows, border_dq[plan.inside])
        work.wait()
        dk.index_add_(0, plan.sent, returned[:, 0])
        dv.index_add_(0, plan.sent, returned[:, 1])
        return dq, dk, dv, dsinks, None, None, None, None, None
