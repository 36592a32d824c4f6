"""Megatron's TransformerConfig with further fields for the modules of this package."""

from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_gptoss.config import AdapterConfig, ModelConfig, Quantization
from megatron_gptoss.user_error import UserError


class MissingPackageError(UserError, RuntimeError):
    """Missing package that the configuration needs. The message names it."""


@dataclass
class PolicyTransformerConfig(TransformerConfig):
    """Megatron's configuration with further fields for the modules of this package."""

    architecture: ModelConfig = field(kw_only=True)
    """Architecture of the model, of any family."""

    attention_backend_name: str = "auto"
    """Backend of ``gptoss_kernels.sink_attention``."""
    core_attention: type[torch.nn.Module] | None = None
    """On GPUs: attention module that replaces SinkAttention; None for SinkAttention."""
    position_embedding_type: str = "none"
    """Position embedding of GPTModel. It has none, because SinkAttention rotates by position."""

    context_scheme_full: str = "auto"
    """Context-parallel scheme of full-attention layers."""
    context_scheme_window: str = "auto"
    """Context-parallel scheme of sliding-window layers."""

    recompute_layers: int | None = None
    """Number of layers, from the first of a chunk, that recompute activations; None for all."""

    adapter: AdapterConfig | None = None
    """Trained adapters; None if all parameters are trained."""
    quantization: Quantization | None = None
    """Number format of the experts, or with an adapter of their frozen base; None for
    ``params_dtype``."""

    # Deliberate faults for ablations.
    router_noise: float = 0.0
    """Standard deviation of noise on the routers' logits."""
    sinks: bool = True
    """False disables the sinks of attention."""
    sink_gradient: bool = True
    """False sets the gradient of the sinks to 0."""
    sink_backward: bool = True
    """False replaces the backward pass by the backward pass of attention without sinks."""

    @property
    def trained_quantization(self) -> Quantization | None:
        """Format that experts are trained through; None if their weights are used as they are."""
        return self.quantization if self.adapter is None else None

    @property
    def has_unmerged_experts(self) -> bool:
        """True if experts multiply by their base and adapters separately, see ``unmerged_product``."""
        return self.adapter is not None and not self.adapter.merge_experts

    @property
    def has_mxfp4_base(self) -> bool:
        """True if the frozen experts below adapters are held in MXFP4."""
        return self.quantization is not None and self.adapter is not None


def set_distribution(parameter: torch.nn.Parameter, **attributes: Any) -> None:
    """Set attributes that tell Megatron how a parameter is distributed over ranks.

    Args:
        parameter: parameter to change, of any shape [...].
        attributes: names and values, for example ``allreduce`` or ``sequence_parallel``.
    """
    for name, value in attributes.items():
        setattr(parameter, name, value)


def parameter_device(config: TransformerConfig) -> torch.device:
    """Return the device on which Megatron's layers allocate their parameters."""
    if config.use_cpu_initialization:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
