"""A small model with nonzero adapters, equal in every layout."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state

from converters.model_weights import load_hf_weights
from gptoss_kernels import mxfp4
from megatron_gptoss.config import AdapterConfig, ParallelConfig
from megatron_gptoss.families.gpt_oss.config import GptOssModelConfig
from megatron_gptoss.layers.adapters import (
    LowRank,
    expert_name,
    initialize_adapters,
    named_adapters,
)
from megatron_gptoss.layers.unmerged import unmerged_product
from megatron_gptoss.model import build_model
from tests.support.megatron_gptoss.reference import TINY, hf_model

# Rows of whole MXFP4 blocks, and two key/value groups on each of two tensor-parallel ranks.
MODEL = TINY.model_copy(update={"num_layers": 2, "intermediate_size": 96, "num_key_value_heads": 4})
TARGETS = ("q", "k", "v", "o", "experts", "router", "embedding", "head")
ADAPTER = AdapterConfig(rank=8, alpha=16, targets=TARGETS)


def base_weights(config: GptOssModelConfig = MODEL) -> dict[str, torch.Tensor]:
    """Return random weights by Hugging Face name. Experts have values that MXFP4 can represent."""
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


@dataclass(frozen=True)
class SingleAdapter:
    """The adapter of one weight; for experts, the part of one expert."""

    whole: LowRank
    index: int | None
    """Index of the expert on this rank; None if the weight is not of experts."""

    @property
    def scale(self) -> float:
        return self.whole.scale

    @property
    def a(self) -> torch.Tensor:
        return self._part(self.whole.a)

    @property
    def b(self) -> torch.Tensor:
        return self._part(self.whole.b)

    @property
    def gradients(self) -> dict[str, torch.Tensor]:
        """Gradients of the last step, by factor."""
        return {name: self._part(p.main_grad) for name, p in self.whole.named_parameters()}

    def _part(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.index is None else tensor[self.index]


def single_adapters(model: torch.nn.Module) -> Iterator[tuple[str, SingleAdapter]]:
    """Yield ``named_adapters``, with the adapters of experts one by one."""
    for name, adapter in named_adapters(model):
        if adapter.experts is None:
            yield name, SingleAdapter(adapter, index=None)
            continue
        for index, expert in enumerate(adapter.experts):
            yield expert_name(name, expert), SingleAdapter(adapter, index)


@torch.no_grad()
def draw_b(model: torch.nn.Module, std: float) -> None:
    """Draw B at random: it is initialized with 0, which hides most mistakes."""
    for name, adapter in single_adapters(model):
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "little")
        generator = torch.Generator().manual_seed(seed)
        b = std * torch.randn(adapter.whole.full_shape[0], adapter.whole.rank, generator=generator)
        if adapter.whole.split == 0:
            group = parallel_state.get_tensor_model_parallel_group()
            b = b.chunk(group.size())[group.rank()]
        adapter.b.copy_(b)


def kept_share_of_small_updates(device: str) -> float:
    """Return the share of a small update by which bf16 outputs of ``unmerged_product`` change in the mean.

    The update is about 1/20 of the last bit of outputs and biases.
    """
    torch.manual_seed(0)
    rows, inner, outer, rank = 2048, 256, 256, 8
    draw = lambda *shape: torch.randn(*shape).bfloat16().to(device)  # noqa: E731
    x = draw(rows, inner)
    weights = draw(1, outer, inner) / 4
    biases = 4 * draw(1, outer)
    a = draw(1, rank, inner) / 16
    b = draw(1, outer, rank) / 2048
    base, changed = (
        unmerged_product(x, a, factor, lambda: weights, [rows], 1.0, biases).double()
        for factor in (torch.zeros_like(b), b)
    )
    update = x.double() @ a[0].double().t() @ b[0].double().t()
    return float(((changed - base) * update).sum() / update.square().sum())
