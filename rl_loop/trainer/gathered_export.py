"""Export of the policy as a Hugging Face directory, written by the rank with all weights."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from converters.compared_parameters import ComparedParameters, choose_compared_parameters
from converters.errors import ConversionError
from converters.gathering import WeightGathering
from converters.hf_directory import HfDirectory, write_hf_directory
from converters.mapping import NamedTensor
from converters.mxfp4_tensors import Digests, directory_digests, first_difference, stored_names
from converters.names import parameter_mappings
from converters.read_back import check_weights
from megatron_gptoss.config import ModelConfig
from rl_loop.trainer.weight_export import WeightExport


def export_weights(gathering: WeightGathering, export: WeightExport) -> None:
    """Gather all weights on rank 0, which writes them. Collective.

    All ranks begin every layer together, so no rank waits longer for a message than rank 0 takes to
    write one layer. If rank 0 cannot write, it still receives the messages that the other ranks
    send. If a rank cannot read its weights, the directory is unchanged.

    Raises:
        ConversionError: ``write_export`` failed (on rank 0), or ``WeightGathering.confirmed``
            failed (on every rank).
        GatheringAbortedError: on every rank, if a rank has too little memory for its part.
    """
    weights = gathering.confirm(gathering.begin(mxfp4_experts=export.mxfp4_experts, paced=True))
    try:
        if dist.get_rank() == 0:
            write_export(export, gathering.config, weights)
    finally:
        for _ in weights:
            # Other ranks receive all messages here. Rank 0 receives the rest after a failure.
            pass


def write_export(export: WeightExport, model: ModelConfig, weights: Iterable[NamedTensor]) -> None:
    """Write all weights of ``model`` with one tensor in memory at a time.

    A sample of the written files is read back and compared with copies of the weights: all tensors
    that are not experts, and the experts of one layer. MXFP4 experts are all compared with
    ``export.mxfp4_digests``.

    Args:
        export: directory, format and further files.
        model: configuration of the weights.
        weights: all Hugging Face tensors in any order, on any device.

    Raises:
        ConversionError: a tensor is missing, unknown or of a different shape, the disk is full, or a
            file differs from the written weights. The message names the tensor or file, and the
            directory is unchanged.
    """
    compared = choose_compared_parameters("weights", model, "sample")
    compared_names = _list_names(model, compared)
    kept: dict[str, torch.Tensor] = {}

    # Called before the directory gets its final name, so a wrong export never appears.
    def check(partial: Path) -> None:
        check_weights(kept, partial, compared)
        check_mxfp4_experts(export.directory, partial, export.mxfp4_digests)

    def host_copies() -> Iterator[NamedTensor]:
        for name, tensor in weights:
            # The gathering may reuse a tensor's memory for the next tensor.
            on_host = tensor.detach().cpu()
            if name in compared_names:
                kept[name] = on_host.clone()
            yield name, on_host
            del tensor, on_host  # They would otherwise exist while the next tensor is gathered.

    write_hf_directory(
        export.directory,
        model,
        host_copies(),
        extras=export.extras,
        eos_token_ids=export.eos_token_ids,
        overwrite=True,
        quantized=export.mxfp4_experts,
        check=check,
    )


def check_mxfp4_experts(
    directory: Path, partial: Path, mxfp4_digests: Mapping[str, Digests]
) -> None:
    """Check that the files hold the same MXFP4 experts as the trainer and the engines.

    Args:
        directory: final name of the files, for the message.
        partial: current directory of the files.
        mxfp4_digests: expected digests, by the name of their holder.

    Raises:
        ConversionError: an expert differs. The message names the first one.
    """
    if not mxfp4_digests:
        return
    written = directory_digests(HfDirectory(partial, unfinished=True))
    # A digest covers all bits of a matrix, while values may be equal for different bits.
    for side, digests in mxfp4_digests.items():
        name = first_difference(digests, written)
        if name is not None:
            raise ConversionError(
                f"{directory}: the MXFP4 values of {name} differ from those of {side} (digest "
                f"{written.get(name, 'none')}, expected {digests.get(name, 'none')}). The export was not "
                "written. Write it again with --resume"
            )


def _list_names(model: ModelConfig, compared: ComparedParameters) -> set[str]:
    """Return the stored names of the compared tensors, in bf16 and in MXFP4."""
    names = set()
    for mapping in parameter_mappings(model).values():
        if compared.includes(mapping):
            for name in mapping.hf_names:
                # Experts have other names in MXFP4.
                names |= {name, *stored_names(name)}
    return names
