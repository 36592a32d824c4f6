"""A model with adapters equals its merged weights, and trains only the adapters."""

from __future__ import annotations

import re

import pytest
import torch

from converters.mapping import split_qkv
from converters.model_weights import export_hf_weights, load_hf_weights
from megatron_gptoss.config import AdapterConfig, OptimizerConfig, ParallelConfig, Quantization
from megatron_gptoss.layers.adapters import LowRank, initialize_adapters, named_adapters
from megatron_gptoss.model import build_model
from megatron_gptoss.packed_sequence import PackedSequence
from megatron_gptoss.packing import PackedBatch, build_batch
from megatron_gptoss.trainer import PolicyTrainer
from tests.support.megatron_gptoss.adapted import (
    ADAPTER,
    MODEL,
    adapted_model,
    base_weights,
    single_adapters,
)
from tests.support.megatron_gptoss.reference import documents, mean_cross_entropy

pytestmark = pytest.mark.usefixtures("process_groups")


SAMPLES = documents([34, 2, 9, 21])
TOKENS = int(SAMPLES.loss_tokens.sum())


def batches() -> list[PackedBatch]:
    return [build_batch(SAMPLES, [0, 1]), build_batch(SAMPLES, [2, 3])]


def plain_model_with_merged_weights(model: torch.nn.Module) -> torch.nn.Module:
    merged = {name: tensor.clone() for name, tensor in export_hf_weights(model, MODEL)}
    plain = build_model(MODEL, ParallelConfig(), next(model.parameters()).dtype)
    load_hf_weights(plain, MODEL, merged.__getitem__)
    return plain


def train_one_step(model: torch.nn.Module) -> PolicyTrainer:
    trainer = PolicyTrainer(model, OptimizerConfig(clip_grad=1e9))
    trainer.train_step(batches(), mean_cross_entropy(TOKENS), learning_rate=1e-9)
    return trainer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exported_adapters_compute_equal_bits(dtype: torch.dtype) -> None:
    model = adapted_model(ParallelConfig(), dtype=dtype)
    merged = plain_model_with_merged_weights(model)
    base = build_model(MODEL, ParallelConfig(), dtype)
    load_hf_weights(base, MODEL, base_weights().__getitem__)

    scores = [
        torch.cat(PolicyTrainer(each, OptimizerConfig()).score(batches()))
        for each in (model, merged, base)
    ]
    assert torch.equal(scores[0], scores[1])
    assert (scores[0] - scores[2]).abs().max() > 0.1


def test_logits_equal_those_of_merged_weights() -> None:
    model = adapted_model(ParallelConfig()).eval()
    merged = plain_model_with_merged_weights(model).eval()
    [batch, _] = batches()
    inputs = (batch.token_ids[None], batch.position_ids[None], None)
    with torch.no_grad():
        logits, expected = (
            each(*inputs, packed_seq_params=PackedSequence.of(batch)) for each in (model, merged)
        )
    assert logits.shape == (1, batch.tokens, MODEL.vocab_size)
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)


def test_new_adapters_do_not_change_outputs() -> None:
    model = adapted_model(ParallelConfig())
    initialize_adapters(model, seed=3)
    expected = base_weights()
    for name, tensor in export_hf_weights(model, MODEL):
        assert torch.equal(tensor, expected[name]), name


def test_initial_values_depend_on_seed_and_name() -> None:
    model = adapted_model(ParallelConfig())
    drawn = {}
    for seed in (0, 1, 0):
        initialize_adapters(model, seed)
        adapters = dict(single_adapters(model))
        before = drawn.get(seed)
        drawn[seed] = {name: adapter.a.detach().clone() for name, adapter in adapters.items()}
        if before is not None:
            assert all(torch.equal(drawn[seed][name], a) for name, a in before.items())

    everything = [a for by_name in drawn.values() for a in by_name.values()]
    assert len({tuple(a.flatten()[:4].tolist()) for a in everything}) == len(everything)
    for a in everything:
        bound = a.shape[1] ** -0.5
        assert 0.9 * bound < a.abs().max() <= bound


def test_gradients_are_those_of_the_merged_weights() -> None:
    model = adapted_model(ParallelConfig())
    plain = plain_model_with_merged_weights(model)
    train_one_step(model)
    train_one_step(plain)

    weight_gradients = {name: p.main_grad for name, p in plain.named_parameters()}
    checked = set()
    for name, adapter in single_adapters(model):
        layer, target = re.fullmatch(r"(.*)\.adapters\.(\w+)", name).groups()
        gradient = weight_gradients[f"{layer}.weight"]
        if target in ("q", "k", "v"):
            parts = split_qkv(gradient, groups=MODEL.num_key_value_heads, head_size=MODEL.head_size)
            gradient = parts["qkv".index(target)]

        expected_a = adapter.scale * adapter.b.detach().T @ gradient
        expected_b = adapter.scale * gradient @ adapter.a.detach().T
        for factor, expected in (("a", expected_a), ("b", expected_b)):
            gradient_error = (adapter.gradients[factor] - expected).abs().max()
            error = gradient_error / expected.abs().max()
            assert error < 1e-5, f"gradient of {name} is off by {error:.1e}"
            assert expected.abs().max() > 0
        checked.add(target)
    assert checked == {"q", "k", "v", "o", "gate_up", "down", "router", "embedding", "head"}


