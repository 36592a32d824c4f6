"""Loading of Hugging Face tensors into a Megatron model in memory, and export from it.

Models may have any tensor-, pipeline-, expert- and data-parallel layout with
expert-tensor-parallel size 1. The groups are those of ``megatron.core.parallel_state``.
"""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state

from converters.errors import ConversionError
from converters.gathering import GatheredWeights, WeightGathering
from converters.hf_directory import LazyExpertStack
from converters.local_weights import find_local_weights
from converters.mapping import ParameterMapping
from megatron_gptoss.checkpoint.base_digest import local_digest
from megatron_gptoss.checkpoint.state import has_adapters
from megatron_gptoss.config import ModelConfig

GetTensor = Callable[[str], torch.Tensor] | Callable[[str], torch.Tensor | LazyExpertStack]


@torch.no_grad()
def load_hf_weights(model: torch.nn.Module, config: ModelConfig, get_tensor: GetTensor) -> None:
    """Load Hugging Face tensors into every weight of this rank's ``model``.

    Each rank calls this function independently. If the model has adapters, only their frozen base
    is loaded.

    Args:
        model: this rank's part of the model. Values are converted to the dtype of the parameter.
        config: model configuration.
        get_tensor: returns the Hugging Face tensor with a name. It is called only for tensors that
            this rank needs. From a LazyExpertStack, only this rank's experts are read.

    Raises:
        ConversionError: a tensor is missing or has the wrong shape, the name table lacks a
            parameter, or a parameter stores only MXFP4 values and the tensor has others. The
            message names the tensor or parameter. ConversionError is a ValueError.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    tensors: dict[str, torch.Tensor | LazyExpertStack] = {}

    # Experts that share a tensor are adjacent in the table, so each tensor is read once.
    for mapping, weight in find_local_weights(model, config):
        if any(name not in tensors for name in mapping.hf_names):
            tensors = _get_tensors(mapping, get_tensor)
        parts = _parts(mapping, tensors, config.num_experts)

        # ``to_megatron`` needs memory for the full parameter until it is sharded. This is
        # acceptable, because the only large parameters are experts, which are not sharded.
        local = mapping.shard(mapping.to_megatron(*parts), group.rank(), group.size())
        if local.shape != weight.shape:
            raise ConversionError(
                f"parameter {mapping.name} has shape {list(weight.shape)} on this rank, but its "
                f"shard of {', '.join(mapping.hf_names)} has {list(local.shape)}. Load the weights "
                "into a model of the same configuration"
            )
        try:
            weight.load(local)
        except ValueError as error:
            raise ConversionError(f"parameter {mapping.name}: {error}") from None

    # Adapter checkpoints contain a digest of the base. Compute it here, so that the first save need
    # not.
    if has_adapters(model):
        local_digest(model)


def _get_tensors(
    mapping: ParameterMapping, get_tensor: GetTensor
) -> dict[str, torch.Tensor | LazyExpertStack]:
    """Return the parameter's tensors by name. Raises ConversionError if one is missing."""
    try:
        return {name: get_tensor(name) for name in mapping.hf_names}
    except KeyError as error:
        raise ConversionError(
            f"tensor {error.args[0]} is missing from the weights to load"
        ) from None


def _parts(
    mapping: ParameterMapping, tensors: dict[str, torch.Tensor | LazyExpertStack], num_experts: int
) -> list[Any]:
    """Return the parts of the tensors that form a parameter, after checking the shapes."""
    parts: list[Any] = []
    for name, shape in zip(mapping.hf_names, mapping.part_shapes, strict=True):
        tensor = tensors[name]
        expected = shape if mapping.expert is None else (num_experts, *shape)
        # Check before slicing: slices of a tensor with more experts would load without an error.
        if tuple(tensor.shape) != expected:
            raise ConversionError(
                f"tensor {name} has shape {list(tensor.shape)}, but the model configuration requires "
                f"{list(expected)}. Use the configuration of these weights"
            )
        if mapping.expert is None:
            parts.append(tensor)
        else:
            # A LazyExpertStack reads only this expert here.
            parts.append(tensor[mapping.expert])
    return parts


def export_hf_weights(
    model: torch.nn.Module, config: ModelConfig, transposed: bool = False
) -> GatheredWeights:
    """Return all Hugging Face tensors on global rank 0, in the order of ``hf_shapes``.

    Adapters are merged into their weights, and weights that are trained through MXFP4 are rounded
    to MXFP4, one weight at a time.

    Collective: every rank must iterate to the end or call ``finish``. Ranks other than 0 get no
    tensors.

    Args:
        model: model of any parallel layout.
        config: model configuration.
        transposed: see ``names.hf_tensors``.
    """
    return WeightGathering(model, config).begin(transposed=transposed)
