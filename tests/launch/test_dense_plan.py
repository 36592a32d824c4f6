"""``gptoss plan`` of dense decoders: Qwen2.5's published sizes, and the report of a run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from converters.names import hf_shapes
from launch.cli import app
from megatron_gptoss import distributed
from megatron_gptoss.config import ParallelConfig
from megatron_gptoss.families.dense.config import DenseModelConfig
from megatron_gptoss.model import build_model
from megatron_gptoss.planning.flops import forward_flops
from megatron_gptoss.planning.parameter_counts import parameters_per_gpu
from rl_loop.config.errors import ConfigError, StartError
from rl_loop.config.load import dump_config, load_config
from rl_loop.config.run import SftConfig
from rl_loop.lifecycle.start_checks import check_run_requirements
from tests.support.distributed import free_port, run_distributed
from tests.support.megatron_gptoss.dense_reference import LLAMA, MODELS

CONFIG = Path(__file__).parents[2] / "configs/sft/tiny_retool.yaml"
PUBLISHED = {
    "0.5b": 494_032_768,
    "1.5b": 1_543_714_304,
    "3b": 3_085_938_688,
    "7b": 7_615_616_512,
    "14b": 14_770_033_664,
    "32b": 32_763_876_352,
}
LAYOUTS: dict[str, dict[str, int]] = {
    "0.5b": {"world_size": 1},
    "1.5b": {"world_size": 1},
    "3b": {"world_size": 2},
    "7b": {"world_size": 4},
    "14b": {"world_size": 8, "tensor": 2},
    "32b": {"world_size": 16, "tensor": 4},
}


SIZES = {
    "0.5b": (24, 896, 4864, 14, 2, 151_936),
    "1.5b": (28, 1536, 8960, 12, 2, 151_936),
    "3b": (36, 2048, 11_008, 16, 2, 151_936),
    "7b": (28, 3584, 18_944, 28, 4, 152_064),
    "14b": (48, 5120, 13_824, 40, 8, 152_064),
}
"""Layers, widths, heads and vocabulary by model size. The 32B is a shipped file."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return values of ``model`` by size: directories with the config.json of the releases."""
    found = {"32b": "qwen2.5-32b"}
    keys = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads",
            "num_key_value_heads", "vocab_size")  # fmt: skip
    for size, values in SIZES.items():
        directory = tmp_path_factory.mktemp(size)
        content = dict(zip(keys, values, strict=True)) | {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "hidden_act": "silu",
            "max_position_embeddings": 32_768,
            "max_window_layers": 21,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1_000_000.0,
            "sliding_window": 32_768,
            "tie_word_embeddings": values[1] < 3000,
            "use_sliding_window": False,
        }
        (directory / "config.json").write_text(json.dumps(content))
        found[size] = str(directory)
    return found


def load_sft_config(model: str, *overrides: str) -> SftConfig:
    return load_config(CONFIG, SftConfig, [f"model={model}", *overrides])


@pytest.mark.parametrize("size", PUBLISHED)
def test_published_sizes_have_published_parameter_counts(size: str, models: dict[str, str]) -> None:
    model = load_sft_config(models[size]).model
    assert isinstance(model, DenseModelConfig)
    assert model.num_parameters == PUBLISHED[size]
    assert sum(math.prod(shape) for shape in hf_shapes(model).values()) == PUBLISHED[size]


@pytest.mark.parametrize("size", PUBLISHED)
def test_published_sizes_can_be_planned(size: str, models: dict[str, str]) -> None:
    overrides = [f"parallel.{key}={value}" for key, value in LAYOUTS[size].items()]
    overrides.append("training.max_tokens_per_micro_batch=8192")
    overrides += [f"model={models[size]}", "dtype=bf16"]
    result = CliRunner().invoke(app, ["plan", str(CONFIG), "--sft", "--gpu", "h200", *overrides])
    assert result.exit_code == 0, result.output
    assert "tensors of the update, GB: weights" in result.output
    assert "an update at H200 rates" in result.output
    assert "moe" not in result.output, "advice about experts that are not there"


