"""Sums over the sequences of a packed row, whichever context-parallel rank holds their tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Sequences:
    """Which sequence every token belongs to. Everything is constant to autograd."""

    index: torch.Tensor
    """int64 [tokens], below ``count``; padding may say anything, as it is in no mask"""
    count: int
    group: dist.ProcessGroup | None = None
    """Ranks that hold the other tokens of the same sequences."""

    def sum(self, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """values [tokens], mask bool [tokens] -> [count], fp64."""
        total = torch.zeros(self.count, dtype=torch.float64, device=values.device)
        total.index_add_(0, self.index, torch.where(mask, values.detach(), 0).double())
        if self.group is not None and self.group.size() > 1:
            dist.all_reduce(total, group=self.group)
        return total

    def mean(self, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """[count]; 0 for a sequence without masked tokens."""
        return self.sum(values, mask) / self.sum(mask, mask).clamp(min=1)

    def spread(self, per_sequence: torch.Tensor) -> torch.Tensor:
        """[count] -> [tokens]"""
        return per_sequence[self.index]
