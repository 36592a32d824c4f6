from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_gptoss.context_parallel.token_order import inverse_order
from megatron_gptoss.families.gpt_oss.config import GptOssModelConfig
from megatron_gptoss.packing import PackedBatch, build_batch, pack, schedule
from megatron_gptoss.planning.flops import forward_flops
from megatron_gptoss.samples import TrainingSamples
from tests.support.megatron_gptoss.reference import unpack

MODEL = GptOssModelConfig(num_layers=24, num_experts=32)
lengths = st.lists(st.integers(2, 40), min_size=1, max_size=20)


def build_samples(lengths: list[int]) -> TrainingSamples:
    """Return samples with unique token ids, so that a misplaced token is noticed."""
    starts = np.cumsum([0, *lengths])
    return TrainingSamples.join(
        [
            {
                "token_ids": range(start, start + n),
                "loss_mask": [0] + [1] * (n - 1),
                "advantages": [float(start)] * n,
                "rollout_log_probs": [-float(t) for t in range(start, start + n)],
                "routed_experts": np.full((n - 1, 2, 3), start, dtype=np.int16),
            }
            for start, n in zip(starts, lengths, strict=False)
        ]
    )


def flops(length: int) -> float:
    return forward_flops(MODEL, [length])


def test_labels_are_the_next_tokens_of_the_same_sequence() -> None:
    samples = TrainingSamples.join(
        [
            {"token_ids": [5, 6, 7], "loss_mask": [0, 1, 1]},
            {"token_ids": [8, 9], "loss_mask": [0, 1]},
        ]
    )
    batch = build_batch(samples)
    assert batch.token_ids.tolist() == [5, 6, 8]
    assert batch.labels.tolist() == [6, 7, 9]
    assert batch.position_ids.tolist() == [0, 1, 0]
    assert batch.sample_ids.tolist() == [0, 0, 1]
    assert batch.cu_seqlens.tolist() == [0, 2, 3]
    assert batch.max_seqlen == 2


