"""Optimizer steps on several passes: reduction over ranks, settings, failed passes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from megatron_gptoss import distributed
from megatron_gptoss.config import OptimizerConfig, ParallelConfig
from megatron_gptoss.layers.adapters import copy_factors
from megatron_gptoss.optimizer import AdamSettings
from megatron_gptoss.packing import PackedBatch, build_batch
from megatron_gptoss.step_results import LossOutput
from megatron_gptoss.trainer import PolicyTrainer
from tests.support.distributed import free_port, run_distributed
from tests.support.megatron_gptoss.adapted import adapted_model
from tests.support.megatron_gptoss.reference import documents, mean_cross_entropy

SAMPLES = documents([20, 13, 9, 17])
TOKENS = int(SAMPLES.loss_tokens.sum())
PASSES = [[0, 1], [2, 3]]
"""Sequences of each pass."""
LOSS = mean_cross_entropy(TOKENS)
SETTINGS = AdamSettings(
    learning_rate=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0, clip_grad=math.inf
)


def policy() -> PolicyTrainer:
    return PolicyTrainer(adapted_model(ParallelConfig()), OptimizerConfig())


def gradient(trainer: PolicyTrainer) -> torch.Tensor:
    buffers = [b for chunk in trainer.model for b in chunk.buffers + chunk.expert_parallel_buffers]
    return torch.cat([buffer.grad_data.flatten().clone() for buffer in buffers])


def gradient_of_passes(rank: int, world: int, port: int) -> torch.Tensor:
    """Return the gradient of a step on two passes, whose sequences the ranks share."""
    torch.set_num_threads(1)
    distributed.initialize(ParallelConfig(world_size=world), rank, port=port)
    try:
        trainer = policy()
        for sequences in PASSES:
            own = sequences if world == 1 else [sequences[rank]]
            trainer.accumulate([build_batch(SAMPLES, own)], LOSS)
        trainer.step(SETTINGS)
        return gradient(trainer)
    finally:
        distributed.shutdown()


def test_ranks_reduce_gradients_of_two_passes_once() -> None:
    (expected,) = run_distributed(gradient_of_passes, 1, 1, free_port())
    for found in run_distributed(gradient_of_passes, 2, 2, free_port()):
        assert float((found - expected).norm() / expected.norm()) < 1e-6


@pytest.mark.usefixtures("process_groups")
class TestOneRank:
    def test_two_passes_equal_one_pass_of_both(self) -> None:
        batches = [build_batch(SAMPLES, sequences) for sequences in PASSES]
        together, apart = policy(), policy()
        step = together.train_step(batches, LOSS, SETTINGS.learning_rate)
        sums = [apart.accumulate([batch], LOSS).sums["loss"] for batch in batches]
        update = apart.step(AdamSettings.of(apart.config, SETTINGS.learning_rate))

        assert sum(sums) == pytest.approx(step.sums["loss"])
        assert update.grad_norm == step.grad_norm
        for a, b in zip(copy_factors(together.module), copy_factors(apart.module), strict=True):
            assert torch.equal(a, b)

    def test_each_step_has_its_settings(self) -> None:
        """Compare the first factor with Adam by its formula."""
        trainer = policy()
        parameter = next(p for p in trainer.module.parameters() if p.requires_grad)
        expected = parameter.detach().double().clone()
        first, second = torch.zeros_like(expected), torch.zeros_like(expected)
        for number, settings in enumerate(
            [
                SETTINGS,
                AdamSettings(
                    3e-3, beta1=0.5, beta2=0.8, eps=1e-4, weight_decay=0.1, clip_grad=1e-3
                ),
            ],
            start=1,
        ):
            trainer.accumulate([build_batch(SAMPLES)], LOSS)
            grad = parameter.main_grad.double().clone()
            norm = trainer.step(settings).grad_norm
            grad *= min(1.0, settings.clip_grad / norm)
            expected *= 1 - settings.learning_rate * settings.weight_decay
            first = settings.beta1 * first + (1 - settings.beta1) * grad
            second = settings.beta2 * second + (1 - settings.beta2) * grad**2
            root = (second / (1 - settings.beta2**number)).sqrt() + settings.eps
            expected -= settings.learning_rate * first / (1 - settings.beta1**number) / root
            assert torch.allclose(parameter.detach().double(), expected, rtol=0, atol=1e-5)

    def test_step_fails_after_a_failed_pass(self) -> None:
        trainer = policy()
        batches = [build_batch(SAMPLES, sequences) for sequences in PASSES]
        before = copy_factors(trainer.module)

        def broken(
            log_probs: torch.Tensor, entropy: torch.Tensor, batch: PackedBatch
        ) -> LossOutput:
            raise ValueError("no such column")

        trainer.accumulate(batches[:1], LOSS)
        with pytest.raises(ValueError, match="no such column"):
            trainer.accumulate(batches[1:], broken)
        with pytest.raises(RuntimeError, match=r"an earlier pass failed .*no such column"):
            trainer.step(SETTINGS)
        assert_unchanged(trainer, before)

        with pytest.raises(RuntimeError, match="no gradient"):
            trainer.step(SETTINGS)
        trainer.accumulate(batches, LOSS)
        assert trainer.step(SETTINGS).parameters_updated

    def test_no_pass_follows_a_reduced_one(self) -> None:
        trainer = policy()
        trainer.accumulate([build_batch(SAMPLES)], LOSS, is_last=True)
        with pytest.raises(RuntimeError, match="are reduced"):
            trainer.accumulate([build_batch(SAMPLES)], LOSS)
        assert trainer.step(SETTINGS).parameters_updated


def assert_unchanged(trainer: PolicyTrainer, factors: Sequence[torch.Tensor]) -> None:
    for before, after in zip(factors, copy_factors(trainer.module), strict=True):
        assert torch.equal(before, after)
