"""A small model with adapters that change what it computes, the same in every layout."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from megatron.core import parallel_state

from converters.live import load_hf_weights
from gptoss_kernels import mxfp4
from megatron_gptoss.config import AdapterConfig, ModelConfig, ParallelConfig
from megatron_gptoss.layers.adapters import initialize_adapters, named_adapters
from megatron_gptoss.model import build_model
from tests.megatron_gptoss.reference import TINY, hf_model

# rows of whole MXFP4 blocks, and two key/value groups on each of two tensor-parallel ranks
MODEL = TINY.model_copy(update={"num_layers": 2, "intermediate_size": 96, "num_key_value_heads": 4})
TARGETS = ("q", "k", "v", "o", "experts", "router", "embedding", "head")
ADAPTER = AdapterConfig(rank=8, alpha=16, targets=TARGETS)


def base_weights(config: ModelConfig = MODEL) -> dict[str, torch.Tensor]:
    """Random weights by Hugging Face name, the experts' with values that MXFP4 can hold."""
    weights = hf_model(config, std=0.1).state_dict()
    for name, tensor in weights.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            packed = mxfp4.quantize(tensor.mT.contiguous().bfloat16())
            weights[name] = mxfp4.dequantize(*packed).mT.float()
    return weights


def adapted_model(
    parallel: ParallelConfig,
    adapter: AdapterConfig = ADAPTER,
    dtype: torch.dtype = torch.float32,
    b_std: float = 0.05,
    **overrides: Any,
) -> torch.nn.Module:
    model = build_model(MODEL, parallel, dtype, adapter=adapter, **overrides)
    load_hf_weights(model, MODEL, base_weights().__getitem__)
    initialize_adapters(model, seed=0)
    draw_b(model, b_std)
    return model


@torch.no_grad()
def draw_b(model: torch.nn.Module, std: float) -> None:
    """B is 0 at first, and hides most mistakes."""
    for name, adapter in named_adapters(model):
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "little")
        generator = torch.Generator().manual_seed(seed)
        b = std * torch.randn(adapter.full_shape[0], adapter.rank, generator=generator)
        if adapter.split == 0:
            group = parallel_state.get_tensor_model_parallel_group()
            b = b.chunk(group.size())[group.rank()]
        adapter.b.copy_(b)
