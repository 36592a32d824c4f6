"""Name table of dense decoders.

Hugging Face has separate gate and up projections. Megatron has one matrix, all gates above all ups.
A tensor-parallel rank has a share of each half.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from converters.mapping import (
    ParameterMapping,
    Parts,
    embedding_mapping,
    output_mappings,
    qkv_mapping,
    unchanged_in_layer,
)
from megatron_gptoss.families.dense.config import DenseModelConfig

STATEFUL_MODULES = (
    "self_attention.linear_qkv",
    "self_attention.linear_proj",
    "self_attention.core_attention",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)
"""Modules of a layer with ``_extra_state`` in checkpoints of either layer specification."""


def mappings(config: DenseModelConfig) -> Iterator[ParameterMapping]:
    """Yield all parameters in model order."""
    yield embedding_mapping(config)
    for layer in range(config.num_layers):
        yield from _attention_mappings(config, layer)
        yield from _mlp_mappings(config, layer)
    yield from output_mappings(config)


def _attention_mappings(config: DenseModelConfig, layer: int) -> Iterator[ParameterMapping]:
    hidden = config.hidden_size
    unchanged = partial(unchanged_in_layer, layer)

    yield unchanged(
        "self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight", (hidden,)
    )
    yield qkv_mapping(config, layer, "weight")
    # Qwen2.5 has these biases, Llama has none.
    if config.has_qkv_bias:
        yield qkv_mapping(config, layer, "bias")
    yield unchanged(
        "self_attention.linear_proj.weight",
        "self_attn.o_proj.weight",
        (hidden, config.query_size),
        tensor_parallel_dim=1,
    )


def _mlp_mappings(config: DenseModelConfig, layer: int) -> Iterator[ParameterMapping]:
    hidden = config.hidden_size
    intermediate = config.intermediate_size
    unchanged = partial(unchanged_in_layer, layer)

    norm = unchanged("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", (hidden,))
    # Transformer Engine fuses this norm into linear_fc1, and checkpoints have its key.
    yield replace(norm, checkpoint_key="decoder.layers.mlp.linear_fc1.layer_norm_weight")
    yield ParameterMapping(
        name=f"decoder.layers.{layer}.mlp.linear_fc1.weight",
        shape=(2 * intermediate, hidden),
        hf_names=tuple(f"model.layers.{layer}.mlp.{x}_proj.weight" for x in ("gate", "up")),
        part_shapes=((intermediate, hidden), (intermediate, hidden)),
        tensor_parallel_dim=0,
        # Every rank needs the gate and the up channels of its share.
        tensor_parallel_blocks=2,
        layer=layer,
        expert=None,
        checkpoint_key="decoder.layers.mlp.linear_fc1.weight",
        to_megatron=_gate_above_up,
        to_hf=_gate_and_up,
    )
    yield unchanged(
        "mlp.linear_fc2.weight",
        "mlp.down_proj.weight",
        (hidden, intermediate),
        tensor_parallel_dim=1,
    )


def _gate_above_up(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.cat([gate, up])


def _gate_and_up(fc1: torch.Tensor) -> Parts:
    gate, up = fc1.chunk(2)
    return gate, up
