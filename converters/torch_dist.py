"""Conversion between Hugging Face directories and torch_dist checkpoints, tensor by tensor.

A checkpoint is a directory of Megatron's dist_checkpointing and ``gptoss_config.json``, the
ModelConfig as JSON. A trainer's checkpoints have the same contents. Keys are those of Megatron's
Transformer Engine layers for every layer specification:

* Layers are stacked along a leading dimension, experts along a second one.
* The norm before attention is ``decoder.layers.self_attention.linear_qkv.layer_norm_weight``.
* The norm before experts is ``decoder.layers.pre_mlp_layernorm.weight``, the norm before a dense
  MLP ``decoder.layers.mlp.linear_fc1.layer_norm_weight``.

The CPU layer specification maps its names to these keys.

Before a conversion appears under its final name, a part of its parameters is read back and compared
with the source (``read_back``). ``ComparedParameters`` lists them before anything is written. While
a conversion runs, it drops the pages of all other parameters from the page cache (``page_cache``).
Otherwise, a conversion larger than the memory would evict the pages of the compared parameters, and
the comparison would read them from the disk.
"""

import contextlib
import math
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Self

import torch

from converters.bits import FileRange
from converters.compared_parameters import ComparedParameters, choose_compared_parameters
from converters.errors import ConversionError
from converters.families.registry import get_family_tensors
from converters.hf_directory import (
    HfDirectory,
    vocabulary_size,
    write_hf_directory,
    written_shapes,
)
from converters.hf_layouts import is_expert_matrix
from converters.mapping import NamedParts, ParameterMapping
from converters.megatron_checkpoint import MegatronCheckpoint, check_same_model
from converters.model_extras import EXTRAS_FOLDER, ModelExtras, copy_extras, read_extras
from converters.mxfp4_export import quantize
from converters.names import parameter_mappings, stack_experts
from converters.ordered_map import Progress, ordered_map
from converters.page_cache import StreamedPages, read_window, write_window
from converters.read_back import check_export, check_import, export_kind
from converters.reports import Check, ExportReport, ReadBackResult, RoundingError
from converters.torch_dist_files import Shape, TorchDistWriter
from megatron_gptoss.checkpoint.checksums import write_checksums
from megatron_gptoss.checkpoint.directory import MODEL_CONFIG_FILE
from megatron_gptoss.config import ModelConfig
from megatron_gptoss.config.precision import Precision, torch_dtype
from megatron_gptoss.new_directory import new_directory

ExportFormat = Literal["bf16", "fp32", "mxfp4"]


# -- import ------------------------------------------------------------------------------------


def import_checkpoint(
    hf_dir: Path,
    megatron_dir: Path,
    dtype: Precision | None = None,
    progress: Progress | None = None,
    check: Check = "sample",
    check_progress: Progress | None = None,
) -> ReadBackResult:
    """Write a checkpoint that loads at any tensor-, pipeline- and expert-parallel size.

    Args:
        hf_dir: source, a directory in Hugging Face's or OpenAI's format.
        megatron_dir: checkpoint to write. It appears in one move at the end. An interrupted or
            wrong import leaves nothing.
        dtype: dtype of the written weights; None to keep each tensor's dtype.
        progress: callback that receives the progress of writing.
        check: scope of the comparison after writing (``read_back``).
        check_progress: callback that receives the progress of the comparison.

    Returns:
        Result of the comparison.

    Raises:
        ConversionError: naming the file, key or tensor.
    """
    # Read and check all settings before the first byte is written.
    source = HfDirectory(hf_dir)
    extras = read_extras(hf_dir)
    compared = choose_compared_parameters("import", source.config, check)
    converted_dtype = None if dtype is None else torch_dtype(dtype)

    with new_directory(Path(megatron_dir)) as partial:
        with TorchDistWriter(partial) as writer:
            _write_parameters(source, writer, converted_dtype, compared, progress)
            for key, shape, index in _empty_entries(source.config):
                writer.add_object(key, shape, index, None)
            # A trainer that starts from an import begins at iteration 0.
            state = {"checkpoint_version": 3.0, "iteration": 0}
            writer.add_object("common_state", (1,), (0,), state)
        (partial / MODEL_CONFIG_FILE).write_text(source.config.model_dump_json(indent=1))
        # The writer hashed the data in memory, which saves a second pass over the file.
        write_checksums(partial, writer.checksum())
        copy_extras(extras, Path(hf_dir), partial / EXTRAS_FOLDER)
        # Before the directory gets its final name: a wrong checkpoint must not become visible.
        result = check_import(hf_dir, partial, converted_dtype, compared, check_progress)
    return result


