"""GPT-OSS as a Megatron TransformerConfig: the one builder for the tiny model, 20B and 120B."""

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from megatron.core.transformer.moe.fused_a2a import HAVE_DEEP_EP
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_gptoss.config import AdapterConfig, ModelConfig, ParallelConfig, Quantization
from megatron_gptoss.user_error import UserError


class MissingPackageError(UserError, RuntimeError):
    """The configuration needs a package that is not installed; the message names it."""


@dataclass
class GptOssTransformerConfig(TransformerConfig):
    """Megatron's configuration plus what our modules read."""

    gptoss: ModelConfig = field(kw_only=True)

    attention_backend_name: str = "auto"
    """Backend of ``gptoss_kernels.sink_attention``."""
    core_attention: type[torch.nn.Module] | None = None
    """On GPUs: attention module in place of SinkAttention."""
    position_embedding_type: str = "none"
    """GPTModel reads it. Positions enter in SinkAttention, not there."""

    context_scheme_full: str = "auto"
    """Context-parallel scheme of full-attention layers."""
    context_scheme_window: str = "auto"
    """Context-parallel scheme of sliding-window layers."""
    context_bandwidth: float = 0.0
    """Bytes per second that a GPU sends to its context-parallel peers."""
    attention_rate: float = 0.0
    """Floating-point operations per second of full attention on one GPU."""

    recompute_layers: int | None = None
    """The first layers of a chunk, which recompute; None: all."""

    adapter: AdapterConfig | None = None
    """What is trained; None: all parameters."""
    base: Literal["bf16", "mxfp4"] = "bf16"
    """How experts' frozen weights are held."""
    quantization: Quantization | None = None
    """What experts are trained through; None for their weights as they are."""

    # Faults on purpose, for ablations.
    router_noise: float = 0.0
    """Standard deviation of noise on the routers' logits."""
    sinks: bool = True
    """False: attention without sinks."""
    sink_gradient: bool = True
    """False: the sinks get a gradient of zero."""
    sink_backward: bool = True
    """False: the backward pass is that of attention without sinks."""


def mark(parameter: torch.nn.Parameter, **attributes: Any) -> None:
    """Set the attributes by which Megatron knows how a parameter is spread over ranks."""
    for name, value in attributes.items():
        setattr(parameter, name, value)


def parameter_device(config: TransformerConfig) -> torch.device:
    """Return where Megatron's layers allocate their parameters."""
    if config.use_cpu_initialization:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def swish_1702(x: torch.Tensor) -> torch.Tensor:
    """Compute x * sigmoid(1.702 x), the gate of GPT-OSS's SwiGLU.

    Megatron's quick_gelu is the same function, but always compiled.
    """
    return x * torch.sigmoid(1.702 * x)


def build_transformer_config(
    model: ModelConfig,
    parallel: ParallelConfig,
    dtype: torch.dtype = torch.bfloat16,
    **overrides: Any,
) -> GptOssTransformerConfig:
    """Build the configuration of one trainer rank.

    ``overrides`` replace single fields, as negative controls and benchmarks do.

    Raises:
        MissingPackageError: where ``parallel`` asks for a dispatcher that is not installed.
    """
    if parallel.expert_dispatcher == "deepep" and not (HAVE_DEEP_EP and torch.cuda.is_available()):
        raise MissingPackageError(
            "parallel.expert_dispatcher deepep: install DeepEP on a machine with GPUs, or use alltoall"
        )

    settings = {
        "gptoss": model,
        **_shape_settings(model),
        **_attention_settings(model),
        **_expert_settings(model, parallel, dtype),
        **_training_settings(model, dtype),
        **_parallel_settings(parallel),
        **_device_settings(parallel),
        **overrides,
    }
    return GptOssTransformerConfig(**settings)


def _shape_settings(model: ModelConfig) -> dict[str, Any]:
    return {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        # Every layer is a mixture of experts; Megatron asks for the width of a dense one, too.
        "ffn_hidden_size": model.intermediate_size,
        "moe_ffn_hidden_size": model.intermediate_size,
        "num_attention_heads": model.num_attention_heads,
        "num_query_groups": model.num_key_value_heads,
        "kv_channels": model.head_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": model.rms_norm_eps,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        # This flag also creates the biases of the router, the experts and the output projection.
        "add_bias_linear": True,
        "add_qkv_bias": True,
    }


