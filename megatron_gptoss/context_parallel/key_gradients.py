"""Sum of the gradients of keys that several spans see."""

from itertools import accumulate, pairwise

from torch import Tensor


def slices_of(counts: list[int]) -> list[slice]:
    """Return consecutive slices with these lengths. Empty slices are left out."""
    return [slice(start, end) for start, end in pairwise([0, *accumulate(counts)]) if end > start]


def add_in_order(total: Tensor, rows: Tensor, parts: Tensor, groups: list[slice]) -> None:
    """Add rows to a tensor in place, one group after another.

    A GPU adds the rows of one call of ``index_add_`` in any order. Three or more addends of a row
    would thus have other bits in every run.

    Args:
        total: [n, ...], of the dtype of the sum.
        rows: [k] int64 row of ``total`` for each part.
        parts: [k, ...] addends.
        groups: slices of ``parts``. A row is at most twice in a group.
    """
    for group in groups:
        total.index_add_(0, rows[group], parts[group].to(total.dtype))
