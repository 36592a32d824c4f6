"""A dense model as a GPT-OSS model: same function, and a report of what clamps and windows change."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from converters.errors import ConversionError
from converters.families.registry import hugging_face_reference
from converters.hf_directory import HfDirectory
from converters.reference.layouts import build_getter
from converters.reference.rotary import rotary_frequencies
from converters.upcycling.architecture import UpcycleOptions, upcycled_config
from converters.upcycling.calibration import measure
from converters.upcycling.calibration_text import calibration_tokens, read_calibration_text
from converters.upcycling.convert import upcycle
from converters.upcycling.weights import upcycled_tensors
from megatron_gptoss.families.dense.config import DenseModelConfig
from megatron_gptoss.layers.rotary import inverse_frequencies
from rl_loop.chat.tokenizer_vocabulary import read_vocabulary
from rl_loop.chatml.vocabulary import ChatMlVocabulary, tiny_vocabulary
from rl_loop.harmony.codec import Harmony, PromptConfig
from rl_loop.harmony.vocabulary import SPECIAL_TOKENS, HarmonyTokenizer
from tests.support.converters.dense_models import save_dense
from tests.support.converters.models import save_hf, tiny_weights
from tests.support.megatron_gptoss.dense_reference import LLAMA, MODELS, dense_weights
from tests.support.rl_loop.unused_tokens import add_unused_tokens

EXACT = UpcycleOptions(sliding_window=8192, sink=-100.0, expert_noise=0.0)
"""Options that keep the function: no windows, no sinks, equal experts."""
TOKENS = torch.arange(60) * 37 % LLAMA.vocab_size


def compute_logits(directory: Path, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    source = HfDirectory(directory)
    return hugging_face_reference(source.config, source.get, dtype).logits(TOKENS)


def compute_loss(directory: Path) -> float:
    return cross_entropy(compute_logits(directory)[:-1], TOKENS[1:]).item()


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

    tensors = dict(upcycled_tensors(source, config, EXACT, measured, torch.float64))
    upcycled = hugging_face_reference(config, build_getter(tensors), torch.float64).logits(TOKENS)
    torch.testing.assert_close(upcycled, compute_logits(source.path), atol=1e-10, rtol=0)


def test_report_predicts_the_loss_of_the_clamps(tmp_path: Path) -> None:
    dense = save_dense(tmp_path / "dense", LLAMA, with_large_gates(LLAMA, 12.0))
    report = upcycle(dense, tmp_path / "moe", EXACT, TOKENS.tolist(), torch.float32)

    predicted = report.clamped_loss - report.dense_loss
    assert abs(predicted) > 1e-3 and report.clamped_share > 0
    measured = compute_loss(tmp_path / "moe") - compute_loss(dense)
    assert measured == pytest.approx(predicted, rel=0.01)
    assert "of the gate activations exceed 7" in str(report)


def test_report_predicts_the_loss_with_windows_and_sinks(tmp_path: Path) -> None:
    dense = save_dense(tmp_path / "dense", LLAMA)
    options = dataclasses.replace(EXACT, sliding_window=6, sink=1.0)
    report = upcycle(dense, tmp_path / "moe", options, TOKENS.tolist(), torch.float32)
    assert report.clamped_loss == pytest.approx(report.dense_loss, abs=1e-5)
    assert abs(report.upcycled_loss - report.dense_loss) > 1e-3
    assert compute_loss(tmp_path / "moe") == pytest.approx(report.upcycled_loss, abs=1e-5)


@torch.no_grad()
def test_transformers_reads_the_upcycled_model(tmp_path: Path) -> None:
    dense = save_dense(tmp_path / "dense", LLAMA)
    upcycle(dense, tmp_path / "moe", EXACT, TOKENS.tolist(), torch.float32)
    logits = [
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(TOKENS[None]).logits
        for path in (dense, tmp_path / "moe")
    ]
    torch.testing.assert_close(logits[0], logits[1], atol=1e-4, rtol=0)


@torch.no_grad()
def count_loads(model: torch.nn.Module) -> torch.Tensor:
    """Return the loads [layers, experts] of TOKENS in transformers."""
    counts = []

    def count(module: object, inputs: object, output: tuple[torch.Tensor, ...]) -> None:
        counts.append(torch.bincount(output[-1].flatten(), minlength=4).double())

    hooks = [layer.mlp.router.register_forward_hook(count) for layer in model.model.layers]
    model(TOKENS[None])
    for hook in hooks:
        hook.remove()
    loads = torch.stack(counts)
    return loads / loads.mean(dim=1, keepdim=True)


def test_all_experts_get_an_even_share_of_the_text(tmp_path: Path) -> None:
    dense = save_dense(tmp_path / "dense", LLAMA)
    options = UpcycleOptions(sliding_window=6, expert_noise=0.0)
    report = upcycle(dense, tmp_path / "moe", options, TOKENS.tolist(), torch.float32)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "moe", dtype=torch.float32)
    loads = count_loads(model)
    assert report.load_min == pytest.approx(loads.min().item())
    assert report.load_max == pytest.approx(loads.max().item())
    assert 0.9 < loads.min() <= loads.max() < 1.1

    for layer in model.model.layers:
        layer.mlp.router.bias.data.zero_()
    assert count_loads(model).min() < 0.7, "routers without bias prefer some experts"


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


def chatml_with_unused_tokens(directory: Path, unused: int) -> Path:
    """Write a small dense model with a ChatML tokenizer and further added tokens."""
    config = LLAMA.model_copy(update={"vocab_size": 512})
    save_dense(directory, config)
    tiny_vocabulary(config.vocab_size, "Hello").save(directory)
    add_unused_tokens(directory, unused)
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    return directory


def test_harmonys_tokens_replace_unused_ones(tmp_path: Path) -> None:
    dense = chatml_with_unused_tokens(tmp_path / "dense", 8)
    options = dataclasses.replace(EXACT, harmony=True)
    upcycle(dense, tmp_path / "moe", options, TOKENS.tolist(), torch.float32)
    assert not (tmp_path / "moe/chat_template.jinja").exists()

    # All ids that are text keep their text, and the tokens work with Harmony's codec.
    before = read_vocabulary(ChatMlVocabulary, dense, 512)
    after = read_vocabulary(HarmonyTokenizer, tmp_path / "moe", 512)
    assert after.encode_text("Hello <|end|>") == before.encode_text("Hello <|end|>")
    assert after.markup["<|start|>"] == before.markup["<|im_start|>"]
    assert after.markup["<|end|>"] == before.markup["<|im_end|>"]
    assert after.markup["<|endoftext|>"] == before.markup["<|endoftext|>"]
    assert {"<unused_6>", "<unused_7>", "<tool_call>"} < set(after.markup)
    prompt = Harmony(after, PromptConfig()).render_prompt([{"role": "user", "content": "Hello"}])
    assert after.decode(prompt).endswith("<|start|>user<|message|>Hello<|end|><|start|>assistant")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "moe")
    assert loaded(after.decode(prompt), add_special_tokens=False).input_ids == prompt
    assert loaded.eos_token_id == after.markup["<|return|>"]
    settings = json.loads((tmp_path / "moe/generation_config.json").read_text())
    assert settings["eos_token_id"] == list(after.stop_token_ids)

    dense_rows, rows = (
        HfDirectory(path).get("model.embed_tokens.weight") for path in (dense, tmp_path / "moe")
    )
    end = before.markup["<|im_end|>"]
    assert torch.equal(rows[after.markup["<|return|>"]], dense_rows[end])
    assert torch.equal(rows[end], dense_rows[end])
    channel = before.encode_text(" channel")
    expected = dense_rows[channel].mean(0)
    torch.testing.assert_close(rows[after.markup["<|channel|>"]], expected)
    new = {i for name, i in after.markup.items() if name in SPECIAL_TOKENS} - set(
        before.markup[name] for name in ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
    )
    kept = [i for i in range(512) if i not in new]
    assert len(new) == 6 and torch.equal(rows[kept], dense_rows[kept])


def test_tokenizers_without_room_for_harmony_are_rejected(tmp_path: Path) -> None:
    options = dataclasses.replace(EXACT, harmony=True)
    few = chatml_with_unused_tokens(tmp_path / "few", 5)
    with pytest.raises(ConversionError, match=r"needs 6 added tokens .* but there are 5"):
        upcycle(few, tmp_path / "moe", options, TOKENS.tolist())
    (few / "tokenizer.json").write_text('{"added_tokens": []}')
    with pytest.raises(ConversionError, match="cannot be read as a tokenizer"):
        upcycle(few, tmp_path / "moe", options, TOKENS.tolist())
    save_dense(tmp_path / "none", LLAMA)
    with pytest.raises(ConversionError, match=r"tokenizer\.json: cannot be read"):
        upcycle(tmp_path / "none", tmp_path / "moe", options, TOKENS.tolist())
    assert not (tmp_path / "moe").exists()


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("gpt_oss", "model_type is gpt_oss, but only dense models"),
        ("rope", "rope_scaling has rope_type 'linear', which GPT-OSS cannot"),
        ("experts", "experts_per_token .5. exceeds num_experts .4."),
        ("text", "calibration text must have at least 2 tokens"),
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
