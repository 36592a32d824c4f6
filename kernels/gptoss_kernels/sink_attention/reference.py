"""Attention with sinks in plain torch: any device, any floating dtype, forward and analytic backward.

For head h with sink logit s, over the allowed keys j of query i::

    LSE_i   = log(sum_j exp(S_ij) + exp(s))        P_ij = exp(S_ij - LSE_i)        O_i = sum_j P_ij V_j
    delta_i = dO_i . O_i                           dS_ij = P_ij (dO_i . V_j - delta_i)
    ds      = -sum_i exp(s - LSE_i) delta_i

The sink takes probability and carries no value, so the usual backward holds with the sink-aware LSE and O.

Sequences are cut into tiles of QUERY_BLOCK rows. Tiles that see the same number of keys are computed together as one
batched product, so a pack of many short sequences costs a handful of calls; keys are visited in chunks with an online
softmax, so memory stays bounded however long a sequence is."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gptoss_kernels.sink_attention.layout import PackedLayout, Saved

QUERY_BLOCK = 32
"""Rows of a tile."""
KEY_CHUNK = 4096
"""Most keys of one product; longer rows use the online softmax."""
SCORES_PER_BATCH = 1 << 20
"""Most scores held at once (4 MB in fp32), unless one tile with one chunk of keys already has more."""


@dataclass
class TileBatch:
    """Tiles of equal extent. Index tensors point into the packed tokens; clamped entries are masked."""

    rows: Tensor
    """[tiles, QUERY_BLOCK] int64"""
    row_valid: Tensor | None
    """[tiles, QUERY_BLOCK] bool, None when every row is real"""
    chunks: list[tuple[Tensor, Tensor]]
    """per chunk of keys: [tiles, keys] int64, and [tiles, QUERY_BLOCK, keys] bool that is True where hidden"""


def reference_forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, layout: PackedLayout, window: int | None, scale: float
) -> tuple[Tensor, Tensor]:
    """O like q [tokens, heads, head_size], and LSE [tokens, heads]; accumulates in fp32, in fp64 for fp64 inputs."""
    compute = torch.promote_types(q.dtype, torch.float32)
    tokens, heads, head_size = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    o = torch.empty_like(q)
    lse = torch.empty(tokens, heads, dtype=compute, device=q.device)
    sink = sinks.to(compute).view(1, kv_heads, group, 1, 1)
    for batch in _tile_batches(layout, window, heads, q.device):
        tiles = len(batch.rows)
        query = _gather(q, batch.rows, compute, kv_heads).mul_(scale)
        highest = sink.expand(tiles, kv_heads, group, QUERY_BLOCK, 1)
        total = torch.ones_like(highest)
        out: Any = None
        for columns, hidden in batch.chunks:
            scores = _scores(query, _gather(k, columns, compute, kv_heads), hidden, group)
            new = torch.maximum(highest, scores.amax(-1, keepdim=True))
            # a sink of -inf with no visible key in this chunk would give inf - inf
            new = new.clamp_min(torch.finfo(compute).min)
            decay = (highest - new).exp_()
            p = scores.sub_(new).exp_()
            total = total * decay + p.sum(-1, keepdim=True)
            part = p.view(tiles, kv_heads, group * QUERY_BLOCK, -1) @ _gather(v, columns, compute, kv_heads)
            out = part if out is None else out.mul_(decay.reshape(tiles, kv_heads, -1, 1)).add_(part)
            highest = new
        out = out.view(tiles, kv_heads, group, QUERY_BLOCK, head_size) / total
        _scatter(o, batch, out)
        _scatter(lse.unsqueeze(-1), batch, highest + total.log())
    return o, lse


def reference_backward(
    saved: Saved, grad_o: Tensor, layout: PackedLayout, window: int | None, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and the sinks, each in its input's dtype."""
    q, k, v, sinks, o, lse = saved
    compute = lse.dtype
    heads, head_size = q.shape[1:]
    kv_heads = k.shape[1]
    group = heads // kv_heads
    delta = torch.einsum("thd,thd->th", o.to(compute), grad_o.to(compute))
    grad_sinks = -(torch.exp(sinks.to(compute) - lse) * delta).sum(0)
    grad_q = torch.empty_like(q)
    grad_k = torch.zeros(k.shape, dtype=compute, device=k.device)
    grad_v = torch.zeros_like(grad_k)
    for batch in _tile_batches(layout, window, heads, q.device):
        tiles = len(batch.rows)
        query = _gather(q, batch.rows, compute, kv_heads).mul_(scale)
        row_lse = _gather(lse.unsqueeze(-1), batch.rows, compute, kv_heads).view(tiles, kv_heads, group, -1, 1)
        row_delta = _gather(delta.unsqueeze(-1), batch.rows, compute, kv_heads)
        grad_out = _gather(grad_o, batch.rows, compute, kv_heads)
        if batch.row_valid is not None:
            for rows in (row_delta, grad_out):
                rows.view(tiles, kv_heads, group, QUERY_BLOCK, -1).mul_(batch.row_valid[:, None, None, :, None])
        dq: Any = None
        for columns, hidden in batch.chunks:
            key = _gather(k, columns, compute, kv_heads)
            p = _scores(query, key, hidden, group).sub_(row_lse).exp_().view(tiles, kv_heads, group * QUERY_BLOCK, -1)
            flat = columns.reshape(-1)
            dv = p.transpose(-1, -2) @ grad_out
            grad_v.index_add_(0, flat, dv.transpose(1, 2).reshape(-1, kv_heads, head_size))
            ds = grad_out @ _gather(v, columns, compute, kv_heads).transpose(-1, -2)
            ds.sub_(row_delta).mul_(p)
            dk = ds.transpose(-1, -2) @ query
            grad_k.index_add_(0, flat, dk.transpose(1, 2).reshape(-1, kv_heads, head_size))
            part = ds @ key
            dq = part if dq is None else dq.add_(part)
        _scatter(grad_q, batch, dq.mul_(scale).view(tiles, kv_heads, group, QUERY_BLOCK, head_size))
    return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype), grad_sinks.to(sinks.dtype)


