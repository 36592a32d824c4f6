"""Experts with unmerged adapters: outputs, gradients, small updates, and both ways to run the experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gptoss_kernels import mxfp4
from megatron_gptoss.config import OptimizerConfig, ParallelConfig
from megatron_gptoss.layers.adapters import initialize_adapters, without_adapters
from megatron_gptoss.layers.merge import merge
from megatron_gptoss.layers.unmerged import unmerged_product
from megatron_gptoss.packing import PackedBatch, build_batch
from megatron_gptoss.trainer import PolicyTrainer
from tests.support.megatron_gptoss.adapted import (
    ADAPTER,
    adapted_model,
    kept_share_of_small_updates,
    single_adapters,
)
from tests.support.megatron_gptoss.reference import documents, mean_cross_entropy

pytestmark = pytest.mark.usefixtures("process_groups")


ROW_COUNTS = [5, 0, 7, 3]
SCALE = 4.0
SAMPLES = documents([34, 2, 9, 21])
TOKENS = int(SAMPLES.loss_tokens.sum())


def batches() -> list[PackedBatch]:
    return [build_batch(SAMPLES, [0, 1]), build_batch(SAMPLES, [2, 3])]


def served(
    x: torch.Tensor, weights: torch.Tensor, a: torch.Tensor, b: torch.Tensor, biases: torch.Tensor
) -> torch.Tensor:
    """Return a server's product: both products and the bias are summed in fp32, and rounded once."""
    out = []
    for rows, w, a1, b1, bias in zip(x.split(ROW_COUNTS), weights, a, b, biases, strict=True):
        low = (rows.float() @ a1.float().t()).to(x.dtype) * SCALE
        sums = rows.float() @ w.float().t() + low.float() @ b1.float().t()
        out.append((sums + bias.float()).to(x.dtype))
    return torch.cat(out)


@pytest.mark.parametrize("rank", [3, 8])
def test_gradients_equal_those_of_autograd_in_fp64(rank: int) -> None:
    torch.manual_seed(0)
    rows, inner, outer = sum(ROW_COUNTS), 96, 64
    draw = lambda *shape: torch.randn(*shape, requires_grad=True)  # noqa: E731
    factors = [draw(rows, inner), draw(4, rank, inner), draw(4, outer, rank)]
    weights = torch.randn(4, outer, inner)
    biases = torch.randn(4, outer)
    grad = torch.randn(rows, outer)
    found = unmerged_product(*factors, lambda: weights, ROW_COUNTS, SCALE, biases)
    gradients = torch.autograd.grad(found, factors, grad)

    wide = [factor.detach().double().requires_grad_() for factor in factors]
    x, a, b = wide
    full = weights.double() + SCALE * (b @ a)
    split = zip(x.split(ROW_COUNTS), full, biases.double(), strict=True)
    expected = torch.cat([part @ matrix.t() + bias for part, matrix, bias in split])
    expected_gradients = torch.autograd.grad(expected, wide, grad.double())

    pairs = zip((found, *gradients), (expected, *expected_gradients), strict=True)
    for name, (ours, theirs) in zip(("y", "x", "a", "b"), pairs, strict=True):
        error = (ours.double() - theirs).abs().max() / theirs.abs().max()
        assert error < 1e-6, (name, float(error))


@pytest.mark.parametrize("size", [1e-4, 1e-3, 3e-3])
def test_bf16_outputs_equal_those_of_one_accumulator(size: float) -> None:
    """At most 2% of the outputs differ from a server's, because sums have another order."""
    torch.manual_seed(0)
    inner, outer, rank = 960, 640, 8
    weights = torch.stack(
        [
            mxfp4.dequantize(*mxfp4.quantize((0.02 * torch.randn(outer, inner)).bfloat16()))
            for _ in ROW_COUNTS
        ]
    )
    x = torch.randn(sum(ROW_COUNTS), inner).bfloat16()
    a = ((2 * torch.rand(4, rank, inner) - 1) / inner**0.5).bfloat16()
    b = (size * torch.randn(4, outer, rank)).bfloat16()
    biases = (0.1 * torch.randn(4, outer)).bfloat16()

    found = unmerged_product(x, a, b, lambda: weights, ROW_COUNTS, SCALE, biases)
    expected = served(x, weights, a, b, biases)
    differing = (found != expected).float().mean()
    assert differing <= 0.02, float(differing)
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=1e-3)


