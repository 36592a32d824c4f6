"""Experts trained through MXFP4 compute with their exported values and train at full precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GptOssForCausalLM, Mxfp4Config

from converters import mxfp4_tensors
from converters.errors import ConversionError
from converters.gathering import WeightGathering
from converters.hf_directory import write_hf_directory
from converters.model_weights import export_hf_weights, load_hf_weights
from converters.mxfp4_tensors import fake_quantize_experts, quantize_experts
from converters.torch_dist import export_checkpoint
from gptoss_kernels import mxfp4
from megatron_gptoss.checkpoint.loader import load_model_weights
from megatron_gptoss.checkpoint.state import model_state
from megatron_gptoss.config import OptimizerConfig, ParallelConfig
from megatron_gptoss.layers import quantized_experts
from megatron_gptoss.layers.quantized_experts import QuantizedExpertLinear, QuantizedExperts
from megatron_gptoss.model import build_model, freeze
from megatron_gptoss.packed_sequence import PackedSequence
from megatron_gptoss.packing import PackedBatch, build_batch
from megatron_gptoss.trainer import PolicyTrainer
from tests.support.megatron_gptoss.adapted import MODEL
from tests.support.megatron_gptoss.reference import (
    documents,
    hf_logits,
    hf_model,
    mean_cross_entropy,
    save_checkpoint,
)

pytestmark = pytest.mark.usefixtures("process_groups")


SAMPLES = documents([34, 2, 9, 21])
TOKENS = int(SAMPLES.loss_tokens.sum())
Weights = dict[str, torch.Tensor]


def batches() -> list[PackedBatch]:
    return [build_batch(SAMPLES, [0, 1]), build_batch(SAMPLES, [2, 3])]


def master_weights() -> Weights:
    """Return weights by Hugging Face name with values that MXFP4 lacks."""
    return hf_model(MODEL, std=0.1).state_dict()


def model_with(
    weights: Weights, quantization: Any = None, dtype: torch.dtype = torch.float32, **options: Any
) -> torch.nn.Module:
    model = build_model(MODEL, ParallelConfig(), dtype, quantization=quantization, **options)
    load_hf_weights(model, MODEL, weights.__getitem__)
    return model


def quantized_model(dtype: torch.dtype = torch.float32, **options: Any) -> torch.nn.Module:
    return model_with(master_weights(), "mxfp4", dtype, **options)


def exported_values(model: torch.nn.Module) -> Weights:
    return {name: tensor.clone() for name, tensor in export_hf_weights(model, MODEL)}


def mxfp4_weights(model: torch.nn.Module) -> Weights:
    gathered = WeightGathering(model, MODEL).begin(mxfp4_experts=True)
    return {name: tensor.clone() for name, tensor in gathered}


def scores(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat(PolicyTrainer(model, OptimizerConfig()).score(batches()))


def train_one_step(model: torch.nn.Module, learning_rate: float) -> PolicyTrainer:
    trainer = PolicyTrainer(model, OptimizerConfig(clip_grad=1e9))
    trainer.train_step(batches(), mean_cross_entropy(TOKENS), learning_rate)
    return trainer


def matrices(model: torch.nn.Module) -> list[QuantizedExpertLinear]:
    return [module for module in model.modules() if isinstance(module, QuantizedExpertLinear)]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("matrices_at_once", [1, 3, 100])
def test_batched_expert_quantization_equals_single_experts(
    matrices_at_once: int, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = quantized_model()
    gathering = WeightGathering(model, MODEL)
    launches: list[int] = []
    quantize = mxfp4.quantize

    def counted(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        launches.append(len(x))
        return quantize(x)

    largest = 2 * 2 * MODEL.intermediate_size * MODEL.hidden_size
    monkeypatch.setattr(mxfp4_tensors, "QUANTIZED_AT_ONCE_BYTES", matrices_at_once * largest)
    monkeypatch.setattr(mxfp4, "quantize", counted)
    sent = {name: tensor.clone() for name, tensor in gathering.begin(mxfp4_experts=packed)}
    monkeypatch.undo()

    assert sum(launches) == 2 * MODEL.num_layers * MODEL.num_experts
    at_once = min(matrices_at_once, MODEL.num_experts)
    assert max(launches) <= 2 * at_once  # the number of smaller matrices per launch is double
    assert max(launches) >= at_once
    expected = (
        quantize_experts(master_weights()) if packed else fake_quantize_experts(master_weights())
    )
    assert sent.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(sent[name], tensor), name


# -- the forward pass ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 1e-6), (torch.float64, 1e-13)],
)
def test_quantized_model_equals_model_with_exported_values(
    dtype: torch.dtype, tolerance: float
) -> None:
    model = quantized_model(dtype)
    plain = model_with(exported_values(model), dtype=dtype)
    unquantized = model_with(master_weights(), dtype=dtype)
    expected = scores(plain)
    gap = (scores(model) - expected).abs().max()
    assert gap <= tolerance
    assert (scores(unquantized) - expected).abs().max() > 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_of_exported_values_changes_nothing(dtype: torch.dtype) -> None:
    model = quantized_model(dtype)
    again = model_with(exported_values(model), "mxfp4", dtype)
    assert torch.equal(scores(again), scores(model))


def test_model_equals_transformers_on_its_export(tmp_path: Path) -> None:
    model = quantized_model()
    write_hf_directory(tmp_path / "hf", MODEL, mxfp4_weights(model).items(), quantized=True)
    loaded: Any = GptOssForCausalLM.from_pretrained(
        tmp_path / "hf",
        attn_implementation="eager",
        dtype=torch.float32,
        quantization_config=Mxfp4Config(dequantize=True),
    )
    loaded = loaded.float().eval()

    # Equal values give the same model.
    values = exported_values(model)
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, values[name]), name
    batch = build_batch(SAMPLES)
    with torch.no_grad():
        logits = model.eval()(
            batch.token_ids[None],
            batch.position_ids[None],
            None,
            packed_seq_params=PackedSequence.of(batch),
        )[0]
    torch.testing.assert_close(logits, hf_logits(loaded, SAMPLES), atol=2e-5, rtol=0)


def test_only_the_matrices_of_experts_are_rounded() -> None:
    values = exported_values(quantized_model())
    for name, master in master_weights().items():
        is_matrix = name.endswith(("gate_up_proj", "down_proj"))
        assert torch.equal(values[name], master) != is_matrix, name


# -- the backward pass ---------------------------------------------------------------------------


def test_gradients_equal_model_with_exported_values() -> None:
    model = quantized_model()
    plain = train_one_step(model_with(exported_values(model)), learning_rate=1e-9).module
    train_one_step(model, learning_rate=1e-9)

    expected = dict(plain.named_parameters())
    found = dict(model.named_parameters())
    assert found.keys() == expected.keys()
    for name, parameter in found.items():
        wanted = expected[name].main_grad
        scale = wanted.abs().max()
        assert scale > 0, name
        error = (parameter.main_grad - wanted).abs().max() / scale
        assert error < 1e-5, f"gradient of {name} is off by {error:.1e}"


def test_gradients_without_megatron_buffers_equal_autograd() -> None:
    experts = quantized_model().decoder.layers[0].mlp.experts
    row_counts = [3, 0, 2, 0, 0, 4, 0, 0]
    torch.manual_seed(0)
    x = torch.randn(9, MODEL.hidden_size, requires_grad=True)
    for stack, with_bias in ((experts.gate_up, True), (experts.down, False)):
        rows = x[:, : stack.linears[0].weight.shape[1]]
        if rows.shape[1] < stack.linears[0].weight.shape[1]:
            rows = torch.randn(9, stack.linears[0].weight.shape[1], requires_grad=True)
        stack.multiply(rows, row_counts, with_bias).square().sum().backward()
        found = [(linear.weight.grad, linear.bias.grad) for linear in stack.linears]

        # Compute the same with autograd and a straight-through estimator for the rounding.
        expected = []
        first = 0
        for linear, count in zip(stack.linears, row_counts, strict=True):
            weight = linear.weight.detach().clone().requires_grad_()
            bias = linear.bias.detach().clone().requires_grad_()
            straight = weight + (linear.quantized_weight() - weight).detach()
            y = rows.detach()[first : first + count] @ straight.t()
            if with_bias:
                y = y + bias
            y.square().sum().backward()
            expected.append((weight.grad, bias.grad))
            first += count
        for (weight_grad, bias_grad), (wanted, wanted_bias) in zip(found, expected, strict=True):
            torch.testing.assert_close(weight_grad, wanted, rtol=1e-4, atol=1e-4)
            if with_bias:
                torch.testing.assert_close(bias_grad, wanted_bias, rtol=1e-4, atol=1e-4)


def test_master_weights_learn_updates_below_mxfp4_precision() -> None:
    model = quantized_model()
    masters = [linear.weight.detach().clone() for linear in matrices(model)]
    before = exported_values(model)
    trainer = train_one_step(model, learning_rate=1e-6)
    assert all(
        not torch.equal(linear.weight, master)
        for linear, master in zip(matrices(model), masters, strict=True)
    )

    # Adam changes every weight by the learning rate. Only a few changes are visible in 4 bits.
    name = "model.layers.0.mlp.experts.down_proj"
    changed = (exported_values(model)[name] != before[name]).float().mean()
    assert changed < 1e-3
    for _ in range(3):
        trainer.train_step(batches(), mean_cross_entropy(TOKENS), 1e-2)
    assert (exported_values(model)[name] != before[name]).float().mean() > 0.05


def test_only_frozen_experts_have_no_gradient() -> None:
    model = quantized_model()
    freeze(model, ["experts"])
    trainer = train_one_step(model, learning_rate=1e-3)
    values = exported_values(trainer.module)
    for name, value in exported_values(quantized_model()).items():
        is_frozen = ".mlp." in name or "post_attention_layernorm" in name
        assert torch.equal(values[name], value) == is_frozen, name


def test_experts_accept_zero_tokens() -> None:
    experts = quantized_model().decoder.layers[0].mlp.experts
    x = torch.randn(0, MODEL.hidden_size, requires_grad=True)
    output, _ = experts(x, torch.zeros(MODEL.num_experts, dtype=torch.int64), torch.rand(0))
    output.sum().backward()
    assert output.shape == (0, MODEL.hidden_size)
    assert all((p.grad == 0).all() for p in experts.parameters())


def test_weights_are_rounded_again_only_after_another_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = quantized_model()
    first, second = (layer.mlp.experts for layer in model.decoder.layers)
    assert isinstance(first, QuantizedExperts)
    rounds: list[int] = []
    fake_quantize = mxfp4.fake_quantize

    def counting(*args: Any, **kwargs: Any) -> torch.Tensor:
        rounds.append(1)
        return fake_quantize(*args, **kwargs)

    monkeypatch.setattr(quantized_experts.mxfp4, "fake_quantize", counting)
    x = torch.randn(16, MODEL.hidden_size, requires_grad=True)
    counts = torch.full((MODEL.num_experts,), 2)
    hidden, _ = first(x, counts, torch.rand(16))
    output, _ = second(hidden, counts, torch.rand(16))
    assert len(rounds) == 4
    output.square().sum().backward()
    assert len(rounds) == 6


@pytest.mark.parametrize("pieces", [1, 2])
def test_recomputed_layers_give_the_same_gradients(pieces: int) -> None:
    """torch's checkpoints of both layers, or of each, do the same as parallel.recompute moe."""
    torch.manual_seed(0)
    hidden = torch.randn(16, MODEL.hidden_size)
    probs = torch.rand(16)

    def gradients(is_recomputed: bool) -> list[torch.Tensor]:
        model = quantized_model()
        layers = [layer.mlp.experts for layer in model.decoder.layers]
        x = hidden.clone().requires_grad_()
        output = x
        for first in range(0, 2, 2 // pieces):
            piece = layers[first : first + 2 // pieces]
            if is_recomputed:
                output = torch.utils.checkpoint.checkpoint(
                    run_layers, output, piece, probs, use_reentrant=True
                )
            else:
                output = run_layers(output, piece, probs)
        output.square().sum().backward()
        return [x.grad, *(p.grad for layer in layers for p in layer.parameters())]

    found, expected = gradients(True), gradients(False)
    assert len(found) == len(expected) == 1 + 2 * 4 * MODEL.num_experts
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def run_layers(hidden: torch.Tensor, layers: list[Any], probs: torch.Tensor) -> torch.Tensor:
    counts = torch.full((MODEL.num_experts,), 2)
    for layer in layers:
        hidden, _ = layer(hidden, counts, probs)
    return hidden


# -- names, checkpoints, exports -----------------------------------------------------------------


def test_quantized_checkpoints_equal_full_training_checkpoints(tmp_path: Path) -> None:
    model = quantized_model()
    plain = model_with(master_weights())
    found = {name: tensor.key for name, tensor in model_state(model)["0"].items()}
    expected = {name: tensor.key for name, tensor in model_state(plain)["0"].items()}
    assert found == expected

    path = save_checkpoint(tmp_path, train_one_step(model, 1e-3), 1, {})
    load_model_weights(path, plain)
    again = quantized_model()
    load_model_weights(path, again)
    masters = dict(model.named_parameters())
    for loaded in (plain, again):
        assert all(torch.equal(p, masters[name]) for name, p in loaded.named_parameters())
    assert torch.equal(scores(again), scores(model))


def test_converted_checkpoint_has_the_trained_bytes(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model = quantized_model()
    checkpoint = save_checkpoint(tmp_path, train_one_step(model, 1e-2), 1, {})
    export_checkpoint(checkpoint, tmp_path / "hf", "mxfp4")
    exported = load_file(tmp_path / "hf/model.safetensors")

    trained = mxfp4_weights(model)
    assert exported.keys() == trained.keys()
    packed = [name for name in trained if name.endswith(("_blocks", "_scales"))]
    assert len(packed) == 4 * MODEL.num_layers
    assert all(torch.equal(exported[name], trained[name]) for name in packed)


def test_checkpoint_of_rounded_experts_is_not_exported_in_bf16(tmp_path: Path) -> None:
    model = quantized_model()
    checkpoint = save_checkpoint(tmp_path, train_one_step(model, 1e-2), 1, {})
    with pytest.raises(ConversionError, match="trained through MXFP4, but bf16 would write them"):
        export_checkpoint(checkpoint, tmp_path / "bf16", "bf16")

    # The scales of another model would give other bytes for the same blocks.
    export_checkpoint(checkpoint, tmp_path / "first", "mxfp4")
    export_checkpoint(checkpoint, tmp_path / "second", "mxfp4", reference=tmp_path / "first")
    files = [tmp_path / name / "model.safetensors" for name in ("first", "second")]
    assert files[0].read_bytes() == files[1].read_bytes()
    plain = save_checkpoint(
        tmp_path / "plain", train_one_step(model_with(master_weights()), 1e-2), 1, {}
    )
    export_checkpoint(plain, tmp_path / "plain_bf16", "bf16")


def test_unquantizable_model_is_rejected_by_key() -> None:
    narrow = MODEL.model_copy(update={"intermediate_size": 48})
    with pytest.raises(ValueError, match="intermediate_size is 48"):
        build_model(narrow, ParallelConfig(), quantization="mxfp4")


# -- on a GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_training_on_gpu_equals_model_with_exported_values() -> None:
    model = quantized_model(torch.bfloat16)
    plain = model_with(exported_values(model), dtype=torch.bfloat16)
    # Use one trainer per model, because on GPUs each hooks the backward pass of its parameters.
    found, expected = (
        PolicyTrainer(trained, OptimizerConfig(clip_grad=1e9)) for trained in (model, plain)
    )
    scores_found, scores_expected = (
        torch.cat(trainer.score(batches())) for trainer in (found, expected)
    )
    assert (scores_found - scores_expected).abs().max() < 5e-2

    for trainer in (found, expected):
        trainer.train_step(batches(), mean_cross_entropy(TOKENS), 1e-9)
    by_name = {name: p.main_grad for name, p in found.module.named_parameters()}
    for linear in matrices(found.module):
        for parameter in (linear.weight, linear.bias):
            assert parameter.main_grad.abs().max() > 0
    # Only grouped experts have different names.
    for name, parameter in expected.module.named_parameters():
        if ".experts." in name:
            continue
        scale = parameter.main_grad.abs().max()
        assert (by_name[name] - parameter.main_grad).abs().max() < 5e-2 * scale, name
