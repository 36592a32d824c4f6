"""Packed rows and context-parallel layouts of sequences that share prefixes."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_gptoss.context_parallel import AttentionShape, HardwareRates, balanced_layout
from megatron_gptoss.context_parallel.cost_model import choose_scheme
from megatron_gptoss.context_parallel.key_gradients import add_in_order
from megatron_gptoss.context_parallel.token_order import rank_tokens, row_indices, token_order
from megatron_gptoss.packing import PackedBatch, build_batch
from megatron_gptoss.prefix_tree import PrefixSharing
from megatron_gptoss.samples import TrainingSamples
from tests.support.megatron_gptoss.branching import branching_samples

GPTOSS = AttentionShape(heads=64, kv_heads=8, head_size=64)
H200 = HardwareRates(bandwidth=300e9, rate=525e12)
LABEL_COLUMNS = ("labels", "loss_mask", "advantages", "old_log_probs", "sample_ids")


def token_of_labels(batch: PackedBatch) -> list[tuple[Any, ...]]:
    """Return id, position and routes of the token that predicts each label, without padding."""
    columns = [batch.token_ids, batch.position_ids]
    if batch.routed_experts is not None:
        columns.append(batch.routed_experts.flatten(1))
    rows = zip(*(batch.at_labels(column).tolist() for column in columns), strict=True)
    is_label = (batch.sample_ids >= 0).tolist()
    return [row for row, kept in zip(rows, is_label, strict=True) if kept]


@pytest.mark.parametrize("with_routes", [False, True])
@pytest.mark.parametrize("align", [1, 16])
@pytest.mark.parametrize("min_shared", [1, 6])
def test_labels_keep_the_inputs_of_whole_sequences(
    with_routes: bool, align: int, min_shared: int
) -> None:
    samples = branching_samples(3, with_routes=with_routes)
    whole = build_batch(samples)
    batch = build_batch(samples, align=align, sharing=PrefixSharing(min_shared))
    assert batch.prefixes is not None
    assert batch.tokens < whole.tokens / 2
    assert batch.tokens % align == 0
    assert token_of_labels(batch) == token_of_labels(whole)
    for name in LABEL_COLUMNS:
        assert torch.equal(getattr(batch, name)[: whole.tokens], getattr(whole, name))


def test_tokens_with_unequal_routes_stay_apart() -> None:
    samples = branching_samples(3, with_routes=True, unequal_routes=0.1)
    batch = build_batch(samples, sharing=PrefixSharing(1))
    assert token_of_labels(batch) == token_of_labels(build_batch(samples))
    assert batch.tokens > build_batch(samples.without_routes(), sharing=PrefixSharing(1)).tokens


def test_padding_predicts_labels_outside_the_loss() -> None:
    batch = build_batch(branching_samples(3), align=64, sharing=PrefixSharing(1))
    padding = batch.tokens - build_batch(branching_samples(3), sharing=PrefixSharing(1)).tokens
    assert padding > 0
    assert batch.is_padding.tolist() == [False] * (batch.tokens - padding) + [True] * padding
    assert batch.sample_ids[-padding:].tolist() == [-1] * padding
    assert not batch.loss_mask[-padding:].any()


def test_pairs_are_the_distinct_labels_of_each_token() -> None:
    samples = TrainingSamples.join(
        [
            {"token_ids": [1, 2, 3], "loss_mask": [0, 1, 1]},
            {"token_ids": [1, 2, 4], "loss_mask": [0, 1, 1]},
            {"token_ids": [1, 2, 3], "loss_mask": [0, 1, 1]},
        ]
    )
    batch = build_batch(samples, sharing=PrefixSharing(1))
    prefixes = batch.prefixes
    assert batch.token_ids.tolist() == [1, 2]
    assert prefixes.label_rows.tolist() == [0, 1] * 3
    assert prefixes.pair_rows.tolist() == [0, 1, 1]
    assert prefixes.pair_labels.tolist() == [2, 3, 4]
    assert prefixes.pair_of_label.tolist() == [0, 1, 0, 2, 0, 1]


def equal_batches(first: PackedBatch, second: PackedBatch) -> bool:
    pairs = [(getattr(first, field.name), getattr(second, field.name)) for field in fields(first)]
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


def test_rows_without_common_prefixes_stay_rows_of_sequences() -> None:
    samples = TrainingSamples.join(
        [{"token_ids": [first, 2, 3], "loss_mask": [0, 1, 1]} for first in (5, 6)]
    )
    assert equal_batches(build_batch(samples, sharing=PrefixSharing(1)), build_batch(samples))
    assert equal_batches(
        build_batch(samples, [], 4, sharing=PrefixSharing(1)), build_batch(samples, [], 4)
    )
    # A common prefix that is shorter than the limit.
    samples = branching_samples(3)
    assert equal_batches(build_batch(samples, sharing=PrefixSharing(1000)), build_batch(samples))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 5))
def test_every_rank_gets_equally_many_tokens_and_their_paths(seed: int, ranks: int) -> None:
    batch = build_batch(branching_samples(seed), align=ranks, sharing=PrefixSharing(1))
    if batch.prefixes is None:
        return
    layout = batch.context_layout_over(ranks)
    assert torch.equal(token_order(layout).sort().values, torch.arange(batch.tokens))
    for rank, spans in enumerate(layout.spans):
        assert len(rank_tokens(layout, rank)) == batch.tokens // ranks
        whole = [layout.is_whole(span) for span in spans]
        assert whole == sorted(whole)
        split = [span for span, is_whole in zip(spans, whole, strict=True) if not is_whole]
        assert layout.shared[rank] == sum(span.tokens for span in split)
        for span in spans:
            # The keys of a span are at all positions before its end.
            path = row_indices(layout, span._replace(start=0))
            assert batch.position_ids[path].tolist() == list(range(span.end))
            last = int(path[-1])
            label = (batch.prefixes.label_rows == last).nonzero()[0, 0]
            if batch.sample_ids[label] >= 0:
                assert torch.equal(
                    path, batch.prefixes.label_rows[label - span.end + 1 : label + 1]
                )


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_shards_hold_each_label_with_its_token(ranks: int) -> None:
    batch = build_batch(
        branching_samples(3, with_routes=True), align=ranks, sharing=PrefixSharing(1)
    )
    seen = []
    for rank in range(ranks):
        shard = batch.context_parallel_shard(rank, ranks)
        labels = batch.rank_labels(rank, ranks)
        seen.append(labels)
        assert shard.tokens == batch.tokens // ranks
        for column in ("token_ids", "position_ids", "routed_experts"):
            got = shard.at_labels(getattr(shard, column))
            assert torch.equal(got, batch.at_labels(getattr(batch, column))[labels])
        for name in LABEL_COLUMNS:
            assert torch.equal(getattr(shard, name), getattr(batch, name)[labels])
        pairs = shard.prefixes
        assert torch.equal(pairs.pair_rows[pairs.pair_of_label], pairs.label_rows)
        assert torch.equal(pairs.pair_labels[pairs.pair_of_label], shard.labels)
        own = rank_tokens(batch.context_layout_over(ranks), rank)
        assert torch.equal(shard.is_padding, batch.is_padding[own])
    assert torch.equal(torch.cat(seen).sort().values, torch.arange(len(batch.labels)))


def test_work_is_balanced_over_ranks() -> None:
    # A prompt of 8,000 tokens with 16 answers of 1,000.
    offsets = (0, *range(8000, 24001, 1000))
    parents = (-1, *[0] * 16)
    for ranks in (2, 4, 8):
        layout = balanced_layout(offsets, ranks, parents)
        work = [layout.pairs(rank) for rank in range(ranks)]
        assert sum(work) == 8000 * 8001 // 2 + 16 * (9000 * 9001 - 8000 * 8001) // 2
        assert max(work) * ranks < 1.03 * sum(work)


def test_all_to_all_is_refused_for_shared_prefixes() -> None:
    layout = balanced_layout((0, 8, 12, 16), 2, (-1, 0, 0))
    assert choose_scheme(layout, GPTOSS, None, H200) == "all_gather"
    assert choose_scheme(layout, GPTOSS, 128, H200) == "halo"
    with pytest.raises(ValueError, match="all_to_all does not support sequences that share"):
        choose_scheme(layout, GPTOSS, None, H200, "all_to_all")


def test_key_gradients_are_added_in_order() -> None:
    rows = torch.tensor([0, 2, 0, 2, 1, 2])
    parts = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0, 32.0])
    total = torch.zeros(3, dtype=torch.float64)
    add_in_order(total, rows, parts)
    assert total.tolist() == [5, 16, 42]
