"""Specification of transformer layers on GPUs, with linear layers of Transformer Engine."""

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
    """Layer without activation recomputation, whatever the configuration says."""

    def __init__(self, config: PolicyTransformerConfig, *args: Any, **kwargs: Any) -> None:
        # Copy it first, because all layers share one configuration object.
        config = copy(config)
        config.recompute_granularity = None
        config.recompute_modules = None
        super().__init__(config, *args, **kwargs)


def require_transformer_engine() -> None:
    """Raise MissingPackageError if Transformer Engine is not installed."""
    if not HAVE_TE:
        raise MissingPackageError(
            "training on GPUs needs Transformer Engine 2.x. "
            "Run pip install transformer-engine[pytorch]"
        )


def transformer_engine_block_spec(
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
    num_layers = get_num_layers_to_build(config, stage)
    # parallel.recompute_layers limits recomputation to the first layers of each chunk.
    num_recomputing = num_layers
    if config.recompute_layers is not None:
        num_recomputing = min(num_layers, config.recompute_layers)

    # Megatron's own option cannot recompute "selective" modules in some layers only.
    recomputing = ModuleSpec(module=TransformerLayer, submodules=submodules)
    keeping = ModuleSpec(module=NoRecomputeLayer, submodules=submodules)
    layers = [recomputing] * num_recomputing + [keeping] * (num_layers - num_recomputing)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=TENorm)
