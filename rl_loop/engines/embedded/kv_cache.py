"""Key/value cache with one row per sequence, and attention of a flat batch over it.

The input of the model's linear layers is one row of tokens without padding. It contains decoding
sequences, one token each, and prefilling sequences, many tokens each. Only attention separates
sequences. It uses the public attention registry of transformers:
``model.set_attn_implementation(ATTENTION_NAME)``, and a ``StepLayout`` that is passed to the
model's forward as the keyword ``layout``.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedConfig

from megatron_gptoss.routes import route_dtype

ATTENTION_NAME = "rl_loop_row_cache"

QUERY_CHUNK = 512
"""Queries of a prefill that are computed at a time. Bounds the size of the score matrix."""
MIN_CAPACITY = 128
"""Minimum capacity of the rows after the first step, in positions."""
NO_WINDOW = 1 << 40
"""Window of a full-attention layer: more tokens than any text has."""


class RowCache:
    """Keys, values and expert indices of ``rows`` sequences. Position p is at index p of a row.

    Running sequences have the first rows, so that a decoding step reads them without a copy. The
    other rows keep finished sequences (``tokens[row]``) for turns that continue them. The capacity
    grows to powers of two.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        rows: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        layers = config.num_hidden_layers
        kv_heads = config.num_key_value_heads

        # The tensors are created with capacity 0 and grow in the first step.
        self.keys_values = torch.zeros(
            (layers, 2, rows, kv_heads, 0, config.head_dim),
            dtype=dtype,
            device=device,
        )
        """[layers, key or value, rows, kv_heads, capacity, head_size]."""
        top_k = getattr(config, "num_experts_per_tok", 0)
        experts = getattr(config, "num_local_experts", 0)
        no_routes = np.zeros((rows, 0, layers, top_k), route_dtype(experts))
        self.routes = torch.from_numpy(no_routes).to(device)
        """Experts chosen for each token: uint8 or int16 [rows, capacity, layers, top_k].

        top_k is 0 for a dense model.
        """
        self.tokens: list[list[int]] = [[] for _ in range(rows)]
        """Tokens of finished sequences by row. Empty for running sequences and unused rows."""
        self._last_used = [0] * rows  # a counter, not a time: larger is later

    def reserve(self, length: int) -> None:
        """Increase the capacity to at least ``length`` tokens. Cached data is kept."""
        capacity = self.routes.shape[1]
        if length <= capacity:
            return

        # With doubling, the cache is copied a number of times that is logarithmic in the longest sequence.
        power_of_two = 1 << (length - 1).bit_length()
        added = max(MIN_CAPACITY, power_of_two) - capacity
        # ``pad`` takes the dimensions from the last to the first, so the capacity is the second
        # pair.
        self.keys_values = functional.pad(self.keys_values, (0, 0, 0, added))
        self.routes = functional.pad(self.routes, (0, 0, 0, 0, 0, added))

    def write(
        self,
        layer: int,
        key: torch.Tensor,
        value: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
    ) -> None:
        """Store keys and values of one layer.

        Args:
            layer: index of the layer.
            key: [kv_heads, tokens, head_size].
            value: [kv_heads, tokens, head_size].
            rows: [tokens], row of each token.
            positions: [tokens], position of each token in its row.
        """
        # Two index tensors around a slice put their dimension first: [tokens, kv_heads,
        # head_size].
        self.keys_values[layer, 0][rows, :, positions] = key.transpose(0, 1)
        self.keys_values[layer, 1][rows, :, positions] = value.transpose(0, 1)

    def begin(self, row: int, source: int, length: int) -> None:
        """Assign ``row`` to a new sequence.

        Args:
            row: first row after the running sequences.
            source: row whose first ``length`` tokens are also those of the new sequence.
            length: number of cached tokens to use.
        """
        continues_source = source >= row and len(self.tokens[source]) <= length
        if continues_source:
            # The new sequence continues the whole finished sequence, so it takes the row over
            # without a copy.
            replaced = source
        else:
            # The source must stay available, for its own sequence or for another turn. Copy the
            # prefix over the least recently used finished sequence.
            replaced = min(range(row, len(self._last_used)), key=lambda r: self._last_used[r])
            prefix = self.keys_values[:, :, source, :, :length]
            self.keys_values[:, :, replaced, :, :length] = prefix
            self.routes[replaced, :length] = self.routes[source, :length]

        # ``row`` may hold a finished sequence that is longer than the prefix.
        self._swap(replaced, row, length=max(length, len(self.tokens[row])))
        self.tokens[row] = []

    def finish(self, row: int, tokens: list[int], last_row: int, last_length: int) -> None:
        """Keep a finished sequence, and close the gap between the running ones.

        Args:
            row: row of the finished sequence.
            tokens: its tokens.
            last_row: row of the last running sequence, which moves to ``row``.
            last_length: cached tokens of that sequence.
        """
        self.tokens[row] = tokens
        self._last_used[row] = max(self._last_used) + 1
        self._swap(row, last_row, length=max(len(tokens), last_length))

    def _swap(self, a: int, b: int, length: int) -> None:
        """Swap two rows, of which the first ``length`` positions are in use."""
        if a == b:
            return
        # Indexing with a list copies, so the right side is complete before the left is written.
        self.keys_values[:, :, [a, b], :, :length] = self.keys_values[:, :, [b, a], :, :length]
        self.routes[[a, b], :length] = self.routes[[b, a], :length]
        self.tokens[a], self.tokens[b] = self.tokens[b], self.tokens[a]
        self._last_used[a], self._last_used[b] = self._last_used[b], self._last_used[a]


