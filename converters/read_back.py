"""Reads a conversion back from its finished files and compares it with the source.

This happens before the directory gets its name. The expected values are computed a second time, by
other objects than those that wrote, from the source's files. What was written is brought back with
the other direction of the name table (an import is compared as Hugging Face tensors, an export as
Megatron parameters). The MXFP4 codec is used by one thread at a time, and a few rows of every
expert are also computed from the format's definition.

A sample is read while the system still brings what was written to the disk, which a conversion has
to wait for anyway: it comes from the page cache, which a conversion keeps free for it
(``page_cache``). All is read when it is on the disk, and from there.

What this cannot see: a name table that is wrong in both directions (``verify`` can), an MXFP4
codec that is always wrong in some rows but right in those that are computed from the definition,
and source files that were damaged before. A sample does not see values of experts of the other
layers (that these have their place and length in the files is checked), nor a disk that does not
keep what it was given."""

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from converters.bits import TensorRange, as_bytes, same_bits, same_in_files
from converters.errors import ConversionError
from converters.hf_directory import HfDirectory
from converters.hf_layouts import is_expert_matrix
from converters.mapping import ParameterMapping
from converters.megatron_checkpoint import MegatronCheckpoint
from converters.mxfp4_export import quantize
from converters.mxfp4_tensors import stored_names
from converters.names import parameter_mappings
from converters.pipeline import Progress, ordered_map
from converters.reference.mxfp4 import defined_values, nearest, some_rows
from converters.reports import ExportReport, QuantizationLoss, ReadBack
from converters.sample import Selection, remember_layer
from megatron_gptoss.config import ModelConfig
from megatron_gptoss.durable_files import directory_syncing
from megatron_gptoss.new_directory import final_name

# -- imports -----------------------------------------------------------------------------------


def check_import(
    hf_dir: Path,
    partial: Path,
    dtype: torch.dtype | None,
    selection: Selection,
    progress: Progress | None = None,
) -> ReadBack:
    """Compare an unfinished torch_dist checkpoint with the directory it was imported from.

    Args:
        hf_dir: the source.
        partial: the checkpoint, which has not got its name yet.
        dtype: that weights were converted to; None if each kept its own.
        selection: what to compare.
        progress: told how far it is.

    Raises:
        ConversionError: naming tensor, expert and file of a difference.
    """
    comparison = _ImportComparison(hf_dir, partial, dtype, from_disk=selection.check == "all")
    return _compare_selected(
        comparison.compare,
        kind="import",
        config=comparison.source.config,
        partial=partial,
        selection=selection,
        progress=progress,
    )


class _ImportComparison:
    """Compares single parameters of an import, from several threads."""

    def __init__(
        self, hf_dir: Path, partial: Path, dtype: torch.dtype | None, from_disk: bool
    ) -> None:
        self.source = HfDirectory(hf_dir)
        self._written = MegatronCheckpoint(partial, unfinished=True, from_disk=from_disk)
        self._final = final_name(partial)
        self._dtype = dtype
        self._from_disk = from_disk
        self._codec = threading.Lock()

        if self._written.config != self.source.config:
            raise ConversionError(f"{self._final}: its model configuration is not that of {hf_dir}")
        self._written.check_places()

    def compare(self, mapping: ParameterMapping) -> None:
        # Embedding and output layer, most of what is no expert, are compared without loading them.
        if mapping.is_unchanged and self._dtype is None:
            written_range = self._written.tensor_range(mapping)
            source_range = self.source.tensor_range(mapping.hf_names[0])
            if _same_ranges(written_range, source_range, self._from_disk):
                return

        where = _Location(mapping, self._final, self._written.file_of(mapping))
        with where.named_in_errors():
            parts = mapping.named_parts(self._written.parameter(mapping))
        for name, part in parts.items():
            self._compare_part(name, part, where)

    def _compare_part(self, name: str, part: torch.Tensor, where: "_Location") -> None:
        expert = where.mapping.expert

        # One thread at a time: a codec that threads disturb is wrong in the writing alone.
        with self._codec:
            expected = self.source.get(name, expert)
        if self._dtype is not None:
            expected = expected.to(self._dtype)
        where.require_same(name, part, expected)

        # The codec compared with itself is right whenever it errs the same way twice.
        packed = self.source.read_mxfp4(name, expert)
        if packed is not None:
            blocks, scales = packed
            defined = defined_values(some_rows(blocks), some_rows(scales))
            where.require_same(name, some_rows(part.mT), defined.to(part.dtype))


# -- exports -----------------------------------------------------------------------------------


