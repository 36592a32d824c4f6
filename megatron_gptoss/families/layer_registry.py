"""Registry of each model family's layers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

from megatron_gptoss.config import ModelConfig, ParallelConfig
from megatron_gptoss.families.dense import layers as dense
from megatron_gptoss.families.dense.config import DenseModelConfig
from megatron_gptoss.families.gpt_oss import layers as gpt_oss
from megatron_gptoss.families.gpt_oss.config import GptOssModelConfig
from megatron_gptoss.transformer_config import PolicyTransformerConfig


@dataclass(frozen=True)
class FamilyLayers:
    """Functions that describe the layers of a family to Megatron."""

    transformer_settings: Callable[[Any, ParallelConfig, torch.dtype], dict[str, Any]]
    """(model, layout, dtype) -> fields of TransformerConfig for this family."""
    cpu_layer: Callable[[PolicyTransformerConfig], TransformerLayerSubmodules]
    """Modules of a layer on a CPU."""
    gpu_layer: Callable[[PolicyTransformerConfig], TransformerLayerSubmodules]
    """Modules of a layer on a GPU. They need Transformer Engine."""


_LAYERS: dict[type[ModelConfig], FamilyLayers] = {
    GptOssModelConfig: FamilyLayers(
        gpt_oss.transformer_settings, gpt_oss.cpu_layer, gpt_oss.gpu_layer
    ),
    DenseModelConfig: FamilyLayers(dense.transformer_settings, dense.cpu_layer, dense.gpu_layer),
}


def get_family_layers(model: ModelConfig) -> FamilyLayers:
    """Return the layers of a model's family."""
    return _LAYERS[type(model)]
