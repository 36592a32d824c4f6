"""Layout of sequences in a packed row, and their columns as tensors."""

from collections.abc import Sequence

import numpy as np
import torch

from megatron_gptoss.prefix_tree import (
    PrefixKeys,
    PrefixSharing,
    PrefixTree,
    build_prefix_tree,
)
from megatron_gptoss.routes import route_digests, unknown_route
from megatron_gptoss.samples import TrainingSamples, check_route_array
from megatron_gptoss.token_columns import TOKEN_COLUMNS, ColumnError


class PackedRow:
    """Layout of sequences in a packed row."""

    def __init__(
        self,
        samples: TrainingSamples,
        sequences: Sequence[int],
        align: int,
        sharing: PrefixSharing | None,
    ) -> None:
        """Compute the layout, see ``build_batch`` for the arguments.

        Raises:
            ColumnError: a sequence is too short, or its routes do not fit a tree.
        """
        self.samples = samples
        self.sequences = sequences

        # The last token of a sequence is not an input, because it has no label.
        self.lengths: list[int] = []
        for i in sequences:
            tokens = int(samples.offsets[i + 1] - samples.offsets[i])
            if tokens < 2:
                raise ColumnError(
                    f"{samples.sequence_name(i)} has {tokens} tokens; at least 2 are needed to predict one"
                )
            self.lengths.append(tokens - 1)

        filled = sum(self.lengths)
        self.tree = self._build_tree(sharing, filled)
        """Tree of the sequences if they share prefixes. The columns are those of whole sequences."""

        # The padding is a separate sequence, so that no other token attends to it. A row without
        # sequences is all padding. With a tree, its tokens are aligned.
        computed = filled if self.tree is None else self.tree.tokens
        self.padding = -computed % align if computed else align
        self.segments = self.lengths + ([self.padding] if self.padding else [])
        self.tokens = filled + self.padding

    def _build_tree(self, sharing: PrefixSharing | None, filled: int) -> PrefixTree | None:
        """Return the tree of the sequences, or None if they share no prefix."""
        if sharing is None:
            return None
        self._check_routes()
        routes = self.samples.routed_experts
        digests = None if routes is None else [route_digests(routes[i]) for i in self.sequences]
        keys = PrefixKeys.of(self.samples, self.sequences, sharing.prompts_only, digests)
        tree = build_prefix_tree(keys, sharing.min_shared)
        return tree if tree.tokens < filled else None

    def _check_routes(self) -> None:
        """Raise ColumnError if the routes of a sequence do not fit."""
        routes = self.samples.routed_experts
        if routes is None:
            return
        for i, length in zip(self.sequences, self.lengths, strict=True):
            check_route_array(routes[i], length + 1, self.samples.sequence_name(i))

    def column(self, name: str) -> torch.Tensor:
        """Return a column of the samples as a row of the declared dtype."""
        declared = TOKEN_COLUMNS[name]
        dtype = getattr(torch, declared.dtype_name)
        return self.entries(name, dtype, first=1 if declared.belongs_to == "label" else 0)

    def entries(self, name: str, dtype: torch.dtype, first: int) -> torch.Tensor:
        """Return the entries of a column in all sequences, and its default in the padding.

        Args:
            name: a column that the samples have.
            dtype: dtype of the result.
            first: first entry to take of each sequence: 0 for inputs, 1 for labels.
        """
        source = getattr(self.samples, name)
        row = torch.empty(self.tokens, dtype=dtype)
        # The array shares the row's memory, and NumPy converts dtypes while it copies.
        filled = row.numpy()
        at = 0
        for i, length in zip(self.sequences, self.lengths, strict=True):
            start = self.samples.offsets[i] + first
            filled[at : at + length] = source[start : start + length]
            at += length
        filled[at:] = TOKEN_COLUMNS[name].default
        return row

    def token_sample_ids(self, sample_ids: Sequence[int]) -> torch.Tensor:
        """Return the id of each token's sequence, int64 [tokens], and -1 in the padding."""
        numbers = [*sample_ids, -1] if self.padding else [*sample_ids]
        return torch.from_numpy(np.repeat(np.array(numbers, dtype=np.int64), self.segments))

    def routes(self) -> torch.Tensor | None:
        """Join the routes of the sequences. The trainer's routers choose for the padding."""
        # Without sequences the shape of routes is unknown, and the routers choose.
        if self.samples.routed_experts is None or not self.lengths:
            return None

        self._check_routes()
        rows = [self.samples.routed_experts[i] for i in self.sequences]

        # [T, layers, top_k], copied once, into place: routes are by far the largest column, 96 bytes a
        # token for the 24 layers and 4 experts of the 20B model.
        dtype = rows[0].dtype
        filled = self.tokens - self.padding
        joined = np.empty((self.tokens, *rows[0].shape[1:]), dtype)
        joined[filled:] = unknown_route(dtype)
        np.concatenate(rows, out=joined[:filled], casting="no")
        return torch.from_numpy(joined)