def check_export(
    megatron_dir: Path,
    partial: Path,
    *,
    dtype: torch.dtype | None,
    reference: Path | None,
    report: ExportReport,
    selection: Selection,
    progress: Progress | None = None,
) -> ReadBack:
    """Compare an unfinished Hugging Face directory with the checkpoint it was exported from.

    Args:
        megatron_dir: the source.
        partial: the directory, which has not got its name yet.
        dtype: of the weights; None if experts are MXFP4 and the rest bf16.
        reference: whose MXFP4 scales were kept where they fit.
        report: what the export says that MXFP4 cost, compared with a second computation.
        selection: what to compare.
        progress: told how far it is.

    Raises:
        ConversionError: naming tensor, expert and file of a difference.
    """
    from_disk = selection.check == "all"
    comparison = _ExportComparison(megatron_dir, partial, dtype, reference, from_disk)
    recomputed = ExportReport()

    def add_loss(mapping: ParameterMapping, loss: QuantizationLoss | None) -> None:
        if loss is not None:
            recomputed.add(mapping.hf_names[0], loss)

    result = _compare_selected(
        comparison.compare,
        kind=export_kind(dtype),
        config=comparison.source.config,
        partial=partial,
        selection=selection,
        use=add_loss,
        progress=progress,
    )
    # The report is all that a user sees of the loss, and the writing threads computed it.
    for name, loss in recomputed.losses.items():
        reported = report.losses.get(name)
        if not loss.is_close_to(reported):
            raise ConversionError(
                f"{final_name(partial)}: the loss of {name} by quantization was reported as "
                f"{reported}, but is {loss}; nothing was kept. Convert again"
            )
    return result


def export_kind(dtype: torch.dtype | None) -> str:
    """Return the name under which ``sample`` remembers exports to ``dtype`` (None: MXFP4)."""
    if dtype is None:
        return "export_mxfp4"
    return f"export_{dtype}".replace("torch.", "")


class _ExportComparison:
    """Compares single parameters of an export, from several threads."""

    def __init__(
        self,
        megatron_dir: Path,
        partial: Path,
        dtype: torch.dtype | None,
        reference: Path | None,
        from_disk: bool,
    ) -> None:
        self.source = MegatronCheckpoint(megatron_dir, verify=False)
        self._written = HfDirectory(partial, unfinished=True, from_disk=from_disk)
        self._reference = None if reference is None else HfDirectory(reference)
        self._final = final_name(partial)
        self._to_mxfp4 = dtype is None
        self._dtype = dtype or torch.bfloat16
        self._from_disk = from_disk
        self._codec = threading.Lock()

    def compare(self, mapping: ParameterMapping) -> QuantizationLoss | None:
        name = mapping.hf_names[0]
        if mapping.is_unchanged:
            source_range = self.source.tensor_range(mapping)
            is_copy = source_range is not None and source_range.dtype == self._dtype
            written_range = self._written.tensor_range(name)
            if is_copy and _same_ranges(written_range, source_range, self._from_disk):
                return None

        exact = self.source.parameter(mapping)
        where = _Location(mapping, self._final, self._written.file_of(name))
        if self._to_mxfp4 and mapping.expert is not None and is_expert_matrix(name):
            [matrix] = mapping.to_hf(exact)
            return self._compare_mxfp4(name, mapping.expert, matrix, where)

        self._compare_floats(mapping, exact.to(self._dtype), where)
        return None

    def _compare_floats(
        self, mapping: ParameterMapping, expected: torch.Tensor, where: "_Location"
    ) -> None:
        with where.named_in_errors():
            parts = {name: self._written.get(name, mapping.expert) for name in mapping.hf_names}
        if same_bits(mapping.to_megatron(*parts.values()), expected):
            return

        # Somewhere they differ; the parts say in which tensor.
        for name, part in mapping.named_parts(expected).items():
            where.file = self._written.file_of(name)
            where.require_same(name, parts[name], part)
        raise ConversionError(
            f"the two directions of the name table do not agree about {mapping.name}"
        )

    def _compare_mxfp4(
        self, name: str, expert: int, matrix: torch.Tensor, where: "_Location"
    ) -> QuantizationLoss:
        """Compare blocks and scales of one expert's ``matrix`` [in, out]."""
        with self._codec:
            expected, loss = quantize(name, expert, matrix, self._reference)
        with where.named_in_errors():
            packed = self._written.read_mxfp4(name, expert)
        # HfDirectory refuses a directory that does not hold what its config.json says
        assert packed is not None
        for (stored_name, values), written in zip(expected.items(), packed, strict=True):
            where.file = self._written.file_of(stored_name)
            where.require_same(stored_name, written, values)

        blocks, scales = (some_rows(tensor) for tensor in packed)
        defined = defined_values(blocks, scales)
        exact = some_rows(matrix.mT.to(torch.bfloat16))
        # With the reference's bytes nothing may be lost; else nothing more than the format loses.
        is_exact = torch.equal(defined, exact.float())
        if (loss.changed == 0 and not is_exact) or not nearest(defined, exact, scales):
            raise ConversionError(
                f"{where}: its MXFP4 blocks do not stand for the numbers nearest to those of "
                f"{self.source.path}: the codec of this machine is wrong; nothing was kept"
            )
        return loss


# -- weights in memory -------------------------------------------------------------------------


