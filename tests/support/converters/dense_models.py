"""Hugging Face directories of tiny dense models."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from megatron_gptoss.families.dense.config import DenseModelConfig
from tests.support.megatron_gptoss.dense_reference import (
    dense_weights,
)

Weights = dict[str, torch.Tensor]


def save_dense(
    directory: Path,
    config: DenseModelConfig,
    weights: Weights | None = None,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write a directory with the safetensors library."""
    directory.mkdir()
    tensors = weights or dense_weights(config)
    save_file(
        {name: tensor.to(dtype).contiguous() for name, tensor in tensors.items()},
        directory / "model.safetensors",
    )
    (directory / "config.json").write_text(json.dumps(config.to_hf_config()))
    return directory
