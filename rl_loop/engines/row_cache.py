"""Keys, values and routed experts of the sequences that are being decoded, one row each, and of finished ones."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import GptOssConfig

NO_ROUTE = -1
"""Where no router has written yet."""


@dataclass(frozen=True)
class CachedSequence:
    """What one finished sequence leaves for the next turn that continues it."""

    tokens: list[int]
    keys_values: torch.Tensor  # [layers, 2, kv_heads, len(tokens), head_size]
    routes: torch.Tensor  # int16 [len(tokens), layers, top_k]


class RowCache:
    """``rows`` sequences of up to ``capacity`` tokens, position p of a sequence at index p of its row.

    The capacity grows in powers of two as sequences need it. Active rows are kept at the front, so that a decoding
    step reads them without a copy.
    """

    def __init__(self, config: GptOssConfig, rows: int, dtype: torch.dtype, device: torch.device) -> None:
        self._layers, self._rows = config.num_hidden_layers, rows
        self._kv_heads, self._size = config.num_key_value_heads, config.head_dim
        self._top_k = config.num_experts_per_tok
        self._dtype, self._device = dtype, device
        self.capacity = 0
        self._allocate(0)

    def _allocate(self, capacity: int) -> None:
        self.capacity = capacity
        shape = (self._layers, 2, self._rows, self._kv_heads, capacity, self._size)
        self._keys_values = torch.zeros(shape, dtype=self._dtype, device=self._device)
        self._routes = torch.full(
            (self._rows, capacity, self._layers, self._top_k), NO_ROUTE, dtype=torch.int16, device=self._device
        )

    def reserve(self, length: int) -> None:
        """Make room for sequences of ``length`` tokens; what is cached stays."""
        if length <= self.capacity:
            return
        old, keys_values, routes = self.capacity, self._keys_values, self._routes
        self._allocate(max(128, 1 << (length - 1).bit_length()))
        self._keys_values[..., :old, :] = keys_values
        self._routes[:, :old] = routes

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [rows, kv_heads, capacity, head_size] of one layer (views)."""
        return self._keys_values[index, 0], self._keys_values[index, 1]

    def write_index(self, slots: torch.Tensor) -> torch.Tensor:
        """For ``write``: from slots [tokens] (row * capacity + position), int64 [kv_heads * tokens]."""
        row, position = slots // self.capacity, slots % self.capacity
        head = torch.arange(self._kv_heads, device=slots.device)[:, None]
        return ((row * self._kv_heads + head) * self.capacity + position).flatten()

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor, index: torch.Tensor) -> None:
        """Store key and value [1, kv_heads, tokens, head_size] of one layer."""
        for part, new in enumerate((key, value)):
            self._keys_values[layer, part].view(-1, self._size).index_copy_(0, index, new.reshape(-1, self._size))

    def write_routes(self, slots: torch.Tensor, routes: torch.Tensor) -> None:
        """Store routes [tokens, layers, top_k]."""
        self._routes.view(-1, self._layers, self._top_k).index_copy_(0, slots, routes.to(torch.int16))

    def routes(self, row: int, length: int) -> torch.Tensor:
        """int16 [length, layers, top_k], a copy in host memory."""
        return self._routes[row, :length].to("cpu", copy=True)

    def copy_row(self, source: int, target: int, length: int) -> None:
        self._keys_values[:, :, target, :, :length] = self._keys_values[:, :, source, :, :length]
        self._routes[target, :length] = self._routes[source, :length]

    def snapshot(self, row: int, tokens: list[int]) -> CachedSequence:
        n = len(tokens)
        return CachedSequence(tokens, self._keys_values[:, :, row, :, :n].clone(), self._routes[row, :n].clone())

    def load(self, row: int, sequence: CachedSequence, length: int) -> None:
        self._keys_values[:, :, row, :, :length] = sequence.keys_values[..., :length, :]
        self._routes[row, :length] = sequence.routes[:length]


class PrefixStore:
    """Finished sequences, least recently used first, ``max_tokens`` in all."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._entries: OrderedDict[int, CachedSequence] = OrderedDict()
        self._tokens = 0
        self._next = 0

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        self._entries.clear()
        self._tokens = 0

    def match(self, tokens: Sequence[int], longer_than: int = 0) -> tuple[CachedSequence | None, int]:
        """The sequence that shares the longest prefix with ``tokens``, and its length; None if not ``longer_than``."""
        best, length, found = None, longer_than, -1
        for number, entry in reversed(self._entries.items()):
            shared = common_prefix(entry.tokens, tokens, length)
            if shared > length:
                best, length, found = entry, shared, number
        if best is not None:
            self._entries.move_to_end(found)
        return best, length

    def add(self, sequence: CachedSequence) -> None:
        """Keep a sequence instead of those that are a prefix of it, and forget old ones beyond ``max_tokens``."""
        size = len(sequence.tokens)
        if not 0 < size <= self._max_tokens:
            return
        for number, entry in list(self._entries.items()):
            shorter = min(size, len(entry.tokens))
            if common_prefix(entry.tokens, sequence.tokens, shorter - 1) < shorter:
                continue
            if size < len(entry.tokens):
                return  # held already, as part of a longer one
            self._drop(number)
        self._entries[self._next] = sequence
        self._next += 1
        self._tokens += size
        while self._tokens > self._max_tokens:
            self._drop(next(iter(self._entries)))

    def _drop(self, number: int) -> None:
        self._tokens -= len(self._entries.pop(number).tokens)


def common_prefix(a: Sequence[int], b: Sequence[int], longer_than: int = 0) -> int:
    """How many leading tokens a and b share, or anything up to ``longer_than`` if that is not exceeded.

    Comparing the one token that would make the prefix longer first rules most candidates out.
    """
    shortest = min(len(a), len(b))
    if shortest <= longer_than or a[longer_than] != b[longer_than] or a[:longer_than] != b[:longer_than]:
        return 0
    if a[:shortest] == b[:shortest]:
        return shortest
    return next(i for i in range(longer_than, shortest) if a[i] != b[i])