def check_weights(
    weights: Mapping[str, torch.Tensor],
    partial: Path,
    selection: Selection,
    progress: Progress | None = None,
) -> ReadBack:
    """Compare an unfinished Hugging Face directory with the weights that it was written from.

    Args:
        weights: by Hugging Face name, at least those selected; experts that were written as MXFP4
            as blocks and scales.
        partial: the directory, which has not got its name yet.
        selection: what to compare.
        progress: told how far it is.

    Raises:
        ConversionError: naming tensor, expert and file of a difference.
    """
    written = HfDirectory(partial, unfinished=True, from_disk=selection.check == "all")

    def compare(mapping: ParameterMapping) -> None:
        for name in mapping.hf_names:
            where = _Location(mapping, final_name(partial), written.file_of(name))
            with where.named_in_errors():
                parts = _stored_parts(written, name, mapping.expert)

            for stored_name, part in parts.items():
                expected = weights[stored_name]
                if mapping.expert is not None:
                    expected = expected[mapping.expert]
                where.require_same(stored_name, part, expected)

    return _compare_selected(
        compare,
        kind="weights",
        config=written.config,
        partial=partial,
        selection=selection,
        progress=progress,
    )


def _stored_parts(written: HfDirectory, name: str, expert: int | None) -> dict[str, torch.Tensor]:
    """Read a tensor, or one expert's slice of it: by its name, or blocks and scales by theirs."""
    packed = written.read_mxfp4(name, expert)
    if packed is None:
        return {name: written.get(name, expert)}
    return dict(zip(stored_names(name), packed, strict=True))


# -- comparing ---------------------------------------------------------------------------------


def _compare_selected[Result](
    compare: Callable[[ParameterMapping], Result],
    *,
    kind: str,
    config: ModelConfig,
    partial: Path,
    selection: Selection,
    use: Callable[[ParameterMapping, Result], None] = lambda mapping, result: None,
    progress: Progress | None,
) -> ReadBack:
    """Call ``compare`` for everything selected, on all cores; ``partial`` is on the disk on
    return.

    ``use`` gets the results in the order of the name table.
    """
    table = list(parameter_mappings(config).values())
    selected = [mapping for mapping in table if selection.includes(mapping)]

    with torch.no_grad(), directory_syncing(partial) as wait_for_sync:
        # Dropping dirty pages does nothing: what is to come from the disk must be there first.
        if selection.check == "all":
            wait_for_sync()

        began = time.perf_counter()
        results = ordered_map(
            compare, selected, size=lambda mapping: mapping.bf16_bytes, progress=progress
        )
        with contextlib.closing(results):
            for mapping, result in zip(selected, results, strict=True):
                use(mapping, result)
        ended = time.perf_counter()
        synced = wait_for_sync()

    # Only now: the experts of a layer that were found wrong are compared again next time.
    if selection.layer is not None:
        remember_layer(kind, config, selection.layer)

    waited_for_disk = min(max(0.0, synced - began), ended - began)
    return ReadBack(
        check=selection.check,
        layer=selection.layer,
        layers=config.num_layers,
        compared=sum(math.prod(mapping.shape) for mapping in selected),
        parameters=sum(math.prod(mapping.shape) for mapping in table),
        seconds=ended - began,
        added_seconds=ended - began - waited_for_disk,
    )


def _same_ranges(written: TensorRange | None, source: TensorRange | None, from_disk: bool) -> bool:
    """Tell whether a tensor that is only copied is the same in both files.

    If it is not, or has no single place, comparing its values says what is wrong.
    """
    if written is None or source is None:
        return False
    try:
        return same_in_files(written, source, from_disk)
    except OSError:
        return False


@dataclass
class _Location:
    """Where a parameter was written, for messages."""

    mapping: ParameterMapping
    directory: Path
    """The name that the directory would have got."""
    file: str

    def __str__(self) -> str:
        return self._describe(", ".join(self.mapping.hf_names))

    def _describe(self, name: str) -> str:
        text = f"{self.directory / self.file}: tensor {name}"
        if self.mapping.expert is not None:
            text += f", expert {self.mapping.expert}"
        return text

    @contextlib.contextmanager
    def named_in_errors(self) -> Iterator[None]:
        """Say in a ConversionError from inside of which tensor and expert it is."""
        try:
            yield
        except ConversionError as error:
            raise ConversionError(
                f"{self} cannot be read back ({error}); nothing was kept"
            ) from None

    def require_same(self, name: str, written: torch.Tensor, expected: torch.Tensor) -> None:
        """Raise ConversionError if the two are not the same bit for bit."""
        if not same_bits(written, expected):
            raise ConversionError(
                f"{self._describe(name)} {_difference(written, expected)}; nothing was kept. "
                "Convert again; if it happens again, check memory and disk of this machine"
            )


def _difference(written: torch.Tensor, expected: torch.Tensor) -> str:
    """Say in what two tensors differ, as the rest of a sentence about the first."""
    if written.dtype != expected.dtype or written.shape != expected.shape:
        return (
            f"was written as {written.dtype} {list(written.shape)}, not {expected.dtype} "
            f"{list(expected.shape)}"
        )
    differs = as_bytes(written) != as_bytes(expected)
    differs = differs.reshape(-1, written.element_size()).any(-1)
    return (
        f"holds something else than was to be written in {int(differs.sum()):,} of "
        f"{len(differs):,} values, the first of them number {int(differs.argmax()):,}"
    )
