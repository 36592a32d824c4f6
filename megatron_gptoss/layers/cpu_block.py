"""RMSNorm and the specification of transformer layers on CPUs."""

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

from megatron_gptoss.transformer_config import PolicyTransformerConfig, set_distribution


class CpuRMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm with support for sequence parallelism.

    Tensor parallelism needs sequence parallelism, which Megatron's wrapper (torch_norm.py) rejects.
    """

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float = 1e-5,
        **unused: Any,
    ) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)

        # The gradient covers only the tokens of this rank. The mark makes Megatron sum it over
        # tensor-parallel ranks.
        set_distribution(self.weight, sequence_parallel=config.sequence_parallel)


def cpu_block_spec(
    submodules: TransformerLayerSubmodules,
    config: PolicyTransformerConfig,
    stage: int,
) -> TransformerBlockSubmodules:
    """Return the specification of this pipeline rank's model chunk.

    Args:
        submodules: modules of each layer.
        config: configuration of the model.
        stage: index of the chunk on this rank (virtual pipeline stage).
    """
    layer = ModuleSpec(module=TransformerLayer, submodules=submodules)
    layers = [layer] * get_num_layers_to_build(config, stage)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=CpuRMSNorm)