def common_prefix(a: Sequence[int], b: Sequence[int], longer_than: int = 0) -> int:
    """Return the number of leading tokens that a and b share. 0 if at most ``longer_than``."""
    shortest = min(len(a), len(b))
    if shortest <= longer_than:
        return 0

    # First compare the token that would make the prefix longer, because it excludes most
    # candidates.
    if a[longer_than] != b[longer_than] or a[:longer_than] != b[:longer_than]:
        return 0
    if a[:shortest] == b[:shortest]:
        return shortest
    return next(i for i in range(longer_than, shortest) if a[i] != b[i])


@dataclass(frozen=True)
class CacheSegment:
    """Consecutive new tokens of one sequence in the flat input of a step."""

    first: int
    """Index of the first token in the flat input."""
    length: int
    """Number of tokens."""
    past: int
    """Tokens of the sequence that are already in the cache."""
    row: int
    """Row of the sequence in the cache. Ignored without a cache."""


@dataclass(frozen=True)
class VisibleKeys:
    """Cached keys that a group of queries attends to."""

    positions: slice
    """Positions that at least one of the queries sees."""
    masked: torch.Tensor
    """bool [queries, positions]: True where a query does not see a key."""


class StepLayout:
    """Mapping from the flat tokens of one forward pass to sequences.

    Tokens ``[0, len(decoding))`` decode: token i is the only new token of cache row i, at position
    ``decoding[i]`` of its sequence. The segments follow. Without a cache nothing is read or
    written.
    """

    def __init__(
        self,
        decoding: list[int],
        segments: list[CacheSegment],
        cache: RowCache | None,
        device: torch.device,
    ) -> None:
        self.decoding = decoding
        self.segments = segments
        self.cache = cache

        positions = list(decoding)
        rows = list(range(len(decoding)))
        for segment in segments:
            positions += range(segment.past, segment.past + segment.length)
            rows += [segment.row] * segment.length
        self.positions = torch.tensor(positions, device=device)
        """Position of each token in its sequence, [tokens]."""
        self.rows = torch.tensor(rows, device=device)
        """Cache row of each token, [tokens]."""
        self._decoding_keys: dict[int, VisibleKeys] = {}

    def decoding_keys(self, window: int) -> VisibleKeys:
        """Return the cached keys that the decoding rows see. Cached per size of the window."""
        if window not in self._decoding_keys:
            # One slice for all rows, so that keys are read without a gather. Keys outside a row's
            # window are masked.
            first = max(0, min(self.decoding) - window + 1)
            keys = slice(first, max(self.decoding) + 1)
            queries = self.positions[: len(self.decoding)]
            self._decoding_keys[window] = _visible_keys(queries, keys, window)
        return self._decoding_keys[window]

    def last_tokens(self) -> list[int]:
        """Return the index of each sequence's last token in the flat input, decoding rows first."""
        last_of_segments = [segment.first + segment.length - 1 for segment in self.segments]
        return [*range(len(self.decoding)), *last_of_segments]


