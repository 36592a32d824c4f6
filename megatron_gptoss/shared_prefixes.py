"""Relation between the tokens and the labels of a packed row whose sequences share prefixes.

A shared token is in the row once, but it predicts a label of every sequence that contains it. Label
columns are therefore longer than token columns. They have the entries of whole sequences, so that
losses and metrics need not know that prefixes are shared.
"""

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor


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
        pairs, pair_of_label = torch.unique(
            torch.stack([label_rows, labels]), dim=1, return_inverse=True
        )
        return cls(parents, label_rows, pairs[0], pairs[1], pair_of_label)

    def to(self, device: torch.device | str) -> Self:
        """Copy all tensors to a device."""
        return replace(
            self,
            label_rows=self.label_rows.to(device, non_blocking=True),
            pair_rows=self.pair_rows.to(device, non_blocking=True),
            pair_labels=self.pair_labels.to(device, non_blocking=True),
            pair_of_label=self.pair_of_label.to(device, non_blocking=True),
        )
