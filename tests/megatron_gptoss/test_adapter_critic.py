"""A critic on a frozen base: only its adapters and its value head are trained and saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_gptoss.checkpoint.base_digest import base_digest
from megatron_gptoss.checkpoint.errors import CheckpointError
from megatron_gptoss.checkpoint.loader import load_checkpoint
from megatron_gptoss.config import OptimizerConfig, ParallelConfig, Quantization
from megatron_gptoss.critic import ValueTrainer, make_critic
from megatron_gptoss.packing import build_batch
from megatron_gptoss.step_results import LossOutput
from tests.support.megatron_gptoss.adapted import adapted_model
from tests.support.megatron_gptoss.reference import documents, save_checkpoint

pytestmark = pytest.mark.usefixtures("process_groups")


BATCH = build_batch(documents([20, 13]))


def critic(quantization: Quantization | None = None, b_std: float = 0.05) -> ValueTrainer:
    policy = adapted_model(ParallelConfig(), b_std=b_std, quantization=quantization)
    model = make_critic(policy)
    return ValueTrainer(model, OptimizerConfig())


def error_of_values(values: torch.Tensor, batch: Any) -> LossOutput:
    """Return the mean error of values whose targets alternate between 1 and -1."""
    wanted = 1.0 - 2.0 * (batch.labels % 2)
    loss = ((values - wanted).square() * batch.loss_mask).sum() / 31
    return LossOutput(loss, {"loss": loss})


def steps(trainer: ValueTrainer, count: int) -> list[float]:
    return [trainer.train_step([BATCH], error_of_values, 1e-2).sums["loss"] for _ in range(count)]


def test_critic_trains_only_adapters_and_value_head() -> None:
    trainer = critic()
    before = {name: p.detach().clone() for name, p in trainer.module.named_parameters()}
    losses = steps(trainer, 6)
    assert losses[0] == pytest.approx(1.0), "values begin at zero"
    assert losses[-1] < 0.8 * losses[0]

    for name, parameter in trainer.module.named_parameters():
        is_trained = ".adapters." in name or name == "output_layer.weight"
        assert torch.equal(parameter, before[name]) != is_trained, name


@pytest.mark.parametrize("quantization", [None, "mxfp4"])
def test_a_resumed_critic_continues_the_same_curve_to_the_bit(
    quantization: Quantization | None, tmp_path: Path
) -> None:
    trainer = critic()
    steps(trainer, 3)
    path = save_checkpoint(tmp_path, trainer, 3, {"step": 3})
    expected = steps(trainer, 3)

    resumed = critic(quantization, b_std=0.2)
    assert load_checkpoint(path, resumed) == {"step": 3}
    assert steps(resumed, 3) == expected


def test_value_head_is_not_part_of_the_base(tmp_path: Path) -> None:
    trainer = critic()
    digest = base_digest(trainer.module)
    steps(trainer, 2)
    assert base_digest(trainer.module) == digest

    path = save_checkpoint(tmp_path, trainer, 2, {})
    with torch.no_grad():
        trainer.module.decoder.final_layernorm.weight[0] += 1
    with pytest.raises(CheckpointError, match="holds adapters of a different base"):
        load_checkpoint(path, trainer)