def _write_parameters(
    source: HfDirectory,
    writer: TorchDistWriter,
    dtype: torch.dtype | None,
    compared: ComparedParameters,
    progress: Progress | None,
) -> None:
    """Convert all parameters on all cores, and write them in the order of the name table."""
    mappings = list(parameter_mappings(source.config).values())
    leading_shape = (source.config.num_layers, source.config.num_experts)

    def written_bytes(mapping: ParameterMapping) -> int:
        """Return the bytes of a parameter in the checkpoint."""
        # Progress counts written bytes, which differ from the read bytes of MXFP4.
        written_dtype = dtype or source.dtype(mapping.hf_names[0])
        return math.prod(mapping.shape) * written_dtype.itemsize

    with StreamedPages(read_window()) as read, StreamedPages(write_window()) as written:

        def convert(mapping: ParameterMapping) -> torch.Tensor:
            """Return the Megatron tensor of a parameter."""
            parts = [source.get(name, mapping.expert) for name in mapping.hf_names]
            # Drop the pages of tensors that the comparison will not read. Otherwise they would evict
            # the pages that it will read.
            if not compared.includes(mapping):
                for name in mapping.hf_names:
                    read.add(source.file_ranges(name, mapping.expert))
            tensor = mapping.to_megatron(*parts)
            if dtype is not None:
                tensor = tensor.to(dtype)
            # Copy here, in parallel. The only writing thread would copy otherwise.
            return tensor.contiguous()

        tensors = ordered_map(convert, mappings, size=written_bytes, progress=progress)
        # closing() stops the threads if writing fails, for example on a full disk.
        with contextlib.closing(tensors):
            for mapping, tensor in zip(mappings, tensors, strict=True):
                index = mapping.checkpoint_index
                byte_range = writer.add_tensor(
                    mapping.checkpoint_key, leading_shape[: len(index)], index, tensor
                )
                if not compared.includes(mapping):
                    written.add([byte_range])


def _empty_entries(config: ModelConfig) -> Iterator[tuple[str, Shape, Shape]]:
    """Yield (key, shape, index) of ``_extra_state`` of linear and norm modules.

    Megatron stores fp8 scales in these entries. Our checkpoints have no scales, but Megatron
    requires the entries.
    """
    layers = config.num_layers
    experts = config.num_experts
    family = get_family_tensors(config)
    # Megatron's loader fails by default if an entry of its model is missing, and ignores additional
    # ones. Therefore the entries of the local and of the Transformer Engine layers are both
    # written.
    for layer in range(layers):
        for module in family.stateful_modules:
            yield f"decoder.layers.{module}._extra_state", (layers,), (layer,)
        # Experts have an entry each, like their weights.
        for module in family.stateful_expert_modules:
            key = f"decoder.layers.mlp.experts.experts.{module}._extra_state"
            for expert in range(experts):
                yield key, (layers, experts), (layer, expert)
    # The final norm is outside of the layers, so it has one entry.
    yield "decoder.final_layernorm._extra_state", (1,), (0,)


# -- export ------------------------------------------------------------------------------------