def test_only_adapters_are_trained() -> None:
    model = adapted_model(ParallelConfig())
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer = PolicyTrainer(model, OptimizerConfig())
    for _ in range(2):
        step = trainer.train_step(batches(), mean_cross_entropy(TOKENS), learning_rate=1e-2)
    assert step.parameters_updated

    for name, parameter in model.named_parameters():
        is_changed = not torch.equal(parameter, before[name])
        assert is_changed == (".adapters." in name), name
        assert hasattr(parameter, "main_grad") == (".adapters." in name), name
    trained = sum(buffer.numel for chunk in trainer.model for buffer in chunk.buffers)
    assert trained == sum(a.a.numel() + a.b.numel() for _, a in named_adapters(model))


@pytest.mark.parametrize(
    "targets",
    [("v",), ("o",), ("experts",), ("router",), ("q", "k"), ("embedding",), ("head",)],
)
def test_each_target_learns_alone(targets: tuple[str, ...]) -> None:
    adapter = AdapterConfig(rank=8, alpha=16, targets=targets)
    model = adapted_model(ParallelConfig(), adapter, b_std=0.0)
    trainer = PolicyTrainer(model, OptimizerConfig())
    losses = []
    for _ in range(8):
        step = trainer.train_step(batches(), mean_cross_entropy(TOKENS), learning_rate=1e-2)
        losses.append(step.sums["loss"])
    assert losses[-1] < losses[0] - 0.05


def test_every_adapter_is_called() -> None:
    # The distributed optimizer gathers the parameters of a module when the module is called.
    model = adapted_model(ParallelConfig())
    called = set()
    for name, adapter in named_adapters(model):
        adapter.register_forward_hook(lambda *_, name=name: called.add(name))
    PolicyTrainer(model, OptimizerConfig()).score(batches())
    assert called == {name for name, _ in named_adapters(model)}


def train_three_steps(
    quantization: Quantization | None, targets: tuple[str, ...]
) -> tuple[list[float], torch.nn.Module]:
    adapter = ADAPTER.model_copy(update={"targets": targets})
    model = adapted_model(ParallelConfig(), adapter, quantization=quantization)
    trainer = PolicyTrainer(model, OptimizerConfig())
    losses = []
    for _ in range(3):
        step = trainer.train_step(batches(), mean_cross_entropy(TOKENS), learning_rate=1e-2)
        losses.append(step.sums["loss"])
    return losses, model


@pytest.mark.parametrize("targets", [("q", "experts"), ("o",)])
def test_mxfp4_base_trains_to_equal_bits(targets: tuple[str, ...]) -> None:
    dense_losses, dense = train_three_steps(None, targets)
    mxfp4_losses, packed = train_three_steps("mxfp4", targets)
    if "experts" in targets:
        assert mxfp4_losses == dense_losses
    else:
        # Megatron computes the frozen experts of a dense base
        assert mxfp4_losses == pytest.approx(dense_losses, rel=1e-6)

    adapters = dict(named_adapters(dense))
    for name, adapter in named_adapters(packed):
        if "experts" in targets:
            assert torch.equal(adapter.a, adapters[name].a), name
            assert torch.equal(adapter.b, adapters[name].b), name

    experts = [name for name, _ in packed.named_parameters() if ".experts." in name]
    assert not any(name.endswith("weight") for name in experts)
    sizes = [b.numel() for name, b in packed.named_buffers() if ".linear_fc" in name]
    weights = MODEL.num_layers * MODEL.num_experts * 3 * MODEL.hidden_size * MODEL.intermediate_size
    assert sum(sizes) == weights * 17 / 32


def test_weights_that_mxfp4_cannot_hold_are_rejected_by_name() -> None:
    model = build_model(MODEL, ParallelConfig(), adapter=ADAPTER, quantization="mxfp4")
    weights = base_weights()
    weights["model.layers.1.mlp.experts.down_proj"][3, 0, 0] += 0.01
    message = r"decoder.layers.1.mlp.experts.local_experts.3.linear_fc2.weight: 1 of 6144 values"
    with pytest.raises(ValueError, match=message):
        load_hf_weights(model, MODEL, weights.__getitem__)


def test_non_finite_gradient_is_named() -> None:
    model = adapted_model(ParallelConfig())
    trainer = PolicyTrainer(model, OptimizerConfig())

    def poison(module: LowRank, inputs: object, output: tuple[torch.Tensor, ...]) -> None:
        output[0].register_hook(lambda gradient: gradient * torch.nan)

    name, adapter = next(iter(named_adapters(model)))
    adapter.register_forward_hook(poison)
    step = trainer.train_step(batches(), mean_cross_entropy(TOKENS), learning_rate=1e-2)
    assert f"the gradient of {name}.a " in step.non_finite_gradients