def test_small_updates_are_kept() -> None:
    """In bf16 merged weights lose 38% of an update of Adam's first 30 steps."""
    torch.manual_seed(0)
    inner = outer = 512
    weights = mxfp4.dequantize(*mxfp4.quantize((0.02 * torch.randn(outer, inner)).bfloat16()))
    a = ((2 * torch.rand(8, inner) - 1) / inner**0.5).bfloat16()
    b = (3e-4 * torch.randn(outer, 8)).bfloat16()
    x = torch.randn(256, inner).bfloat16()
    update = SCALE * (x.double() @ a.double().t() @ b.double().t())

    # A base of 0 leaves the update, with all roundings before it is added to the product with W.
    kept = unmerged_product(
        x, a[None], b[None], lambda: torch.zeros_like(weights)[None], [256], SCALE
    )
    missing = float((kept.double() - update).norm() / update.norm())
    assert missing <= 0.01, missing

    base = x.double() @ weights.double().t()
    merged = x.double() @ merge(weights, a, b, SCALE).double().t()
    assert (merged - base - update).norm() / update.norm() > 0.3


def test_updates_below_the_last_bit_are_kept() -> None:
    """The outputs' mean change is the update, although one update is smaller than half of an output's last bit."""
    kept = kept_share_of_small_updates("cpu")
    assert 0.9 < kept < 1.1, kept


@pytest.mark.parametrize("merges", [False, True])
def test_regression_reaches_an_update_that_merging_loses(merges: bool) -> None:
    """After 300 steps of Adam on B, at most 1% of the target's output is missing; with merged bf16 weights 38%."""
    torch.manual_seed(0)
    size, rank, tokens = 512, 8, 256
    weights = mxfp4.dequantize(*mxfp4.quantize((0.02 * torch.randn(size, size)).bfloat16()))
    a = ((2 * torch.rand(rank, size) - 1) / size**0.5).bfloat16()
    target = SCALE * (3e-4 * torch.randn(size, rank)) @ a.float()
    b = torch.zeros(size, rank, requires_grad=True)
    optimizer = torch.optim.Adam([b], lr=1e-5)
    generator = torch.Generator().manual_seed(1)

    def change(x: torch.Tensor) -> torch.Tensor:
        """Return what the adapter adds to the output, with a straight-through gradient if merged."""
        factors = (a[None].float(), b.bfloat16().float()[None])
        unmerged = unmerged_product(
            x, *factors, lambda: torch.zeros(1, size, size), [len(x)], SCALE
        )
        if not merges:
            return unmerged
        merged = merge(weights, a, b.detach().bfloat16(), SCALE).float() - weights.float()
        return unmerged + (x @ merged.t() - unmerged).detach()

    for _ in range(300):
        x = torch.randn(tokens, size, generator=generator)
        (change(x) - x @ target.t()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    x = torch.randn(4 * tokens, size, generator=generator)
    expected = x @ target.t()
    missing = float((change(x).detach() - expected).norm() / expected.norm())
    print("missing:", missing)
    assert missing > 0.2 if merges else missing < 0.01, missing


def unmerged_models(**settings: Any) -> list[torch.nn.Module]:
    """Return the same model with grouped and with sequential experts."""
    adapter = ADAPTER.model_copy(update={"merge_experts": False, **settings})
    return [
        adapted_model(ParallelConfig(), adapter, quantization="mxfp4", moe_grouped_gemm=grouped)
        for grouped in (True, False)
    ]


@pytest.mark.parametrize("expert_rank", [8, 3])
def test_grouped_training_equals_sequential_experts(expert_rank: int) -> None:
    gradients = []
    losses = []
    for model in unmerged_models(expert_rank=expert_rank):
        trainer = PolicyTrainer(model, OptimizerConfig(clip_grad=1e9))
        statistics = trainer.train_step(batches(), mean_cross_entropy(TOKENS), 3e-3)
        losses.append(statistics.sums["loss"])
        gradients.append(
            {
                f"{name}.{factor}": gradient.clone()
                for name, adapter in single_adapters(trainer.module)
                for factor, gradient in adapter.gradients.items()
            }
        )

    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    grouped, sequential = gradients
    for name, expected in sequential.items():
        error = (grouped[name] - expected).abs().max() / expected.abs().max()
        assert error < 1e-5, (name, float(error))


def test_unmerged_and_merged_experts_are_one_model_in_fp32() -> None:
    [unmerged, _] = unmerged_models()
    merged = adapted_model(ParallelConfig(), quantization="mxfp4", moe_grouped_gemm=True)
    scores = [
        torch.cat(PolicyTrainer(model, OptimizerConfig()).score(batches()))
        for model in (unmerged, merged)
    ]
    torch.testing.assert_close(*scores, rtol=1e-4, atol=1e-4)


def test_experts_without_update_equal_their_base() -> None:
    """A new adapter, a disabled adapter and no adapter give the same bits."""
    scores = []
    for targets in (ADAPTER.targets, ("q",)):
        for model in unmerged_models(targets=targets, merge_experts="experts" not in targets):
            trainer = PolicyTrainer(model, OptimizerConfig())
            with without_adapters(model):
                scores.append(torch.cat(trainer.score(batches())))
            initialize_adapters(model, seed=0)
            scores.append(torch.cat(trainer.score(batches())))
    # grouped and sequential experts multiply in the same order on a CPU
    for score in scores[1:]:
        torch.testing.assert_close(score, scores[0], rtol=0, atol=1e-6)
