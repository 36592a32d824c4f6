"""Weights of a running Megatron model: filling it from Hugging Face tensors and reading it out.

Both work on this rank's part of the model under any tensor, pipeline, expert and data parallel
layout (expert tensor parallel size 1), with the groups of ``megatron.core.parallel_state``.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from converters.errors import ConversionError
from converters.hf_directory import ExpertStack
from converters.names import (
    NamedTensor,
    ParameterMapping,
    global_name,
    hf_tensors,
    parameter_mappings,
)
from megatron_gptoss.config import ModelConfig
from megatron_gptoss.model import chunks_of
from megatron_gptoss.weights import Weight, named_weights

GetTensor = Callable[[str], torch.Tensor] | Callable[[str], torch.Tensor | ExpertStack]


# -- loading -----------------------------------------------------------------------------------


@torch.no_grad()
def load_hf_weights(model: torch.nn.Module, config: ModelConfig, get_tensor: GetTensor) -> None:
    """Fill every weight of this rank's ``model`` in place. Not collective.

    Adapters stay as they are: what is loaded is their base.

    Args:
        model: of any parallel layout; other dtypes are converted to the parameter's.
        config: of the model.
        get_tensor: returns the Hugging Face tensor of a name. Called only for names of which this
            rank holds a part; if it answers with an ExpertStack, only this rank's experts are read.

    Raises:
        ConversionError: (a ValueError) naming the tensor when it is missing or has another shape,
            or when the model has a parameter that the name table does not know, or one that holds
            MXFP4 values only and would change.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    tensors: dict[str, torch.Tensor | ExpertStack] = {}

    # In the table, experts that share a tensor follow one another: one read serves all.
    for mapping, weight in _local_weights(model, config):
        if any(name not in tensors for name in mapping.hf_names):
            tensors = _get_tensors(mapping, get_tensor)
        parts = _parts(mapping, tensors, config.num_experts)

        # The full parameter exists for a moment: only experts are large, and they are not split.
        local = mapping.shard(mapping.to_megatron(*parts), group.rank(), group.size())
        if local.shape != weight.shape:
            raise ConversionError(
                f"parameter {mapping.name} has shape {list(weight.shape)} on this rank, but its "
                f"share of {', '.join(mapping.hf_names)} has {list(local.shape)}: model and "
                "configuration differ"
            )
        try:
            weight.load(local)
        except ValueError as error:
            raise ConversionError(f"parameter {mapping.name}: {error}") from None


def _get_tensors(
    mapping: ParameterMapping, get_tensor: GetTensor
) -> dict[str, torch.Tensor | ExpertStack]:
    try:
        return {name: get_tensor(name) for name in mapping.hf_names}
    except KeyError as error:
        raise ConversionError(
            f"tensor {error.args[0]} is missing from the weights to load"
        ) from None


def _parts(
    mapping: ParameterMapping, tensors: dict[str, torch.Tensor | ExpertStack], num_experts: int
) -> list[Any]:
    """Take a parameter's parts from the tensors, checking the shapes of these."""
    parts: list[Any] = []
    for name, shape in zip(mapping.hf_names, mapping.part_shapes, strict=True):
        tensor = tensors[name]
        expected = shape if mapping.expert is None else (num_experts, *shape)
        if tuple(tensor.shape) != expected:
            raise ConversionError(
                f"tensor {name} has shape {list(tensor.shape)}, but the model configuration says "
                f"{list(expected)}"
            )
        if mapping.expert is None:
            parts.append(tensor)
        else:
            parts.append(tensor[mapping.expert])
    return parts


def _local_weights(
    model: torch.nn.Module, config: ModelConfig
) -> list[tuple[ParameterMapping, Weight]]:
    """Return what this rank holds, in the order of the name table."""
    table = parameter_mappings(config)
    experts = config.num_experts // parallel_state.get_expert_model_parallel_world_size()
    first_expert = experts * parallel_state.get_expert_model_parallel_rank()

    local = {}
    for chunk in chunks_of(model):
        first_layer = chunk.decoder.layers[0].layer_number - 1  # Megatron counts from 1
        for name, weight in named_weights(chunk):
            full_name = global_name(name, first_layer, first_expert)
            if full_name not in table:
                raise ConversionError(
                    f"parameter {name} ({full_name} of the whole model) has no counterpart in "
                    f"Hugging Face's GPT-OSS of {config.num_layers} layers and "
                    f"{config.num_experts} experts"
                )
            local[full_name] = weight
    return [(mapping, local[name]) for name, mapping in table.items() if name in local]


