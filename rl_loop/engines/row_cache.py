"""Keys, values and routed experts, one row per sequence: of those that are being decoded and of finished ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional
from transformers import GptOssConfig


class RowCache:
    """``rows`` sequences, position p of a sequence at index p of its row.

    Running sequences have the first rows, so that a decoding step reads them without a copy. The rows behind them hold
    finished ones, ``tokens[row]``, for turns that continue them. The capacity grows in powers of two.
    """

    def __init__(self, config: GptOssConfig, rows: int, dtype: torch.dtype, device: torch.device) -> None:
        layers, heads, size = config.num_hidden_layers, config.num_key_value_heads, config.head_dim
        self.keys_values = torch.zeros(layers, 2, rows, heads, 0, size, dtype=dtype, device=device)
        self.routes = torch.zeros(rows, 0, layers, config.num_experts_per_tok, dtype=torch.int16, device=device)
        self.tokens: list[list[int]] = [[] for _ in range(rows)]
        """Of finished sequences; empty where nothing is kept and for those that run."""
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
    """How many leading tokens a and b share; 0 if they are not more than ``longer_than``.

    Comparing the one token that would make the prefix longer first rules most candidates out.
    """
    shortest = min(len(a), len(b))
    if shortest <= longer_than or a[longer_than] != b[longer_than] or a[:longer_than] != b[:longer_than]:
        return 0
    if a[:shortest] == b[:shortest]:
        return shortest
    return next(i for i in range(longer_than, shortest) if a[i] != b[i])
