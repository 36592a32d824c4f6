"""Context parallelism: layout of rows, all schemes against one rank, messages, choice of scheme."""

from __future__ import annotations

import random
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from gptoss_kernels.sink_attention import sink_attention
from megatron_gptoss.config import ParallelConfig
from megatron_gptoss.context_parallel import (
    AttentionShape,
    HardwareRates,
    balanced_layout,
    candidates,
)
from megatron_gptoss.context_parallel.attention import context_parallel_attention
from megatron_gptoss.context_parallel.cost_model import choose_scheme
from megatron_gptoss.context_parallel.token_order import (
    inverse_order,
    rank_tokens,
    row_indices,
    token_order,
)
from megatron_gptoss.families.gpt_oss.config import GptOssModelConfig
from tests.support.distributed import free_port, run_distributed
from tests.support.tolerances import rounding_error

H200 = HardwareRates(bandwidth=300e9, rate=525e12)
MODEL = GptOssModelConfig(num_layers=2, num_experts=4, num_attention_heads=8, num_key_value_heads=2)
GPTOSS = AttentionShape(heads=64, kv_heads=8, head_size=64)


def build_layout(lengths: list[int], ranks: int) -> Any:
    padding = -sum(lengths) % ranks
    return balanced_layout((0, *accumulate(lengths + [padding] * (padding > 0))), ranks)


# -- the layout ----------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=30), st.integers(2, 9))
def test_each_token_is_on_one_rank_and_ranks_have_equal_counts(
    lengths: list[int], ranks: int
) -> None:
    layout = build_layout(lengths, ranks)
    tokens = layout.offsets[-1]
    assert all(len(rank_tokens(layout, rank)) == tokens // ranks for rank in range(ranks))
    assert torch.equal(token_order(layout).sort().values, torch.arange(tokens))
    assert torch.equal(token_order(layout)[inverse_order(layout)], torch.arange(tokens))
    for rank, spans in enumerate(layout.spans):
        assert torch.equal(
            torch.cat([row_indices(layout, span) for span in spans]), rank_tokens(layout, rank)
        )
        for before, after in pairwise(spans):
            assert before.sequence != after.sequence or before.end < after.start, (
                "in order, and not adjacent"
            )
        whole = [
            s.end - s.start == layout.offsets[s.sequence + 1] - layout.offsets[s.sequence]
            for s in spans
        ]
        assert whole == sorted(whole), "shared sequences come first"
        assert layout.shared[rank] == sum(
            s.end - s.start for s, alone in zip(spans, whole, strict=True) if not alone
        )


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("tokens", [16_384, 131_072])
def test_ranks_get_equal_attention_work(ranks: int, tokens: int) -> None:
    for seed in range(20):
        draw = random.Random(seed)
        lengths = []
        left = tokens
        while left:  # agent episodes: most are short, some very long
            lengths.append(
                min(int(draw.lognormvariate(draw.choice([5.5, 6.5, 7.5]), 1)) + 20, left)
            )
            left -= lengths[-1]
        layout = build_layout(lengths, ranks)
        for window, bound in ((None, 1.03), (128, 1.08)):
            work = [layout.pairs(rank, window) for rank in range(ranks)]
            assert max(work) <= bound * sum(work) / ranks, (seed, window)


def test_short_sequences_are_not_split_or_communicated() -> None:
    layout = build_layout([100] * 64, 4)
    assert layout.shared == (0, 0, 0, 0)
    for window in (None, 8):
        best = candidates(layout, GPTOSS, window, H200)[0]
        assert best.bytes_sent == 0


def test_window_work_counts_visible_keys() -> None:
    layout = build_layout([50, 3, 47], 2)
    for rank in range(2):
        pairs = sum(
            min(p + 1, 8) for span in layout.spans[rank] for p in range(span.start, span.end)
        )
        assert layout.pairs(rank, 8) == pairs


# -- every scheme against one rank ---------------------------------------------------------------

HEADS = 8
KV_HEADS = 2
HEAD_SIZE = 16
PACKS = [
    [64],  # crosses every boundary
    [30, 1, 1, 5, 29, 3, 3, 8],
    [9, 1, 2, 40, 1, 7, 4],
    [1] * 8,
    [3, 5],  # segments of one token, shorter than the windows
    *[[random.Random(seed).choice([1, 2, 5, 17, 60]) for _ in range(9)] for seed in range(4)],
]
CASES = [
    (None, "all_gather"),
    (None, "all_to_all"),
    (1, "halo"),
    (8, "halo"),
    (50, "halo"),
    (7, "all_to_all"),
]


def compare_and_count(rank: int, ranks: int, port: int) -> tuple[dict[str, float], dict[int, int]]:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks
    )
    result = compare_schemes(rank, ranks), count_bytes(rank, ranks)
    dist.destroy_process_group()
    return result


