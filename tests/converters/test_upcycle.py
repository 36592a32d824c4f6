"""A dense model as a GPT-OSS model: same function, and a report of what clamps and windows change."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from converters.errors import ConversionError
from converters.families.registry import hugging_face_reference
from converters.hf_directory import HfDirectory
from converters.reference.layouts import source_of
from converters.reference.rotary import rotary_frequencies
from converters.upcycle import (
    UpcycleOptions,
    calibration_tokens,
    measure,
    read_calibration_text,
    upcycle,
    upcycled_config,
    upcycled_tensors,
)
from megatron_gptoss.families.dense.config import DenseModelConfig
from megatron_gptoss.layers.rotary import inverse_frequencies
from rl_loop.chatml.vocabulary import tiny_vocabulary
from tests.support.converters.dense_models import save_dense
from tests.support.converters.models import save_hf, tiny_weights
from tests.support.megatron_gptoss.dense_reference import LLAMA, MODELS, dense_weights

EXACT = UpcycleOptions(sliding_window=8192, sink=-100.0, expert_noise=0.0)
"""Options that keep the function: no windows, no sinks, equal experts."""
TOKENS = torch.arange(60) * 37 % LLAMA.vocab_size


def logits_of(directory: Path, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    source = HfDirectory(directory)
    return hugging_face_reference(source.config, source.get, dtype).logits(TOKENS)


def loss_of(directory: Path) -> float:
    return cross_entropy(logits_of(directory)[:-1], TOKENS[1:]).item()


def with_large_gates(config: DenseModelConfig, factor: float) -> dict[str, torch.Tensor]:
    """Return weights whose gates exceed the clamp of GPT-OSS."""
    weights = dense_weights(config)
    return {
        name: factor * value if "gate_proj" in name else value for name, value in weights.items()
    }


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "llama, tied", "qwen2", "head size of hidden / heads"])
def test_upcycled_logits_equal_the_dense_ones(name: str, tmp_path: Path) -> None:
    source = HfDirectory(save_dense(tmp_path / "dense", MODELS[name]))
    config = upcycled_config(source, EXACT)
    measured = measure(source, config, EXACT, TOKENS)
    assert measured.report.clamped_share == 0, "the clamps are not reached"

    tensors = dict(upcycled_tensors(source, config, EXACT, measured.up_scales, torch.float64))
    upcycled = hugging_face_reference(config, source_of(tensors), torch.float64).logits(TOKENS)
    torch.testing.assert_close(upcycled, logits_of(source.path), atol=1e-10, rtol=0)


def test_report_predicts_the_loss_of_the_clamps(tmp_path: Path) -> None:
    dense = save_dense(tmp_path / "dense", LLAMA, with_large_gates(LLAMA, 12.0))
    report = upcycle(dense, tmp_path / "moe", EXACT, TOKENS.tolist(), torch.float32)

    predicted = report.clamped_loss - report.dense_loss
    assert abs(predicted) > 1e-3 and report.clamped_share > 0
    measured = loss_of(tmp_path / "moe") - loss_of(dense)
    assert measured == pytest.approx(predicted, rel=0.01)
    assert "of the gate activations exceed 7" in str(report)


def test_report_predicts_the_loss_with_windows_and_sinks(tmp_path: Path) -> None:
    dense = save_dense(tmp_path / "dense", LLAMA)
    options = dataclasses.replace(EXACT, sliding_window=6, sink=1.0)
    report = upcycle(dense, tmp_path / "moe", options, TOKENS.tolist(), torch.float32)
    assert report.clamped_loss == pytest.approx(report.dense_loss, abs=1e-5)
    assert abs(report.upcycled_loss - report.dense_loss) > 1e-3
    assert loss_of(tmp_path / "moe") == pytest.approx(report.upcycled_loss, abs=1e-5)


@torch.no_grad()
def test_transformers_reads_the_upcycled_model(tmp_path: Path) -> None:
    dense = save_dense(tmp_path / "dense", LLAMA)
    upcycle(dense, tmp_path / "moe", EXACT, TOKENS.tolist(), torch.float32)
    logits = [
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(TOKENS[None]).logits
        for path in (dense, tmp_path / "moe")
    ]
    torch.testing.assert_close(logits[0], logits[1], atol=1e-4, rtol=0)


def test_up_stays_within_its_clamp_at_any_scale(tmp_path: Path) -> None:
    weights = {
        name: 300.0 * value if "up_proj" in name else value
        for name, value in dense_weights(LLAMA).items()
    }
    dense = save_dense(tmp_path / "dense", LLAMA, weights)
    report = upcycle(dense, tmp_path / "moe", EXACT, TOKENS.tolist(), torch.float32)
    assert report.clamped_loss == pytest.approx(report.dense_loss, rel=1e-5)


def test_noise_separates_the_experts(tmp_path: Path) -> None:
    dense = save_dense(tmp_path / "dense", LLAMA)
    noisy = dataclasses.replace(EXACT, expert_noise=0.03)
    for name in ("first", "second"):
        upcycle(dense, tmp_path / name, noisy, TOKENS.tolist(), torch.float32)
    other = dataclasses.replace(noisy, seed=1)
    upcycle(dense, tmp_path / "other", other, TOKENS.tolist(), torch.float32)

    first, second, third = (HfDirectory(tmp_path / name) for name in ("first", "second", "other"))
    name = "model.layers.1.mlp.experts.down_proj"
    experts = first.get(name)
    assert torch.equal(experts, second.get(name)), "the seed decides"
    assert not torch.equal(experts, third.get(name))

    upcycle(dense, tmp_path / "equal", EXACT, TOKENS.tolist(), torch.float32)
    equal = HfDirectory(tmp_path / "equal").get(name)
    assert torch.equal(equal[0], equal[1])
    # Noise is proportional to the dense weights, whose channels have scales of their own.
    channel_scale = 1.702 / (
        equal[0] / HfDirectory(dense).get("model.layers.1.mlp.down_proj.weight").T
    ).mean(1)
    noise = (experts - equal) * channel_scale[:, None] / 1.702
    spread = HfDirectory(dense).get("model.layers.1.mlp.down_proj.weight").std()
    assert noise.std().item() == pytest.approx(0.03 * spread.item(), rel=0.05)


def test_tokenizer_and_end_tokens_come_along(tmp_path: Path) -> None:
    config = LLAMA.model_copy(update={"vocab_size": 512})
    dense = save_dense(tmp_path / "dense", config)
    tiny_vocabulary(config.vocab_size, "Hello").save(dense)
    (dense / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    upcycle(
        dense, tmp_path / "moe", EXACT, calibration_tokens(dense, "Hello, Hello!"), torch.float32
    )
    written = tmp_path / "moe"
    assert (written / "tokenizer.json").read_bytes() == (dense / "tokenizer.json").read_bytes()
    assert '"eos_token_id": [' in (written / "generation_config.json").read_text()


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("gpt_oss", "model_type gpt_oss is no dense model"),
        ("rope", "rope_scaling linear cannot be expressed in GPT-OSS"),
        ("experts", "experts per token: 5 exceeds the 4 experts"),
        ("text", "text: needs at least two tokens"),
    ],
)
def test_unsuitable_sources_are_rejected(case: str, message: str, tmp_path: Path) -> None:
    dense = tmp_path / "source"
    if case == "gpt_oss":
        save_hf(dense, tiny_weights())
    else:
        save_dense(dense, MODELS["linear rope" if case == "rope" else "llama"])
    options = dataclasses.replace(EXACT, experts_per_token=5 if case == "experts" else 2)
    tokens = [1] if case == "text" else TOKENS.tolist()
    with pytest.raises(ConversionError, match=message):
        upcycle(dense, tmp_path / "moe", options, tokens)
    assert not (tmp_path / "moe").exists()


def test_missing_tokenizer_is_named(tmp_path: Path) -> None:
    dense = save_dense(tmp_path / "dense", LLAMA)
    with pytest.raises(ConversionError, match=r"tokenizer\.json: no such file"):
        calibration_tokens(dense)
    (dense / "tokenizer.json").write_text("{}")
    with pytest.raises(ConversionError, match=r"tokenizer\.json: cannot be read"):
        calibration_tokens(dense)


def test_pipes_and_bytes_are_no_calibration_input(tmp_path: Path) -> None:
    """A pipe would block the command."""
    os.mkfifo(tmp_path / "tokenizer.json")
    with pytest.raises(ConversionError, match="not a regular file"):
        calibration_tokens(tmp_path)
    with pytest.raises(ConversionError, match="not a regular file"):
        read_calibration_text(tmp_path / "tokenizer.json")
    (tmp_path / "text").write_bytes(b"\xff")
    with pytest.raises(ConversionError, match="text: cannot be read as text"):
        read_calibration_text(tmp_path / "text")


def test_progress_of_measuring_and_writing_reaches_the_end(tmp_path: Path) -> None:
    dense = save_dense(tmp_path / "dense", LLAMA)
    written: list[tuple[int, int]] = []
    measured: list[tuple[int, int]] = []
    upcycle(
        dense,
        tmp_path / "moe",
        EXACT,
        TOKENS.tolist(),
        progress=lambda *values: written.append(values),
        measure_progress=lambda *values: measured.append(values),
    )
    for calls in (written, measured):
        assert len(calls) > LLAMA.num_layers
        assert [done for done, _ in calls] == sorted(done for done, _ in calls)
        assert calls[-1][0] == calls[-1][1]


def test_trainer_rotates_by_the_dense_frequencies(tmp_path: Path) -> None:
    """YaRN with factor 1 keeps all bits, in the reference and in the trainer."""
    # With YaRN's default bounds, the ramp would round two of these frequencies.
    sizes = {"head_size": 64, "max_length": 2048, "rope_theta": 10_000.0}
    model = LLAMA.model_copy(update=sizes)
    source = HfDirectory(save_dense(tmp_path / "dense", model))
    config = upcycled_config(source, EXACT)
    for frequencies in (inverse_frequencies, rotary_frequencies):
        upcycled, factor = frequencies(config)
        dense, _ = frequencies(source.config)
        assert torch.equal(upcycled, dense) and factor == 1.0
