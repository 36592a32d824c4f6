from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_gptoss.config import ModelConfig
from megatron_gptoss.packing import PackedBatch, Sample, build_batch, pack, unpack
from megatron_gptoss.planning.flops import forward_flops

MODEL = ModelConfig(num_layers=24, num_experts=32)
lengths = st.lists(st.integers(2, 40), min_size=1, max_size=20)


def samples_of(lengths: list[int]) -> list[Sample]:
    """Token ids are unique over all samples, so that a token in a wrong place is seen."""
    starts = np.cumsum([0, *lengths])
    return [
        Sample(
            token_ids=list(range(start, start + n)),
            loss_mask=[0] + [1] * (n - 1),
            advantages=[float(start)] * n,
            rollout_log_probs=[-float(t) for t in range(start, start + n)],
            routed_experts=np.full((n - 1, 2, 3), start, dtype=np.int16),
        )
        for start, n in zip(starts, lengths, strict=False)
    ]


def test_labels_are_the_next_tokens_of_the_same_sequence() -> None:
    batch = build_batch([Sample([5, 6, 7], [0, 1, 1]), Sample([8, 9], [0, 1])])
    assert batch.input_ids.tolist() == [5, 6, 8]
    assert batch.labels.tolist() == [6, 7, 9]
    assert batch.position_ids.tolist() == [0, 1, 0]
    assert batch.cu_seqlens.tolist() == [0, 2, 3]
    assert batch.max_seqlen == 2


def test_the_padding_tail_is_a_sequence_of_its_own_outside_the_loss() -> None:
    batch = build_batch([Sample([5, 6, 7], [0, 1, 1])], align=8)
    assert batch.tokens == 8
    assert batch.cu_seqlens.tolist() == [0, 2, 8]
    assert batch.loss_mask.tolist() == [1, 1, 0, 0, 0, 0, 0, 0]
    assert batch.sample_ids.tolist()[2:] == [-1] * 6


@given(lengths, st.integers(1, 3), st.sampled_from([1, 2, 8]), st.integers(1, 4))
def test_every_label_appears_exactly_once_with_what_belongs_to_it(
    sizes: list[int], data_parallel: int, align: int, multiple: int
) -> None:
    samples = samples_of(sizes)
    per_rank = pack(samples, 100_000, data_parallel, align, multiple=multiple)
    assert [len(rank) for rank in per_rank] == [multiple] * data_parallel
    seen: dict[int, list[float]] = {}
    for batch in [batch for rank in per_rank for batch in rank]:
        assert batch.tokens % align == 0
        real = batch.sample_ids >= 0
        assert torch.equal(batch.rollout_log_probs[real], -batch.labels[real].float())
        starts = torch.tensor([samples[i].token_ids[0] for i in batch.sample_ids[real]])
        assert torch.equal(batch.advantages[real], starts.float())
        assert torch.equal(batch.routed_experts[real, 0, 0].long(), starts)
        seen |= unpack(batch.labels, batch)
    assert [seen[i][1:] for i in range(len(samples))] == [s.token_ids[1:] for s in samples]


@given(lengths, st.integers(40, 90), st.integers(1, 2), st.integers(1, 3))
def test_micro_batches_respect_the_limit_and_ranks_take_the_same_multiple_of_them(
    sizes: list[int], limit: int, data_parallel: int, multiple: int
) -> None:
    per_rank = pack(samples_of(sizes), limit, data_parallel, multiple=multiple)
    assert len({len(rank) for rank in per_rank}) == 1
    assert len(per_rank[0]) % multiple == 0
    assert all(batch.tokens <= limit for rank in per_rank for batch in rank)


def test_a_rank_without_a_sample_passes_one_token_that_is_in_no_loss_and_has_every_column() -> None:
    (sample,) = samples_of([5])
    sample.old_log_probs = [-1.0] * 5
    (busy,), (idle,) = pack([sample], 100, data_parallel_size=2, align=4)
    assert busy.loss_mask.tolist() == [1] * 4
    assert idle.loss_mask.tolist() == [0] * 4 and idle.sample_ids.tolist() == [-1] * 4
    assert idle.old_log_probs is not None and (idle.routed_experts == -1).all()
    assert unpack(idle.labels, idle) == {}


def test_a_long_tail_is_shared_out_by_work_at_every_micro_batch() -> None:
    lengths = np.random.default_rng(0).lognormal(8.0, 1.0, 512).clip(64, 32_000).astype(int)
    samples = [Sample([1] * n, [1] * n) for n in lengths]

    def flops(length: int) -> float:
        return forward_flops(MODEL, [length])

    def imbalance(per_rank: list[list[PackedBatch]]) -> float:
        """Of the time that ranks take which wait for the slowest at every micro-batch."""
        work = np.array(
            [[sum(map(flops, b.cu_seqlens.diff().tolist())) for b in rank] for rank in per_rank]
        )
        return work.max(0).sum() / work.mean(0).sum() - 1

    by_work = pack(samples, 65_536, 8, align=8, work=flops)
    assert imbalance(by_work) < 0.01
    assert imbalance(pack(samples, 65_536, 8, align=8)) > 2 * imbalance(by_work)
    tokens = sum(batch.tokens for rank in by_work for batch in rank)
    assert (sum(lengths) - len(lengths)) / tokens > 0.999


@given(lengths, st.sampled_from([2, 3, 4, 8]))
def test_context_parallel_shards_come_back_into_the_order_of_the_row(
    sizes: list[int], ranks: int
) -> None:
    batch = build_batch(samples_of(sizes), align=ranks)
    shards = [batch.context_parallel_shard(rank, ranks) for rank in range(ranks)]
    inverse = batch.context_layout_over(ranks).inverse
    for name in (
        "input_ids",
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
            [Sample([1] * 12, [1] * 12)],
            10,
            1,
            "sample 0 has 12 tokens, more than max_tokens_per_micro_batch.*11 or more",
        ),
        ([], 10, 2, "there are no samples to pack"),
        ([Sample([1], [1])], 10, 1, "sample 0 has 1 tokens"),
        ([Sample([1, 2, 3], [0, 1])], 10, 1, "loss_mask has 2 entries for 3 tokens"),
    ],
)
def test_what_cannot_be_packed_is_named(
    samples: list[Sample], limit: int, data_parallel: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        pack(samples, limit, data_parallel)
