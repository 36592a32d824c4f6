"""A model without its adapters equals its base bit by bit, so a reference policy needs no copy."""

from __future__ import annotations

import pytest
import torch

from converters.model_weights import load_hf_weights
from megatron_gptoss.config import OptimizerConfig, ParallelConfig, Quantization
from megatron_gptoss.layers.adapters import initialize_adapters, without_adapters
from megatron_gptoss.model import build_model
from megatron_gptoss.packing import build_batch
from megatron_gptoss.scorer import LogProbScorer
from megatron_gptoss.trainer import PolicyTrainer
from tests.support.megatron_gptoss.adapted import MODEL, adapted_model, base_weights
from tests.support.megatron_gptoss.reference import documents, mean_cross_entropy

pytestmark = pytest.mark.usefixtures("process_groups")


SAMPLES = documents([34, 2, 9, 21])
BATCHES = [build_batch(SAMPLES, [0, 1]), build_batch(SAMPLES, [2, 3])]
TOKENS = int(SAMPLES.loss_tokens.sum())


def scores_of_base(dtype: torch.dtype) -> torch.Tensor:
    """Return scores of a model that was built without adapters."""
    model = build_model(MODEL, ParallelConfig(), dtype)
    load_hf_weights(model, MODEL, base_weights().__getitem__)
    return torch.cat(LogProbScorer(model).score(BATCHES))


@pytest.mark.parametrize("quantization", [None, "mxfp4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_disabled_adapters_score_like_the_base(
    dtype: torch.dtype, quantization: Quantization | None
) -> None:
    model = adapted_model(ParallelConfig(), dtype=dtype, quantization=quantization)
    trainer = PolicyTrainer(model, OptimizerConfig())
    trainer.train_step(BATCHES, mean_cross_entropy(TOKENS), learning_rate=1e-2)
    with_adapters = torch.cat(trainer.score(BATCHES))
    with without_adapters(trainer.module):
        reference = torch.cat(trainer.score(BATCHES))

    assert torch.equal(reference, scores_of_base(dtype))
    assert torch.equal(torch.cat(trainer.score(BATCHES)), with_adapters)
    assert (with_adapters - reference).abs().max() > 0.1


def test_adapter_scale_is_restored_after_an_error() -> None:
    scorer = LogProbScorer(adapted_model(ParallelConfig()))
    before = torch.cat(scorer.score(BATCHES))
    with pytest.raises(RuntimeError, match="out of memory"), without_adapters(scorer.module):
        raise RuntimeError("out of memory")
    assert torch.equal(torch.cat(scorer.score(BATCHES)), before)


def test_reference_pass_does_not_change_gradients() -> None:
    losses = []
    for has_reference in (False, True):
        trainer = PolicyTrainer(adapted_model(ParallelConfig()), OptimizerConfig())
        for _ in range(3):
            if has_reference:
                with without_adapters(trainer.module):
                    trainer.score(BATCHES)
            step = trainer.train_step(BATCHES, mean_cross_entropy(TOKENS), learning_rate=1e-2)
        losses.append((step.sums["loss"], step.grad_norm))
    assert losses[0] == losses[1]


@pytest.mark.gpu
@pytest.mark.parametrize("quantization", [None, "mxfp4"])
def test_disabled_adapters_equal_zero_adapters_on_gpu(
    quantization: Quantization | None,
) -> None:
    """Plain models have other layers on GPUs, so their last bits differ."""
    model = adapted_model(ParallelConfig(), dtype=torch.bfloat16, quantization=quantization)
    scorer = LogProbScorer(model)
    with_adapters = torch.cat(scorer.score(BATCHES))
    with without_adapters(model):
        reference = torch.cat(scorer.score(BATCHES))
    initialize_adapters(model, seed=0)

    assert torch.equal(reference, torch.cat(scorer.score(BATCHES)))
    assert (with_adapters - reference).abs().max() > 0.1