def _attention_settings(model: ModelConfig) -> dict[str, Any]:
    return {
        # One learned sink per head.
        "softmax_type": "learnable",
        # Keys to the left of a token and to the right. Every second layer, from the second on,
        # skips the window: it is the even 0-based layers that have it.
        "window_size": (model.sliding_window - 1, 0),
        "window_attn_skip_freq": 2,
    }


def _expert_settings(
    model: ModelConfig,
    parallel: ParallelConfig,
    dtype: torch.dtype,
) -> dict[str, Any]:
    # DeepEP is the default implementation of Megatron's flex dispatcher.
    dispatchers = {"alltoall": "alltoall", "deepep": "flex"}
    return {
        # Clamped SwiGLU: swish(clamp(gate)) * (clamp(up) + 1). None of Megatron's fusions are on:
        # some need CUDA, and bias_activation_fusion would clamp before it adds the bias.
        "gated_linear_unit": True,
        "activation_func": swish_1702,
        "glu_linear_offset": 1.0,
        "activation_func_clamp_value": model.swiglu_limit,
        # The softmax is taken over the chosen experts only. There is no balancing loss: the
        # policy gradient is the loss.
        "num_moe_experts": model.num_experts,
        "moe_router_topk": model.experts_per_token,
        "moe_router_pre_softmax": False,
        "moe_router_score_function": "softmax",
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp64" if dtype == torch.float64 else "fp32",
        "moe_token_dispatcher_type": dispatchers[parallel.expert_dispatcher],
    }


def _training_settings(model: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    return {
        # Losses come in normalised over the global batch; Megatron only adds gradients up.
        "calculate_per_token_loss": True,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "init_method_std": model.initializer_std,
        # Rows differ in length, and with them the messages between stages.
        "variable_seq_lengths": True,
    }


def _parallel_settings(parallel: ParallelConfig) -> dict[str, Any]:
    # Megatron takes any number of chunks, even 1, for an interleaved schedule.
    is_interleaved = parallel.virtual_pipeline > 1
    virtual_pipeline = parallel.virtual_pipeline if is_interleaved else None

    return {
        "tensor_model_parallel_size": parallel.tensor,
        # Megatron requires it for mixtures of experts.
        "sequence_parallel": parallel.tensor > 1,
        "expert_model_parallel_size": parallel.expert,
        "expert_tensor_parallel_size": 1,
        "pipeline_model_parallel_size": parallel.pipeline,
        "num_layers_in_last_pipeline_stage": parallel.last_stage_layers,
        "virtual_pipeline_model_parallel_size": virtual_pipeline,
        # In one batch, two ranks would take the interleaved schedule's messages of one direction
        # for those of the other.
        "overlap_p2p_comm": is_interleaved,
        "batch_p2p_comm": not is_interleaved,
        # PyTorch keeps alive what is being sent: nothing has to wait for the GPU after a message.
        "batch_p2p_sync": False,
        "context_parallel_size": parallel.context,
        "context_scheme_full": parallel.context_scheme_full,
        "context_scheme_window": parallel.context_scheme_window,
        "context_bandwidth": parallel.context_bandwidth * 1e9,
        "attention_rate": parallel.attention_tflops * 1e12,
        "base": parallel.base,
    }


def _device_settings(parallel: ParallelConfig) -> dict[str, Any]:
    if not torch.cuda.is_available():
        return {
            "transformer_impl": "local",
            "use_cpu_initialization": True,
            # Batching groups the messages of NCCL; gloo gains nothing from it.
            "batch_p2p_comm": False,
        }

    settings: dict[str, Any] = {
        "transformer_impl": "transformer_engine",
        "moe_grouped_gemm": True,
        "moe_permute_fusion": True,
    }
    if parallel.recompute:
        settings["recompute_granularity"] = "selective"
        settings["recompute_modules"] = list(parallel.recompute)
        settings["recompute_layers"] = parallel.recompute_layers
    return settings
