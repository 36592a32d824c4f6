"""The frozen base of adapters, from a Hugging Face directory: as a trainer holds it, and its
digest."""

import contextlib

import torch

from converters.hf_directory import HfDirectory
from converters.mapping import ParameterMapping
from converters.names import parameter_mappings
from converters.pipeline import Progress, ordered_map
from megatron_gptoss.tensor_hash import as_digits, digest_of_values


def read_base(
    source: HfDirectory, mapping: ParameterMapping, dtype: torch.dtype
) -> list[torch.Tensor]:
    """Read the parts of a parameter in the dtype in which a trainer of ``dtype`` holds them."""
    if mapping.name.endswith(".router.bias"):
        dtype = torch.promote_types(dtype, torch.float32)
    return [source.get(name, mapping.expert).to(dtype) for name in mapping.hf_names]


def parameter_digest(mapping: ParameterMapping, parameter: torch.Tensor) -> torch.Tensor:
    """Compute what a parameter of the base adds to its digest, int64 []."""
    layer = 0 if mapping.layer is None else mapping.layer + 1
    return digest_of_values(parameter, layer)


def directory_digest(
    source: HfDirectory, dtype: torch.dtype, progress: Progress | None = None
) -> str:
    """Compute the digest that a trainer of ``dtype`` has of this base.

    Reads all of it, on all cores; ``progress`` is told how far it is.
    """

    def digest(mapping: ParameterMapping) -> torch.Tensor:
        return parameter_digest(mapping, mapping.to_megatron(*read_base(source, mapping, dtype)))

    table = list(parameter_mappings(source.config).values())
    digests = ordered_map(digest, table, size=lambda mapping: mapping.bf16_bytes, progress=progress)
    total = torch.zeros((), dtype=torch.int64)
    with contextlib.closing(digests):
        for value in digests:
            total += value
    return as_digits(total)
