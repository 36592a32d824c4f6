"""Import, export and verify of dense decoders are exact, and errors are found and named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from converters.errors import ConversionError
from converters.hf_directory import HfDirectory
from converters.mapping import ParameterMapping
from converters.names import global_name, hf_shapes, hf_tensors, parameter_mappings
from converters.torch_dist import export_checkpoint, import_checkpoint
from converters.verify import verify
from launch.cli import app
from megatron_gptoss.config.precision import torch_dtype
from megatron_gptoss.families.registry import read_hf_config
from tests.support.converters.dense_models import Weights, save_dense
from tests.support.megatron_gptoss.dense_reference import (
    LLAMA,
    MODELS,
    QWEN2,
    dense_hf_model,
    dense_weights,
)


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


@pytest.mark.parametrize("name", MODELS)
def test_tensors_and_their_shapes_are_those_of_transformers(name: str) -> None:
    weights = dense_weights(MODELS[name])
    assert hf_shapes(MODELS[name]) == {key: tuple(t.shape) for key, t in weights.items()}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_round_trip_is_bit_exact(tmp_path: Path, name: str, precision: Any) -> None:
    config = MODELS[name]
    weights = dense_weights(config)
    dtype = torch_dtype(precision)
    source = save_dense(tmp_path / "hf", config, weights, dtype)

    import_checkpoint(source, tmp_path / "megatron")
    report = verify(source, tmp_path / "megatron")
    assert report.equal and report.tensors == len(weights), report

    export_checkpoint(tmp_path / "megatron", tmp_path / "back", precision, max_shard_bytes=20_000)
    back = HfDirectory(tmp_path / "back")
    assert back.config == config
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 1
    for key, tensor in weights.items():
        assert torch.equal(as_bits(back.get(key)), as_bits(tensor.to(dtype))), key


@pytest.mark.parametrize("name", ["llama, tied", "qwen2", "llama 3's rope", "qwen2.5's yarn"])
def test_transformers_loads_an_export_with_the_same_logits(tmp_path: Path, name: str) -> None:
    config = MODELS[name]
    source = save_dense(tmp_path / "hf", config)
    import_checkpoint(source, tmp_path / "megatron")
    export_checkpoint(tmp_path / "megatron", tmp_path / "back", "fp32")

    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "back", **options)
    ids = torch.arange(90)[None] % config.vocab_size
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, dense_hf_model(config)(ids).logits)


def test_file_written_by_transformers_is_read(tmp_path: Path) -> None:
    """save_pretrained writes other keys into config.json than the released models have."""
    for name in ("qwen2, tied", "llama 3's rope", "qwen2.5's yarn", "linear rope"):
        config = MODELS[name]
        directory = tmp_path / name.replace(" ", "_")
        dense_hf_model(config).save_pretrained(directory)
        assert read_hf_config(directory) == config, name
        import_checkpoint(directory, tmp_path / f"megatron {name}")
        assert verify(directory, tmp_path / f"megatron {name}").equal


# -- the table --------------------------------------------------------------------------------


def megatron_tensor(mapping: ParameterMapping, weights: Weights) -> torch.Tensor:
    return mapping.to_megatron(*(weights[name] for name in mapping.hf_names))


@pytest.mark.parametrize("name", ["llama", "qwen2, tied"])
def test_mapping_round_trip_is_bit_exact_and_complete(name: str) -> None:
    config = MODELS[name]
    weights = dense_weights(config)
    back = dict(hf_tensors(config, lambda mapping: megatron_tensor(mapping, weights)))
    assert list(back) == list(hf_shapes(config))
    assert all(torch.equal(back[key], weights[key]) for key in weights)


def test_gates_precede_ups_and_ranks_get_parts_of_both() -> None:
    mapping = parameter_mappings(LLAMA)["decoder.layers.0.mlp.linear_fc1.weight"]
    gate = torch.arange(80.0)[:, None].expand(80, 48)
    full = mapping.to_megatron(gate, gate + 1000)
    assert full[:, 0].tolist() == [*range(80), *range(1000, 1080)]

    second = mapping.shard(full, rank=1, ranks=2)
    assert second[:, 0].tolist() == [*range(40, 80), *range(1040, 1080)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_joined_shards_equal_the_full_tensor(ranks: int) -> None:
    for mapping in parameter_mappings(QWEN2).values():
        full = torch.randn(mapping.shape)
        shards = [mapping.shard(full, rank, ranks) for rank in range(ranks)]
        assert all(tuple(shard.shape) == mapping.local_shape(ranks) for shard in shards)
        assert torch.equal(mapping.unshard(shards), full)


@pytest.mark.parametrize(
    ("local", "expected"),
    [
        ("decoder.layers.1.pre_mlp_layernorm.weight", "decoder.layers.3.pre_mlp_layernorm.weight"),
        (
            "decoder.layers.1.mlp.linear_fc1.layer_norm_weight",
            "decoder.layers.3.pre_mlp_layernorm.weight",
        ),
        ("decoder.layers.0.mlp.linear_fc1.weight", "decoder.layers.2.mlp.linear_fc1.weight"),
    ],
)
def test_local_names_of_both_layer_specifications_become_global(local: str, expected: str) -> None:
    assert global_name(local, layer_offset=2, expert_offset=0) == expected
    assert expected in parameter_mappings(LLAMA)


# -- detection of mistakes ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "mistake"),
    [
        ("linear_fc1.weight", lambda gate, up: torch.cat([up, gate])),
        ("linear_fc1.weight", lambda gate, up: torch.stack([gate, up], 1).flatten(0, 1)),
        ("linear_qkv.weight", lambda q, k, v: torch.cat([q, k, v])),
        ("linear_qkv.bias", lambda q, k, v: torch.cat([q, k, v])),
    ],
    ids=["up before gate", "interleaved", "qkv not by groups", "biases not by groups"],
)
def test_verify_detects_table_that_is_wrong_in_both_directions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, mistake: Any
) -> None:
    """The tensors then survive a round trip, but the layers compute wrong results."""

    def table(config: Any) -> dict[str, ParameterMapping]:
        return {
            name: _wrong(mapping, mistake) if name.endswith(kind) else mapping
            for name, mapping in parameter_mappings(config).items()
        }

    source = save_dense(tmp_path / "hf", QWEN2)
    for module in ("torch_dist", "verify", "read_back"):
        monkeypatch.setattr(f"converters.{module}.parameter_mappings", table)
    import_checkpoint(source, tmp_path / "megatron")
    report = verify(source, tmp_path / "megatron")
    assert not report.differences
    assert report.first_stage == "layer 0"


def _wrong(mapping: ParameterMapping, mistake: Any) -> ParameterMapping:
    """Return a wrong mapping that inverts its own mistake."""
    rows = [shape[0] for shape in mapping.part_shapes]
    tail = mapping.part_shapes[0][1:]
    numbers = torch.arange(sum(rows)).view(-1, *[1] * len(tail))
    order = mistake(*numbers.split(rows)).flatten()

    def back(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        restored = torch.empty_like(tensor)
        restored[order] = tensor
        return restored.split(rows)

    return replace(mapping, to_megatron=mistake, to_hf=back)


def _without(key: str) -> Any:
    return lambda weights, config: weights.pop(key)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "qwen2",
            _without("model.layers.1.self_attn.k_proj.bias"),
            r"hf/model.safetensors: tensor model.layers.1.self_attn.k_proj.bias is missing",
        ),
        ("llama", _without("lm_head.weight"), "tensor lm_head.weight is missing"),
        (
            "llama",
            lambda w, c: w.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(96)}),
            r"hf/model.safetensors: tensor model.layers.0.self_attn.q_proj.bias is not part of the llama",
        ),
        (
            "llama, tied",
            lambda w, c: w.update({"lm_head.weight": torch.ones(128, 48)}),
            "tensor lm_head.weight differs from model.embed_tokens.weight",
        ),
        (
            "llama",
            lambda w, c: w.update({"model.layers.2.mlp.up_proj.weight": torch.ones(48, 80)}),
            r"tensor model.layers.2.mlp.up_proj.weight has shape \[48, 80\], .* \[80, 48\]",
        ),
        ("llama", lambda w, c: c.update(model_type="mamba"), r"config.json: model_type is 'mamba'"),
        (
            "llama",
            lambda w, c: c.update(attention_bias=True),
            "config.json: attention_bias must be",
        ),
        (
            "llama",
            lambda w, c: c.update(hidden_act="gelu"),
            "config.json: hidden_act must be 'silu'",
        ),
        ("llama", lambda w, c: c.pop("vocab_size"), "config.json: key 'vocab_size' is missing"),
        (
            "qwen2",
            lambda w, c: c.update(use_sliding_window=True),
            "use_sliding_window must be False",
        ),
        (
            "qwen2",
            lambda w, c: c.update(rope_scaling={"type": "dynamic", "factor": 2.0}),
            "rope_scaling.rope_type 'dynamic' is not supported",
        ),
        (
            "qwen2",
            lambda w, c: c.update(rope_scaling={"type": "yarn", "factor": 2.0}),
            r"rope_scaling.original_max_position_embeddings is missing",
        ),
    ],
)
def test_misfit_error_names_file_and_tensor(
    tmp_path: Path, name: str, change: Any, message: str
) -> None:
    config = MODELS[name]
    weights = dense_weights(config)
    raw = config.to_hf_config()
    change(weights, raw)
    directory = save_dense(tmp_path / "hf", config, weights)
    (directory / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConversionError, match=message):
        import_checkpoint(directory, tmp_path / "megatron")
    assert not (tmp_path / "megatron").exists()


def test_mxfp4_needs_experts(tmp_path: Path) -> None:
    import_checkpoint(save_dense(tmp_path / "hf", LLAMA), tmp_path / "megatron")
    with pytest.raises(ConversionError, match="mxfp4: is a format of experts, and llama has none"):
        export_checkpoint(tmp_path / "megatron", tmp_path / "back", "mxfp4")


def test_convert_command_verifies_and_names_a_difference(tmp_path: Path) -> None:
    source = save_dense(tmp_path / "hf", QWEN2, dtype=torch.bfloat16)
    run = CliRunner().invoke
    megatron, back = str(tmp_path / "megatron"), str(tmp_path / "back")
    result = run(app, ["convert", "import", str(source), megatron])
    assert result.exit_code == 0, result.output
    assert "all " in result.output and "parameters" in result.output
    assert run(app, ["convert", "export", megatron, back]).exit_code == 0
    assert run(app, ["convert", "verify", back, megatron]).exit_code == 0

    changed = load_file(source / "model.safetensors")
    changed["model.layers.3.mlp.gate_proj.weight"][5, 7] += 1
    other = save_dense(tmp_path / "other", QWEN2, changed, torch.bfloat16)
    result = run(app, ["convert", "verify", str(other), megatron])
    assert result.exit_code == 1
    assert "model.layers.3.mlp.gate_proj.weight: 1 elements" in result.output
    assert "outputs differ first in layer 3" in result.output
