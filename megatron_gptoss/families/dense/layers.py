"""Layers of dense decoders for Megatron."""

from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_submodules,
    get_gpt_layer_with_transformer_engine_submodules,
)
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

from megatron_gptoss.config import ParallelConfig
from megatron_gptoss.families.dense.config import DenseModelConfig
from megatron_gptoss.layers.attention import SinkAttention
from megatron_gptoss.layers.cpu_block import CpuRMSNorm
from megatron_gptoss.layers.transformer_engine_block import require_transformer_engine
from megatron_gptoss.transformer_config import PolicyTransformerConfig


def transformer_settings(
    model: DenseModelConfig, parallel: ParallelConfig, dtype: torch.dtype
) -> dict[str, Any]:
    """Return the fields of TransformerConfig for a dense decoder.

    Args:
        model: architecture.
        parallel: layout; unused.
        dtype: data type of the parameters; unused.
    """
    return {
        "add_bias_linear": False,
        "add_qkv_bias": model.has_qkv_bias,
        "softmax_type": "vanilla",
        "activation_func": torch.nn.functional.silu,
        # Megatron's fused SwiGLU uses torch.compile, which does not work on every CPU.
        "bias_activation_fusion": torch.cuda.is_available(),
        # A dense model dispatches nothing, but Megatron rejects its default dispatcher for rows of
        # different lengths.
        "moe_token_dispatcher_type": "alltoall",
    }


def cpu_layer(config: PolicyTransformerConfig) -> TransformerLayerSubmodules:
    """Return the modules of a layer on CPUs."""
    # Megatron maps the checkpoint keys of this layer to those of Transformer Engine's layer, whose
    # linear layers contain the norms. One checkpoint therefore works for both.
    submodules = get_gpt_layer_local_submodules(normalization="RMSNorm")
    submodules.self_attention.submodules.core_attention = SinkAttention
    submodules.input_layernorm = CpuRMSNorm
    submodules.pre_mlp_layernorm = CpuRMSNorm
    return submodules


def gpu_layer(config: PolicyTransformerConfig) -> TransformerLayerSubmodules:
    """Return the modules of a layer on GPUs.

    Raises:
        MissingPackageError: Transformer Engine is not installed.
    """
    require_transformer_engine()
    submodules = get_gpt_layer_with_transformer_engine_submodules()
    submodules.self_attention.submodules.core_attention = config.core_attention or SinkAttention
    return submodules