@pytest.fixture(scope="module")
def two_ranks() -> list[Any]:
    return run_distributed(compare_and_count, 2, 2, free_port())


@pytest.fixture(scope="module")
def four_ranks() -> list[Any]:
    return run_distributed(compare_and_count, 4, 4, free_port())


def compare_schemes(rank: int, ranks: int) -> dict[str, float]:
    """Return the largest error of O and gradients relative to the bound, per scheme."""
    worst: dict[str, float] = {}
    for lengths in PACKS:
        layout = build_layout(lengths, ranks)
        tokens = layout.offsets[-1]
        torch.manual_seed(0)
        sizes = (HEADS, KV_HEADS, KV_HEADS, HEADS)
        q, k, v, grad_o = (torch.randn(tokens, heads, HEAD_SIZE) for heads in sizes)
        sinks = torch.randn(HEADS)

        cu_seqlens = torch.tensor(layout.offsets)
        part = rank_tokens(layout, rank)
        for window, scheme in CASES:
            whole = [x.clone().requires_grad_() for x in (q, k, v, sinks)]
            out = sink_attention(
                *whole, cu_seqlens=cu_seqlens, max_seqlen=layout.longest, window=window
            )
            grads = torch.autograd.grad(out, whole, grad_o)
            want = [out[part], *(grad[part] for grad in grads[:3]), grads[3]]
            precise = [x.detach().double().requires_grad_() for x in whole]
            exact_out = sink_attention(
                *precise, cu_seqlens=cu_seqlens, max_seqlen=layout.longest, window=window
            )
            exact = [exact_out, *torch.autograd.grad(exact_out, precise, grad_o.double())]
            allowed = [
                rounding_error(x.detach(), y.detach())
                for x, y in zip((out, *grads), exact, strict=True)
            ]

            local = [x[part].requires_grad_() for x in (q, k, v)] + [sinks.clone().requires_grad_()]
            out = context_parallel_attention(
                *local, layout, dist.group.WORLD, window, HEAD_SIZE**-0.5, scheme=scheme
            )
            got = [out, *torch.autograd.grad(out, local, grad_o[part])]
            dist.all_reduce(got[-1])  # each rank has a part of the sinks' gradient

            names = ("o", "dq", "dk", "dv", "dsinks")
            for name, x, y, bound in zip(names, got, want, allowed, strict=True):
                key = f"{scheme} {name}"
                worst[key] = max(worst.get(key, 0.0), float((x - y).abs().max()) / bound)
                assert bound < 1e-3 * y.abs().max()
    return worst


@pytest.mark.parametrize("ranks", ["two_ranks", "four_ranks"])
def test_every_scheme_equals_one_rank(ranks: str, request: pytest.FixtureRequest) -> None:
    for worst, _ in request.getfixturevalue(ranks):
        for name, error in worst.items():
            assert error <= 1, name


# -- messages ------------------------------------------------------------------------------------


WINDOW = 32
LENGTHS = [1024, 4096, 8192]


