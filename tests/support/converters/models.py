"""The tiny model of the converters' tests and its directory, written by the safetensors library."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from converters.names import hf_shapes
from megatron_gptoss.families.gpt_oss.config import GptOssModelConfig

# All dimensions differ, so that a mix-up changes a shape.
TINY = GptOssModelConfig(
    num_layers=2,
    num_experts=4,
    experts_per_token=2,
    hidden_size=40,
    intermediate_size=24,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_size=6,
    vocab_size=96,
    sliding_window=8,
)


def tiny_weights() -> dict[str, torch.Tensor]:
    """Random fp32 weights. All values differ, so that a mix-up of tensors is detected."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: 0.2 * torch.randn(shape, generator=generator) + ("norm" in name)
        for name, shape in hf_shapes(TINY).items()
    }


def save_hf(
    directory: Path, weights: dict[str, torch.Tensor], dtype: torch.dtype = torch.float32
) -> Path:
    directory.mkdir()
    save_file(
        {name: tensor.to(dtype).contiguous() for name, tensor in weights.items()},
        directory / "model.safetensors",
    )
    (directory / "config.json").write_text(json.dumps(TINY.to_hf_config()))
    return directory
