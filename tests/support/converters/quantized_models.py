"""Hugging Face directories whose experts are MXFP4."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from converters.hf_directory import written_shapes
from converters.hf_layouts import QUANTIZATION_CONFIG
from megatron_gptoss.families.gpt_oss.config import GptOssModelConfig
from tests.support.converters.models import TINY

Weights = dict[str, torch.Tensor]
MODEL = TINY.model_copy(update={"hidden_size": 64, "intermediate_size": 32, "num_experts": 3})
DOWN = "model.layers.1.mlp.experts.down_proj"


def quantized_weights(
    config: GptOssModelConfig, seed: int = 0, scales: tuple[int, int] = (110, 124)
) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in written_shapes(config, quantized=True).items():
        if name.endswith("_blocks"):
            weights[name] = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
            weights[name].view(-1, 16)[0] = 0
            for code in range(
                7
            ):  # the largest code of these blocks is not one that a newly chosen scale would give
                weights[name].view(-1, 16)[1 + code] = code
        elif name.endswith("_scales"):
            weights[name] = torch.randint(*scales, shape, dtype=torch.uint8, generator=generator)
        else:
            weights[name] = (
                0.2 * torch.randn(shape, generator=generator) + ("norm" in name)
            ).bfloat16()
    return weights


def save(directory: Path, config: GptOssModelConfig, weights: Weights) -> Path:
    directory.mkdir()
    save_file(weights, directory / "model.safetensors")
    content = config.to_hf_config(quantization_config=QUANTIZATION_CONFIG, dtype="bfloat16")
    (directory / "config.json").write_text(json.dumps(content))
    return directory
