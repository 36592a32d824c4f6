"""Writing the policy as a Hugging Face directory, from the rank that the weights are gathered on."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from converters.errors import ConversionError
from converters.gathering import WeightGathering
from converters.hf_directory import HfDirectory, write_hf_directory
from converters.mapping import NamedTensor
from converters.mxfp4_tensors import Digests, directory_digests, first_difference, stored_names
from converters.names import parameter_mappings
from converters.read_back import check_weights
from converters.sample import Selection, select_parameters
from megatron_gptoss.config import ModelConfig
from rl_loop.trainer.weight_export import WeightExport


def export_weights(gathering: WeightGathering, export: WeightExport) -> None:
    """Gather all weights on rank 0, which writes them. Collective.

    All ranks begin every layer together, so that none waits longer for a message than rank 0 takes
    to write one layer. A rank 0 that cannot write goes on with the messages that the others wait
    for, and nothing is replaced if a rank could not read its own weights.

    Raises:
        ConversionError: on rank 0, as ``write_export`` does; on every rank, as
            ``WeightGathering.confirmed`` does.
        GatheringRefused: on every rank, if one has no memory for its part.
    """
    weights = gathering.confirmed(gathering.begin(packed=export.packed, paced=True))
    try:
        if dist.get_rank() == 0:
            write_export(export, gathering.config, weights)
    finally:
        for _ in weights:
            pass  # all of it on other ranks, and what a failure has left on this one


def write_export(export: WeightExport, model: ModelConfig, weights: Iterable[NamedTensor]) -> None:
    """Write all weights of ``model`` as they come, one tensor in memory at a time.

    A sample of what is on the disk is compared with what was written: what belongs to no
    expert, and the experts of one layer, of which copies are kept until then. Of packed experts
    all are compared with ``export.packed_digests``.

    Args:
        export: what is written besides, and where.
        model: the configuration of the weights.
        weights: all Hugging Face tensors in any order, on any device.

    Raises:
        ConversionError: naming the tensor that is missing, unknown or of another shape, the file
            when the disk is full, or what was read back otherwise than it was written. Whatever
            was in the directory before stays.
    """
    selection = select_parameters("weights", model, "sample")
    compared = _names_of(model, selection)
    kept: dict[str, torch.Tensor] = {}

    def check(partial: Path) -> None:
        check_weights(kept, partial, selection)
        check_packed_experts(export.directory, partial, export.packed_digests)

    def on_their_way() -> Iterator[NamedTensor]:
        for name, tensor in weights:
            # A tensor of the gathering may share memory with the next one.
            on_host = tensor.detach().cpu()
            if name in compared:
                kept[name] = on_host.clone()
            yield name, on_host
            del tensor, on_host  # or they would outlive their successor's gathering

    write_hf_directory(
        export.directory,
        model,
        on_their_way(),
        extras=export.extras,
        eos_token_ids=export.eos_token_ids,
        overwrite=True,
        quantized=export.packed,
        check=check,
    )


def check_packed_experts(
    directory: Path, partial: Path, packed_digests: Mapping[str, Digests]
) -> None:
    """Check that the files hold the bits that others hold of all packed experts.

    Args:
        directory: the name that the files will get, for the message.
        partial: where they are.
        packed_digests: what to compare them with, by the name of who holds it.

    Raises:
        ConversionError: naming the first expert that differs.
    """
    if not packed_digests:
        return
    written = directory_digests(HfDirectory(partial, unfinished=True))
    for side, digests in packed_digests.items():
        name = first_difference(digests, written)
        if name is not None:
            raise ConversionError(
                f"{directory}: {name} holds other bits ({written.get(name, 'none')}) than {side} "
                f"({digests.get(name, 'none')}); nothing was kept"
            )


def _names_of(model: ModelConfig, selection: Selection) -> set[str]:
    """Return the names of the tensors that hold what is selected, packed or not."""
    names = set()
    for mapping in parameter_mappings(model).values():
        if selection.includes(mapping):
            for name in mapping.hf_names:
                names |= {name, *stored_names(name)}
    return names
