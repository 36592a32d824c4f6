"""Prefix trees: every sequence is found again, nothing unequal is merged, nothing equal is missed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_gptoss.context_parallel.segments import RowSegments
from megatron_gptoss.prefix_tree import PrefixKeys, PrefixSharing, PrefixTree, build_prefix_tree
from megatron_gptoss.routes import route_digests
from megatron_gptoss.samples import TrainingSamples

# Two ids, so that most sequences have prefixes in common.
sequences = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), min_size=1, max_size=12)


def build_keys(rows: list[list[int]]) -> PrefixKeys:
    return PrefixKeys([np.array(row, np.uint8)[:, None] for row in rows])


def build_tree(samples: TrainingSamples, prompts_only: bool = False) -> PrefixTree:
    routes = samples.routed_experts
    digests = None if routes is None else [route_digests(row) for row in routes]
    return build_prefix_tree(PrefixKeys.of(samples, range(len(samples)), prompts_only, digests))


def tree_tokens(tree: PrefixTree, rows: list[list[int]]) -> list[int | None]:
    """Return the token at each place of the tree, written by the sequences."""
    tokens: list[int | None] = [None] * tree.tokens
    for sequence, row in enumerate(rows):
        for place, token in zip(tree.rows(sequence), row, strict=True):
            assert tokens[place] in (None, token), "two tokens at one place"
            tokens[place] = token
    return tokens


@settings(max_examples=300, deadline=None)
@given(sequences, st.integers(1, 4))
def test_sequences_are_the_paths_of_their_tree(rows: list[list[int]], min_shared: int) -> None:
    tree = build_prefix_tree(build_keys(rows), min_shared)
    assert None not in tree_tokens(tree, rows)
    segments = tree.segments
    for sequence in range(len(rows)):
        places = tree.rows(sequence)
        # Positions count along the path, and each place lies in one segment.
        for position, place in enumerate(places):
            segment = np.searchsorted(segments.offsets, place, side="right") - 1
            assert segments.depths[segment] + place - segments.offsets[segment] == position


@settings(max_examples=300, deadline=None)
@given(sequences)
def test_a_tree_has_as_many_tokens_as_prefixes(rows: list[list[int]]) -> None:
    prefixes = {tuple(row[: end + 1]) for row in rows for end in range(len(row))}
    assert build_prefix_tree(build_keys(rows)).tokens == len(prefixes)


@settings(max_examples=300, deadline=None)
@given(sequences, st.integers(1, 5))
def test_shared_segments_have_the_smallest_length(rows: list[list[int]], min_shared: int) -> None:
    tree = build_prefix_tree(build_keys(rows), min_shared)
    users = np.zeros(tree.tokens, int)
    for sequence in range(len(rows)):
        users[tree.rows(sequence)] += 1
    for start, tokens in zip(tree.segments.offsets, tree.segments.lengths, strict=False):
        of_segment = set(users[start : start + tokens])
        assert len(of_segment) == 1
        assert of_segment == {1} or tokens >= min_shared
    for segment, parent in enumerate(tree.segments.parents):
        assert parent < segment


def test_long_prefixes_merge_beside_short_ones() -> None:
    # All three share 2 tokens, and two of them share 8.
    rows = [[1, 1, 2, 2, 2, 2, 2, 2, 3], [1, 1, 2, 2, 2, 2, 2, 2, 4], [1, 1, 5, 5, 5]]
    assert build_prefix_tree(build_keys(rows), min_shared=4).tokens == 8 + 1 + 1 + 5


def test_deep_trees_need_no_recursion() -> None:
    rows = [[7] * length for length in range(1, 3000)]
    assert build_prefix_tree(build_keys(rows)).tokens == 2999


@pytest.mark.parametrize("min_shared", [0, -1])
def test_min_shared_is_positive(min_shared: int) -> None:
    with pytest.raises(ValueError, match="min_shared must be at least 1"):
        PrefixSharing(min_shared)


def samples_with_routes(routes: list[list[list[int]]]) -> TrainingSamples:
    """Return equal sequences of 4 tokens, with the routes [3][top_k] of each."""
    return TrainingSamples.join(
        [
            {
                "token_ids": [300, 301, 302, 303],
                "loss_mask": [0, 1, 1, 1],
                "routed_experts": np.array(rows, np.uint8)[:, None, :],
            }
            for rows in routes
        ]
    )


def test_tokens_with_other_routes_are_not_merged() -> None:
    samples = samples_with_routes([[[0, 1], [2, 3], [4, 5]], [[0, 1], [2, 7], [4, 5]]])
    tree = build_tree(samples)
    assert tree.segments == RowSegments((0, 1, 3, 5), (-1, 0, 0))
    assert build_tree(samples.without_routes()).tokens == 3


def test_the_order_of_experts_is_no_difference() -> None:
    samples = samples_with_routes([[[0, 1], [2, 3], [4, 5]], [[1, 0], [3, 2], [5, 4]]])
    assert build_tree(samples).tokens == 3


def test_ids_differ_beyond_their_first_byte() -> None:
    rows = [{"token_ids": [1, 257, 3], "loss_mask": [0, 1, 1]} for _ in range(2)]
    rows[1]["token_ids"] = [1, 513, 3]
    assert build_tree(TrainingSamples.join(rows)).tokens == 3


def test_row_ranges_follow_the_parents() -> None:
    # Segment 2 continues 1, which continues 0. Segment 3 is another root.
    segments = RowSegments((0, 4, 6, 9, 11), (-1, 0, 1, -1))
    assert segments.depths == (0, 4, 6, 0)
    assert segments.row_ranges(2, 0, 9) == [(0, 4), (4, 6), (6, 9)]
    assert segments.row_ranges(2, 5, 7) == [(5, 6), (6, 7)]
    assert segments.row_ranges(1, 1, 4) == [(1, 4)]
    assert segments.row_ranges(3, 0, 2) == [(9, 11)]
    assert [segments.is_alone(i) for i in range(4)] == [False, False, False, True]
