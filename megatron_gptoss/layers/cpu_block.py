"""The block of layers on CPUs."""

from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
)

from megatron_gptoss.layers.cpu_norm import CpuRMSNorm
from megatron_gptoss.transformer_config import PolicyTransformerConfig


def cpu_block_spec(
    submodules: TransformerLayerSubmodules,
    config: PolicyTransformerConfig,
    stage: int,
) -> TransformerBlockSubmodules:
    """Specify one chunk of this pipeline rank, whose layers have ``submodules``."""
    layer = ModuleSpec(module=TransformerLayer, submodules=submodules)
    layers = [layer] * get_num_layers_to_build(config, stage)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=CpuRMSNorm)
