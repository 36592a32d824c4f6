"""Weights of a Megatron model that this rank holds, by entries of the name table.

Megatron numbers layers and experts per rank, the table numbers them over the model.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core import parallel_state

from converters.errors import ConversionError
from converters.mapping import ParameterMapping
from converters.mxfp4_tensors import (
    Digests,
    append_scales,
    matrices_at_once,
    matrix_digest,
    matrix_name,
    mxfp4_parts,
    pack_stack,
    row_order,
    stacked_in_bf16,
    stored_names,
)
from converters.names import global_name, parameter_mappings
from gptoss_kernels import mxfp4
from megatron_gptoss.config import ModelConfig
from megatron_gptoss.model import list_chunks
from megatron_gptoss.weights import (
    ExpertFactor,
    LocalWeight,
    QuantizedWeight,
    UnmergedWeight,
    named_expert_factors,
    named_weights,
)

MEGATRON_EMBEDDING = "embedding.word_embeddings.weight"
MEGATRON_OUTPUT_LAYER = "output_layer.weight"


def find_local_weights(
    model: torch.nn.Module, config: ModelConfig
) -> list[tuple[ParameterMapping, LocalWeight]]:
    """Return this rank's weights with their entries, in the order of the name table.

    Raises:
        ConversionError: naming a parameter that the table does not have.
    """
    table = parameter_mappings(config)
    local = {}
    for chunk in list_chunks(model):
        for name, weight in named_weights(chunk):
            full_name = _global_name(name, chunk, config)
            if config.tied_embeddings and full_name == MEGATRON_OUTPUT_LAYER:
                # Copy of the embedding on the last pipeline stage.
                full_name = MEGATRON_EMBEDDING
            if full_name not in table:
                raise ConversionError(
                    f"parameter {name} (global name {full_name}) has no counterpart in Hugging "
                    f"Face's {config.model_type} with {config.num_layers} layers and "
                    f"{config.num_experts} experts"
                )
            local[full_name] = weight
    return [(mapping, local[name]) for name, mapping in table.items() if name in local]


def _global_name(name: str, chunk: Any, config: ModelConfig) -> str:
    """Return the name in the whole model of a module or weight of a chunk."""
    # Megatron gives every expert-parallel rank consecutive experts, in rank order.
    experts = config.num_experts // parallel_state.get_expert_model_parallel_world_size()
    first_expert = experts * parallel_state.get_expert_model_parallel_rank()
    first_layer = chunk.decoder.layers[0].layer_number - 1  # Megatron counts from 1
    return global_name(name, first_layer, first_expert)


class LocalWeights:
    """Reads this rank's weights in the form in which they are sent to other ranks."""

    def __init__(self, model: torch.nn.Module, config: ModelConfig) -> None:
        local = find_local_weights(model, config)
        self._mappings = [mapping for mapping, _ in local]
        self._weights = {mapping.name: weight for mapping, weight in local}
        self._places = {mapping.name: i for i, mapping in enumerate(self._mappings)}
        self._factors = {
            _global_name(name, chunk, config): factor
            for chunk in list_chunks(model)
            for name, factor in named_expert_factors(chunk)
        }

    def sent_dtypes(self) -> dict[str, torch.dtype]:
        """Return the dtype in which every weight is sent, by global parameter name.

        It is uint8 for MXFP4-trained experts.
        """
        # A model may have several dtypes: the router's bias stays fp32.
        dtypes = {}
        for name, weight in self._weights.items():
            dtypes[name] = torch.uint8 if isinstance(weight, QuantizedWeight) else weight.dtype
        # Factors have the dtype of the weights that they change.
        dtypes |= {name: factor.read().dtype for name, factor in self._factors.items()}
        return dtypes

    def mxfp4_bases(self) -> frozenset[str]:
        """Return the global parameter names of experts whose adapters are not merged.

        Receivers that hold MXFP4 get the base as blocks and scales. Other receivers get merged
        weights.
        """
        weights = self._weights.items()
        return frozenset(name for name, weight in weights if isinstance(weight, UnmergedWeight))

    def read(self, name: str) -> dict[str, torch.Tensor]:
        """Return this rank's shard of a parameter in the form in which it is sent.

        MXFP4-trained experts are quantized in batches: the result also has the experts of this rank
        that follow in the table.

        Args:
            name: global parameter name.

        Returns:
            Shards [local_shape] by global parameter name, uint8 [..., in / 32, 17] for MXFP4. They
            may share memory with the parameters.
        """
        if not isinstance(self._weights[name], QuantizedWeight):
            # Messages need contiguous memory, and merged adapters give a new tensor anyway.
            return {name: self._weights[name].read().contiguous()}

        first = self._places[name]
        last = first + matrices_at_once(self._weights[name].shape)
        names = []
        for mapping in self._mappings[first:last]:
            # Only experts of the same tensor have the same shape and can share a launch.
            if mapping.hf_names == self._mappings[first].hf_names:
                names.append(mapping.name)
        joined = append_scales(*mxfp4.quantize(stacked_in_bf16(self._without_rounding(names))))
        return dict(zip(names, joined, strict=True))

    def read_stack(
        self, mappings: Sequence[ParameterMapping], *, quantized: bool
    ) -> dict[str, torch.Tensor]:
        """Return the stacked parts of this rank's neighboring experts, by stored name.

        One batch of kernels serves all experts.

        Args:
            mappings: entries of one matrix, bias or adapter factor of neighboring experts, in order.
            quantized: whether the matrix is trained through MXFP4 or is a base in MXFP4. The result
                then has blocks and scales.

        Returns:
            Parts [experts, ...] of the Hugging Face tensors.
        """
        names = [mapping.name for mapping in mappings]
        if quantized and isinstance(self._weights[names[0]], UnmergedWeight):
            return self._stack_of_bases(mappings[0], names)
        if quantized:
            return pack_stack(mappings[0], self._without_rounding(names))

        known: Mapping[str, LocalWeight | ExpertFactor] = self._weights
        if names[0] in self._factors:
            known = self._factors
        stack = torch.stack([known[name].read() for name in names])
        order = row_order(mappings[0], stack.device)
        return {mappings[0].hf_names[0]: stack[:, order]}

    def _stack_of_bases(
        self, mapping: ParameterMapping, names: Sequence[str]
    ) -> dict[str, torch.Tensor]:
        """Return the stacked blocks and scales of bases in MXFP4, by stored name.

        Args:
            mapping: entry of the first expert's matrix.
            names: global parameter names.
        """
        packed = []
        for name in names:
            weight = self._weights[name]
            assert isinstance(weight, UnmergedWeight)
            packed.append(weight.read_mxfp4())
        order = row_order(mapping, packed[0][0].device)
        stored = stored_names(mapping.hf_names[0])
        parts = zip(*packed, strict=True)
        return {name: torch.stack(part)[:, order] for name, part in zip(stored, parts, strict=True)}

    def mxfp4_digests(self) -> Digests:
        """Return digests of this rank's MXFP4-trained experts."""
        digests: Digests = {}
        for mapping in self._mappings:
            weight = self._weights[mapping.name]
            if isinstance(weight, QuantizedWeight):
                assert mapping.expert is not None
                # In Hugging Face's row order, like the digests of directories.
                blocks, scales = mxfp4_parts(mapping, *weight.read_mxfp4()).values()
                name = matrix_name(mapping.hf_names[0], mapping.expert)
                digests[name] = matrix_digest(blocks, scales)
        return digests

    def _without_rounding(self, names: Sequence[str]) -> list[torch.Tensor]:
        """Return the unrounded weights of MXFP4-trained experts."""
        unrounded = []
        for name in names:
            weight = self._weights[name]
            assert isinstance(weight, QuantizedWeight)
            # Quantizing the unrounded values gives the bytes that training computes with.
            unrounded.append(weight.without_rounding())
        return unrounded
