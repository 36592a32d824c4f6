"""A cache of keys and values with one row per sequence, and attention over it for a flat batch of decoding and
prefilling sequences.

The model's linear layers see one row of tokens without padding; only attention knows which token belongs to which
sequence. It reaches a transformers model through the public attention registry: ``model.set_attn_implementation``
with ``ATTENTION_NAME``, and a ``StepLayout`` passed to the model's forward as the keyword ``layout``."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import GptOssConfig

ATTENTION_NAME = "rl_loop_row_cache"

# queries of a prefill that are attended at a time; bounds the score matrix
QUERY_CHUNK = 512

NO_WINDOW = 1 << 40


class RowCache:
    """``rows`` sequences, position p of a sequence at index p of its row.

    Running sequences have the first rows, so that a decoding step reads them without a copy. The rows behind them hold
    finished ones, ``tokens[row]``, for turns that continue them. The capacity grows in powers of two."""

    def __init__(self, config: GptOssConfig, rows: int, dtype: torch.dtype, device: torch.device) -> None:
        layers, heads, size = config.num_hidden_layers, config.num_key_value_heads, config.head_dim
        self.keys_values = torch.zeros(layers, 2, rows, heads, 0, size, dtype=dtype, device=device)
        self.routes = torch.zeros(rows, 0, layers, config.num_experts_per_tok, dtype=torch.int16, device=device)
        # of finished sequences; empty where nothing is kept and for those that run
        self.tokens: list[list[int]] = [[] for _ in range(rows)]
        self._used = [0] * rows  # larger is later

    def reserve(self, length: int) -> None:
        """Make room for sequences of ``length`` tokens; what is cached stays."""
        capacity = self.routes.shape[1]
        if length > capacity:
            more = max(128, 1 << (length - 1).bit_length()) - capacity
            self.keys_values = functional.pad(self.keys_values, (0, 0, 0, more))
            self.routes = functional.pad(self.routes, (0, 0, 0, 0, 0, more))

    def write(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor
    ) -> None:
        """Store key and value [kv_heads, tokens, head_size] of one layer; rows, positions: [tokens]."""
        for part, new in enumerate((key, value)):
            self.keys_values[layer, part][rows, :, positions] = new.transpose(0, 1)

    def begin(self, row: int, source: int, length: int) -> None:
        """Give ``row``, the first behind the running ones, to a sequence whose first ``length`` tokens are those of row
        ``source``. What it replaces is the row itself, if all of it goes on, or else the oldest finished sequence."""
        replaced = source
        if source < row or len(self.tokens[source]) > length:
            replaced = min(range(row, len(self._used)), key=lambda r: self._used[r])
            self.keys_values[:, :, replaced, :, :length] = self.keys_values[:, :, source, :, :length]
            self.routes[replaced, :length] = self.routes[source, :length]
        self._swap(replaced, row, max(length, len(self.tokens[row])))
        self.tokens[row] = []

    def finish(self, row: int, tokens: list[int], last: int, last_length: int) -> None:
        """Keep ``tokens``, whose sequence ran in ``row``; the sequence of the ``last`` running row takes its place."""
        self.tokens[row] = tokens
        self._used[row] = max(self._used) + 1
        self._swap(row, last, max(len(tokens), last_length))

    def _swap(self, a: int, b: int, length: int) -> None:
        if a != b:
            self.keys_values[:, :, [a, b], :, :length] = self.keys_values[:, :, [b, a], :, :length]
            self.routes[[a, b], :length] = self.routes[[b, a], :length]
            self.tokens[a], self.tokens[b] = self.tokens[b], self.tokens[a]
            self._used[a], self._used[b] = self._used[b], self._used[a]


def common_prefix(a: Sequence[int], b: Sequence[int], longer_than: int = 0) -> int:
    """How many leading tokens a and b share; 0 if they are not more than ``longer_than``."""
    shortest = min(len(a), len(b))
    # the one token that would make the prefix longer comes first, because it rules most candidates out
    if shortest <= longer_than or a[longer_than] != b[longer_than] or a[:longer_than] != b[:longer_than]:
        return 0
    if a[:shortest] == b[:shortest]:
        return shortest
    return next(i for i in range(longer_than, shortest) if a[i] != b[i])


@dataclass(frozen=True)
class Segment:
    """Consecutive new tokens of one sequence: ``length`` of them from ``first`` in the flat input."""

    first: int
    length: int
    past: int  # tokens of the sequence that are in the cache already
    row: int  # of the cache, if there is one


class StepLayout:
    """How the flat tokens of one forward pass map to sequences.

    Tokens ``[0, len(decoding))`` decode: token i is the one new token of cache row i, at position ``decoding[i]`` of
    its sequence. The segments follow. Without a cache nothing is read or written."""

    def __init__(
        self, decoding: list[int], segments: list[Segment], cache: RowCache | None, device: torch.device
    ) -> None:
        self.decoding, self.segments, self.cache = decoding, segments, cache
        positions, rows = list(decoding), list(range(len(decoding)))
        for segment in segments:
            positions += range(segment.past, segment.past + segment.length)
            rows += [segment.row] * segment.length
        self.positions = torch.tensor(positions, device=device)
        self.rows = torch.tensor(rows, device=device)
        self._hidden: dict[int, tuple[slice, torch.Tensor]] = {}

    def decoding_keys(self, window: int) -> tuple[slice, torch.Tensor]:
        """Which cached positions the decoding rows look at, and bool [rows, 1, 1, positions]: which they do not see."""
        if window not in self._hidden:
            seen = slice(max(0, min(self.decoding) - window + 1), max(self.decoding) + 1)
            hidden = _hidden(self.positions[: len(self.decoding)], seen, window)
            self._hidden[window] = seen, hidden[:, None, None]
        return self._hidden[window]

    def last_tokens(self) -> list[int]:
        """Index in the flat input of every sequence's last token: decoding rows first, then the segments."""
        return [*range(len(self.decoding)), *(segment.first + segment.length - 1 for segment in self.segments)]


