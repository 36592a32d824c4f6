"""GPT-OSS has the logits and gradients of transformers, and needs all of its features."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch

from converters.model_weights import load_hf_weights
from gptoss_kernels.sink_attention import dispatch
from megatron_gptoss.config import OptimizerConfig, ParallelConfig
from megatron_gptoss.families.gpt_oss.config import GptOssModelConfig
from megatron_gptoss.layers import rotary
from megatron_gptoss.layers.attention import slow_reasons
from megatron_gptoss.model import build_model
from megatron_gptoss.packed_sequence import PackedSequence
from megatron_gptoss.packing import build_batch
from megatron_gptoss.trainer import PolicyTrainer
from tests.support.megatron_gptoss.reference import (
    TINY,
    documents,
    hf_logits,
    hf_loss,
    hf_model,
    hf_norms_in_full_precision,
    mean_cross_entropy,
)
from tests.support.tolerances import assert_within, rounding_error

pytestmark = pytest.mark.usefixtures("process_groups")


SAMPLES = documents([34, 2, 9, 21])


@pytest.fixture(scope="module")
def reference() -> object:
    return hf_model()


def megatron(
    reference: torch.nn.Module,
    dtype: torch.dtype = torch.float32,
    config: GptOssModelConfig = TINY,
    **overrides: object,
) -> torch.nn.Module:
    model = build_model(config, ParallelConfig(), dtype, **overrides)
    load_hf_weights(model, config, reference.state_dict().__getitem__)
    return model.eval()


def test_every_kind_of_layer_without_a_kernel_has_a_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    build = functools.partial(build_model, TINY, ParallelConfig())
    models = [build(torch.bfloat16), build(torch.float32)]
    reference = build(torch.bfloat16, attention_backend_name="reference")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        dispatch, "unsupported_reason", lambda backend, shape: f"{backend} is missing"
    )

    windowed, full = sorted(slow_reasons(models[0]), reverse=True)
    assert "heads 8/2, head size 16, window 8" in windowed and "hopper is missing" in windowed
    assert "heads 8/2, head size 16, full attention" in full and "hopper is missing" in full
    assert slow_reasons(models[1]) == []
    assert slow_reasons(reference) == []


def logits(model: torch.nn.Module, align: int = 1) -> torch.Tensor:
    batch = build_batch(SAMPLES, align=align)
    with torch.no_grad():
        out = model(
            batch.token_ids[None],
            batch.position_ids[None],
            None,
            packed_seq_params=PackedSequence.of(batch),
        )
    return out[0, : int(SAMPLES.loss_tokens.sum())]


def distance(model: torch.nn.Module, reference: torch.nn.Module) -> float:
    with torch.no_grad():
        return (logits(model) - hf_logits(reference, SAMPLES)).abs().max().item()


def rounding_of_logits(std: float) -> float:
    """Return the largest change of ``hf_model``'s logits by rounding to fp32."""
    exact = hf_model(std=std).double()
    exact.config._experts_implementation = "eager"
    with torch.no_grad(), hf_norms_in_full_precision():
        return rounding_error(hf_logits(hf_model(std=std), SAMPLES), hf_logits(exact, SAMPLES))


def test_fp32_logits_of_packed_documents_match_transformers() -> None:
    reference = hf_model(std=0.15)
    assert distance(megatron(reference), reference) < rounding_of_logits(0.15) < 2e-4


def test_fp64_logits_of_packed_documents_match_transformers() -> None:
    reference = hf_model().double()
    reference.config._experts_implementation = "eager"
    with hf_norms_in_full_precision():
        assert distance(megatron(reference, torch.float64), reference) < 1e-12


def test_bf16_is_about_as_close_to_fp32_as_transformers_own_bf16() -> None:
    # all experts are active, because a different routing would hide other errors
    config = TINY.model_copy(update={"experts_per_token": TINY.num_experts})
    reference = hf_model(config)
    with torch.no_grad():
        exact = hf_logits(reference, SAMPLES)
        theirs = (
            (hf_logits(hf_model(config).to(torch.bfloat16), SAMPLES).float() - exact).abs().mean()
        )
    ours = (logits(megatron(reference, torch.bfloat16, config)).float() - exact).abs().mean()
    assert ours < 1.5 * theirs


def test_padding_tail_does_not_change_the_logits_of_documents(reference: torch.nn.Module) -> None:
    model = megatron(reference)
    assert_within(logits(model, align=16), logits(model), rounding_of_logits(0.2))


def test_gradients_match_transformers() -> None:
    reference = hf_model(std=0.15)
    hf_loss(reference, SAMPLES).backward()
    exact = hf_model(std=0.15).double()
    exact.config._experts_implementation = "eager"
    with hf_norms_in_full_precision():
        hf_loss(exact, SAMPLES).backward()
    model = megatron(reference)
    trainer = PolicyTrainer(model, OptimizerConfig(clip_grad=1e9))
    tokens = int(SAMPLES.loss_tokens.sum())
    batches = [build_batch(SAMPLES, [0, 1]), build_batch(SAMPLES, [2, 3])]
    trainer.train_step(batches, mean_cross_entropy(tokens), learning_rate=1e-9)
    expected, in_float64 = (
        build_model(TINY, ParallelConfig(), dtype) for dtype in (torch.float32, torch.float64)
    )
    for gradients, source in ((expected, reference), (in_float64, exact)):
        named = {name: parameter.grad for name, parameter in source.named_parameters()}
        load_hf_weights(gradients, TINY, named.__getitem__)
    for (name, parameter), want, float64 in zip(
        model.named_parameters(), expected.parameters(), in_float64.parameters(), strict=True
    ):
        allowed = rounding_error(want.detach(), float64.detach())
        assert_within(parameter.main_grad, want.detach(), allowed, name)
        assert want.abs().max() > max(0, 1e3 * allowed), f"no gradient for {name}"


