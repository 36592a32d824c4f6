"""All config.json keys of transformers: their values are kept, or an error names the key.

Each key is flipped and removed. Logits of transformers on the changed directory are compared with
those on its export, unless the import rejects the key.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, RopeParameters
from transformers.utils.logging import disable_progress_bar

from converters.errors import ConversionError
from converters.hf_directory import HfDirectory
from converters.torch_dist import export_checkpoint, import_checkpoint
from megatron_gptoss.config import ModelConfig
from megatron_gptoss.families.registry import FAMILIES, parse_family, read_hf_config

SIZES: dict[str, Any] = {
    "num_hidden_layers": 2, "hidden_size": 48, "intermediate_size": 32, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 12, "vocab_size": 96, "max_position_embeddings": 512,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 64, "rope_theta": 150000.0,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "gpt_oss": SIZES | {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2,
                        "sliding_window": 8, "rope_parameters": YARN},
    "llama": SIZES | {"model_type": "llama"},
    "qwen2": SIZES | {"model_type": "qwen2", "rope_parameters": YARN | {"truncate": True}},
}  # fmt: skip
OTHER_VALUES: dict[type, tuple[Any, ...]] = {
    bool: (True, False),
    int: (0, 1, 3, 64),
    float: (0.0, 0.5, 1.0, 3.0),
    str: ("gelu", "default", "linear"),
    type(None): (True, 1, 0.5, 3, "x", ["x"], {"x": 1}),
    list: ([], ["x"], [1, 2]),
    dict: ({}, {"x": 1}),
}
ROPE_VALUES = (None, False, True, 0, 0.5, 1.0, 2.0, 100, "x")
TYPES_OF_PARAMETERS = {
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 64},
    "longrope": {"factor": 8.0, "original_max_position_embeddings": 64,
                 "short_factor": [1.5] * 6, "long_factor": [2.0] * 6},
    "yarn": {"factor": 8.0, "original_max_position_embeddings": 64},
    "proportional": {"partial_rotary_factor": 0.5},
}  # fmt: skip


def known_keys(family: type[ModelConfig], model_type: str) -> list[str]:
    """Return all keys with a name in transformers or in the project's key table."""
    config: Any = AutoConfig.for_model(model_type)
    keys = {field.name for field in dataclasses.fields(config)}
    keys |= {field.name for field in dataclasses.fields(PreTrainedConfig)}
    keys |= set(config.attribute_map) | set(config.to_dict())
    keys |= set(GenerationConfig().to_dict())
    table = family.hf_keys
    keys |= {*table.fields, *table.aliases, *table.fixed, *table.checked, *table.copied}
    keys |= {"rope_theta", "rope_scaling", "partial_rotary_factor", "swiglu_alpha", "auto_map"}
    keys |= {"original_max_position_embeddings", "is_causal", "tie_weights", "quantization_config"}
    return sorted(keys - {"model_type"})


class Model:
    """A tiny transformers model on disk, and cached results of its changed copies."""

    def __init__(self, directory: Path, model_type: str) -> None:
        torch.manual_seed(0)
        self.directory = directory
        config = AutoConfig.for_model(**MODELS[model_type])
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.normal_(0, 0.15)
                if "norm" in name:
                    parameter.add_(1.0)
        self.original = directory / "original"
        model.save_pretrained(self.original)
        self.config = json.loads((self.original / "config.json").read_text())
        self._exports: dict[str, torch.Tensor] = {}

    def changed(self, config: dict[str, Any]) -> Path:
        path = self.directory / "changed"
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        for file in self.original.iterdir():
            if file.name != "config.json":
                os.link(file, path / file.name)
        (path / "config.json").write_text(json.dumps(config))
        return path

    def exported_logits(self, directory: Path) -> torch.Tensor | None:
        """Import and export ``directory``, at most once per model."""
        key = read_hf_config(directory).model_dump_json()
        if key not in self._exports:
            for name in ("megatron", "export"):
                shutil.rmtree(self.directory / name, ignore_errors=True)
            import_checkpoint(directory, self.directory / "megatron")
            export_checkpoint(self.directory / "megatron", self.directory / "export", "fp32")
            logits = compute_logits(self.directory / "export")
            assert logits is not None
            self._exports[key] = logits
        return self._exports[key]


disable_progress_bar()


@torch.no_grad()
def compute_logits(directory: Path) -> torch.Tensor | None:
    """Return transformers' logits; None if it cannot load the directory or lacks weights."""
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
        if info["missing_keys"] or info["mismatched_keys"]:
            return None
        return model.eval()(torch.arange(3, 63)[None], return_dict=True).logits
    except Exception:
        return None