def _visible_keys(queries: torch.Tensor, keys: slice, window: int) -> VisibleKeys:
    """Mask the keys after each query and before its window.

    Args:
        queries: [queries], positions in one sequence.
        keys: positions in the same sequence.
        window: number of tokens that a query sees, including its own.
    """
    key = torch.arange(keys.start, keys.stop, device=queries.device)
    query = queries[:, None]
    return VisibleKeys(keys, masked=(key > query) | (key <= query - window))


def row_cache_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    layout: StepLayout,
    s_aux: torch.Tensor | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attend each token to its own sequence, through transformers' attention interface.

    Args:
        module: attention layer.
        query: [1, heads, tokens, head_size].
        key: [1, kv_heads, tokens, head_size].
        value: [1, kv_heads, tokens, head_size].
        attention_mask: ignored, because the layout contains all information.
        scaling: factor of the scores.
        layout: sequence and position of each token.
        s_aux: [heads], attention sinks. None for a model without sinks.
        sliding_window: number of tokens that a query sees, including its own. None: all.

    Returns:
        [1, tokens, heads, head_size], and None instead of attention weights.
    """
    heads, tokens, head_size = query.shape[1:]
    kv_heads = key.shape[1]
    window = sliding_window or NO_WINDOW
    cache = layout.cache

    # Grouped-query attention: query heads are grouped by their shared key/value head.
    grouped = (query[0] * scaling).view(kv_heads, -1, tokens, head_size)
    sinks = None if s_aux is None else s_aux.view(kv_heads, -1, 1)
    output = query.new_empty(tokens, heads, head_size)

    cached: torch.Tensor | None = None
    if cache is not None:
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        # Write first, because a token also sees its own key.
        cache.write(layer, key[0], value[0], layout.rows, layout.positions)
        cached = cache.keys_values[layer]
        if layout.decoding:
            rows = len(layout.decoding)
            output[:rows] = _attend_decoding(grouped[:, :, :rows], cached, sinks, layout, window)

    for segment in layout.segments:
        keys, values = _keys_values(segment, key[0], value[0], cached)
        for chunk, visible in _query_chunks(segment, layout, window):
            output[chunk] = _attend_prefill(grouped[:, :, chunk], keys, values, sinks, visible)

    return output[None], None


def _keys_values(
    segment: CacheSegment,
    key: torch.Tensor,
    value: torch.Tensor,
    cached: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all keys and values of a segment's sequence, [kv_heads, positions, head_size] each.

    Args:
        segment: new tokens of the sequence.
        key: [kv_heads, tokens, head_size], keys of the flat input.
        value: [kv_heads, tokens, head_size], values of the flat input.
        cached: one layer of the cache, which also contains the new tokens. None without a cache.
    """
    if cached is not None and segment.past:
        keys, values = cached[:, segment.row]
        return keys, values

    # The sequence has no earlier tokens. Its new tokens are contiguous in the flat input, which is
    # cheaper to read than the cache's padded row.
    new_tokens = slice(segment.first, segment.first + segment.length)
    return key[:, new_tokens], value[:, new_tokens]


