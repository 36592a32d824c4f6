"""Adapters in PEFT's format, written without PEFT."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from megatron_gptoss.config import ModelConfig

PREFIX = "base_model.model.model.layers"


def write_adapter(
    path: Path,
    model: ModelConfig,
    modules: Iterable[str],
    layers: Iterable[int] | None = None,
    rank: int = 4,
    settings: dict[str, Any] | None = None,
    scale: float = 0.2,
) -> Path:
    """Write an adapter of attention projections.

    Args:
        path: directory to create.
        model: configuration of the base.
        modules: projections with tensors.
        layers: layers with tensors; None for all.
        rank: rank of all adapters.
        settings: keys that replace those of adapter_config.json.
        scale: standard deviation of all values.
    """
    sizes = {
        "q_proj": (model.query_size, model.hidden_size),
        "k_proj": (model.key_size, model.hidden_size),
        "v_proj": (model.key_size, model.hidden_size),
        "o_proj": (model.hidden_size, model.query_size),
    }
    generator = torch.Generator().manual_seed(5)
    tensors = {}
    for layer in range(model.num_layers) if layers is None else layers:
        for module in modules:
            rows, columns = sizes[module]
            name = f"{PREFIX}.{layer}.self_attn.{module}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(rank, columns, generator=generator)
            tensors[f"{name}.lora_B.weight"] = torch.randn(rows, rank, generator=generator)
    path.mkdir()
    save_file(
        {name: scale * tensor for name, tensor in tensors.items()},
        path / "adapter_model.safetensors",
        metadata={"format": "pt"},
    )
    content = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": list(modules),
    }
    (path / "adapter_config.json").write_text(json.dumps(content | (settings or {})))
    return path