def fault_in(
    model: Model, key: str, config: dict[str, Any], compares_logits: bool = True
) -> str | None:
    """Return a description of a reading error of ``config``, or None."""
    directory = model.changed(config)
    try:
        HfDirectory(directory)
    except ConversionError as error:
        if key in str(error) or "tensor" in str(error):
            return None
        return f"is refused without naming the key: {error}"
    if not compares_logits:
        return None

    expected = compute_logits(directory)
    if expected is None:
        return None
    found = model.exported_logits(directory)
    assert found is not None
    if torch.equal(expected, found):
        return None
    return f"gives logits that differ by {(expected - found).abs().max():.3g}"


def flips(value: Any) -> Iterator[Any]:
    """Yield other values of a key."""
    for kind, values in OTHER_VALUES.items():
        if type(value) is kind:
            yield from values
    if value is not None:
        yield None


@pytest.fixture(scope="module", params=list(MODELS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp(request.param), request.param)


# Llama and Qwen2 have the same class of configurations, so one of them suffices in make test.
MODELS_IN_MAKE_TEST = ["gpt_oss", "llama", pytest.param("qwen2", marks=pytest.mark.slow)]


@pytest.mark.parametrize("model", MODELS_IN_MAKE_TEST, indirect=True)
def test_config_key_survives_or_is_rejected_when_flipped(model: Model) -> None:
    model_type = model.config["model_type"]
    of_generation = set(GenerationConfig().to_dict()) - set(
        AutoConfig.for_model(model_type).to_dict()
    )
    faults = []
    for key in known_keys(parse_family(model_type, "test"), model_type):
        before = model.config.get(key)
        others = [
            value
            for value in flips(before)
            if value != before or isinstance(value, bool) != isinstance(before, bool)
        ]
        for number, value in enumerate(others):
            # A forward pass reads no generation-only key, so one value of such a key suffices.
            compares = number == 0 or key not in of_generation
            fault = fault_in(model, key, model.config | {key: value}, compares)
            if fault is not None:
                faults.append(f"{key}: {before!r} -> {value!r} {fault}")
    assert not faults, "\n".join(faults)


def test_config_key_survives_or_is_rejected_when_removed(model: Model) -> None:
    faults = []
    for key in model.config.keys() - {"model_type"}:
        config = {other: value for other, value in model.config.items() if other != key}
        # Without the table, transformers uses a default.
        named = "rope" if key == "rope_parameters" else key
        fault = fault_in(model, named, config)
        if fault is not None:
            faults.append(f"{key} removed {fault}")
    assert not faults, "\n".join(faults)


def test_config_key_that_we_use_is_used_by_transformers(model: Model) -> None:
    """If transformers ignored the key, one directory would describe two models."""
    table = parse_family(model.config["model_type"], "test").hf_keys
    original, architecture = compute_logits(model.original), read_hf_config(model.config)
    assert original is not None
    ignored = []
    for key in table.fields:
        before = model.config.get(key, getattr(architecture, table.fields[key]))
        for value in flips(before):
            directory = model.changed(model.config | {key: value})
            try:
                changes = HfDirectory(directory).config != architecture
            except ConversionError:
                continue
            found = compute_logits(directory) if changes else None
            if found is not None and torch.equal(found, original):
                ignored.append(key)
    # One key concerns only the start of training. The other is a length that no result depends on.
    assert set(ignored) <= {"initializer_range", "max_position_embeddings"}


@pytest.mark.parametrize("model", MODELS_IN_MAKE_TEST, indirect=True)
@pytest.mark.parametrize("section", ["rope_parameters", "rope_scaling"])
def test_rope_key_survives_or_is_rejected(model: Model, section: str) -> None:
    """The test tries all keys of all RoPE types in both spellings."""
    parameters = model.config["rope_parameters"]
    outside = {key: value for key, value in model.config.items() if key != "rope_parameters"}
    changes: list[tuple[str, dict[str, Any]]] = []
    for key in {*RopeParameters.__annotations__, "attention_factor", "mscale", "x", "truncate"}:
        values = [*ROPE_INIT_FUNCTIONS, "default"] if key in ("type", "rope_type") else ROPE_VALUES
        changes += [(key, parameters | {key: value}) for value in values]
        changes.append((key, {k: v for k, v in parameters.items() if k != key}))
    theta = {"rope_theta": 20_000.0}
    for rope_type, needed in TYPES_OF_PARAMETERS.items():
        changes.append(("rope_type", {"rope_type": rope_type, **theta, **needed}))
        changes.append(("type", {"type": rope_type, **theta, **needed}))
    changes.append(("rope", {"full_attention": parameters, "sliding_attention": parameters}))

    faults = []
    for key, rope in changes:
        # A type requires certain keys, and the error names these keys.
        named = "rope" if key in ("type", "rope_type") else key
        fault = fault_in(model, named, outside | {section: rope})
        if fault is not None:
            faults.append(f"{section} {key}: {rope} {fault}")
    assert not faults, "\n".join(faults)


def test_config_key_in_two_places_must_agree(model: Model) -> None:
    rope = model.config["rope_parameters"]
    doubled = {
        "rope_theta": {"rope_theta": 5.0},
        "rope_scaling": {"rope_scaling": rope | {"rope_type": "linear", "factor": 3.0}},
        "original_max_position_embeddings": {"original_max_position_embeddings": 128},
    }
    if model.config["model_type"] == "gpt_oss":
        doubled["num_experts"] = {"num_experts": 3}
        doubled["experts_per_token"] = {"experts_per_token": 3}
        doubled["initial_context_length"] = {"initial_context_length": 128}
    for key, change in doubled.items():
        with pytest.raises(ValueError, match=key):
            read_hf_config(model.config | change)
    agreeing = {"rope_theta": rope["rope_theta"], "rope_scaling": rope}
    assert read_hf_config(model.config | agreeing) == read_hf_config(model.config)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", 10**9), ("hidden_size", -1), ("vocab_size", 10**18),
        ("rms_norm_eps", float("inf")), ("rope_theta", float("nan")), ("head_dim", 10**9),
        ("num_attention_heads", "8" * 9), ("num_key_value_heads", 0), ("hidden_size", None),
        ("max_position_embeddings", 10**30), ("intermediate_size", [1]),
    ],
)  # fmt: skip
def test_config_value_out_of_bounds_is_named_in_one_line(
    model: Model, key: str, value: object
) -> None:
    config = {name: entry for name, entry in model.config.items() if name != "rope_parameters"}
    rope = {k: v for k, v in model.config["rope_parameters"].items() if k != "rope_theta"}
    with pytest.raises(ValueError, match=f"^config: .*{key}") as error:
        read_hf_config(config | {"rope_parameters": rope, key: value})
    assert "\n" not in str(error.value)
    assert "pydantic" not in str(error.value)