def count_bytes(rank: int, ranks: int) -> dict[int, int]:
    """Return the bytes that this rank sends in forward and backward of a window layer, by length.

    Each length is a batch with one sequence. Other collectives are removed, so a call fails.
    """
    exchange = dist.all_to_all_single
    sent = []

    def counted(
        output: torch.Tensor,
        given: torch.Tensor,
        out: list[int],
        splits: list[int],
        **options: Any,
    ) -> Any:
        row = 2 * KV_HEADS * HEAD_SIZE * given.element_size()
        assert given.numel() * given.element_size() == sum(splits) * row
        sent.append((sum(splits) - splits[rank]) * row)
        return exchange(output, given, out, splits, **options)

    result = {}
    with pytest.MonkeyPatch.context() as patch:
        for name in (
            "all_gather_into_tensor",
            "all_gather",
            "all_reduce",
            "all_to_all",
            "batch_isend_irecv",
        ):
            patch.delattr(dist, name)
        patch.setattr(dist, "all_to_all_single", counted)
        for length in LENGTHS:
            sent.clear()
            q = torch.randn(length // ranks, HEADS, HEAD_SIZE, requires_grad=True)
            k, v = (
                torch.randn(length // ranks, KV_HEADS, HEAD_SIZE, requires_grad=True)
                for _ in range(2)
            )
            inputs = q, k, v, torch.zeros(HEADS), build_layout([length], ranks), dist.group.WORLD
            context_parallel_attention(*inputs, WINDOW, 0.25).sum().backward()
            result[length] = sum(sent)
    return result


def test_window_layer_traffic_is_independent_of_sequence_length(
    two_ranks: list[Any], four_ranks: list[Any]
) -> None:
    token = 2 * KV_HEADS * HEAD_SIZE * 4  # a key and a value in fp32
    border = (WINDOW - 1) * token
    for ranks in (two_ranks, four_ranks):
        for _, counts in ranks:
            assert len(set(counts.values())) == 1, "O(window), not O(tokens)"
    # Two ranks hold chunks 0 and 3, and chunks 1 and 2 without a gap. Each rank sends one border
    # forward. The gradients of received borders return in the backward pass.
    assert [counts[8192] for _, counts in two_ranks] == [2 * border] * 2
    # four ranks: seven borders, one of them between chunks 3 and 4 of the same rank
    assert sum(counts[8192] for _, counts in four_ranks) == 2 * 6 * border
    predicted = candidates(
        build_layout([8192], 4), AttentionShape(HEADS, KV_HEADS, HEAD_SIZE, 4), WINDOW, H200
    )[0]
    assert predicted.scheme == "halo"
    assert predicted.bytes_sent == max(counts[8192] for _, counts in four_ranks)


# -- choice of scheme ----------------------------------------------------------------------------


def test_window_layers_use_halo_and_all_ranks_have_a_scheme() -> None:
    for ranks in (2, 4, 8, 16):
        layout = build_layout([131_072], ranks)
        assert choose_scheme(layout, GPTOSS, 128, H200) == "halo"
        assert choose_scheme(layout, GPTOSS, None, H200) in ("all_gather", "all_to_all")
    assert choose_scheme(build_layout([131_072], 3), GPTOSS, None, H200) == "all_gather"


def test_slow_network_uses_scheme_with_least_traffic() -> None:
    layout = build_layout([32_768], 8)
    slow = HardwareRates(bandwidth=1e9, rate=525e12)
    costs = candidates(layout, GPTOSS, None, slow)
    assert costs[0].bytes_sent == min(cost.bytes_sent for cost in costs)


def test_unsuitable_scheme_error_names_a_suitable_one() -> None:
    shape = AttentionShape(heads=8, kv_heads=2, head_size=16)
    with pytest.raises(
        ValueError,
        match=r"all_to_all cannot split full layers with 8 heads over 3.*use all_gather",
    ):
        choose_scheme(build_layout([30], 3), shape, None, H200, "all_to_all")


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        (
            {"world_size": 3, "context": 3, "context_scheme_full": "all_to_all"},
            r"context_scheme_full all_to_all needs parallel.context \(3\) to divide .*\(8\): "
            r"use parallel.context 1, 2, or scheme a",
        ),
        (
            {"world_size": 3, "context": 3, "context_scheme_window": "all_to_all"},
            r"context_scheme_window.*: use parallel.context 1, 2, or scheme halo",
        ),
        ({"world_size": 6, "context": 4}, r"world_size \(6\).*\(1 x 1 x 4 = 4\): use 4 ranks"),
    ],
)
def test_unsplittable_layout_error_suggests_a_valid_one(
    parallel: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ParallelConfig(**parallel).check_layout(MODEL)
    ParallelConfig(world_size=3, context=3).check_layout(MODEL)


def test_a_row_that_does_not_divide_names_the_padding_it_needs() -> None:
    with pytest.raises(
        ValueError, match=r"19 packed tokens .* 4 context-parallel ranks. Pad the row to 20 tokens"
    ):
        balanced_layout((0, 10, 19), 4)