@pytest.mark.parametrize("size", ["0.5b", "7b"])
@pytest.mark.parametrize(
    "layout", [{}, {"tensor": 2}, {"pipeline": 2}, {"tensor": 2, "pipeline": 2}]
)
def test_parameters_per_gpu_equal_those_of_the_built_model(
    size: str, layout: dict[str, int], models: dict[str, str]
) -> None:
    """The counts come from the name table. Every rank has a share of each parameter."""
    model = load_sft_config(models[size]).model
    parallel = ParallelConfig(world_size=4, **layout)
    stages = [parameters_per_gpu(model, parallel, stage) for stage in range(parallel.pipeline)]
    assert all(expert == 0 for _, expert in stages)

    copies = model.tied_embeddings and parallel.pipeline > 1
    embedding = model.vocab_size * model.hidden_size if copies else 0
    norms = (2 * model.num_layers + 1) * model.hidden_size
    split = PUBLISHED[size] - norms + embedding
    assert sum(dense for dense, _ in stages) == split / parallel.tensor + norms


def count(rank: int, ports: list[int]) -> list[int]:
    counts = []
    for layout, port in zip(({"tensor": 2}, {"pipeline": 2}), ports, strict=True):
        parallel = ParallelConfig(world_size=2, **layout)
        distributed.initialize(parallel, rank, port=port)
        built = build_model(MODELS["qwen2, tied"], parallel, torch.float32)
        counts.append(sum(parameter.numel() for parameter in built.parameters()))
        distributed.shutdown()
    return counts


def test_ranks_hold_the_planned_parameters() -> None:
    model = MODELS["qwen2, tied"]
    tensor, pipeline = (
        ParallelConfig(world_size=2, tensor=2),
        ParallelConfig(world_size=2, pipeline=2),
    )
    found = run_distributed(count, 2, [free_port(), free_port()])
    for rank, (split, stage) in enumerate(found):
        assert split == parameters_per_gpu(model, tensor)[0]
        assert stage == parameters_per_gpu(model, pipeline, rank)[0]


def test_flops_are_two_per_weight_plus_attention() -> None:
    weights = LLAMA.num_parameters - (2 * LLAMA.num_layers + 1) * 48 - 128 * 48
    pairs = 10 * 11 // 2
    attention = LLAMA.num_layers * 4 * pairs * 96
    assert forward_flops(LLAMA, [10]) == 2 * 10 * weights + attention


def test_a_dumped_configuration_loads_to_the_same(tmp_path: Path) -> None:
    config = load_sft_config("qwen2.5-32b", "model.rope_scaling={rope_type: yarn, factor: 4, "
                       "original_max_position_embeddings: 32768}")  # fmt: skip
    (tmp_path / "config.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "config.yaml", SftConfig) == config
    assert config.model.rope_frequencies.factor == 4


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.num_expert=4", "model.num_expert: unknown key"),
        ("model.model_type=mamba", "model: model_type is 'mamba', expected one of gpt_oss, llama"),
        ("model.num_key_value_heads=7", r"num_attention_heads \(40\) must be a multiple"),
        ("model.num_experts=4", "model.num_experts: Input should be 0"),
        (
            "quantization=mxfp4",
            "quantization is mxfp4, a format of experts, but a qwen2 model has no experts",
        ),
        ("adapter={rank: 4}", "adapter.targets: q of a qwen2 model cannot be adapted"),
    ],
)
def test_dense_plan_errors_name_the_key(override: str, message: Any) -> None:
    with pytest.raises(ConfigError, match=message):
        load_sft_config("qwen2.5-32b", override)


def test_run_without_model_tokenizer_is_rejected_at_the_start() -> None:
    with pytest.raises(StartError, match="vocabulary=gptoss does not fit a qwen2 model"):
        check_run_requirements(load_sft_config("qwen2.5-32b", "vocabulary=gptoss"))