def _hidden(positions: torch.Tensor, keys: slice, window: int) -> torch.Tensor:
    """bool [len(positions), keys]: the keys after a position, and those before its window."""
    key = torch.arange(keys.start, keys.stop, device=positions.device)
    return (key > positions[:, None]) | (key <= positions[:, None] - window)


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

    Returns [1, tokens, heads, head_size]. ``attention_mask`` is ignored: the layout says it all."""
    heads, tokens, size = query.shape[1:]
    kv_heads, window, cache = key.shape[1], sliding_window or NO_WINDOW, layout.cache
    sinks = s_aux.view(kv_heads, -1, 1)
    grouped = (query[0] * scaling).view(kv_heads, -1, tokens, size)  # [kv_heads, heads of each, tokens, head_size]
    output = query.new_empty(tokens, heads, size)
    if cache is not None:
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        cache.write(layer, key[0], value[0], layout.rows, layout.positions)
        if rows := len(layout.decoding):
            seen, hidden = layout.decoding_keys(window)
            keys, values = cache.keys_values[layer, :, :rows, :, seen]
            scores = grouped[:, :, :rows].permute(2, 0, 1, 3) @ keys.transpose(-1, -2)
            output[:rows] = (_sink_softmax(scores, hidden, sinks) @ values).view(rows, heads, size)
    for segment in layout.segments:
        if cache is not None and segment.past:
            keys, values = cache.keys_values[layer, :, segment.row]
        else:
            own = slice(segment.first, segment.first + segment.length)
            keys, values = key[0, :, own], value[0, :, own]
        for start in range(0, segment.length, QUERY_CHUNK):
            count = min(QUERY_CHUNK, segment.length - start)
            at = slice(segment.first + start, segment.first + start + count)
            first = segment.past + start
            seen = slice(max(0, first - window + 1), first + count)
            queries = grouped[:, :, at].reshape(kv_heads, -1, size)
            scores = (queries @ keys[:, seen].transpose(-1, -2)).view(kv_heads, -1, count, seen.stop - seen.start)
            weights = _sink_softmax(scores, _hidden(layout.positions[at], seen, window), sinks[..., None])
            attended = weights.reshape(kv_heads, -1, seen.stop - seen.start) @ values[:, seen]
            output[at] = attended.view(heads, count, size).transpose(0, 1)
    return output[None], None


def _sink_softmax(scores: torch.Tensor, hidden: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Softmax over the last dimension with one more logit per head, the sink, that has no value.

    ``hidden`` (bool) and ``sinks``, with its last dimension 1, broadcast against ``scores`` [..., keys]. Halves are
    summed in fp32."""
    wide = scores.float() if scores.dtype in (torch.bfloat16, torch.float16) else scores
    wide = wide.masked_fill(hidden, float("-inf"))
    combined = torch.cat([wide, sinks.to(wide.dtype).expand(*wide.shape[:-1], 1)], dim=-1)
    return torch.softmax(combined, dim=-1)[..., :-1].to(scores.dtype)
