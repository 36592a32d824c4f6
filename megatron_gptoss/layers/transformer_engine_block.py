"""The layer specification for GPUs: Transformer Engine's linears around our own modules."""

from copy import copy
from functools import partial
from typing import Any

from megatron.core.extensions.transformer_engine import HAVE_TE, TENorm
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_with_transformer_engine_submodules,
)
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
)

from megatron_gptoss.layers.adapted_experts import (
    ADAPTED_EXPERT_LINEARS,
    has_adapted_experts,
)
from megatron_gptoss.layers.adapted_grouped_experts import AdaptedGroupedExperts
from megatron_gptoss.layers.adapted_linears import (
    SEPARATE_NORM_KEYS,
    choose_projections,
    choose_router,
    has_adapted_qkv,
)
from megatron_gptoss.layers.attention import SinkAttention
from megatron_gptoss.layers.experts import GptOssGroupedMLP
from megatron_gptoss.layers.quantized_experts import QUANTIZED_EXPERT_LINEARS, QuantizedExperts
from megatron_gptoss.step_clock import TimedMoELayer
from megatron_gptoss.transformer_config import GptOssTransformerConfig, MissingPackageError


class NoRecomputeLayer(TransformerLayer):
    """A layer that recomputes nothing, whatever the configuration says."""

    def __init__(self, config: GptOssTransformerConfig, *args: Any, **kwargs: Any) -> None:
        # All layers share one configuration object.
        config = copy(config)
        config.recompute_granularity = None
        config.recompute_modules = None
        super().__init__(config, *args, **kwargs)


def transformer_engine_block_spec(
    config: GptOssTransformerConfig,
    stage: int,
) -> TransformerBlockSubmodules:
    """Specify the layers of one chunk of this pipeline rank.

    Raises:
        MissingPackageError: where Transformer Engine is missing.
    """
    if not HAVE_TE:
        raise MissingPackageError(
            "training on GPUs needs Transformer Engine 2.x (pip install transformer-engine[pytorch])"
        )

    submodules = get_gpt_layer_with_transformer_engine_submodules(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=True,
    )
    submodules.mlp = partial(TimedMoELayer, submodules=_moe_submodules(config, submodules))
    submodules.self_attention.submodules.core_attention = config.core_attention or SinkAttention
    choose_projections(submodules.self_attention.submodules, config)
    if has_adapted_qkv(config):
        # Transformer Engine's projection includes the norm before it.
        submodules.input_layernorm = TENorm
        submodules.sharded_state_dict_keys_map = SEPARATE_NORM_KEYS

    num_layers = get_num_layers_to_build(config, stage)
    num_recomputing = num_layers
    if config.recompute_layers is not None:
        num_recomputing = min(num_layers, config.recompute_layers)

    recomputing = ModuleSpec(module=TransformerLayer, submodules=submodules)
    keeping = ModuleSpec(module=NoRecomputeLayer, submodules=submodules)
    layers = [recomputing] * num_recomputing + [keeping] * (num_layers - num_recomputing)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=TENorm)


def _moe_submodules(
    config: GptOssTransformerConfig,
    submodules: TransformerLayerSubmodules,
) -> MoESubmodules:
    """Choose the classes of experts and router; ``submodules`` are Megatron's."""
    if config.quantization == "mxfp4":
        experts = partial(QuantizedExperts, submodules=QUANTIZED_EXPERT_LINEARS)
    elif has_adapted_experts(config):
        experts = partial(AdaptedGroupedExperts, submodules=ADAPTED_EXPERT_LINEARS)
    else:
        # Megatron's helper hides the grouped linears in nested partials.
        grouped_linears = submodules.mlp.keywords["submodules"].experts.keywords["submodules"]
        experts = partial(GptOssGroupedMLP, submodules=grouped_linears)
    return MoESubmodules(experts=experts, router=choose_router(config))
