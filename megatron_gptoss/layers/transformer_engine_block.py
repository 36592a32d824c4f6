"""The block of layers on GPUs: Transformer Engine's linears around our own modules."""

from copy import copy
from typing import Any

from megatron.core.extensions.transformer_engine import HAVE_TE, TENorm
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
)

from megatron_gptoss.transformer_config import MissingPackageError, PolicyTransformerConfig


class NoRecomputeLayer(TransformerLayer):
    """A layer that recomputes nothing, whatever the configuration says."""

    def __init__(self, config: PolicyTransformerConfig, *args: Any, **kwargs: Any) -> None:
        # All layers share one configuration object.
        config = copy(config)
        config.recompute_granularity = None
        config.recompute_modules = None
        super().__init__(config, *args, **kwargs)


def require_transformer_engine() -> None:
    """Raise MissingPackageError where Transformer Engine is missing."""
    if not HAVE_TE:
        raise MissingPackageError(
            "training on GPUs needs Transformer Engine 2.x (pip install transformer-engine[pytorch])"
        )


def transformer_engine_block_spec(
    submodules: TransformerLayerSubmodules,
    config: PolicyTransformerConfig,
    stage: int,
) -> TransformerBlockSubmodules:
    """Specify one chunk of this pipeline rank, whose layers have ``submodules``."""
    num_layers = get_num_layers_to_build(config, stage)
    num_recomputing = num_layers
    if config.recompute_layers is not None:
        num_recomputing = min(num_layers, config.recompute_layers)

    recomputing = ModuleSpec(module=TransformerLayer, submodules=submodules)
    keeping = ModuleSpec(module=NoRecomputeLayer, submodules=submodules)
    layers = [recomputing] * num_recomputing + [keeping] * (num_layers - num_recomputing)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=TENorm)
