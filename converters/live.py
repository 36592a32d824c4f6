"""Weights of a running Megatron model: loading from and export to Hugging Face tensors.

Both work on this rank's part of the model under any tensor-, pipeline-, expert- and data-parallel
layout (expert-tensor-parallel size 1), with the groups of ``megatron.core.parallel_state``.
"""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state

from converters.errors import ConversionError
from converters.gathering import GatheredWeights, WeightGathering
from converters.hf_directory import ExpertStack
from converters.local_weights import find_local_weights
from converters.mapping import ParameterMapping
from megatron_gptoss.checkpoint.base_digest import local_digest
from megatron_gptoss.checkpoint.state import has_adapters
from megatron_gptoss.config import ModelConfig

GetTensor = Callable[[str], torch.Tensor] | Callable[[str], torch.Tensor | ExpertStack]


@torch.no_grad()
def load_hf_weights(model: torch.nn.Module, config: ModelConfig, get_tensor: GetTensor) -> None:
    """Fill every weight of this rank's ``model`` in place. Not collective.

    Adapters stay unmodified: the tensors are loaded into their base.

    Args:
        model: model of any parallel layout. Values are converted to the parameter's dtype.
        config: model configuration.
        get_tensor: returns the Hugging Face tensor of a name. Called only for names of which this
            rank holds a part. If it returns an ExpertStack, only this rank's experts are read.

    Raises:
        ConversionError: (a ValueError) naming the tensor if it is missing or has another shape, or
            naming the parameter if the name table does not know it, or if it holds MXFP4 values
            only and would change.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    tensors: dict[str, torch.Tensor | ExpertStack] = {}

    # Experts that share a tensor are adjacent in the table, so one read serves all.
    for mapping, weight in find_local_weights(model, config):
        if any(name not in tensors for name in mapping.hf_names):
            tensors = _get_tensors(mapping, get_tensor)
        parts = _parts(mapping, tensors, config.num_experts)

        # The full parameter exists temporarily. Only experts are large, and they are not split.
        local = mapping.shard(mapping.to_megatron(*parts), group.rank(), group.size())
        if local.shape != weight.shape:
            raise ConversionError(
                f"parameter {mapping.name} has shape {list(weight.shape)} on this rank, but its "
                f"shard of {', '.join(mapping.hf_names)} has {list(local.shape)}: model and "
                "configuration differ"
            )
        try:
            weight.load(local)
        except ValueError as error:
            raise ConversionError(f"parameter {mapping.name}: {error}") from None

    # Adapter checkpoints hold a digest of the base. Compute it here instead of in the first save.
    if has_adapters(model):
        local_digest(model)


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
    """Return a parameter's parts of the tensors, after checking the tensors' shapes."""
    parts: list[Any] = []
    for name, shape in zip(mapping.hf_names, mapping.part_shapes, strict=True):
        tensor = tensors[name]
        expected = shape if mapping.expert is None else (num_experts, *shape)
        # Check before slicing: slices of a tensor with more experts would load without an error.
        if tuple(tensor.shape) != expected:
            raise ConversionError(
                f"tensor {name} has shape {list(tensor.shape)}, but the model configuration says "
                f"{list(expected)}"
            )
        if mapping.expert is None:
            parts.append(tensor)
        else:
            # An ExpertStack reads only this expert here.
            parts.append(tensor[mapping.expert])
    return parts


def export_hf_weights(
    model: torch.nn.Module, config: ModelConfig, transposed: bool = False
) -> GatheredWeights:
    """Return all Hugging Face tensors on global rank 0, in the order of ``hf_shapes``.

    Adapters are merged into their weights, and weights that are trained through MXFP4 are rounded
    to MXFP4, one weight at a time.

    Collective: every rank must exhaust the iterator or call ``finish``. On ranks other than 0 it
    yields no tensor.

    Args:
        model: model of any parallel layout.
        config: model configuration.
        transposed: see ``names.hf_tensors``.
    """
    return WeightGathering(model, config).begin(transposed=transposed)
