"""Megatron's TransformerConfig with what our modules read besides."""

from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_gptoss.config import AdapterConfig, ModelConfig, Quantization
from megatron_gptoss.user_error import UserError


class MissingPackageError(UserError, RuntimeError):
    """The configuration needs a package that is not installed; the message names it."""


@dataclass
class PolicyTransformerConfig(TransformerConfig):
    """Megatron's configuration plus what our modules read."""

    architecture: ModelConfig = field(kw_only=True)
    """The model, of any family."""

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

    recompute_layers: int | None = None
    """The first layers of a chunk, which recompute; None: all."""

    adapter: AdapterConfig | None = None
    """What is trained; None: all parameters."""
    quantization: Quantization | None = None
    """Format of the experts, or with an adapter of their frozen base; None for ``params_dtype``."""

    # Faults on purpose, for ablations.
    router_noise: float = 0.0
    """Standard deviation of noise on the routers' logits."""
    sinks: bool = True
    """False: attention without sinks."""
    sink_gradient: bool = True
    """False: the sinks get a gradient of zero."""
    sink_backward: bool = True
    """False: the backward pass is that of attention without sinks."""

    @property
    def trained_quantization(self) -> Quantization | None:
        """Format that experts are trained through; None if their weights are used as they are."""
        return self.quantization if self.adapter is None else None

    @property
    def has_packed_base(self) -> bool:
        """True if the frozen experts below adapters are held in MXFP4."""
        return self.quantization is not None and self.adapter is not None


def mark(parameter: torch.nn.Parameter, **attributes: Any) -> None:
    """Set the attributes by which Megatron knows how a parameter is spread over ranks."""
    for name, value in attributes.items():
        setattr(parameter, name, value)


def parameter_device(config: TransformerConfig) -> torch.device:
    """Return where Megatron's layers allocate their parameters."""
    if config.use_cpu_initialization:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
