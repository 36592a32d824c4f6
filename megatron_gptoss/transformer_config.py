"""GPT-OSS as a Megatron TransformerConfig: the one builder for the tiny model, 20B and 120B."""

from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.transformer.moe.fused_a2a import HAVE_DEEP_EP
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_gptoss.config import ModelConfig, ParallelConfig


@dataclass
class GptOssTransformerConfig(TransformerConfig):
    """Megatron's configuration plus what our own attention reads."""

    gptoss: ModelConfig = field(kw_only=True)
    attention_backend_name: str = "auto"
    core_attention: type[torch.nn.Module] | None = None  # on GPUs, in place of SinkAttention
    context_scheme_full: str = "auto"
    context_scheme_window: str = "auto"
    context_bandwidth: float = 0.0
    attention_rate: float = 0.0
    recompute_layers: int | None = None
    router_noise: float = 0.0
    sinks: bool = True
    sink_gradient: bool = True
    sink_backward: bool = True
    position_embedding_type: str = "none"  # GPTModel reads it: positions enter in SinkAttention, not there


def mark(parameter: torch.nn.Parameter, **attributes: Any) -> None:
    """Set the attributes by which Megatron's data parallelism and optimizer know how a parameter is spread."""
    for name, value in attributes.items():
        setattr(parameter, name, value)


def swish_1702(x: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(1.702 x), the gate of GPT-OSS's SwiGLU. Megatron's quick_gelu is the same but is always compiled."""
    return x * torch.sigmoid(1.702 * x)


def build_transformer_config(
    model: ModelConfig, parallel: ParallelConfig, dtype: torch.dtype = torch.bfloat16, **overrides: Any
) -> GptOssTransformerConfig:
    """The configuration of one trainer rank. ``overrides`` replace single fields (negative controls). Raises
    RuntimeError where ``parallel`` asks for a dispatcher that is not installed."""
    deepep = parallel.expert_dispatcher == "deepep"
    if deepep and not (HAVE_DEEP_EP and torch.cuda.is_available()):
        raise RuntimeError("parallel.expert_dispatcher deepep: install DeepEP on a machine with GPUs, or use alltoall")
    interleaved = parallel.virtual_pipeline > 1
    settings: dict[str, Any] = {
        "gptoss": model,
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.intermediate_size,
        "moe_ffn_hidden_size": model.intermediate_size,
        "num_attention_heads": model.num_attention_heads,
        "num_query_groups": model.num_key_value_heads,
        "kv_channels": model.head_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": model.rms_norm_eps,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        # biases: this flag also creates those of the router, the experts and the output projection
        "add_bias_linear": True,
        "add_qkv_bias": True,
        # clamped SwiGLU: swish(clamp(gate)) * (clamp(up) + 1)
        "gated_linear_unit": True,
        "activation_func": swish_1702,
        "glu_linear_offset": 1.0,
        "activation_func_clamp_value": model.swiglu_limit,
        # attention: one sink per head, a window on even 0-based layers
        "softmax_type": "learnable",
        "window_size": (model.sliding_window - 1, 0),
        "window_attn_skip_freq": 2,
        # mixture of experts: softmax over the chosen top-k only; no balancing loss, as the policy gradient is the loss
        "num_moe_experts": model.num_experts,
        "moe_router_topk": model.experts_per_token,
        "moe_router_pre_softmax": False,
        "moe_router_score_function": "softmax",
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp64" if dtype == torch.float64 else "fp32",
        "moe_token_dispatcher_type": "flex" if deepep else "alltoall",
        # losses are normalised over the global batch by the caller; Megatron only adds gradients up
        "calculate_per_token_loss": True,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "init_method_std": model.initializer_std,
        "variable_seq_lengths": True,
        "tensor_model_parallel_size": parallel.tensor,
        "sequence_parallel": parallel.tensor > 1,
        "pipeline_model_parallel_size": parallel.pipeline,
        "num_layers_in_last_pipeline_stage": parallel.last_stage_layers,
        "virtual_pipeline_model_parallel_size": parallel.virtual_pipeline if interleaved else None,
        # batched messages of the interleaved schedule would be confused between two ranks
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
        # PyTorch keeps what is being sent alive: nothing has to wait for the GPU after every message
        "batch_p2p_sync": False,
        "context_parallel_size": parallel.context,
        "context_scheme_full": parallel.context_scheme_full,
        "context_scheme_window": parallel.context_scheme_window,
        "context_bandwidth": parallel.context_bandwidth * 1e9,
        "attention_rate": parallel.attention_tflops * 1e12,
        "expert_model_parallel_size": parallel.expert,
        "expert_tensor_parallel_size": 1,
        # no fusions that change numbers or need CUDA: Megatron's defaults (bias_activation_fusion would clamp first)
    }
    if torch.cuda.is_available():
        settings |= {"transformer_impl": "transformer_engine", "moe_grouped_gemm": True, "moe_permute_fusion": True}
        if parallel.recompute:
            settings |= {"recompute_granularity": "selective", "recompute_modules": list(parallel.recompute)}
            settings["recompute_layers"] = parallel.recompute_layers
    else:
        settings |= {"use_cpu_initialization": True, "batch_p2p_comm": False, "transformer_impl": "local"}
    return GptOssTransformerConfig(**(settings | overrides))