def _query_chunks(
    segment: CacheSegment,
    layout: StepLayout,
    window: int,
) -> Iterator[tuple[slice, VisibleKeys]]:
    """Yield chunks of a segment's queries: their slice of the flat input, and their keys."""
    for start in range(0, segment.length, QUERY_CHUNK):
        count = min(QUERY_CHUNK, segment.length - start)
        chunk = slice(segment.first + start, segment.first + start + count)

        # From the first key in the first query's window to the last query. With a sliding window
        # these are much fewer keys than the whole prefix.
        position = segment.past + start
        keys = slice(max(0, position - window + 1), position + count)
        yield chunk, _visible_keys(layout.positions[chunk], keys, window)


def _attend_decoding(
    queries: torch.Tensor,
    cached: torch.Tensor,
    sinks: torch.Tensor | None,
    layout: StepLayout,
    window: int,
) -> torch.Tensor:
    """Attend one new token of each decoding row to that row of the cache.

    Args:
        queries: [kv_heads, heads per kv head, rows, head_size], scaled.
        cached: keys and values of one layer, [2, rows, kv_heads, capacity, head_size].
        sinks: [kv_heads, heads per kv head, 1]. None without sinks.
        layout: layout of the step.
        window: number of tokens that a query sees, including its own.

    Returns:
        [rows, heads, head_size].
    """
    rows, head_size = queries.shape[2:]
    visible = layout.decoding_keys(window)
    keys, values = cached[:, :rows, :, visible.positions]

    # One small matrix product per row and key/value head.
    scores = queries.permute(2, 0, 1, 3) @ keys.transpose(-1, -2)
    weights = _sink_softmax(scores, visible.masked[:, None, None], sinks)
    return (weights @ values).view(rows, -1, head_size)


def _attend_prefill(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    sinks: torch.Tensor | None,
    visible: VisibleKeys,
) -> torch.Tensor:
    """Attend consecutive new tokens of one sequence to its keys.

    Args:
        queries: [kv_heads, heads per kv head, count, head_size], scaled.
        keys: [kv_heads, positions, head_size], from position 0 on.
        values: [kv_heads, positions, head_size], from position 0 on.
        sinks: [kv_heads, heads per kv head, 1]. None without sinks.
        visible: keys that these queries see.

    Returns:
        [count, heads, head_size].
    """
    kv_heads, _, count, head_size = queries.shape
    keys = keys[:, visible.positions]
    values = values[:, visible.positions]
    key_count = keys.shape[1]

    # One matrix product per key/value head, whose query heads are stacked as rows.
    scores = queries.reshape(kv_heads, -1, head_size) @ keys.transpose(-1, -2)
    scores = scores.view(kv_heads, -1, count, key_count)
    if sinks is not None:
        sinks = sinks[..., None]
    weights = _sink_softmax(scores, visible.masked, sinks)
    attended = weights.reshape(kv_heads, -1, key_count) @ values
    return attended.view(-1, count, head_size).transpose(0, 1)


def _sink_softmax(
    scores: torch.Tensor, masked: torch.Tensor, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Return the softmax over the keys and the sink, an additional logit per head without a value.

    Args:
        scores: [..., keys]. bf16 and fp16 are summed in fp32.
        masked: bool, broadcasts against ``scores``.
        sinks: broadcasts against ``scores``, with a last dimension of 1. None without sinks.

    Returns:
        [..., keys] in the dtype of ``scores``. With sinks a row sums to less than 1.
    """
    wide = scores
    if scores.dtype in (torch.bfloat16, torch.float16):
        wide = scores.float()

    wide = wide.masked_fill(masked, float("-inf"))
    if sinks is None:
        return torch.softmax(wide, dim=-1).to(scores.dtype)

    # The sink is part of the softmax's sum, but has no value, so its weight is dropped.
    sink_column = sinks.to(wide.dtype).expand(*wide.shape[:-1], 1)
    combined = torch.cat([wide, sink_column], dim=-1)
    return torch.softmax(combined, dim=-1)[..., :-1].to(scores.dtype)
