"""Dense decoders have the logits and gradients of transformers, and need all of their features."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from converters.model_weights import load_hf_weights
from megatron_gptoss.config import AdapterConfig, OptimizerConfig, ParallelConfig
from megatron_gptoss.families.dense.config import DenseModelConfig
from megatron_gptoss.model import build_model
from megatron_gptoss.packed_sequence import PackedSequence
from megatron_gptoss.packing import build_batch
from megatron_gptoss.trainer import PolicyTrainer
from tests.support.megatron_gptoss.dense_reference import (
    LLAMA,
    MODELS,
    QWEN2,
    dense_hf_model,
    dense_weights,
)
from tests.support.megatron_gptoss.float64_llama import float64_everywhere
from tests.support.megatron_gptoss.reference import (
    documents,
    hf_logits,
    hf_loss,
    mean_cross_entropy,
)
from tests.support.tolerances import assert_within, rounding_error

pytestmark = pytest.mark.usefixtures("process_groups")


SAMPLES = documents([34, 2, 9, 101])
TOKENS = int(SAMPLES.loss_tokens.sum())


def megatron(config: DenseModelConfig, built: Any = None, **overrides: object) -> torch.nn.Module:
    """Load the weights of ``config`` into a new model of it, or into a model of ``built``."""
    model = build_model(built or config, ParallelConfig(), torch.float32, **overrides)
    load_hf_weights(model, built or config, dense_weights(config).__getitem__)
    return model.eval()


def logits(model: torch.nn.Module, samples: Any = SAMPLES) -> torch.Tensor:
    batch = build_batch(samples)
    with torch.no_grad():
        out = model(
            batch.token_ids[None],
            batch.position_ids[None],
            None,
            packed_seq_params=PackedSequence.of(batch),
        )
    return out[0, : int(samples.loss_tokens.sum())]


def exact_reference(config: DenseModelConfig) -> tuple[Any, torch.Tensor]:
    """Return transformers' float64 model with the gradients of ``hf_loss``, and its logits."""
    reference = dense_hf_model(config).double()
    with float64_everywhere():
        with torch.no_grad():
            expected = hf_logits(reference, SAMPLES)
        hf_loss(reference, SAMPLES).backward()
    return reference, expected


