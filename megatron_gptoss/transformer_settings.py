"""Construction of Megatron's TransformerConfig from a model and a layout, for all model families."""

from typing import Any

import torch
from megatron.core.transformer.moe.fused_a2a import HAVE_DEEP_EP

from megatron_gptoss.config import ModelConfig, ParallelConfig
from megatron_gptoss.families.layer_registry import get_family_layers
from megatron_gptoss.transformer_config import MissingPackageError, PolicyTransformerConfig


def build_transformer_config(
    model: ModelConfig,
    parallel: ParallelConfig,
    dtype: torch.dtype = torch.bfloat16,
    **overrides: Any,
) -> PolicyTransformerConfig:
    """Build the configuration of one trainer rank.

    Args:
        model: architecture.
        parallel: layout.
        dtype: data type of the parameters.
        overrides: fields to replace, for ablations and benchmarks.

    Raises:
        MissingPackageError: the dispatcher of ``parallel`` is not installed.
    """
    if parallel.expert_dispatcher == "deepep" and not (HAVE_DEEP_EP and torch.cuda.is_available()):
        raise MissingPackageError(
            "parallel.expert_dispatcher deepep: DeepEP is not available. Install it on a machine "
            "with GPUs, or use alltoall"
        )

    settings = {
        "architecture": model,
        **_shape_settings(model),
        **get_family_layers(model).transformer_settings(model, parallel, dtype),
        **_training_settings(model, dtype),
        **_parallel_settings(parallel),
        **_device_settings(parallel),
        **overrides,
    }
    return PolicyTransformerConfig(**settings)


def _shape_settings(model: ModelConfig) -> dict[str, Any]:
    """Return the fields that describe the architecture."""
    return {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.intermediate_size,
        "num_attention_heads": model.num_attention_heads,
        "num_query_groups": model.num_key_value_heads,
        "kv_channels": model.head_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": model.rms_norm_eps,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "gated_linear_unit": True,
    }


def _training_settings(model: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Return the fields of the training step."""
    return {
        # Losses are normalized over the global batch, so Megatron must only sum gradients.
        "calculate_per_token_loss": True,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "init_method_std": model.initializer_std,
        # Rows have different lengths, and so do the messages between stages.
        "variable_seq_lengths": True,
    }


def _parallel_settings(parallel: ParallelConfig) -> dict[str, Any]:
    """Return the fields of the layout."""
    # Megatron uses the interleaved schedule for any number of chunks, even for 1.
    is_interleaved = parallel.virtual_pipeline > 1
    virtual_pipeline = parallel.virtual_pipeline if is_interleaved else None

    return {
        "tensor_model_parallel_size": parallel.tensor,
        # Megatron requires it for mixtures of experts. Dense models need less memory with it.
        "sequence_parallel": parallel.tensor > 1,
        "expert_model_parallel_size": parallel.expert,
        "expert_tensor_parallel_size": 1,
        "pipeline_model_parallel_size": parallel.pipeline,
        "num_layers_in_last_pipeline_stage": parallel.last_stage_layers,
        "virtual_pipeline_model_parallel_size": virtual_pipeline,
        # With batched messages, two ranks would mix up the forward and backward messages of the
        # interleaved schedule.
        "overlap_p2p_comm": is_interleaved,
        "batch_p2p_comm": not is_interleaved,
        # PyTorch keeps tensors alive while they are sent, so no synchronization is necessary.
        "batch_p2p_sync": False,
        "context_parallel_size": parallel.context,
        "context_scheme_full": parallel.context_scheme_full,
        "context_scheme_window": parallel.context_scheme_window,
    }


def _device_settings(parallel: ParallelConfig) -> dict[str, Any]:
    """Return the fields that depend on the device, and recomputation, which needs a GPU."""
    if not torch.cuda.is_available():
        return {
            "transformer_impl": "local",
            "use_cpu_initialization": True,
            # Batching is an optimization for NCCL, which gloo does not need.
            "batch_p2p_comm": False,
        }

    settings: dict[str, Any] = {"transformer_impl": "transformer_engine"}
    if parallel.recompute:
        settings["recompute_granularity"] = "selective"
        settings["recompute_modules"] = list(parallel.recompute)
        settings["recompute_layers"] = parallel.recompute_layers
    return settings
