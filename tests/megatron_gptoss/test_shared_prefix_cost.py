"""Layers compute shared prefixes with few operations, and the host does not wait for the GPU."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from megatron_gptoss.context_parallel import all_gather, balanced_layout, halo
from megatron_gptoss.context_parallel.attention import context_parallel_attention
from megatron_gptoss.context_parallel.head_groups import copied_head_groups
from megatron_gptoss.context_parallel.key_gradients import add_in_order
from megatron_gptoss.packing import build_batch
from megatron_gptoss.prefix_tree import PrefixSharing
from megatron_gptoss.samples import TrainingSamples

ONE_RANK = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
WINDOWS = [None, 8]
WAITING = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "repeat_interleave",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
}
"""Operations whose result has a size or value that the host reads from the GPU."""


class Operations(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        indices = [x for x in args if isinstance(x, list | tuple)]
        is_index = func.overloadpacket.__name__ in ("index", "index_put", "index_put_")
        if is_index and any(x.dtype == torch.bool for x in tree_leaves(indices) if x is not None):
            # A mask selects as many values as it has True.
            self.counts["nonzero"] += 1
        return func(*args, **(kwargs or {}))

    @property
    def waiting(self) -> set[str]:
        """Names of the operations for which the host would wait."""
        return WAITING & self.counts.keys()


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the calls of attention's passes, whose operations are not counted."""
    calls: Counter[str] = Counter()

    def counted(name: str, real: Any) -> Any:
        def call(*args: Any) -> Any:
            calls[name] += 1
            with _disable_current_modes():
                return real(*args)

        return call

    for module in (all_gather, halo):
        for name in ("attention_forward", "attention_backward"):
            monkeypatch.setattr(module, name, counted(name, getattr(module, name)))
    return calls


def group_layout(samples: int, prefix: int = 40, own: int = 12) -> Any:
    """Return the layout of a group on one rank."""
    ends = range(prefix, prefix + own * samples + 1, own)
    return balanced_layout((0, *ends), 1, (-1, *[0] * samples))


def attend(samples: int, window: int | None, device: str = "cpu", heads: int = 4) -> Any:
    """Return a call that runs attention forward and backward on a group."""
    layout = group_layout(samples)
    tokens = layout.offsets[-1]
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    size = 64 if device == "cuda" else 4
    q, k, v = (
        torch.randn(tokens, count, size, dtype=dtype, device=device, requires_grad=True)
        for count in (heads, 2, 2)
    )
    sinks = torch.zeros(heads, dtype=dtype, device=device, requires_grad=True)
    grad_o = torch.randn_like(q)

    def call() -> None:
        o = context_parallel_attention(q, k, v, sinks, layout, ONE_RANK, window, 0.5)
        o.backward(grad_o)

    return call


@pytest.mark.parametrize("window", WINDOWS)
def test_operations_do_not_depend_on_the_number_of_segments(
    window: int | None, passes: Counter[str]
) -> None:
    counts = []
    for samples in (2, 15):
        call = attend(samples, window)
        # The layout is computed once per row, and all layers share it.
        call()
        passes.clear()
        with Operations() as counted:
            call()
        # Window layers compute the beginnings of segments a second time.
        calls = 1 if window is None else 2
        assert passes == {"attention_forward": calls, "attention_backward": calls}
        assert not counted.waiting
        counts.append(counted.counts)
    assert counts[0] == counts[1]


@pytest.mark.gpu
@pytest.mark.parametrize("window", WINDOWS)
def test_attention_does_not_wait_for_the_gpu(window: int | None) -> None:
    # Kernels are compiled in the first calls.
    attend(3, window, "cuda", heads=16)()
    torch.cuda.synchronize()
    call = attend(5, window, "cuda", heads=16)
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_sums_of_key_gradients_have_the_same_bits_on_a_gpu() -> None:
    torch.manual_seed(0)
    rows = torch.randint(50, (4000,), device="cuda")
    parts = torch.randn(4000, 2, 8, 64, device="cuda", dtype=torch.bfloat16)
    sums = []
    for _ in range(5):
        sums.append(torch.zeros(50, 2, 8, 64, device="cuda"))
        add_in_order(sums[-1], rows, parts)
    assert all(torch.equal(total, sums[0]) for total in sums)
    want = torch.zeros(50, 2, 8, 64)
    add_in_order(want, rows.cpu(), parts.cpu())
    torch.testing.assert_close(sums[0].cpu(), want)


def group_samples(samples: int) -> TrainingSamples:
    """Return sequences with 40 common and 12 other tokens."""
    rng = np.random.default_rng(0)
    prefix = rng.integers(0, 100, 40)
    return TrainingSamples.join(
        [
            {
                "token_ids": np.concatenate([prefix, [i], rng.integers(0, 100, 11)]),
                "loss_mask": [1] * 52,
            }
            for i in range(samples)
        ]
    )


def test_labels_of_a_row_are_found_once() -> None:
    for samples in (2, 15):
        batch = build_batch(group_samples(samples), align=8, sharing=PrefixSharing(1))
        # The rows of the first shard are cached with the layout.
        batch.context_parallel_shard(0, 1)
        with Operations() as counted:
            shard = batch.context_parallel_shard(0, 1)
        assert torch.equal(shard.prefixes.pair_rows, batch.prefixes.pair_rows)
        # One rank keeps the order of the row.
        assert not counted.counts


def test_labels_of_ranks_are_found_without_sorting() -> None:
    counts = []
    for samples in (2, 14):
        batch = build_batch(group_samples(samples), align=4, sharing=PrefixSharing(1))
        batch.context_parallel_shard(1, 2)
        with Operations() as counted:
            batch.context_parallel_shard(1, 2)
        counts.append(counted.counts)
        assert "unique_dim" not in counted.counts and "sort" not in counted.counts
    assert counts[0] == counts[1]


def test_padding_is_found_without_reading_a_mask() -> None:
    batch = build_batch(group_samples(3), align=64, sharing=PrefixSharing(1))
    with Operations() as counted:
        assert batch.is_padding.shape == batch.token_ids.shape
    assert not counted.waiting


def test_copies_of_keys_are_bounded() -> None:
    # 16 sequences of 1,000 tokens after 8,000 tokens: 8 heads of bf16 are copied in one call.
    assert copied_head_groups(152_000, 8, 256) == [slice(0, 8)]
    assert copied_head_groups(1_000_000, 8, 256) == [slice(i, i + 2) for i in (0, 2, 4, 6)]
    assert len(copied_head_groups(100_000_000, 8, 256)) == 8
    assert copied_head_groups(0, 8, 256) == [slice(0, 8)]
