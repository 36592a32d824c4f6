"""Statistics of a training step, and memory that a step or a scoring pass keeps."""

from __future__ import annotations

import pytest
import torch

from converters.model_weights import load_hf_weights
from megatron_gptoss.config import OptimizerConfig, ParallelConfig
from megatron_gptoss.families.gpt_oss.config import GptOssModelConfig
from megatron_gptoss.model import build_model
from megatron_gptoss.optimizer import apply_per_dtype
from megatron_gptoss.packing import build_batch
from megatron_gptoss.planning.flops import attended_pairs, forward_flops
from megatron_gptoss.step_results import LossOutput
from megatron_gptoss.trainer import PolicyTrainer
from tests.support.megatron_gptoss.allocations import Allocations
from tests.support.megatron_gptoss.reference import TINY, documents, hf_model, mean_cross_entropy

pytestmark = pytest.mark.usefixtures("process_groups")


def policy(**settings: object) -> PolicyTrainer:
    model = build_model(TINY, ParallelConfig())
    load_hf_weights(model, TINY, hf_model(std=0.1).state_dict().__getitem__)
    return PolicyTrainer(model, OptimizerConfig(**settings))


@pytest.mark.parametrize(
    ("schedule", "step", "share"),
    [
        ("cosine", 0, 0.25), ("cosine", 3, 1.0), ("cosine", 4, 1.0), ("cosine", 9, 0.55), ("cosine", 14, 0.1),
        ("cosine", 99, 0.1), ("constant", 1, 0.5), ("constant", 4, 1.0), ("constant", 99, 1.0),
    ],
)  # fmt: skip
def test_learning_rate_warms_up_then_stays_or_decays_to_a_tenth(
    schedule: str, step: int, share: float
) -> None:
    config = OptimizerConfig(lr=2e-5, warmup_steps=4, schedule=schedule)
    assert config.learning_rate_at(step, total_steps=14) == pytest.approx(share * 2e-5)


@pytest.mark.parametrize(("length", "window"), [(1, None), (50, None), (5, 8), (50, 8)])
def test_attended_pairs_equal_those_of_the_mask(length: int, window: int | None) -> None:
    row = torch.arange(length)[:, None]
    column = torch.arange(length)[None]
    mask = (column <= row) & (column > row - (window or length))
    assert attended_pairs(length, window) == mask.sum()


def test_flops_of_20b_are_two_per_active_weight_plus_attention() -> None:
    model = GptOssModelConfig(num_layers=24, num_experts=32)
    active = 3_608_307_264  # published number, without the embedding table
    parameters_that_do_not_multiply = (
        24 * (2 * 2880 + 64 + 5120 + 2880 + 32 + 4 * (5760 + 2880)) + 2880
    )
    attention = 4 * 4096 * sum(attended_pairs(1000, w) for w in [128, None] * 12)
    assert (
        forward_flops(model, [1000])
        == 1000 * 2 * (active - parameters_that_do_not_multiply) + attention
    )


def test_a_step_reports_its_speed() -> None:
    batch = build_batch(documents([20, 13]))
    step = policy().train_step([batch], mean_cross_entropy(31), 1e-3)
    assert step.seconds > 0
    assert step.tokens_per_second_per_gpu == pytest.approx(31 / step.seconds)
    assert step.tflops_per_gpu == pytest.approx(
        3 * forward_flops(TINY, [19, 12]) / step.seconds / 1e12
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_decay_shrinks_only_matrices(dtype: torch.dtype) -> None:
    model = build_model(TINY, ParallelConfig(), dtype)
    for parameter in model.parameters():
        parameter.data.fill_(1.0)
    policy = PolicyTrainer(model, OptimizerConfig(weight_decay=0.5, warmup_steps=0))

    def loss_without_gradient(
        log_probs: torch.Tensor, entropy: torch.Tensor, batch: object
    ) -> LossOutput:
        return LossOutput(0.0 * log_probs.sum())

    policy.train_step([build_batch(documents([31]))], loss_without_gradient, learning_rate=0.1)
    decayed = 1 - 0.1 * 0.5
    for name, parameter in model.named_parameters():
        is_matrix = parameter.dim() > 1 and not name.endswith("bias")
        expected = torch.full_like(parameter, decayed if is_matrix else 1.0)
        assert torch.allclose(
            parameter, expected, rtol=4e-3 if dtype == torch.bfloat16 else 1e-6
        ), name


def test_non_finite_gradient_is_skipped_or_stops_the_run() -> None:
    batch = build_batch(documents([20, 13]))

    def poisoned_step(**settings: str) -> object:
        trainer = policy(**settings)
        trainer.module.decoder.layers[1].mlp.router.bias.data[0] = torch.nan
        return trainer.train_step([batch], mean_cross_entropy(31), 1e-3)

    step = poisoned_step()
    assert not step.parameters_updated
    assert (
        "The first is embedding.word_embeddings.weight (rank 0, chunk 0)"
        in step.non_finite_gradients
    )
    with pytest.raises(FloatingPointError, match="parameters are not finite"):
        poisoned_step(on_non_finite="stop")


def test_scoring_needs_far_less_memory_than_training() -> None:
    trainer = policy()
    batch = build_batch(documents([1001, 1001]))
    trainer.train_step([batch], mean_cross_entropy(2000), 1e-6)  # allocations that happen only once
    with Allocations() as scoring:
        trainer.score([batch])
    with Allocations() as training:
        trainer.train_step([batch], mean_cross_entropy(2000), 1e-6)
    assert scoring.peak < training.peak / 2


def test_norm_and_scaling_of_gradients_never_mix_dtypes() -> None:
    generator = torch.Generator().manual_seed(0)
    gradients = [
        torch.randn(n, generator=generator).to(dtype)
        for n, dtype in (
            (5, torch.bfloat16),
            (3, torch.float32),
            (7, torch.bfloat16),
            (1, torch.float32),
        )
    ]
    exact = torch.cat([gradient.double() for gradient in gradients]).norm().item()
    seen = []

    def norm(
        _chunk: int, _overflow: object, lists: list[list[torch.Tensor]], _each: bool
    ) -> tuple[torch.Tensor, None]:
        seen.append({gradient.dtype for gradient in lists[0]})
        return torch.cat([gradient.float() for gradient in lists[0]]).norm().view(1), None

    def scale(
        _chunk: int, _overflow: object, lists: list[list[torch.Tensor]], factor: float
    ) -> None:
        seen.append({gradient.dtype for part in lists for gradient in part})
        for source, target in zip(*lists, strict=True):
            target.copy_(source * factor)

    overflow = torch.zeros(1, dtype=torch.int)
    total, _ = apply_per_dtype(norm, overflow, [gradients], False)
    assert total.shape == (1,)
    assert total.item() == pytest.approx(exact, rel=1e-6)
    apply_per_dtype(scale, overflow, [gradients, gradients], 0.5)
    assert torch.cat([g.double() for g in gradients]).norm().item() == pytest.approx(
        exact / 2, rel=1e-6
    )
    assert seen == [{torch.bfloat16}, {torch.float32}] * 2