def test_padding_is_a_separate_sequence_outside_the_loss() -> None:
    batch = build_batch(
        TrainingSamples.join([{"token_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}]), align=8
    )
    assert batch.tokens == 8
    assert batch.cu_seqlens.tolist() == [0, 2, 8]
    assert batch.max_seqlen == 6
    assert batch.loss_mask.tolist() == [1, 1, 0, 0, 0, 0, 0, 0]
    assert batch.sample_ids.tolist()[2:] == [-1] * 6


COLUMNS = {
    "advantages": torch.float32,
    "rollout_log_probs": torch.float32,
    "old_log_probs": torch.float32,
    "reference_log_probs": torch.float32,
    "values": torch.float32,
    "returns": torch.float32,
    "staleness": torch.int32,
    "is_off_policy": torch.bool,
}


def random_samples(lengths: list[int], columns: set[str], seed: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    samples = []
    for n in lengths:
        sample = {
            "token_ids": rng.integers(0, 1000, n).tolist(),
            "loss_mask": rng.integers(0, 2, n).tolist(),
        }
        for name in columns:
            is_float = COLUMNS[name].is_floating_point
            sample[name] = rng.normal(size=n) if is_float else rng.integers(0, 2, n)
        samples.append(sample)
    return samples


@given(
    lengths,
    st.sets(st.sampled_from(sorted(COLUMNS))),
    st.sampled_from([1, 2, 8]),
    st.integers(0, 99),
    st.data(),
)
def test_packed_row_equals_token_by_token_construction(
    sizes: list[int], columns: set[str], align: int, seed: int, data: st.DataObject
) -> None:
    samples = random_samples(sizes, columns, seed)
    chosen = data.draw(st.lists(st.sampled_from(range(len(sizes))), min_size=1, unique=True))
    batch = build_batch(TrainingSamples.join(samples), chosen, align)

    row: dict[str, list[Any]] = {name: [] for name in columns}
    inputs, labels, positions, mask, numbers = [], [], [], [], []
    for i in chosen:
        for t in range(1, sizes[i]):
            inputs.append(samples[i]["token_ids"][t - 1])
            labels.append(samples[i]["token_ids"][t])
            positions.append(t - 1)
            mask.append(samples[i]["loss_mask"][t])
            numbers.append(i)
            for name in columns:
                row[name].append(samples[i][name][t])
    padding = -len(inputs) % align

    def filled(entries: list[Any], dtype: torch.dtype, fill: int = 0) -> torch.Tensor:
        return torch.tensor(entries + [fill] * padding, dtype=dtype)

    assert torch.equal(batch.token_ids, filled(inputs, torch.int64))
    assert torch.equal(batch.labels, filled(labels, torch.int64))
    assert torch.equal(batch.loss_mask, filled(mask, torch.bool))
    assert torch.equal(batch.sample_ids, filled(numbers, torch.int64, fill=-1))
    assert batch.position_ids.tolist() == positions + list(range(padding))
    for name, dtype in COLUMNS.items():
        column = getattr(batch, name)
        if name in columns:
            assert column.dtype == dtype
            assert torch.equal(column, filled(row[name], dtype))
        else:
            assert column is None


def square(tokens: int) -> float:
    """Return costs that order micro-batches differently from their tokens."""
    return float(tokens) ** 2


def naive_schedule(
    lengths: list[int], limit: int, ranks: int, work: Callable[[int], float], multiple: int
) -> list[list[list[int]]]:
    """Compute ``schedule`` in plain Python: add micro-batches until all sequences fit."""
    inputs = [length - 1 for length in lengths]
    longest_first = sorted(range(len(inputs)), key=lambda i: -inputs[i])
    count = -(-sum(inputs) // (limit * ranks * multiple)) * ranks * multiple
    while True:
        rows: list[list[int]] = [[] for _ in range(count)]
        for i in longest_first:
            roomy = [row for row in rows if sum(inputs[j] for j in row) + inputs[i] <= limit]
            if not roomy:
                break
            cheapest = min(roomy, key=lambda row: sum(work(inputs[j]) for j in row))
            cheapest.append(i)
        else:
            rows.sort(key=lambda row: -sum(work(inputs[j]) for j in row))
            rounds = [rows[first : first + ranks] for first in range(0, count, ranks)]
            rounds.sort(key=lambda some: -max(sum(inputs[j] for j in row) for row in some))
            return [[some[rank] for some in rounds] for rank in range(ranks)]
        count += ranks * multiple


@given(
    lengths,
    st.integers(39, 90),
    st.integers(1, 8),
    st.sampled_from([float, flops, square]),
    st.integers(1, 3),
)
def test_schedule_equals_plain_python_schedule(
    sizes: list[int], limit: int, ranks: int, work: Callable[[int], float], multiple: int
) -> None:
    plan = schedule(np.array(sizes), limit, ranks, work, multiple)
    assert plan.micro_batches == naive_schedule(sizes, limit, ranks, work, multiple)


@given(lengths, st.integers(39, 90), st.integers(1, 4), st.sampled_from([1, 4]))
def test_rank_packs_its_rows_like_a_rank_with_all_rows(
    sizes: list[int], limit: int, ranks: int, align: int
) -> None:
    samples = build_samples(sizes)
    plan = schedule(samples.lengths, limit, ranks)
    everything = pack(samples, limit, ranks, align)

    for rank in range(ranks):
        sent = plan.list_sequences(rank)
        own = samples.take(sent)
        place = {number: i for i, number in enumerate(sent)}
        for numbers, wanted in zip(plan.micro_batches[rank], everything[rank], strict=True):
            sequences = [place[number] for number in numbers]
            batch = build_batch(own, sequences, align, sample_ids=numbers)
            assert_equal(batch, wanted)


def assert_equal(batch: PackedBatch, wanted: PackedBatch) -> None:
    for field in fields(PackedBatch):
        found = getattr(batch, field.name)
        expected = getattr(wanted, field.name)
        if isinstance(expected, torch.Tensor):
            assert found.dtype == expected.dtype
            assert torch.equal(found, expected), field.name
        else:
            assert found == expected, field.name


@given(lengths, st.integers(1, 3), st.sampled_from([1, 2, 8]), st.integers(1, 4))
def test_every_label_appears_once_with_its_columns(
    sizes: list[int], data_parallel: int, align: int, multiple: int
) -> None:
    samples = build_samples(sizes)
    per_rank = pack(samples, 100_000, data_parallel, align, multiple=multiple)
    assert [len(rank) for rank in per_rank] == [multiple] * data_parallel
    starts_of = [int(row[0]) for row in samples.rows("token_ids")]
    seen: dict[int, np.ndarray] = {}
    for batch in [batch for rank in per_rank for batch in rank]:
        assert batch.tokens % align == 0
        real = batch.sample_ids >= 0
        assert torch.equal(batch.rollout_log_probs[real], -batch.labels[real].float())
        starts = torch.tensor([starts_of[i] for i in batch.sample_ids[real]])
        assert torch.equal(batch.advantages[real], starts.float())
        if real.any():
            assert torch.equal(batch.routed_experts[real, 0, 0].long(), starts)
            assert (batch.routed_experts[~real] == -1).all()
        seen |= unpack(batch.labels, batch)
    for i, row in enumerate(samples.rows("token_ids")):
        assert seen[i].tolist() == [0, *row[1:]]


@given(lengths, st.integers(40, 90), st.integers(1, 2), st.integers(1, 3))
def test_micro_batches_fit_limit_and_ranks_get_equal_multiples(
    sizes: list[int], limit: int, data_parallel: int, multiple: int
) -> None:
    per_rank = pack(build_samples(sizes), limit, data_parallel, multiple=multiple)
    assert len({len(rank) for rank in per_rank}) == 1
    assert len(per_rank[0]) % multiple == 0
    assert all(batch.tokens <= limit for rank in per_rank for batch in rank)


def test_rank_without_sequences_gets_padding_with_every_column() -> None:
    samples = build_samples([5]).with_columns(
        old_log_probs=np.full(5, -1, np.float32),
        staleness=np.ones(5, np.int32),
        is_off_policy=np.ones(5, np.bool_),
    )
    (busy,), (idle,) = pack(samples, 100, data_parallel_size=2, align=4)
    assert busy.loss_mask.tolist() == [1] * 4
    assert busy.is_off_policy.tolist() == [True] * 4

    assert idle.cu_seqlens.tolist() == [0, 4]
    assert idle.loss_mask.tolist() == [0] * 4
    assert idle.sample_ids.tolist() == [-1] * 4
    assert idle.old_log_probs.tolist() == [0] * 4
    assert idle.staleness.tolist() == [0] * 4
    assert idle.is_off_policy.tolist() == [False] * 4
    assert unpack(idle.labels, idle) == {}
    # The routers choose the experts of padding.
    assert idle.routed_experts is None


def test_padding_has_the_unknown_route_of_the_dtype() -> None:
    routes = np.full((3, 2, 4), 7, np.uint8)
    sample = {"token_ids": [5, 6, 7, 8], "loss_mask": [0, 1, 1, 1], "routed_experts": routes}
    batch = build_batch(TrainingSamples.join([sample]), align=4)
    assert batch.routed_experts.dtype == torch.uint8
    assert (batch.routed_experts[:3] == 7).all()
    assert (batch.routed_experts[3:] == 255).all()


def test_unpack_splits_vectors_of_tokens_too() -> None:
    batch = build_batch(build_samples([3, 2]), [1, 0], align=4, sample_ids=[8, 5])
    values = torch.arange(8.0).reshape(4, 2)
    per_sample = unpack(values, batch)
    assert per_sample.keys() == {8, 5}
    assert per_sample[8].tolist() == [[0, 0], [0, 1]]
    assert per_sample[5].tolist() == [[0, 0], [2, 3], [4, 5]]


def test_micro_batch_with_most_tokens_is_first() -> None:
    """Later micro-batches then fit into the memory of the first one."""
    lengths = np.array([101, 61, 61])  # the last token of each sequence is not an input
    (alone,) = schedule(lengths, 130, work=square).micro_batches
    assert alone == [[1, 2], [0]]  # 120 tokens that cost 7,200, then 100 tokens that cost 10,000

    # Ranks still process micro-batches of equal cost at the same time.
    twice = np.tile(lengths, 2)
    for rank in schedule(twice, 130, 2, work=square).micro_batches:
        assert [twice[one].tolist() for one in rank] == [[61, 61], [101]]


def test_long_sequences_are_balanced_by_work_per_micro_batch() -> None:
    lengths = np.random.default_rng(0).lognormal(8.0, 1.0, 512).clip(64, 32_000).astype(int)
    tokens = int(lengths.sum())
    samples = TrainingSamples(
        offsets=np.cumsum([0, *lengths]),
        token_ids=np.ones(tokens, np.int32),
        loss_mask=np.ones(tokens, np.bool_),
    )

    def imbalance(per_rank: list[list[PackedBatch]]) -> float:
        """Return the lost share of time if ranks wait for the slowest at every micro-batch."""
        work = np.array(
            [[sum(map(flops, b.cu_seqlens.diff().tolist())) for b in rank] for rank in per_rank]
        )
        return work.max(0).sum() / work.mean(0).sum() - 1

    by_work = pack(samples, 65_536, 8, align=8, work=flops)
    assert imbalance(by_work) < 0.01
    assert imbalance(pack(samples, 65_536, 8, align=8)) > 2 * imbalance(by_work)
    computed = sum(batch.tokens for rank in by_work for batch in rank)
    assert (tokens - len(lengths)) / computed > 0.999


@given(lengths, st.sampled_from([2, 3, 4, 8]))
def test_context_parallel_shards_are_restored_to_row_order(sizes: list[int], ranks: int) -> None:
    batch = build_batch(build_samples(sizes), align=ranks)
    shards = [batch.context_parallel_shard(rank, ranks) for rank in range(ranks)]
    inverse = inverse_order(batch.context_layout_over(ranks))
    for name in (
        "token_ids",
        "labels",
        "position_ids",
        "loss_mask",
        "advantages",
        "sample_ids",
        "routed_experts",
    ):
        parts = [getattr(shard, name) for shard in shards]
        assert len({len(part) for part in parts}) == 1
        assert torch.equal(torch.cat(parts)[inverse], getattr(batch, name))
    assert all(torch.equal(shard.cu_seqlens, batch.cu_seqlens) for shard in shards)


@pytest.mark.parametrize(
    ("samples", "limit", "data_parallel", "message"),
    [
        (
            [{"token_ids": [1] * 12, "loss_mask": [1] * 12}],
            10,
            1,
            "sample 0 has 12 tokens, more than max_tokens_per_micro_batch.*11 or more",
        ),
        ([], 10, 2, "there are no samples to pack"),
        ([{"token_ids": [1], "loss_mask": [1]}], 10, 1, "sample 0 has 1 tokens"),
        (
            [
                {"token_ids": [1, 2], "loss_mask": [1, 1]},
                {"token_ids": [1], "loss_mask": [1]},
            ],
            10,
            1,
            "sample 1 has 1 tokens",
        ),
    ],
)
def test_unpackable_samples_are_named(
    samples: list[dict[str, Any]], limit: int, data_parallel: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        pack(TrainingSamples.join(samples), limit, data_parallel)
