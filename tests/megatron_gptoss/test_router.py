from __future__ import annotations

import pytest
import torch

from converters.model_weights import export_hf_weights, load_hf_weights
from megatron_gptoss.config import OptimizerConfig, ParallelConfig
from megatron_gptoss.layers.router import GptOssRouter
from megatron_gptoss.model import build_model
from megatron_gptoss.packing import build_batch
from megatron_gptoss.trainer import PolicyTrainer
from tests.support.megatron_gptoss.reference import TINY, documents, hf_model, mean_cross_entropy
from tests.support.tolerances import assert_within, product_error, unit_roundoff

pytestmark = pytest.mark.usefixtures("process_groups")


def bf16_model() -> torch.nn.Module:
    model = build_model(TINY, ParallelConfig(), torch.bfloat16)
    load_hf_weights(model, TINY, hf_model().state_dict().__getitem__)
    return model


def test_only_router_biases_of_a_bf16_model_are_fp32() -> None:
    dtypes = {name: parameter.dtype for name, parameter in bf16_model().named_parameters()}
    biases = [name for name in dtypes if name.endswith("router.bias")]
    assert len(biases) == TINY.num_layers
    assert {dtypes.pop(name) for name in biases} == {torch.float32}
    assert set(dtypes.values()) == {torch.bfloat16}


def test_router_logits_of_bf16_inputs_are_exact_to_fp32() -> None:
    router = next(module for module in bf16_model().modules() if isinstance(module, GptOssRouter))
    x = torch.randn(64, TINY.hidden_size).bfloat16()
    exact = x.double() @ router.weight.double().t() + router.bias.double()
    logits = router.gating(x)
    assert logits.dtype == torch.float32
    operands = x.double(), router.weight.double().t()
    bound = product_error(*operands) + unit_roundoff(torch.float32) * exact.abs()
    assert_within(logits, exact, bound)
    rounded = exact - router.bias.double() + router.bias.bfloat16().double()
    with pytest.raises(AssertionError, match="values are off"):
        assert_within(rounded, exact, bound)


def test_bf16_step_changes_fp32_biases_and_export_keeps_them() -> None:
    trainer = PolicyTrainer(bf16_model(), OptimizerConfig())
    bias = trainer.module.decoder.layers[0].mlp.router.bias
    before = bias.detach().clone()
    trainer.train_step([build_batch(documents([20, 13]))], mean_cross_entropy(31), 1e-5)
    # smaller than a step of bf16
    assert 0 < (bias - before).abs().max() < 2e-5
    exported = dict(export_hf_weights(trainer.module, TINY))["model.layers.0.mlp.router.bias"]
    assert torch.equal(exported, bias)
