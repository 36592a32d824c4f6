"""Attention with sinks in plain torch for any device and dtype, with an analytic backward pass.

For head h with sink logit s, over the allowed keys j of query i::

    LSE_i   = log(sum_j exp(S_ij) + exp(s))   P_ij = exp(S_ij - LSE_i)   O_i = sum_j P_ij V_j
    delta_i = dO_i . O_i                      dS_ij = P_ij (dO_i . V_j - delta_i)
    ds      = -sum_i exp(s - LSE_i) delta_i

The sink takes probability and has no value. The backward pass of plain attention is therefore
correct if LSE and O include the sink.

Sequences are cut into tiles of QUERY_BLOCK rows. Tiles that see the same number of keys form one
batched matrix product, so a pack of many short sequences takes few calls. Keys are processed in
chunks with an online softmax (arXiv 1805.02867), so memory is bounded for any sequence length.

Dimensions: ``tiles``, ``kv_heads``, ``group`` (query heads per kv head), ``QUERY_BLOCK`` rows,
``keys`` of a chunk. A product stacks the rows of a group's heads: ``group * QUERY_BLOCK`` rows
that share their keys.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gptoss_kernels.sink_attention.autograd import Gradients, SavedTensors
from gptoss_kernels.sink_attention.layout import PackedLayout

QUERY_BLOCK = 32
"""Rows per tile."""
KEY_CHUNK = 4096
"""Maximum keys per product. More keys take several chunks and the online softmax."""
SCORES_PER_BATCH = 1 << 20
"""Maximum scores in memory: 4 MB in fp32. One tile with one chunk of keys may exceed it."""


@dataclass
class TileBatch:
    """Tiles that see the same number of keys, computed together.

    Indices refer to packed tokens. Indices outside of the pack are clamped and masked.
    """

    rows: Tensor
    """[tiles, QUERY_BLOCK] int64: token of each row."""
    row_valid: Tensor | None
    """[tiles, QUERY_BLOCK] bool: True for rows in their sequence. None if all rows are valid."""
    chunks: list[tuple[Tensor, Tensor]]
    """Chunks of keys as pairs.

    The first tensor is [tiles, keys] int64: the token of each key. The second is
    [tiles, QUERY_BLOCK, keys] bool: True if the row must not see the key.
    """


@dataclass
class TilePlan:
    """All tiles of a packing. Each field is [tiles] int64 on the CPU."""

    starts: Tensor
    """First row of the tile."""
    ends: Tensor
    """End of the tile's sequence. Later rows are not valid."""
    key_blocks: Tensor
    """Blocks of QUERY_BLOCK keys that the tile sees, including its own rows."""