def relative_distance(model: torch.nn.Module, config: DenseModelConfig) -> float:
    with torch.no_grad():
        expected = hf_logits(dense_hf_model(config), SAMPLES)
    return ((logits(model) - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("name", MODELS)
def test_logits_of_packed_documents_match_transformers(name: str) -> None:
    config = MODELS[name]
    _, exact = exact_reference(config)
    with torch.no_grad():
        expected = hf_logits(dense_hf_model(config), SAMPLES)
        allowed = rounding_error(expected, exact)
        assert_within(logits(megatron(config)), expected, allowed)
    assert allowed < 1e-3 * expected.abs().max()


@pytest.mark.parametrize("name", MODELS)
def test_gradients_match_transformers(name: str) -> None:
    config = MODELS[name]
    reference = dense_hf_model(config)
    hf_loss(reference, SAMPLES).backward()
    gradients = {name: parameter.grad for name, parameter in reference.named_parameters()}

    model = megatron(config)
    trainer = PolicyTrainer(model, OptimizerConfig(clip_grad=1e9))
    batches = [build_batch(SAMPLES, [0, 1]), build_batch(SAMPLES, [2, 3])]
    trainer.train_step(batches, mean_cross_entropy(TOKENS), learning_rate=1e-9)

    exact, _ = exact_reference(config)
    in_float64 = {name: parameter.grad for name, parameter in exact.named_parameters()}
    expected, precise = (
        build_model(config, ParallelConfig(), dtype) for dtype in (torch.float32, torch.float64)
    )
    load_hf_weights(expected, config, gradients.__getitem__)
    load_hf_weights(precise, config, in_float64.__getitem__)
    for (parameter_name, parameter), want, float64 in zip(
        model.named_parameters(), expected.parameters(), precise.parameters(), strict=True
    ):
        allowed = rounding_error(want.detach(), float64.detach())
        assert_within(parameter.main_grad, want.detach(), allowed, parameter_name)
        assert want.abs().max() > 1e3 * allowed, f"no gradient for {parameter_name}"


@pytest.mark.parametrize("name", ["llama", "llama, tied", "llama 3's rope"])
def test_float64_logits_and_gradients_equal_transformers(name: str) -> None:
    """In float64 the difference is only rounding, so 13 digits are equal."""
    config = MODELS[name]
    reference = dense_hf_model(config).double()
    with float64_everywhere():
        expected = hf_logits(reference, SAMPLES)
        hf_loss(reference, SAMPLES).backward()
    gradients = {name: parameter.grad for name, parameter in reference.named_parameters()}

    model = build_model(config, ParallelConfig(), torch.float64)
    load_hf_weights(model, config, dense_weights(config).__getitem__)
    batch = build_batch(SAMPLES)
    out = model(
        batch.token_ids[None],
        batch.position_ids[None],
        None,
        packed_seq_params=PackedSequence.of(batch),
    )[0, :TOKENS]
    assert (out - expected).abs().max() < 1e-12 * expected.abs().max()

    ids = [torch.as_tensor(SAMPLES.take([i]).token_ids) for i in range(len(SAMPLES))]
    targets = torch.cat([row[1:] for row in ids]).long()
    torch.nn.functional.cross_entropy(out, targets).backward()
    wanted = build_model(config, ParallelConfig(), torch.float64)
    load_hf_weights(wanted, config, gradients.__getitem__)
    pairs = zip(model.named_parameters(), wanted.parameters(), strict=True)
    for (parameter_name, parameter), want in pairs:
        error = (parameter.grad - want).norm() / want.norm()
        assert error < 1e-12, f"gradient of {parameter_name} is off by {error:.1e}"


@pytest.mark.parametrize("name", ["llama", "qwen2, tied"])
def test_document_does_not_attend_to_others_of_its_row(name: str) -> None:
    model = megatron(MODELS[name])
    together = logits(model)
    _, exact = exact_reference(MODELS[name])
    allowed = rounding_error(together.detach(), exact)
    first = 0
    for i in range(len(SAMPLES)):
        alone = logits(model, SAMPLES.take([i]))
        assert_within(together[first : first + len(alone)], alone, allowed, i)
        first += len(alone)


@pytest.mark.parametrize(
    ("config", "change"),
    [
        (QWEN2, {"rope_theta": 10_000.0}),
        (QWEN2, {"rms_norm_eps": 1e-1}),
        (MODELS["llama 3's rope"], {"rope_scaling": None}),
        (MODELS["qwen2.5's yarn"], {"rope_scaling": None}),
        (MODELS["linear rope"], {"rope_scaling": None}),
    ],
    ids=["theta", "eps", "llama3", "yarn", "linear"],
)
def test_parity_fails_with(config: DenseModelConfig, change: dict[str, object]) -> None:
    wrong = config.model_copy(update=change)
    assert relative_distance(megatron(config, built=wrong), config) > 1e-3


@pytest.mark.parametrize(
    "overrides",
    [{"activation_func": torch.nn.functional.gelu}, {"window_size": (8, 0)}],
    ids=["gelu", "window"],
)
def test_parity_fails_with_another_layer(overrides: dict[str, object]) -> None:
    assert relative_distance(megatron(LLAMA, **overrides), LLAMA) > 1e-3


@pytest.mark.parametrize("part", ["linear_qkv.bias", "linear_fc1", "layernorm"])
def test_parity_fails_without(part: str) -> None:
    model = megatron(QWEN2)
    zeroed = [parameter for name, parameter in model.named_parameters() if part in name]
    assert zeroed
    for parameter in zeroed:
        parameter.data.zero_()
    assert relative_distance(model, QWEN2) > 1e-3


def test_model_without_sinks_is_correct_for_scores_of_any_size() -> None:
    """The sink logit must be minus infinity. A large negative number would affect lower scores."""
    model = megatron(LLAMA)
    assert not any("softmax_offset" in name for name, _ in model.named_parameters())
    row = PackedSequence.of(build_batch(SAMPLES.take([0])))
    attention = model.decoder.layers[0].self_attention.core_attention

    query = torch.full((33, 8, 12), 100.0)
    value = torch.randn(33, 2, 12)
    # The scores are about -40,000, below any plausible number for "no sink".
    out = attention(query, torch.full((33, 2, 12), -100.0), value, packed_seq_params=row)
    assert torch.allclose(out[0], value[0].repeat_interleave(4, 0).flatten())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"adapter": AdapterConfig(rank=2, targets=("q",))}, "adapter.targets: q of a llama model"),
        ({"quantization": "mxfp4"}, "quantization is mxfp4, .* but a llama model has no experts"),
    ],
)
def test_unsupported_dense_features_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_model(LLAMA, ParallelConfig(), **options)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"expert": 2}, r"parallel.expert \(2\) must be 1: a llama model has no experts"),
        ({"recompute": ("moe_act",)}, "parallel.recompute moe_act has no effect"),
        ({"tensor": 4}, "parallel.tensor .4. must divide num_key_value_heads .2."),
    ],
)
def test_impossible_layouts_are_rejected(layout: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParallelConfig(world_size=4, **layout).check_layout(LLAMA)
