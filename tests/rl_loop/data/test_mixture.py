"""A mixture gives every source its share of every block, in an order drawn from the seed."""

from collections import Counter

import pytest

from rl_loop.data.mixture import BLOCK, SourceMixture


@pytest.mark.parametrize("weights", [[1.0], [3, 1], [1, 1, 1], [0.2, 0.5, 0.3], [1, 0]])
def test_every_block_has_the_shares_of_its_sources(weights: list[float]) -> None:
    mixture = SourceMixture(weights, "seed")
    for block in range(3):
        positions = range(block * BLOCK, (block + 1) * BLOCK)
        counts = Counter(mixture.source_at(position) for position in positions)
        for number, weight in enumerate(weights):
            assert counts[number] == pytest.approx(BLOCK * weight / sum(weights), abs=1)


def test_mixture_counts_earlier_draws_of_the_same_source() -> None:
    mixture = SourceMixture([3, 2, 1], "seed")
    turns: Counter[int] = Counter()
    for position in range(3 * BLOCK):
        source = mixture.source_at(position)
        assert mixture.earlier(position) == turns[source]
        turns[source] += 1


def test_order_of_sources_differs_between_blocks_and_seeds() -> None:
    def order(seed: str, block: int) -> list[int]:
        mixture = SourceMixture([1, 1], seed)
        return [mixture.source_at(block * BLOCK + offset) for offset in range(BLOCK)]

    assert order("a", 0) == order("a", 0)
    assert order("a", 0) != order("a", 1)
    assert order("a", 0) != order("b", 0)
