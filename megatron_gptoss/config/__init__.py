"""Typed configuration of the policy: architecture, adapters, parallel layout, optimizer.

Unknown keys and wrong types raise pydantic's ValidationError, which names the key. No module here
imports torch.
"""

from megatron_gptoss.config.adapter import AdapterConfig
from megatron_gptoss.config.hf_config import HfKeys, load_hf_config, read_rope
from megatron_gptoss.config.model import (
    AdapterTarget,
    ModelConfig,
    Quantization,
    check_layer_types,
    derived_head_size,
)
from megatron_gptoss.config.optimizer import OptimizerConfig
from megatron_gptoss.config.parallel import ParallelConfig
from megatron_gptoss.config.quantization import check_quantization
from megatron_gptoss.config.strict_model import StrictModel

__all__ = [
    "AdapterConfig",
    "AdapterTarget",
    "HfKeys",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "Quantization",
    "StrictModel",
    "check_layer_types",
    "check_quantization",
    "derived_head_size",
    "load_hf_config",
    "read_rope",
]
