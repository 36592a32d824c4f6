"""Which of several sources the element at a position comes from."""

import random
from collections.abc import Sequence
from functools import lru_cache

BLOCK = 64
"""Positions within which sources have exactly their shares."""


class Mixture:
    """Shares positions out among sources by weight.

    Within a block of positions every source has its share of them, in an order drawn for the
    block: a function of seed and position."""

    def __init__(self, weights: Sequence[float], seed: str) -> None:
        self._shares = tuple(_shares(weights))
        self._seed = seed

    def source_at(self, position: int) -> int:
        """Return the number of the source whose turn it is at a position."""
        block, offset = divmod(position, BLOCK)
        return _order(self._shares, f"{self._seed}/{block}")[offset]

    def earlier(self, position: int) -> int:
        """Return how many positions before this one belong to the same source."""
        return self.count_before(position, self.source_at(position))

    def count_before(self, position: int, source: int) -> int:
        """Return how many positions before this one belong to a source."""
        block, offset = divmod(position, BLOCK)
        order = _order(self._shares, f"{self._seed}/{block}")
        return block * self._shares[source] + order[:offset].count(source)


@lru_cache(maxsize=8)
def _order(shares: tuple[int, ...], seed: str) -> list[int]:
    order = [number for number, share in enumerate(shares) for _ in range(share)]
    random.Random(seed).shuffle(order)
    return order


def _shares(weights: Sequence[float]) -> list[int]:
    """Share BLOCK out in proportion to ``weights`` (largest remainders)."""
    exact = [BLOCK * weight / sum(weights) for weight in weights]
    shares = [int(share) for share in exact]

    by_remainder = sorted(range(len(exact)), key=lambda i: shares[i] - exact[i])
    # Rounded down, they lack a few: those that lost most to rounding get one more.
    for i in by_remainder[: BLOCK - sum(shares)]:
        shares[i] += 1
    return shares
