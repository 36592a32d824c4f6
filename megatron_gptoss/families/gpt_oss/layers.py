"""Layers of GPT-OSS for Megatron."""

from functools import partial
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import TENorm
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_submodules,
    get_gpt_layer_with_transformer_engine_submodules,
)
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

from megatron_gptoss.config import ParallelConfig
from megatron_gptoss.families.gpt_oss.config import GptOssModelConfig
from megatron_gptoss.layers.adapted_experts import (
    ADAPTED_EXPERT_LINEARS,
    AdaptedExperts,
    has_adapted_experts,
)
from megatron_gptoss.layers.adapted_grouped_experts import AdaptedGroupedExperts
from megatron_gptoss.layers.adapted_linears import (
    SEPARATE_NORM_KEYS,
    choose_projections,
    choose_router,
    has_adapted_qkv,
)
from megatron_gptoss.layers.attention import SinkAttention
from megatron_gptoss.layers.cpu_block import CpuRMSNorm
from megatron_gptoss.layers.cpu_experts import CpuMoELayer, ExpertRowParallelLinear
from megatron_gptoss.layers.experts import GptOssGroupedMLP
from megatron_gptoss.layers.moe_layer import GptOssMoELayer
from megatron_gptoss.layers.quantized_experts import QUANTIZED_EXPERT_LINEARS, QuantizedExperts
from megatron_gptoss.layers.transformer_engine_block import require_transformer_engine
from megatron_gptoss.transformer_config import PolicyTransformerConfig


def swish_1702(x: torch.Tensor) -> torch.Tensor:
    """Compute x * sigmoid(1.702 x), GPT-OSS's SwiGLU gate, for x [...] of any float dtype."""
    # Megatron's quick_gelu is the same function, but it always uses torch.compile.
    return x * torch.sigmoid(1.702 * x)


def transformer_settings(
    model: GptOssModelConfig, parallel: ParallelConfig, dtype: torch.dtype
) -> dict[str, Any]:
    """Return the fields of TransformerConfig for GPT-OSS.

    Args:
        model: architecture.
        parallel: layout.
        dtype: data type of the parameters.
    """
    return {
        # This flag also creates the biases of the router, the experts and the output projection.
        "add_bias_linear": True,
        **_attention_settings(model),
        **_activation_settings(model),
        **_router_settings(model, dtype),
        **_expert_settings(model, parallel),
    }


def _attention_settings(model: GptOssModelConfig) -> dict[str, Any]:
    """Return the fields of attention."""
    return {
        "add_qkv_bias": True,
        # One learned sink per head.
        "softmax_type": "learnable",
        # Number of keys to the left and to the right of a token. Every second layer, from layer 1,
        # skips the window, so layers 0, 2, 4, ... have it.
        "window_size": (model.sliding_window - 1, 0),
        "window_attn_skip_freq": 2,
    }


def _activation_settings(model: GptOssModelConfig) -> dict[str, Any]:
    """Return the fields of the clamped SwiGLU: swish(clamp(gate)) * (clamp(up) + 1)."""
    # Megatron's fusions stay off: some need CUDA, and bias_activation_fusion would clamp before
    # adding the bias.
    return {
        "activation_func": swish_1702,
        "glu_linear_offset": 1.0,
        "activation_func_clamp_value": model.swiglu_limit,
    }


def _router_settings(model: GptOssModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Return the fields of the router."""
    return {
        "moe_router_topk": model.experts_per_token,
        # The softmax is over the selected experts only.
        "moe_router_pre_softmax": False,
        "moe_router_score_function": "softmax",
        # No load-balancing loss, because it would change the objective.
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp64" if dtype == torch.float64 else "fp32",
    }


def _expert_settings(model: GptOssModelConfig, parallel: ParallelConfig) -> dict[str, Any]:
    """Return the fields of the experts."""
    # DeepEP is the default implementation of Megatron's flex dispatcher.
    dispatchers = {"alltoall": "alltoall", "deepep": "flex"}

    # Grouped products and the fused permutation need Transformer Engine, which needs a GPU.
    on_gpu = torch.cuda.is_available()
    return {
        "num_moe_experts": model.num_experts,
        "moe_ffn_hidden_size": model.intermediate_size,
        "moe_token_dispatcher_type": dispatchers[parallel.expert_dispatcher],
        "moe_grouped_gemm": on_gpu,
        "moe_permute_fusion": on_gpu,
    }


def cpu_layer(config: PolicyTransformerConfig) -> TransformerLayerSubmodules:
    """Return the modules of a layer on CPUs."""
    # Grouped products need Transformer Engine. Here experts are computed one at a time.
    submodules = get_gpt_layer_local_submodules(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=False,
        normalization="RMSNorm",
    )
    moe_submodules = MoESubmodules(experts=_cpu_experts(config), router=choose_router(config))
    submodules.mlp = partial(CpuMoELayer, submodules=moe_submodules)

    attention = submodules.self_attention.submodules
    attention.core_attention = SinkAttention
    choose_projections(attention, config)

    submodules.input_layernorm = CpuRMSNorm
    submodules.pre_mlp_layernorm = CpuRMSNorm
    submodules.sharded_state_dict_keys_map = SEPARATE_NORM_KEYS
    return submodules


def _cpu_experts(config: PolicyTransformerConfig) -> partial[SequentialMLP]:
    """Return the classes of experts and of their two matrices."""
    if config.trained_quantization is not None:
        return partial(QuantizedExperts, submodules=QUANTIZED_EXPERT_LINEARS)

    if has_adapted_experts(config):
        # Computing one expert at a time needs memory for a single merged matrix. Tests can select
        # the grouped classes of GPUs.
        grouped = config.moe_grouped_gemm
        experts = AdaptedGroupedExperts if grouped else AdaptedExperts
        return partial(experts, submodules=ADAPTED_EXPERT_LINEARS)

    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=ExpertRowParallelLinear)
    return partial(SequentialMLP, submodules=linears)


def gpu_layer(config: PolicyTransformerConfig) -> TransformerLayerSubmodules:
    """Specify a layer for GPUs.

    Raises:
        MissingPackageError: where Transformer Engine is missing.
    """
    require_transformer_engine()
    submodules = get_gpt_layer_with_transformer_engine_submodules(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=True,
    )
    submodules.mlp = partial(GptOssMoELayer, submodules=_gpu_experts(config, submodules))

    attention = submodules.self_attention.submodules
    attention.core_attention = config.core_attention or SinkAttention
    choose_projections(attention, config)
    if has_adapted_qkv(config):
        # Transformer Engine's projection contains the norm. Its replacement does not.
        submodules.input_layernorm = TENorm
        submodules.sharded_state_dict_keys_map = SEPARATE_NORM_KEYS
    return submodules


def _gpu_experts(
    config: PolicyTransformerConfig,
    submodules: TransformerLayerSubmodules,
) -> MoESubmodules:
    """Return the classes of experts and router. ``submodules`` are Megatron's."""
    if config.trained_quantization is not None:
        experts = partial(QuantizedExperts, submodules=QUANTIZED_EXPERT_LINEARS)
    elif has_adapted_experts(config):
        experts = partial(AdaptedGroupedExperts, submodules=ADAPTED_EXPERT_LINEARS)
    else:
        # Megatron's helper hides the grouped linears in nested partials.
        grouped_linears = submodules.mlp.keywords["submodules"].experts.keywords["submodules"]
        experts = partial(GptOssGroupedMLP, submodules=grouped_linears)
    return MoESubmodules(experts=experts, router=choose_router(config))
