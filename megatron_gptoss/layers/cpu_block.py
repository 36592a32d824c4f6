"""RMSNorm and the block of layers on CPUs."""

from typing import Any

import torch
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
)

from megatron_gptoss.transformer_config import PolicyTransformerConfig, mark


class CpuRMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm under sequence parallelism.

    Tensor parallelism needs it, and Megatron's wrapper (torch_norm.py) refuses it.
    """

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float = 1e-5,
        **unused: Any,
    ) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)

        # The gradient covers only this rank's share of the tokens: Megatron must sum it over
        # tensor-parallel ranks.
        mark(self.weight, sequence_parallel=config.sequence_parallel)


def cpu_block_spec(
    submodules: TransformerLayerSubmodules,
    config: PolicyTransformerConfig,
    stage: int,
) -> TransformerBlockSubmodules:
    """Specify one chunk of this pipeline rank, whose layers have ``submodules``."""
    layer = ModuleSpec(module=TransformerLayer, submodules=submodules)
    layers = [layer] * get_num_layers_to_build(config, stage)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=CpuRMSNorm)