def export_checkpoint(
    megatron_dir: Path,
    hf_dir: Path,
    dtype: ExportFormat = "bf16",
    reference: Path | None = None,
    max_shard_bytes: int = 5_000_000_000,
    progress: Progress | None = None,
    check: Check = "sample",
    check_progress: Progress | None = None,
) -> ExportReport:
    """Write the weights of a checkpoint as a Hugging Face directory.

    Args:
        megatron_dir: source, imported or saved by a trainer.
        hf_dir: directory to write. It does not exist after an error.
        dtype: dtype of the weights. With "mxfp4", expert matrices are MXFP4 and the rest is bf16.
        reference: Hugging Face directory from which tokenizer, chat templates, token ids and
            generation settings are copied. By default, those of the model from which the checkpoint
            was imported. With "mxfp4", blocks keep the reference's scales if the trained values
            still fit them. Experts that were trained in MXFP4 are written exactly as trained.
        max_shard_bytes: maximum size of a file.
        progress: callback that receives the progress of writing.
        check: scope of the comparison after writing (``read_back``).
        check_progress: callback that receives the progress of the comparison.

    Returns:
        Rounding errors, and the result of the comparison.

    Raises:
        ConversionError: naming the file, key or tensor.
    """
    # Check formats and the reference before the first byte is written.
    checkpoint = MegatronCheckpoint(megatron_dir)
    _check_format(checkpoint, dtype)
    quantized = dtype == "mxfp4"

    settings = _read_reference(reference, checkpoint, quantized)

    # Choose the parameters to compare before writing, so that their pages can stay cached.
    float_dtype = None if quantized else torch_dtype(dtype)
    compared = choose_compared_parameters(export_kind(float_dtype), checkpoint.config, check)
    with (
        _Exporter(checkpoint, settings.original, float_dtype, compared) as exporter,
        contextlib.closing(exporter.convert_all(progress)) as parts,
    ):
        write_hf_directory(
            hf_dir,
            checkpoint.config,
            stack_experts(checkpoint.config, parts),
            extras=settings.extras,
            max_shard_bytes=max_shard_bytes,
            quantized=quantized,
            on_written=exporter.release_unless_compared,
            check=lambda partial: exporter.read_back(partial, check_progress),
        )
    return exporter.report


def _check_format(checkpoint: MegatronCheckpoint, dtype: ExportFormat) -> None:
    """Raise ConversionError if the checkpoint cannot be written with this dtype."""
    quantized = dtype == "mxfp4"
    if checkpoint.is_quantized and not quantized:
        raise ConversionError(
            f"{checkpoint.path}: its experts were trained through MXFP4, but {dtype} would write "
            "them before rounding, which is not the trained model. Use --format mxfp4"
        )
    # Rejects widths that do not fit MXFP4 blocks before anything is written.
    written_shapes(checkpoint.config, quantized)


@dataclass(frozen=True)
class _Reference:
    """Data that an export takes from another directory."""

    extras: ModelExtras = field(default_factory=ModelExtras)
    original: HfDirectory | None = None
    """Model whose MXFP4 scales are kept; None for new scales."""


def _read_reference(
    path: Path | None, checkpoint: MegatronCheckpoint, quantized: bool
) -> _Reference:
    """Return the extras, and the model whose MXFP4 scales are kept.

    Without ``path``, the extras are those of the model from which the checkpoint was imported.
    Raises ConversionError if the reference is of a different model.
    """
    if path is None:
        imported = checkpoint.path / EXTRAS_FOLDER
        # An import keeps the extras of its source in this folder.
        return _Reference(read_extras(imported)) if imported.is_dir() else _Reference()

    extras = read_extras(path)
    # A wrong tokenizer would corrupt every text without an error.
    vocab_size = vocabulary_size(path)
    if vocab_size not in (None, checkpoint.config.vocab_size):
        raise ConversionError(
            f"--reference {path}: vocab_size is {vocab_size}, but {checkpoint.config.vocab_size} "
            f"in {checkpoint.path}. Give the model with which the training began"
        )
    # Kept scales would give other bytes than the trained and sampled ones.
    if not quantized or checkpoint.is_quantized:
        return _Reference(extras)
    # A directory with only a tokenizer is a valid reference.
    if not (Path(path) / "config.json").exists():
        return _Reference(extras)

    original = HfDirectory(path)
    check_same_model(original, checkpoint.config, checkpoint.path)
    return _Reference(extras, original)