# -- reading out -------------------------------------------------------------------------------


@torch.no_grad()
def export_hf_weights(
    model: torch.nn.Module, config: ModelConfig, transposed: bool = False
) -> Iterator[NamedTensor]:
    """Yield all Hugging Face tensors of the model, on global rank 0, in the order of ``hf_shapes``.

    Weights with adapters are merged, one after the other.

    Collective: every rank must run the iterator to its end; on other ranks than 0 it yields
    nothing. Each byte is sent once, from the lowest rank that holds it to rank 0. Rank 0 holds one
    Hugging Face tensor at a time (of a layer's experts, the stack of all) besides its own weights.

    dtype and device are the parameter's: of a bf16 model the router's bias comes in fp32. A yielded
    tensor may share memory with a parameter: copy it to keep it beyond the next optimizer step.

    Args:
        model: of any parallel layout.
        config: of the model.
        transposed: see ``names.hf_tensors``.
    """
    tp_size = parallel_state.get_tensor_model_parallel_world_size()
    local = {mapping.name: (mapping, weight) for mapping, weight in _local_weights(model, config)}
    ranks = _gather_contents(local)
    device = next(model.parameters()).device

    def receive(mapping: ParameterMapping) -> torch.Tensor:
        received = []
        for holder, dtype in _shard_holders(mapping, ranks, tp_size):
            if holder == 0:
                _, weight = local[mapping.name]
                received.append(weight.read())
                continue
            buffer = torch.empty(mapping.local_shape(tp_size), dtype=dtype, device=device)
            dist.recv(buffer, src=holder)
            received.append(buffer)
        return mapping.unshard(received)

    if dist.get_rank() == 0:
        yield from hf_tensors(config, receive, transposed)
        return

    # Sends follow the order in which rank 0 receives, or both would wait for ever.
    for mapping, weight in local.values():
        holders = [holder for holder, _ in _shard_holders(mapping, ranks, tp_size)]
        if dist.get_rank() in holders:
            dist.send(weight.read().contiguous(), dst=0)


@dataclass(frozen=True)
class _RankContents:
    """What one rank holds of the model."""

    dtypes: dict[str, torch.dtype]
    """By global parameter name."""
    tp_rank: int


def _gather_contents(
    local: dict[str, tuple[ParameterMapping, Weight]],
) -> list[_RankContents]:
    """Return what every rank holds, by global rank. Collective."""
    # dtypes differ within a model: the router's bias stays fp32.
    contents = _RankContents(
        dtypes={name: weight.dtype for name, (_, weight) in local.items()},
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
    )
    everyone = [contents] * dist.get_world_size()
    dist.all_gather_object(everyone, contents)
    return everyone


def _shard_holders(
    mapping: ParameterMapping, ranks: list[_RankContents], tp_size: int
) -> list[tuple[int, torch.dtype]]:
    """Return, for each tensor-parallel shard, the rank that provides it and its dtype."""
    if mapping.tensor_parallel_dim is None:
        return [_first_holder(mapping, ranks, shard=None)]
    return [_first_holder(mapping, ranks, shard) for shard in range(tp_size)]


def _first_holder(
    mapping: ParameterMapping, ranks: list[_RankContents], shard: int | None
) -> tuple[int, torch.dtype]:
    """Return the lowest rank that holds a shard (None: all of the parameter) and its dtype."""
    # Data-parallel replicas hold the same; every rank must come to the same choice.
    for rank, contents in enumerate(ranks):
        if mapping.name in contents.dtypes and shard in (None, contents.tp_rank):
            return rank, contents.dtypes[mapping.name]
    raise ConversionError(
        f"no rank holds part {shard or 0} of parameter {mapping.name}: the layout is broken"
    )
