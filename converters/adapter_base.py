"""The frozen base of adapters: its values as a trainer holds them, and its digest."""

import contextlib

import torch

from converters.hf_directory import HfDirectory
from converters.mapping import ParameterMapping
from converters.names import parameter_mappings
from converters.ordered_map import Progress, ordered_map
from megatron_gptoss.tensor_hash import as_digits, digest_of_values


def read_base(
    source: HfDirectory, mapping: ParameterMapping, dtype: torch.dtype
) -> list[torch.Tensor]:
    """Read the parts of a parameter in the dtype in which a trainer holds them.

    Args:
        source: Hugging Face directory of the base.
        mapping: entry of the parameter.
        dtype: dtype of the trainer's weights. The router's bias is at least fp32.

    Returns:
        The parts, with the shapes ``mapping.part_shapes``, in the order of ``mapping.hf_names``.
    """
    # The trainer's router keeps its bias in fp32 (megatron_gptoss.layers.router).
    if mapping.name.endswith(".router.bias"):
        dtype = torch.promote_types(dtype, torch.float32)
    return [source.get(name, mapping.expert).to(dtype) for name in mapping.hf_names]


def parameter_digest(mapping: ParameterMapping, parameter: torch.Tensor) -> torch.Tensor:
    """Return the contribution of a parameter to the digest of the base, int64 []."""
    # Parameters outside of layers count as layer 0, so layers start at 1.
    layer = 0 if mapping.layer is None else mapping.layer + 1
    return digest_of_values(parameter, layer)


def directory_digest(
    source: HfDirectory, dtype: torch.dtype, progress: Progress | None = None
) -> str:
    """Return the digest of a base as a trainer of ``dtype`` computes it.

    Reads the whole model, on all cores.

    Args:
        source: Hugging Face directory of the base.
        dtype: dtype of the trainer's weights.
        progress: callback that receives the progress.
    """

    def digest(mapping: ParameterMapping) -> torch.Tensor:
        """Return the digest of one parameter."""
        return parameter_digest(mapping, mapping.to_megatron(*read_base(source, mapping, dtype)))

    # The digest is a sum, so threads may finish in any order.
    mappings = list(parameter_mappings(source.config).values())
    digests = ordered_map(
        digest, mappings, size=lambda mapping: mapping.bf16_bytes, progress=progress
    )
    total = torch.zeros((), dtype=torch.int64)
    with contextlib.closing(digests):
        for value in digests:
            total += value
    return as_digits(total)
