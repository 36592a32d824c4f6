"""Name table of GPT-OSS.

Hugging Face has one tensor for all experts, input-major ([E, in, out]), with alternating gate and
up channels. Megatron has one matrix per expert, output-major ([out, in]), with all gate channels
before all up channels. In the released models down_proj is square, so a missing transpose would
pass every shape check.

Megatron parameters have the names of SequentialMLP, and of a layer norm that Transformer Engine
fuses into the QKV projection. Other implementations of the layers are mapped to these names.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from converters.mapping import (
    ParameterMapping,
    Shape,
    embedding_mapping,
    identity,
    output_mappings,
    qkv_mapping,
    single_part,
    unchanged_in_layer,
)
from megatron_gptoss.families.gpt_oss.config import GptOssModelConfig

STATEFUL_MODULES = (
    "self_attention.linear_qkv",
    "self_attention.linear_proj",
    "self_attention.core_attention",
    "pre_mlp_layernorm",
)
"""Modules of a layer that have an entry ``_extra_state`` in checkpoints, on CPU and GPU."""
STATEFUL_EXPERT_MODULES = ("linear_fc1", "linear_fc2")
"""Modules of an expert that have an entry ``_extra_state`` in checkpoints."""


def mappings(config: GptOssModelConfig) -> Iterator[ParameterMapping]:
    """Yield all parameters in model order."""
    yield embedding_mapping(config)
    for layer in range(config.num_layers):
        yield from _attention_mappings(config, layer)
        yield from _mlp_mappings(config, layer)
    yield from output_mappings(config)


def _attention_mappings(config: GptOssModelConfig, layer: int) -> Iterator[ParameterMapping]:
    hidden = config.hidden_size
    unchanged = partial(unchanged_in_layer, layer)

    yield unchanged(
        "self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight", (hidden,)
    )
    yield qkv_mapping(config, layer, "weight")
    yield qkv_mapping(config, layer, "bias")
    yield unchanged(
        "self_attention.core_attention.softmax_offset",
        # One sink per head, split like the heads.
        "self_attn.sinks",
        (config.num_attention_heads,),
        tensor_parallel_dim=0,
    )
    yield unchanged(
        "self_attention.linear_proj.weight",
        "self_attn.o_proj.weight",
        (hidden, config.query_size),
        tensor_parallel_dim=1,
    )
    # Not split: the bias is added once, after the sum over tensor-parallel ranks.
    yield unchanged("self_attention.linear_proj.bias", "self_attn.o_proj.bias", (hidden,))


def _mlp_mappings(config: GptOssModelConfig, layer: int) -> Iterator[ParameterMapping]:
    hidden = config.hidden_size
    intermediate = config.intermediate_size
    experts = config.num_experts
    unchanged = partial(unchanged_in_layer, layer)

    yield unchanged("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", (hidden,))
    # Not split: every rank routes its own tokens.
    yield unchanged("mlp.router.weight", "mlp.router.weight", (experts, hidden))
    yield unchanged("mlp.router.bias", "mlp.router.bias", (experts,))

    # Gate and up projection of the experts, in one matrix.
    yield from _expert_mappings(
        config,
        layer,
        name="linear_fc1.weight",
        hf_name="gate_up_proj",
        shape=(2 * intermediate, hidden),
        part_shape=(hidden, 2 * intermediate),
        to_megatron=_fc1_weight,
        to_hf=_gate_up_proj,
    )
    yield from _expert_mappings(
        config,
        layer,
        name="linear_fc1.bias",
        hf_name="gate_up_proj_bias",
        shape=(2 * intermediate,),
        part_shape=(2 * intermediate,),
        to_megatron=separate_gate_up,
        to_hf=interleave_gate_up,
    )

    # Down projection. A transpose is its own inverse. The bias has the same order on both sides.
    yield from _expert_mappings(
        config,
        layer,
        name="linear_fc2.weight",
        hf_name="down_proj",
        shape=(hidden, intermediate),
        part_shape=(intermediate, hidden),
        to_megatron=_transpose,
        to_hf=_transpose,
    )
    yield from _expert_mappings(
        config,
        layer,
        name="linear_fc2.bias",
        hf_name="down_proj_bias",
        shape=(hidden,),
        part_shape=(hidden,),
        to_megatron=identity,
        to_hf=identity,
    )


def _expert_mappings(
    config: GptOssModelConfig,
    layer: int,
    *,
    name: str,
    hf_name: str,
    shape: Shape,
    part_shape: Shape,
    to_megatron: Callable[[torch.Tensor], torch.Tensor],
    to_hf: Callable[[torch.Tensor], torch.Tensor],
) -> Iterator[ParameterMapping]:
    """Yield one parameter per expert. ``name`` and ``hf_name`` lack the prefix of the layer."""
    for expert in range(config.num_experts):
        yield ParameterMapping(
            name=f"decoder.layers.{layer}.mlp.experts.local_experts.{expert}.{name}",
            shape=shape,
            hf_names=(f"model.layers.{layer}.mlp.experts.{hf_name}",),
            part_shapes=(part_shape,),
            tensor_parallel_dim=None,
            layer=layer,
            expert=expert,
            # Megatron's checkpoints stack the experts of all ranks under this key.
            checkpoint_key=f"decoder.layers.mlp.experts.experts.{name}",
            to_megatron=to_megatron,
            to_hf=single_part(to_hf),
        )


# -- transforms --------------------------------------------------------------------------------


def separate_gate_up(gate_up: torch.Tensor) -> torch.Tensor:
    """Reorder channels [2 * intermediate, ...] from gate 0, up 0, ... to all gates, all ups."""
    return torch.cat([gate_up[0::2], gate_up[1::2]])


def interleave_gate_up(gate_up: torch.Tensor) -> torch.Tensor:
    """Invert ``separate_gate_up``, for channels [2 * intermediate, ...] of any dtype."""
    gate, up = gate_up.chunk(2)
    return torch.stack([gate, up], dim=1).flatten(0, 1)


# Rows are channels only after the transpose to [out, in]. The inverse reverses the steps.
def _fc1_weight(gate_up_proj: torch.Tensor) -> torch.Tensor:
    return separate_gate_up(gate_up_proj.T)


def _gate_up_proj(fc1_weight: torch.Tensor) -> torch.Tensor:
    return interleave_gate_up(fc1_weight).T


def _transpose(part: torch.Tensor) -> torch.Tensor:
    return part.T
