"""Writing the policy as a Hugging Face directory: what, and where."""

import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from converters.errors import ConversionError
from converters.hf_directory import HfDirectory, write_hf_directory
from converters.mapping import NamedTensor
from converters.mxfp4_tensors import Digests, directory_digests, first_difference, stored_names
from converters.names import parameter_mappings
from converters.read_back import check_weights
from converters.sample import Selection, select_parameters
from megatron_gptoss.config import ModelConfig


@dataclass(frozen=True)
class WeightExport:
    """What is written, and where. A node's disk will not do where the driver is on another node:
    as checkpoints are, exports are written by the trainer's ranks."""

    directory: Path
    """Replaced if it exists, once the new one is complete."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Tokenizer and chat template, by the names of their files."""
    eos_token_ids: tuple[int, ...] = ()
    """That end a turn, for ``generation_config.json``."""
    packed: bool = False
    """Whether experts come, and are written, as MXFP4 blocks and scales."""
    packed_digests: Mapping[str, Digests] = field(default_factory=dict)
    """By the name of who holds them: digests that all packed experts on the disk must have."""

    def write(self, model: ModelConfig, weights: Iterable[NamedTensor]) -> None:
        """Write all weights of ``model`` as they come, one tensor in memory at a time.

        A sample of what is on the disk is compared with what was written: what belongs to no
        expert, and the experts of one layer, of which copies are kept until then. Of packed experts
        all are compared with ``packed_digests``.

        Args:
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
            check_packed_experts(self.directory, partial, self.packed_digests)

        def on_their_way() -> Iterator[NamedTensor]:
            for name, tensor in weights:
                # A tensor of the gathering may share memory with the next one.
                on_host = tensor.detach().cpu()
                if name in compared:
                    kept[name] = on_host.clone()
                yield name, on_host
                del tensor, on_host  # or they would outlive their successor's gathering

        with tempfile.TemporaryDirectory() as scratch:
            for name, content in self.files.items():
                (Path(scratch) / name).write_bytes(content)
            write_hf_directory(
                self.directory,
                model,
                on_their_way(),
                tokenizer_files=sorted(Path(scratch).iterdir()),
                eos_token_ids=self.eos_token_ids,
                overwrite=True,
                quantized=self.packed,
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