def _gather(x: Tensor, index: Tensor, dtype: torch.dtype, kv_heads: int) -> Tensor:
    """[tokens, heads, d] at [tiles, n] -> contiguous [tiles, kv_heads, heads per kv head * n, d]."""
    tiles, n = index.shape
    picked = x.index_select(0, index.reshape(-1)).view(tiles, n, kv_heads, -1, x.shape[-1])
    out = torch.empty(tiles, kv_heads, picked.shape[3], n, x.shape[-1], dtype=dtype, device=x.device)
    return out.copy_(picked.permute(0, 2, 3, 1, 4)).view(tiles, kv_heads, -1, x.shape[-1])


def _scores(query: Tensor, key: Tensor, hidden: Tensor, group: int) -> Tensor:
    """[tiles, kv_heads, group, QUERY_BLOCK, keys], -inf where hidden."""
    tiles, kv_heads = query.shape[:2]
    scores = (query @ key.transpose(-1, -2)).view(tiles, kv_heads, group, QUERY_BLOCK, -1)
    return scores.masked_fill_(hidden[:, None, None], -torch.inf)


def _scatter(target: Tensor, batch: TileBatch, values: Tensor) -> None:
    """target [tokens, heads, d] at the batch's valid rows = values [tiles, kv_heads, group, QUERY_BLOCK, d]."""
    rows = batch.rows.reshape(-1)
    values = values.permute(0, 3, 1, 2, 4).reshape(len(rows), target.shape[1], -1).to(target.dtype)
    if batch.row_valid is not None:
        keep = batch.row_valid.reshape(-1)
        rows, values = rows[keep], values[keep]
    target.index_copy_(0, rows, values)


def _tile_batches(layout: PackedLayout, window: int | None, heads: int, device: torch.device) -> Iterator[TileBatch]:
    """Cut the packing into tiles, group them by extent, yield batches of at most SCORES_PER_BATCH scores."""
    if window is not None and window >= layout.longest:
        window = None
    plan_key = ("reference", window)
    if plan_key not in layout.plans:
        layout.plans[plan_key] = _tile_plan(layout, window)
    starts, last, blocks = layout.plans[plan_key]
    step = torch.arange(QUERY_BLOCK)
    for extent in blocks.unique().tolist():
        members = (blocks == extent).nonzero().squeeze(1)
        keys = extent * QUERY_BLOCK
        per_batch = max(1, SCORES_PER_BATCH // (heads * QUERY_BLOCK * min(keys, KEY_CHUNK)))
        for tile in members.split(per_batch):
            rows = starts[tile, None] + step
            valid = rows < last[tile, None]
            top = starts[tile] + QUERY_BLOCK
            chunks = []
            for begin in range(0, keys, KEY_CHUNK):
                end = min(begin + KEY_CHUNK, keys)
                columns = (top - keys)[:, None] + torch.arange(begin, end)
                hidden = columns[:, None, :] > rows[:, :, None]
                if window is not None:
                    hidden |= columns[:, None, :] <= rows[:, :, None] - window
                chunks.append((columns.clamp_(0, layout.tokens - 1).to(device), hidden.to(device)))
            all_valid = bool(valid.all())
            yield TileBatch(
                rows.clamp_(max=layout.tokens - 1).to(device), None if all_valid else valid.to(device), chunks
            )


def _tile_plan(layout: PackedLayout, window: int | None) -> tuple[Tensor, ...]:
    """Per tile: first row, one-past-last token of its sequence, blocks of keys it sees (none before the sequence)."""
    start, end, number = layout.pieces(QUERY_BLOCK)
    blocks = number + 1
    if window is not None:
        blocks = blocks.clamp(max=(window - 1 + QUERY_BLOCK - 1) // QUERY_BLOCK + 1)
    return start + number * QUERY_BLOCK, end, blocks
