"""Typed configuration of the policy: architecture, adapters, parallel layout, optimizer.

Every model is strict: an unknown key, a wrong type or an impossible layout raises pydantic's
ValidationError, which names the key, before anything is started. None of it imports torch."""

from megatron_gptoss.config.adapter import AdapterConfig
from megatron_gptoss.config.hf_config import load_hf_config, rope_settings
from megatron_gptoss.config.model import AdapterTarget, ModelConfig, Quantization
from megatron_gptoss.config.optimizer import OptimizerConfig
from megatron_gptoss.config.parallel import ParallelConfig
from megatron_gptoss.config.quantization import check_blocks, check_quantization
from megatron_gptoss.config.strict_model import StrictModel

__all__ = [
    "AdapterConfig",
    "AdapterTarget",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "Quantization",
    "StrictModel",
    "check_blocks",
    "check_quantization",
    "load_hf_config",
    "rope_settings",
]
