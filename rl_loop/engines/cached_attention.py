"""Attention over a row cache for a flat batch of decoding and prefilling sequences.

The model's linear layers see one row of tokens without padding; only attention knows which token belongs to which
sequence. It reaches a transformers model through the public attention registry: ``model.set_attn_implementation``
with ``ATTENTION_NAME``, and a ``StepLayout`` passed to the model's forward as the keyword ``layout``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rl_loop.engines.row_cache import RowCache

ATTENTION_NAME = "rl_loop_row_cache"

QUERY_CHUNK = 512
"""Queries of a prefill that are attended at a time; bounds the score matrix."""


@dataclass(frozen=True)
class Segment:
    """Consecutive new tokens of one sequence: ``length`` of them from ``first`` in the flat input."""

    first: int
    length: int
    past: int  # tokens of the sequence that are in the cache already
    row: int | None  # row of the cache; None computes without one (past is 0)


@dataclass(frozen=True)
class DecodeMask:
    """Which cached keys ``[low, high)`` the decoding rows see; ``bias`` is [rows, 1, 1, high - low], 0 or -inf."""

    low: int
    high: int
    bias: torch.Tensor


class StepLayout:
    """How the flat tokens of one forward pass map to sequences.

    Tokens ``[0, len(decode_positions))`` decode: token i is the one new token of cache row i, at that position of its
    sequence. The segments follow. Without a cache nothing is read or written.
    """

    def __init__(
        self,
        decode_positions: list[int],
        segments: list[Segment],
        cache: RowCache | None,
        window: int | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.decode_rows = len(decode_positions)
        self.segments = segments
        self.cache = cache
        positions, slots = list(decode_positions), []
        if cache is not None:
            slots = [row * cache.capacity + position for row, position in enumerate(decode_positions)]
        for segment in segments:
            span = range(segment.past, segment.past + segment.length)
            positions.extend(span)
            if cache is not None and segment.row is not None:
                slots.extend(segment.row * cache.capacity + position for position in span)
        self.positions = torch.tensor(positions, device=device)
        self.slots = torch.tensor(slots, device=device)
        self.write_index = cache.write_index(self.slots) if cache is not None else None
        self._decode_masks: dict[int | None, DecodeMask] = {}
        if self.decode_rows:
            decoding = self.positions[: self.decode_rows, None]
            for limit in {None, window}:
                low = 0 if limit is None else max(0, min(decode_positions) - limit + 1)
                high = max(decode_positions) + 1
                keys = torch.arange(low, high, device=device)
                visible = keys <= decoding
                if limit is not None:
                    visible &= keys > decoding - limit
                bias = torch.zeros(visible.shape, dtype=dtype, device=device).masked_fill_(~visible, float("-inf"))
                self._decode_masks[limit] = DecodeMask(low, high, bias[:, None, None])

    def decode_mask(self, window: int | None) -> DecodeMask:
        return self._decode_masks[window]

    def last_tokens(self) -> list[int]:
        """Index in the flat input of every sequence's last token: decoding rows first, then the segments."""
        return [*range(self.decode_rows), *(segment.first + segment.length - 1 for segment in self.segments)]


def row_cache_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    s_aux: torch.Tensor,
    layout: StepLayout,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """query [1, heads, tokens, head_size], key and value [1, kv_heads, tokens, head_size], s_aux [heads] (the sinks).

    Returns [1, tokens, heads, head_size]. ``attention_mask`` is ignored: the layout says it all.
    """
    heads, tokens, size = query.shape[1:]
    kv_heads = key.shape[1]
    groups = heads // kv_heads
    sinks = s_aux.reshape(kv_heads, groups, 1)
    query = query[0] * scaling
    cache = layout.cache
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    if cache is not None and layout.write_index is not None:
        cache.write(layer, key, value, layout.write_index)
    output = query.new_empty(tokens, heads, size)

    rows = layout.decode_rows
    if rows and cache is not None:
        mask = layout.decode_mask(sliding_window)
        keys, values = (part[:rows, :, mask.low : mask.high] for part in cache.layer(layer))
        queries = query[:, :rows].transpose(0, 1).reshape(rows, kv_heads, groups, size)
        scores = queries @ keys.transpose(-1, -2) + mask.bias
        output[:rows] = (_sink_softmax(scores, sinks) @ values).view(rows, heads, size)

    for segment in layout.segments:
        _attend_segment(query, key[0], value[0], sinks[..., None], segment, layout, layer, sliding_window, output)
    return output[None], None


def _attend_segment(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor,
    segment: Segment,
    layout: StepLayout,
    layer: int,
    window: int | None,
    output: torch.Tensor,
) -> None:
    """Causal attention of one segment's queries to its own tokens and those before them, into ``output``."""
    heads, _, size = query.shape
    kv_heads = key.shape[0]
    end = segment.past + segment.length
    if segment.past and layout.cache is not None and segment.row is not None:
        keys, values = (part[segment.row, :, :end] for part in layout.cache.layer(layer))
    else:
        own = slice(segment.first, segment.first + segment.length)
        keys, values = key[:, own], value[:, own]
    for start in range(0, segment.length, QUERY_CHUNK):
        count = min(QUERY_CHUNK, segment.length - start)
        at = slice(segment.first + start, segment.first + start + count)
        first = segment.past + start
        low = 0 if window is None else max(0, first - window + 1)
        high = first + count
        positions = layout.positions[at, None]
        seen = torch.arange(low, high, device=query.device)
        hidden = seen > positions
        if window is not None:
            hidden |= seen <= positions - window
        queries = query[:, at].reshape(kv_heads, -1, size)
        scores = (queries @ keys[:, low:high].transpose(-1, -2)).view(kv_heads, heads // kv_heads, count, high - low)
        weights = _sink_softmax(scores.masked_fill_(hidden, float("-inf")), sinks)
        attended = weights.reshape(kv_heads, -1, high - low) @ values[:, low:high]
        output[at] = attended.view(heads, count, size).transpose(0, 1)


def _sink_softmax(scores: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Softmax over the last dimension with one more logit per head, the sink, that has no value.

    ``sinks`` broadcasts against ``scores`` [..., keys] with its last dimension 1. Halves are summed in fp32.
    """
    dtype = scores.dtype
    if dtype in (torch.bfloat16, torch.float16):
        scores = scores.float()
    combined = torch.cat([scores, sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)], dim=-1)
    return torch.softmax(combined, dim=-1)[..., :-1].to(dtype)
