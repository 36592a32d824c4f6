"""Trees are cut into pieces that fit into micro-batches, cost about the same and copy few tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_gptoss.packing import schedule
from megatron_gptoss.planning.flops import attended_pairs
from megatron_gptoss.prefix_tree import PrefixKeys, SortedPrefixes
from megatron_gptoss.tree_pieces import TreePiece, cut_trees

# Two ids, so that most sequences have prefixes in common.
sequences = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), min_size=1, max_size=12)


def sort_prefixes(rows: list[list[int]]) -> SortedPrefixes:
    return SortedPrefixes(
        PrefixKeys([np.array(row, np.int32)[:, None].view(np.uint8) for row in rows])
    )


def group(prefix: int, own: list[int]) -> list[list[int]]:
    """Return sequences with ``prefix`` common tokens and the given numbers of own tokens."""
    return [[0] * prefix + [number + 1] * tokens for number, tokens in enumerate(own)]


def pairs(tokens: int) -> float:
    return float(attended_pairs(tokens))


@settings(max_examples=200, deadline=None)
@given(sequences, st.integers(9, 30), st.integers(1, 3), st.integers(1, 4))
def test_pieces_hold_every_sequence_and_fit(
    rows: list[list[int]], max_tokens: int, step: int, min_shared: int
) -> None:
    pieces = cut_trees(sort_prefixes(rows), max_tokens, step, pairs, min_shared)
    taken = [i for piece in pieces for i in piece.sequences]
    assert sorted(taken) == list(range(len(rows)))
    for piece in pieces:
        assert piece.tokens <= max_tokens
        own = [rows[i] for i in piece.sequences]
        assert piece.tokens <= sum(map(len, own))
        if min_shared == 1:
            prefixes = {tuple(row[: end + 1]) for row in own for end in range(len(row))}
            assert piece.tokens == len(prefixes)
            # Each distinct prefix is one query, which sees as many keys as it has tokens.
            assert piece.cost == sum(map(len, prefixes))


def test_a_tree_that_fits_is_not_cut() -> None:
    (piece,) = cut_trees(sort_prefixes(group(80, [10] * 4)), 120, 1, float, 1)
    assert piece == TreePiece([0, 1, 2, 3], 120, 120.0)


def test_large_trees_fill_their_micro_batches() -> None:
    # 512 episodes of 20 tokens with a common prefix of 80: a micro-batch of 320 tokens holds 12.
    pieces = cut_trees(sort_prefixes(group(80, [20] * 512)), 320, 1, float, 8)
    assert len(pieces) == 43
    assert sum(piece.tokens for piece in pieces) == 43 * 80 + 512 * 20


def test_trees_are_cut_where_few_tokens_are_copied() -> None:
    # Two groups share 10 tokens, and each group shares 60 more. Half of the tokens end within the
    # second group, after its first sequence.
    first = [[0] * 10 + [1] * 60 + [number] * 5 for number in (5, 6, 7)]
    second = [
        [0] * 10 + [2] * 60 + [number] * tokens
        for number, tokens in ((5, 5), (6, 15), (7, 15), (8, 50))
    ]
    pieces = cut_trees(sort_prefixes([*first, *second]), 229, 1, float, 1)
    assert [piece.sequences for piece in pieces] == [[0, 1, 2], [3, 4, 5, 6]]
    assert [piece.tokens for piece in pieces] == [85, 155]


def test_trees_are_cut_for_balance() -> None:
    # Four ranks, a tree of 330 tokens, and two sequences of 30. Each rank gets two leaves of the tree.
    rows = [*group(10, [40] * 8), *[[9 + number] * 30 for number in range(2)]]
    lengths = np.array([len(row) + 1 for row in rows])
    plan = schedule(lengths, 400, 4, prefixes=sort_prefixes(rows), min_shared=1)
    sizes = [sorted(len(rows[i]) for i in own) for (own,) in plan.micro_batches]
    assert sorted(sizes) == [[30, 50, 50], [30, 50, 50], [50, 50], [50, 50]]
    assert plan.tokens == 4 * 10 + 8 * 40 + 60


def test_cuts_that_cost_too_much_are_not_made_for_balance() -> None:
    # Two ranks. Two halves would cost nearly twice as much.
    rows = group(100, [1, 1])
    plan = schedule(np.array([102, 102]), 300, 2, prefixes=sort_prefixes(rows), min_shared=1)
    assert sorted(map(len, (own for rank in plan.micro_batches for own in rank))) == [0, 2]
    assert plan.tokens == 102


@pytest.mark.parametrize("min_shared", [1, 5])
def test_short_prefixes_do_not_join_trees(min_shared: int) -> None:
    rows = group(4, [3, 3])
    pieces = cut_trees(sort_prefixes(rows), 100, 1, float, min_shared)
    assert [piece.tokens for piece in pieces] == ([10] if min_shared == 1 else [7, 7])


def test_rows_of_several_pieces_fit() -> None:
    # Eight sequences share 10 tokens with another one, and 13 with each other. In a row with the other
    # one, the run of 3 tokens is shorter than ``min_shared`` and is computed eight times.
    rows = [*([1] * 13 + [2 + number] * 5 for number in range(8)), [1] * 10 + [99] * 45]
    prefixes = sort_prefixes(rows)
    assert prefixes.count_tokens(range(8), 4) + len(rows[8]) == 13 + 8 * 5 + 55 == 108
    assert prefixes.count_tokens(range(9), 4) == 10 + 8 * (3 + 5) + 45 == 119
    lengths = np.array([len(row) + 1 for row in rows])
    for max_tokens in range(55, 125):
        plan = schedule(lengths, max_tokens, prefixes=prefixes, min_shared=4)
        tokens = [prefixes.count_tokens(own, 4) for own in plan.micro_batches[0] if own]
        assert max(tokens) <= max_tokens
        assert sum(tokens) == plan.tokens