def reference_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor,
    layout: PackedLayout,
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Compute attention with sinks, accumulated in fp32 (fp64 for fp64 inputs).

    Args:
        q: [tokens, heads, head_size].
        k: [tokens, kv_heads, head_size].
        v: [tokens, kv_heads, head_size].
        sinks: [heads] logits.
        layout: packing of the tokens.
        window: number of keys that a query sees, including its own; None for all earlier keys.
        scale: factor of the scores.

    Returns:
        O [tokens, heads, head_size] with the dtype of q, and LSE [tokens, heads] with the dtype of
        the accumulation.
    """
    compute = torch.promote_types(q.dtype, torch.float32)
    tokens, heads = q.shape[:2]
    kv_heads = k.shape[1]

    o = torch.empty_like(q)
    lse = torch.empty(tokens, heads, dtype=compute, device=q.device)
    sink = sinks.to(compute).view(1, kv_heads, heads // kv_heads, 1, 1)

    for batch in _tile_batches(layout, window, heads, q.device):
        # Scaling q once is less work than scaling the scores of every chunk.
        query = _gather(q, batch.rows, compute, kv_heads).mul_(scale)
        tile_o, tile_lse = _attend(query, k, v, sink, batch)
        _scatter(o, batch, tile_o)
        _scatter(lse.unsqueeze(-1), batch, tile_lse)
    return o, lse


def _attend(
    query: Tensor, k: Tensor, v: Tensor, sink: Tensor, batch: TileBatch
) -> tuple[Tensor, Tensor]:
    """Compute the online softmax of a batch of tiles over all of their chunks.

    Args:
        query: [tiles, kv_heads, group * QUERY_BLOCK, head_size], scaled.
        k: [tokens, kv_heads, head_size] of the whole pack.
        v: [tokens, kv_heads, head_size] of the whole pack.
        sink: [1, kv_heads, group, 1, 1] logits.
        batch: rows and chunks of the tiles.

    Returns:
        O [tiles, kv_heads, group, QUERY_BLOCK, head_size] and LSE
        [tiles, kv_heads, group, QUERY_BLOCK, 1], both with the dtype of ``query``.
    """
    compute = query.dtype
    tiles, kv_heads, _, head_size = query.shape
    group = sink.shape[2]

    # The sink acts as a key before the first chunk: `total` starts at exp(sink - highest) = 1.
    highest = sink.expand(tiles, kv_heads, group, QUERY_BLOCK, 1)
    total = torch.ones_like(highest)
    out: Any = None
    for columns, hidden in batch.chunks:
        scores = _scores(query, _gather(k, columns, compute, kv_heads), hidden, group)
        new_highest = torch.maximum(highest, scores.amax(-1, keepdim=True))
        # A sink of -inf and a chunk without a visible key would give -inf - -inf, which is NaN.
        new_highest = new_highest.clamp_min(torch.finfo(compute).min)

        # Online softmax: rescale the earlier chunks to the new maximum.
        decay = (highest - new_highest).exp_()
        p = scores.sub_(new_highest).exp_()
        total = total * decay + p.sum(-1, keepdim=True)

        value = _gather(v, columns, compute, kv_heads)
        chunk_out = p.view(tiles, kv_heads, group * QUERY_BLOCK, -1) @ value
        # Sequences of up to KEY_CHUNK tokens have a single chunk, which needs no addition.
        if out is not None:
            chunk_out = out.mul_(decay.reshape(tiles, kv_heads, -1, 1)).add_(chunk_out)
        out = chunk_out
        highest = new_highest

    out = out.view(tiles, kv_heads, group, QUERY_BLOCK, head_size) / total
    return out, highest + total.log()


def reference_backward(
    saved: SavedTensors, grad_o: Tensor, layout: PackedLayout, window: int | None, scale: float
) -> Gradients:
    """Compute the gradients of q, k, v and the sinks by the formulas at the top of this file.

    Args:
        saved: q [tokens, heads, head_size], k and v [tokens, kv_heads, head_size], sinks [heads],
            O [tokens, heads, head_size] and LSE [tokens, heads].
        grad_o: [tokens, heads, head_size] gradient of O.
        layout: packing of the tokens.
        window: number of keys that a query sees, including its own; None for all earlier keys.
        scale: factor of the scores.

    Returns:
        Gradients with the shapes and dtypes of q, k, v and sinks.
    """
    q, k, v, sinks, o, lse = saved
    compute = lse.dtype
    heads, head_size = q.shape[1:]
    kv_heads = k.shape[1]
    group = heads // kv_heads

    delta = torch.einsum("thd,thd->th", o.to(compute), grad_o.to(compute))
    grad_sinks = -(torch.exp(sinks.to(compute) - lse) * delta).sum(0)
    # Each tile owns its rows of dQ. Several tiles add to the same rows of dK and dV, so these are
    # accumulated in full precision and rounded once.
    grad_q = torch.empty_like(q)
    grad_k = torch.zeros(k.shape, dtype=compute, device=k.device)
    grad_v = torch.zeros_like(grad_k)

    for batch in _tile_batches(layout, window, heads, q.device):
        tiles = len(batch.rows)
        query = _gather(q, batch.rows, compute, kv_heads).mul_(scale)
        row_lse = _gather(lse.unsqueeze(-1), batch.rows, compute, kv_heads)
        row_lse = row_lse.view(tiles, kv_heads, group, -1, 1)
        row_delta = _gather(delta.unsqueeze(-1), batch.rows, compute, kv_heads)
        grad_out = _gather(grad_o, batch.rows, compute, kv_heads)

        _zero_invalid(row_delta, batch, group)
        _zero_invalid(grad_out, batch, group)

        dq: Any = None
        for columns, hidden in batch.chunks:
            key = _gather(k, columns, compute, kv_heads)
            value = _gather(v, columns, compute, kv_heads)
            p = _scores(query, key, hidden, group).sub_(row_lse).exp_()
            p = p.view(tiles, kv_heads, group * QUERY_BLOCK, -1)
            _add_at(grad_v, columns, p.transpose(-1, -2) @ grad_out)  # dV = P^T dO

            # dS = P (dO V^T - delta), then dK = dS^T (scale Q) and dQ = scale dS K. `query` is
            # already scaled; dQ gets its factor after the last chunk.
            ds = grad_out @ value.transpose(-1, -2)
            ds.sub_(row_delta).mul_(p)
            _add_at(grad_k, columns, ds.transpose(-1, -2) @ query)
            dq = ds @ key if dq is None else dq.add_(ds @ key)

        _scatter(grad_q, batch, dq.mul_(scale).view(tiles, kv_heads, group, QUERY_BLOCK, head_size))

    return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype), grad_sinks.to(sinks.dtype)


def _zero_invalid(x: Tensor, batch: TileBatch, group: int) -> None:
    """Zero the invalid rows of x [tiles, kv_heads, group * QUERY_BLOCK, d] in place."""
    if batch.row_valid is None:
        return
    # Invalid rows hold tokens of the next sequence or repeat the last token, which would count
    # twice.
    tiles, kv_heads = x.shape[:2]
    valid = batch.row_valid[:, None, None, :, None]
    x.view(tiles, kv_heads, group, QUERY_BLOCK, -1).mul_(valid)


def _scores(query: Tensor, key: Tensor, hidden: Tensor, group: int) -> Tensor:
    """Return the scores [tiles, kv_heads, group, QUERY_BLOCK, keys], -inf where hidden."""
    tiles, kv_heads = query.shape[:2]
    scores = (query @ key.transpose(-1, -2)).view(tiles, kv_heads, group, QUERY_BLOCK, -1)
    return scores.masked_fill_(hidden[:, None, None], -torch.inf)


def _gather(x: Tensor, index: Tensor, dtype: torch.dtype, kv_heads: int) -> Tensor:
    """Return the tokens of x [tokens, heads, d] at index [tiles, n], grouped by kv head.

    Returns:
        [tiles, kv_heads, heads / kv_heads * n, d], contiguous, never a view of x.
    """
    tiles, n = index.shape
    d = x.shape[-1]
    picked = x.index_select(0, index.reshape(-1)).view(tiles, n, kv_heads, -1, d)

    # One copy both permutes and converts.
    out = torch.empty(tiles, kv_heads, picked.shape[3], n, d, dtype=dtype, device=x.device)
    return out.copy_(picked.permute(0, 2, 3, 1, 4)).view(tiles, kv_heads, -1, d)


def _scatter(target: Tensor, batch: TileBatch, values: Tensor) -> None:
    """Write values [tiles, kv_heads, group, QUERY_BLOCK, d] to target [tokens, heads, d]."""
    rows = batch.rows.reshape(-1)
    values = values.permute(0, 3, 1, 2, 4).reshape(len(rows), target.shape[1], -1)
    values = values.to(target.dtype)

    # Invalid rows would overwrite other tokens.
    if batch.row_valid is not None:
        keep = batch.row_valid.reshape(-1)
        rows = rows[keep]
        values = values[keep]
    target.index_copy_(0, rows, values)


def _add_at(target: Tensor, columns: Tensor, values: Tensor) -> None:
    """Add values [tiles, kv_heads, keys, d] to target [tokens, kv_heads, d].

    ``columns`` [tiles, keys] are the tokens. Keys outside of a tile's sequence have values of 0:
    every valid row hides them, and invalid rows have no gradient.
    """
    kv_heads, d = target.shape[1:]
    target.index_add_(0, columns.reshape(-1), values.transpose(1, 2).reshape(-1, kv_heads, d))


def _tile_batches(
    layout: PackedLayout, window: int | None, heads: int, device: torch.device
) -> Iterator[TileBatch]:
    """Yield batches of tiles with the same number of keys, at most SCORES_PER_BATCH scores each."""
    # A window that covers the longest sequence hides nothing. All such windows share a plan.
    if window is not None and window >= layout.longest:
        window = None

    plan_key = ("reference", window)
    if plan_key not in layout.plans:
        layout.plans[plan_key] = _tile_plan(layout, window)
    plan = layout.plans[plan_key]

    for key_blocks in plan.key_blocks.unique().tolist():
        members = (plan.key_blocks == key_blocks).nonzero().squeeze(1)
        keys = key_blocks * QUERY_BLOCK
        scores_per_tile = heads * QUERY_BLOCK * min(keys, KEY_CHUNK)
        tiles_per_batch = max(1, SCORES_PER_BATCH // scores_per_tile)
        for tiles in members.split(tiles_per_batch):
            yield _tile_batch(plan, tiles, keys, layout.tokens, window, device)


def _tile_batch(
    plan: TilePlan,
    tiles: Tensor,
    keys: int,
    tokens: int,
    window: int | None,
    device: torch.device,
) -> TileBatch:
    """Return the index tensors of the plan's ``tiles`` [tiles], which see ``keys`` keys each."""
    starts = plan.starts[tiles]
    rows = starts[:, None] + torch.arange(QUERY_BLOCK)
    valid = rows < plan.ends[tiles, None]

    # The keys end with the tile's own rows, and never start before the tile's sequence. Keys after
    # the sequence come after every valid row, so the causal mask hides them.
    first_keys = starts + QUERY_BLOCK - keys
    chunks = []
    for begin in range(0, keys, KEY_CHUNK):
        end = min(begin + KEY_CHUNK, keys)
        columns = first_keys[:, None] + torch.arange(begin, end)
        hidden = columns[:, None, :] > rows[:, :, None]
        if window is not None:
            hidden |= columns[:, None, :] <= rows[:, :, None] - window
        chunks.append((columns.clamp_(0, tokens - 1).to(device), hidden.to(device)))

    row_valid = None
    if not bool(valid.all()):
        row_valid = valid.to(device)
    return TileBatch(rows.clamp_(max=tokens - 1).to(device), row_valid, chunks)


def _tile_plan(layout: PackedLayout, window: int | None) -> TilePlan:
    """Cut the packing into tiles of QUERY_BLOCK rows, aligned to the start of each sequence."""
    start, end, number = layout.pieces(QUERY_BLOCK)
    # A tile sees all earlier tiles of its sequence and itself.
    key_blocks = number + 1
    if window is not None:
        earlier_keys = window - 1
        earlier_blocks = (earlier_keys + QUERY_BLOCK - 1) // QUERY_BLOCK
        key_blocks = key_blocks.clamp(max=earlier_blocks + 1)
    return TilePlan(starts=start + number * QUERY_BLOCK, ends=end, key_blocks=key_blocks)
