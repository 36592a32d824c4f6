"""Weights of a running Megatron model: filling it from Hugging Face tensors and reading it out.

Both work on this rank's part of the model under any tensor, pipeline, expert and data parallel
layout (expert tensor parallel size 1), with the groups of ``megatron.core.parallel_state``.
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
    for mapping, weight in find_local_weights(model, config):
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

    # Checkpoints of adapters say which base they change. It is read now, and not in the first save.
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


def export_hf_weights(
    model: torch.nn.Module, config: ModelConfig, transposed: bool = False
) -> GatheredWeights:
    """Return all Hugging Face tensors of the model, on global rank 0, in the order of ``hf_shapes``.

    Weights with adapters are merged, and those that are trained through MXFP4 rounded to it, one
    after the other.

    Collective: every rank must run the iterator to its end, or call ``finish``; on other ranks
    than 0 it yields nothing.

    Args:
        model: of any parallel layout.
        config: of the model.
        transposed: see ``names.hf_tensors``.
    """
    return WeightGathering(model, config).begin(transposed=transposed)
