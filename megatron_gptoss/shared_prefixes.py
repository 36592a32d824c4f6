"""Relation between the tokens and the labels of a packed row whose sequences share prefixes.

A shared token is in the row once, but it predicts a label of every sequence that contains it. Label
columns are therefore longer than token columns. They have the entries of whole sequences, so that
losses and metrics need not know that prefixes are shared.
"""

from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor

from gptoss_kernels.device_copies import copy_to_device


@dataclass(frozen=True, eq=False)
class SharedPrefixes:
    """Segments of a row with T tokens and L labels, and the token that predicts each label."""

    parents: tuple[int, ...]
    """Segment that each segment of the row continues, see ``RowSegments``."""
    label_rows: Tensor
    """int64 [L]: token that predicts each label. Every token predicts at least one."""
    pair_rows: Tensor
    """int64 [pairs]: token of each distinct (token, label id) pair.

    The output layer computes each pair once. A token has several pairs where sequences branch.
    """
    pair_labels: Tensor
    """int64 [pairs]: label id of each pair."""
    pair_of_label: Tensor
    """int64 [L]: pair of each label."""

    @classmethod
    def of(cls, parents: tuple[int, ...], label_rows: Tensor, labels: Tensor) -> Self:
        """Find the distinct pairs.

        Args:
            parents: segment that each segment continues.
            label_rows: int64 [L], token that predicts each label.
            labels: int64 [L], id of each label.
        """
        # One integer for each pair: torch.unique compares columns of a matrix one by one on the host,
        # which takes longer than the layers on a GPU.
        ids = int(labels.max()) + 1
        keys, pair_of_label = np.unique((label_rows * ids + labels).numpy(), return_inverse=True)
        rows, pair_labels = np.divmod(keys, ids)
        return cls(
            parents=parents,
            label_rows=label_rows,
            pair_rows=torch.from_numpy(rows),
            pair_labels=torch.from_numpy(pair_labels),
            pair_of_label=torch.from_numpy(pair_of_label),
        )

    def shard(self, places: Tensor, labels: Tensor, rank: int, tokens: int) -> Self:
        """Return the labels of a context-parallel rank.

        Args:
            places: int64 [T], position of each token in the order of the ranks.
            labels: int64 [labels of the rank], indices of the labels that its tokens predict.
            rank: context-parallel rank.
            tokens: number of tokens of each rank.
        """
        pair_places = places[self.pair_rows]
        is_own = pair_places // tokens == rank
        # Index of each pair among the pairs of this rank. Entries of other pairs are not read.
        own_pairs = is_own.cumsum(0) - 1
        first = rank * tokens
        return replace(
            self,
            label_rows=places[self.label_rows[labels]] - first,
            pair_rows=pair_places[is_own] - first,
            pair_labels=self.pair_labels[is_own],
            pair_of_label=own_pairs[self.pair_of_label[labels]],
        )

    def to(self, device: torch.device | str) -> Self:
        """Copy all tensors to a device."""
        return replace(
            self,
            label_rows=copy_to_device(self.label_rows, device),
            pair_rows=copy_to_device(self.pair_rows, device),
            pair_labels=copy_to_device(self.pair_labels, device),
            pair_of_label=copy_to_device(self.pair_of_label, device),
        )