@dataclass(frozen=True)
class _Converted:
    """Result of converting one Megatron parameter."""

    mapping: ParameterMapping
    parts: dict[str, torch.Tensor]
    """Parts by stored name."""
    error: RoundingError | None
    """Rounding error of an expert's matrix; None for other parameters."""


class _Exporter:
    """Converts the parameters of a checkpoint, on all cores."""

    def __init__(
        self,
        checkpoint: MegatronCheckpoint,
        original: HfDirectory | None,
        dtype: torch.dtype | None,
        compared: ComparedParameters,
    ) -> None:
        """Create an exporter.

        Args:
            checkpoint: source.
            original: model whose scales are kept; None for new scales.
            dtype: dtype of all weights; None for MXFP4 experts and bf16 otherwise.
            compared: parameters that are compared at the end, whose pages stay cached.
        """
        self.report = ExportReport()
        self._checkpoint = checkpoint
        self._original = original
        self._dtype = dtype
        self._compared = compared
        self._read = StreamedPages(read_window())
        self._written = StreamedPages(write_window())
        self._mappings = list(parameter_mappings(checkpoint.config).values())
        # A written tensor has all experts of a layer, so its pages are kept if one expert is compared.
        self._compared_names = {
            name
            for mapping in self._mappings
            if compared.includes(mapping)
            for name in mapping.hf_names
        }

    def convert_all(self, progress: Progress | None) -> Generator[NamedParts, None, None]:
        """Yield every parameter's parts, in the order of the name table.

        Rounding errors are added to ``report``.
        """
        results = ordered_map(
            self._convert,
            self._mappings,
            size=lambda mapping: mapping.bf16_bytes,
            progress=progress,
        )
        with contextlib.closing(results):
            for result in results:
                if result.error is not None:
                    self.report.add(result.mapping.hf_names[0], result.error)
                yield result.mapping, result.parts

    def release_unless_compared(self, stored_name: str, byte_range: FileRange) -> None:
        """Release the cached pages of a written tensor unless it will be read back."""
        # ``ComparedParameters`` has no stored names of MXFP4, so derive the name of the parameter.
        name = stored_name.removesuffix("_blocks").removesuffix("_scales")
        if name not in self._compared_names:
            self._written.add([byte_range])

    def read_back(self, partial: Path, progress: Progress | None) -> None:
        """Compare the unfinished directory with the checkpoint.

        Args:
            partial: directory that does not have its final name yet.
            progress: callback that receives the progress.
        """
        self.report.read_back = check_export(
            self._checkpoint.path,
            partial,
            dtype=self._dtype,
            reference=None if self._original is None else self._original.path,
            report=self.report,
            compared=self._compared,
            progress=progress,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._read.close()
        self._written.close()

    def _convert(self, mapping: ParameterMapping) -> _Converted:
        """Return the stored parts of a parameter, and the rounding error of an MXFP4 expert."""
        parts = mapping.named_parts(self._checkpoint.parameter(mapping))
        name = mapping.hf_names[0]
        if not self._compared.includes(mapping):
            self._read.add(self._checkpoint.file_ranges(mapping))

        if self._dtype is None and mapping.expert is not None and is_expert_matrix(name):
            # The parts are not converted to bf16 first, so that the reported error includes that
            # rounding.
            packed, error = quantize(name, mapping.expert, parts[name], self._original)
            if self._original is not None and not self._compared.includes(mapping):
                self._read.add(self._original.file_ranges(name, mapping.expert))
            return _Converted(mapping, packed, error)

        float_dtype = self._dtype or torch.bfloat16
        # Copy here, in parallel. Otherwise the only writing thread would copy.
        converted = {name: part.to(float_dtype).contiguous() for name, part in parts.items()}
        return _Converted(mapping, converted, error=None)