def test_config_table_has_no_key_twice() -> None:
    from megatron_gptoss.config.hf_config import COPIED, FIXED, IGNORED

    for family in FAMILIES:
        table = family.hf_keys
        sets = [table.fields, table.aliases, table.fixed, table.checked, table.copied]
        names = [name for keys in (*sets, COPIED, FIXED, IGNORED) for name in keys]
        assert len(names) == len(set(names)), family


SHARED_BY_RELEASES = {
    "attention_dropout": 0.0, "hidden_act": "silu", "initializer_range": 0.02, "use_cache": True,
    "torch_dtype": "bfloat16", "transformers_version": "4.55.0",
}  # fmt: skip
RELEASED: dict[str, dict[str, Any]] = {
    "openai/gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"], "attention_bias": True, "eos_token_id": 200002,
        "experts_per_token": 4, "head_dim": 64, "hidden_size": 2880, "initial_context_length": 4096,
        "intermediate_size": 2880, "layer_types": ["sliding_attention", "full_attention"] * 12,
        "max_position_embeddings": 131072, "model_type": "gpt_oss", "num_attention_heads": 64,
        "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8,
        "num_local_experts": 32, "output_router_logits": False, "pad_token_id": 199999,
        "quantization_config": {
            "modules_to_not_convert": [
                "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens",
                "lm_head",
            ],
            "quant_method": "mxfp4",
        },
        "rms_norm_eps": 1e-05, "rope_theta": 150000, "router_aux_loss_coef": 0.9,
        "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn",
            "original_max_position_embeddings": 4096, "truncate": False,
        },
        "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False,
        "vocab_size": 201088,
    },
    "Qwen/Qwen2.5-7B-Instruct": {
        "architectures": ["Qwen2ForCausalLM"], "bos_token_id": 151643, "eos_token_id": 151645,
        "hidden_size": 3584, "intermediate_size": 18944, "max_position_embeddings": 32768,
        "max_window_layers": 28, "model_type": "qwen2", "num_attention_heads": 28,
        "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0, "sliding_window": 131072, "tie_word_embeddings": False,
        "use_sliding_window": False, "vocab_size": 152064,
    },
    "meta-llama/Llama-3.1-8B-Instruct": {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009], "hidden_size": 4096, "intermediate_size": 14336,
        "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama",
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_theta": 500000.0,
        "rope_scaling": {
            "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3",
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": False, "vocab_size": 128256,
    },
    "HuggingFaceTB/SmolLM2-135M-Instruct": {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "bos_token_id": 1,
        "eos_token_id": 2, "hidden_size": 576, "intermediate_size": 1536, "is_llama_config": True,
        "max_position_embeddings": 8192, "mlp_bias": False, "model_type": "llama",
        "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3,
        "pad_token_id": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": False,
        "rope_scaling": None, "rope_theta": 100000, "tie_word_embeddings": True,
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}, "vocab_size": 49152,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", RELEASED)
def test_config_of_released_model_is_read(name: str) -> None:
    raw = SHARED_BY_RELEASES | RELEASED[name]
    config = read_hf_config(raw)
    assert read_hf_config(config.to_hf_config(**config.hf_keys.copied_from(raw))) == config