def sinks_learn_nothing_with(reference: torch.nn.Module, **ablation: bool) -> torch.nn.Module:
    """Return the model after a step that would also have trained the sinks."""
    model = megatron(reference, **ablation)
    trainer = PolicyTrainer(model, OptimizerConfig(clip_grad=1e9))
    trainer.train_step([build_batch(SAMPLES)], mean_cross_entropy(62), learning_rate=1e-9)
    for name, parameter in model.named_parameters():
        assert (parameter.main_grad.abs().max() == 0) == ("softmax_offset" in name), name
    return model.eval()


def test_sinks_without_gradient_still_take_attention(reference: torch.nn.Module) -> None:
    model = sinks_learn_nothing_with(reference, sink_gradient=False)
    assert distance(model, reference) < 1e-3


def test_trainer_without_sinks_ignores_them(
    reference: torch.nn.Module,
) -> None:
    model = sinks_learn_nothing_with(reference, sinks=False)
    assert distance(model, reference) > 0.02
    without = hf_model()
    with torch.no_grad():
        for name, parameter in without.named_parameters():
            if name.endswith("sinks"):
                parameter.fill_(-1e4)
    assert distance(model, without) < 1e-3


def test_sink_backward_ablation_equals_backward_without_sinks(
    reference: torch.nn.Module,
) -> None:
    assert distance(sinks_learn_nothing_with(reference, sink_backward=False), reference) < 1e-3
    packed = PackedSequence.of(build_batch(SAMPLES))
    heads = TINY.num_attention_heads, TINY.num_key_value_heads, TINY.num_key_value_heads
    torch.manual_seed(0)
    inputs = [torch.randn(62, count, TINY.head_size, requires_grad=True) for count in heads]
    upstream = torch.randn(62, heads[0] * TINY.head_size)
    outs = []
    grads = []
    for ablation in ({}, {"sink_backward": False}, {"sinks": False}):
        layer = megatron(reference, **ablation).decoder.layers[0]
        outs.append(layer.self_attention.core_attention(*inputs, packed_seq_params=packed))
        grads.append(torch.autograd.grad(outs[-1], inputs, upstream))
    assert torch.equal(outs[1], outs[0])
    for exact, broken, without in zip(*grads, strict=True):
        assert torch.equal(broken, without)
        assert (broken - exact).norm() > 0.05 * exact.norm()


def zeroed(part: str) -> Callable[[torch.nn.Module], None]:
    def edit(model: torch.nn.Module) -> None:
        found = [parameter for name, parameter in model.named_parameters() if part in name]
        assert found, f"no parameter is called {part}"
        for parameter in found:
            parameter.data.zero_()

    return edit


@pytest.mark.parametrize(
    "part",
    [
        "softmax_offset",
        "router.bias",
        "linear_fc1.bias",
        "linear_fc2.bias",
        "linear_qkv.bias",
        "linear_proj.bias",
    ],
)
def test_parity_fails_without(part: str, reference: torch.nn.Module) -> None:
    model = megatron(reference)
    zeroed(part)(model)
    assert distance(model, reference) > 0.02


@pytest.mark.parametrize(
    "change",
    [
        {"window_size": (8, 0)},
        {"window_size": (6, 0)},
        {"window_size": None, "window_attn_skip_freq": None},
        {"window_attn_skip_freq": [0, 1, 0, 1]},
        {"glu_linear_offset": 0.0},
        {"activation_func": torch.nn.functional.silu},
        {"moe_router_pre_softmax": True},
        {"moe_router_topk": 2},
        {"architecture": TINY.model_copy(update={"yarn_factor": 1.0})},
        {"architecture": TINY.model_copy(update={"rope_theta": 10_000.0})},
    ],
    ids=lambda change: (
        ", ".join(
            f"{k}={getattr(v, '__name__', v)}" for k, v in change.items() if k != "architecture"
        )
        or "rope"
    ),
)
def test_parity_fails_with(change: dict[str, object], reference: torch.nn.Module) -> None:
    assert distance(megatron(reference, **change), reference) > 0.02


def test_parity_fails_without_the_swiglu_clamp() -> None:
    reference = hf_model(std=0.4)  # the weights are so large that activations reach the clamp
    fault = distance(megatron(reference, activation_func_clamp_value=None), reference)
    assert distance(megatron(reference), reference) < rounding_of_logits(0.4) < 0.5 * fault


def test_parity_fails_when_the_yarn_ramp_is_rounded(
    reference: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = rotary.yarn_inverse_frequencies
    monkeypatch.setattr(
        rotary, "yarn_inverse_frequencies", lambda config: exact(config, truncate=True)
    )
    assert distance(megatron(reference), reference) > 1e-3


def test_parity_fails_without_separation_of_documents(reference: torch.nn.Module) -> None:
    model = megatron(reference)
    batch = build_batch(SAMPLES)
    batch.cu_seqlens = batch.cu_seqlens[[0, -1]]
    batch.max_seqlen = batch.tokens
    with torch.no_grad():
        out = model(
            batch.token_ids[None],
            batch.position_ids[None],
            None,
            packed_seq_params=PackedSequence.of(batch),
        )
        assert (out[0] - hf_logits(reference, SAMPLES)).abs().max() > 0.02


def test_unpacked_input_is_rejected(reference: torch.nn.Module) -> None:
    ids = torch.zeros(1, 4, dtype=torch.long)
    with pytest.raises(ValueError, match="attention needs packed sequences"):
        megatron(reference)(ids, ids, None)
