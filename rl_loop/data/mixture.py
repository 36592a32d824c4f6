"""Assignment of positions in a data stream to several sources."""

import random
from collections.abc import Sequence
from functools import lru_cache

BLOCK = 64
"""Block size. In each block, every source has exactly its share of positions."""


class SourceMixture:
    """Assigns positions to sources in proportion to weights.

    Within a block of positions every source has its share. The order is random, drawn for each
    block, and depends only on seed and position.
    """

    def __init__(self, weights: Sequence[float], seed: str) -> None:
        self._shares = tuple(_shares(weights))
        self._seed = seed

    def source_at(self, position: int) -> int:
        """Return the index of the source at a position."""
        block, offset = divmod(position, BLOCK)
        return _order(self._shares, f"{self._seed}/{block}")[offset]

    def earlier(self, position: int) -> int:
        """Return the number of earlier positions that belong to the same source."""
        return self.count_before(position, self.source_at(position))

    def count_before(self, position: int, source: int) -> int:
        """Return the number of earlier positions that belong to a source."""
        block, offset = divmod(position, BLOCK)
        order = _order(self._shares, f"{self._seed}/{block}")
        return block * self._shares[source] + order[:offset].count(source)


# Positions are read in sequence, so the order of a block is used many times.
@lru_cache(maxsize=8)
def _order(shares: tuple[int, ...], seed: str) -> list[int]:
    order = [number for number, share in enumerate(shares) for _ in range(share)]
    random.Random(seed).shuffle(order)
    return order


def _shares(weights: Sequence[float]) -> list[int]:
    """Split BLOCK in proportion to ``weights`` (largest remainders)."""
    exact = [BLOCK * weight / sum(weights) for weight in weights]
    shares = [int(share) for share in exact]

    # The key is minus the remainder, so the largest remainders come first.
    by_remainder = sorted(range(len(exact)), key=lambda i: shares[i] - exact[i])
    # The rounded-down shares sum to less than BLOCK. Shares with the largest remainders get one
    # more.
    for i in by_remainder[: BLOCK - sum(shares)]:
        shares[i] += 1
    return shares
