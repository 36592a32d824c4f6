"""Comparison of a finished conversion with its source.

The comparison runs before the directory gets its final name. The expected values are computed a
second time from the source's files, by other objects than the writing ones. The written values are
converted back with the other direction of the name table: an import is compared as Hugging Face
tensors, an export as Megatron parameters. One thread at a time uses the MXFP4 codec, and a few rows
of every expert are also computed from the format's definition.

A sample is read from the page cache (``page_cache`` keeps it there) while the system syncs the
files to the disk, because a conversion must wait for the disk anyway. With check ``all``, every
value is read from the disk after the sync.

The comparison cannot detect:

* a name table that is wrong in both directions (``verify`` can),
* an MXFP4 codec that is always wrong in some rows, except the rows computed from the definition,
* source files that were damaged before,
* with a sample: wrong expert values in other layers (their place and length in the files are
  checked), and a disk that loses data.
"""

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from converters.bits import TensorRange, as_bytes, same_bits, same_in_files
from converters.compared_parameters import ComparedParameters, save_compared_layer
from converters.errors import ConversionError
from converters.hf_directory import HfDirectory
from converters.hf_layouts import is_expert_matrix
from converters.mapping import ParameterMapping
from converters.megatron_checkpoint import MegatronCheckpoint
from converters.mxfp4_export import quantize
from converters.mxfp4_tensors import stored_names
from converters.names import parameter_mappings
from converters.ordered_map import Progress, ordered_map
from converters.reference.mxfp4 import defined_values, nearest, sampled_rows
from converters.reports import ExportReport, ReadBackResult, RoundingError
from megatron_gptoss.config import ModelConfig
from megatron_gptoss.durable_files import directory_syncing
from megatron_gptoss.new_directory import final_name

# -- imports -----------------------------------------------------------------------------------


def check_import(
    hf_dir: Path,
    partial: Path,
    dtype: torch.dtype | None,
    compared: ComparedParameters,
    progress: Progress | None = None,
) -> ReadBackResult:
    """Compare an unfinished torch_dist checkpoint with the directory it was imported from.

    Args:
        hf_dir: source directory.
        partial: checkpoint that does not have its final name yet.
        dtype: dtype to which weights were converted; None if each kept its own.
        compared: parameters to compare.
        progress: callback that receives the progress.

    Raises:
        ConversionError: naming tensor, expert and file of a difference.
    """
    comparison = _ImportComparison(hf_dir, partial, dtype, from_disk=compared.check == "all")
    return _compare_parameters(
        comparison.compare,
        kind="import",
        config=comparison.source.config,
        partial=partial,
        compared=compared,
        progress=progress,
    )


class _ImportComparison:
    """Compares single parameters of an import, from several threads."""

    def __init__(
        self, hf_dir: Path, partial: Path, dtype: torch.dtype | None, from_disk: bool
    ) -> None:
        # Opened a second time, because the object used for writing may have a wrong state.
        self.source = HfDirectory(hf_dir)
        self._written = MegatronCheckpoint(partial, unfinished=True, from_disk=from_disk)
        self._final = final_name(partial)
        self._dtype = dtype
        self._from_disk = from_disk
        self._codec = threading.Lock()

        # Names and shapes of all parameters follow from the configuration, so compare it first.
        if self._written.config != self.source.config:
            raise ConversionError(
                f"{self._final}: the written model configuration differs from that of {hf_dir}. Nothing "
                "was kept. Convert again"
            )
        # A sample reads few chunks. Place and length of all of them are cheap to check.
        self._written.check_chunk_ranges()

    def compare(self, mapping: ParameterMapping) -> None:
        """Compare one parameter with the source. Raises ConversionError if it differs."""
        # The embedding and the output layer hold most non-expert values. Compare their files,
        # without loading them as tensors.
        if mapping.is_unchanged and self._dtype is None:
            written_range = self._written.tensor_range(mapping)
            source_range = self.source.tensor_range(mapping.hf_names[0])
            if _same_ranges(written_range, source_range, self._from_disk):
                return

        # Convert with the inverse of the direction that wrote the file.
        where = _Location(mapping, self._final, self._written.find_file(mapping))
        with where.named_in_errors():
            parts = mapping.named_parts(self._written.parameter(mapping))
        for name, part in parts.items():
            self._compare_part(name, part, where)

    def _compare_part(self, name: str, part: torch.Tensor, where: "_Location") -> None:
        """Compare a written tensor, or one expert's slice of it, with the source."""
        expert = where.mapping.expert

        # One thread at a time, so that a codec fault caused by concurrency affects only writing.
        with self._codec:
            expected = self.source.get(name, expert)
        if self._dtype is not None:
            expected = expected.to(self._dtype)
        where.require_same(name, part, expected)

        # The codec may make the same mistake twice, so compare some rows with the definition.
        packed = self.source.read_mxfp4(name, expert)
        if packed is not None:
            blocks, scales = packed
            defined = defined_values(sampled_rows(blocks), sampled_rows(scales))
            where.require_same(name, sampled_rows(part.mT), defined.to(part.dtype))


# -- exports -----------------------------------------------------------------------------------


def check_export(
    megatron_dir: Path,
    partial: Path,
    *,
    dtype: torch.dtype | None,
    reference: Path | None,
    report: ExportReport,
    compared: ComparedParameters,
    progress: Progress | None = None,
) -> ReadBackResult:
    """Compare an unfinished Hugging Face directory with the checkpoint it was exported from.

    Args:
        megatron_dir: source checkpoint.
        partial: directory that does not have its final name yet.
        dtype: dtype of the weights; None for MXFP4 experts and bf16 otherwise.
        reference: directory whose MXFP4 scales were reused where they fit; None for new scales.
        report: rounding errors reported by the export. They are computed again and compared.
        compared: parameters to compare.
        progress: callback that receives the progress.

    Raises:
        ConversionError: naming tensor, expert and file of a difference.
    """
    from_disk = compared.check == "all"
    comparison = _ExportComparison(megatron_dir, partial, dtype, reference, from_disk)
    recomputed = ExportReport()

    def add_error(mapping: ParameterMapping, error: RoundingError | None) -> None:
        """Add the rounding error of one expert."""
        if error is not None:
            recomputed.add(mapping.hf_names[0], error)

    result = _compare_parameters(
        comparison.compare,
        kind=export_kind(dtype),
        config=comparison.source.config,
        partial=partial,
        compared=compared,
        use=add_error,
        progress=progress,
    )
    # The user sees only the report, which the writing threads computed. Check it, too.
    for name, error in recomputed.errors.items():
        reported = report.errors.get(name)
        if not error.is_close_to(reported):
            raise ConversionError(
                f"{final_name(partial)}: the rounding error of {name} was reported as "
                f"{reported}, but is {error}. Nothing was kept. Convert again"
            )
    return result


def export_kind(dtype: torch.dtype | None) -> str:
    """Return the kind of an export for ``compared_parameters``.

    Args:
        dtype: dtype of the weights; None for MXFP4 experts.
    """
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
        # The export verified the checksums of the source when it opened it.
        self.source = MegatronCheckpoint(megatron_dir, verify=False)
        self._written = HfDirectory(partial, unfinished=True, from_disk=from_disk)
        self._reference = None if reference is None else HfDirectory(reference)
        self._final = final_name(partial)
        self._to_mxfp4 = dtype is None
        self._dtype = dtype or torch.bfloat16
        self._from_disk = from_disk
        # Serializes the codec, as in _ImportComparison.
        self._codec = threading.Lock()

    def compare(self, mapping: ParameterMapping) -> RoundingError | None:
        """Compare one parameter with the source. Raises ConversionError if it differs.

        Returns the rounding error of an MXFP4 expert, None for other parameters.
        """
        name = mapping.hf_names[0]
        # Compare the bytes of large unchanged tensors in the files, without loading them.
        if mapping.is_unchanged:
            source_range = self.source.tensor_range(mapping)
            # Bytes are comparable only if the export did not change the dtype.
            is_copy = source_range is not None and source_range.dtype == self._dtype
            written_range = self._written.tensor_range(name)
            if is_copy and _same_ranges(written_range, source_range, self._from_disk):
                return None

        exact = self.source.parameter(mapping)
        where = _Location(mapping, self._final, self._written.find_file(name))
        if self._to_mxfp4 and mapping.expert is not None and is_expert_matrix(name):
            [matrix] = mapping.to_hf(exact)
            return self._compare_mxfp4(name, mapping.expert, matrix, where)

        self._compare_floats(mapping, exact.to(self._dtype), where)
        return None

    def _compare_floats(
        self, mapping: ParameterMapping, expected: torch.Tensor, where: "_Location"
    ) -> None:
        """Compare a parameter that is not MXFP4 with its expected Megatron tensor."""
        with where.named_in_errors():
            parts = {name: self._written.get(name, mapping.expert) for name in mapping.hf_names}
        # Merge the written parts: the export split them, and splitting again would hide a mistake.
        if same_bits(mapping.to_megatron(*parts.values()), expected):
            return

        # The merged tensors differ. Compare the parts to name the wrong tensor.
        for name, part in mapping.named_parts(expected).items():
            where.file = self._written.find_file(name)
            where.require_same(name, parts[name], part)
        raise ConversionError(
            f"parameter {mapping.name}: export and import of this parameter do not invert each other. "
            "Nothing was kept. Correct its entry in the name table (converters/families)"
        )

    def _compare_mxfp4(
        self, name: str, expert: int, matrix: torch.Tensor, where: "_Location"
    ) -> RoundingError:
        """Compare blocks and scales of one expert's ``matrix`` [in, out]."""
        with self._codec:
            expected, error = quantize(name, expert, matrix, self._reference)
        with where.named_in_errors():
            packed = self._written.read_mxfp4(name, expert)
        # HfDirectory rejects a directory whose tensors do not match its config.json
        assert packed is not None
        for (stored_name, values), written in zip(expected.items(), packed, strict=True):
            where.file = self._written.find_file(stored_name)
            where.require_same(stored_name, written, values)

        # The codec computed both sides above. The definition is independent of it.
        blocks, scales = (sampled_rows(tensor) for tensor in packed)
        defined = defined_values(blocks, scales)
        exact = sampled_rows(matrix.mT.to(torch.bfloat16))
        # The reference's bytes must be lossless. Otherwise only the format's rounding is allowed.
        is_exact = torch.equal(defined, exact.float())
        if (error.changed == 0 and not is_exact) or not nearest(defined, exact, scales):
            raise ConversionError(
                f"{where}: the MXFP4 values are not the nearest ones to {self.source.path}, so "
                "quantization gave a wrong result on this machine. Nothing was kept. Convert on another "
                "machine"
            )
        return error


# -- weights in memory -------------------------------------------------------------------------


def check_weights(
    weights: Mapping[str, torch.Tensor],
    partial: Path,
    compared: ComparedParameters,
    progress: Progress | None = None,
) -> ReadBackResult:
    """Compare an unfinished Hugging Face directory with the weights it was written from.

    Args:
        weights: tensors [written_shapes] by stored name, at least those in ``compared``. Experts that
            were written as MXFP4 are given as blocks and scales.
        partial: directory that does not have its final name yet.
        compared: parameters to compare.
        progress: callback that receives the progress.

    Raises:
        ConversionError: naming tensor, expert and file of a difference.
    """
    # HfDirectory compares names, shapes and dtypes with config.json.
    written = HfDirectory(partial, unfinished=True, from_disk=compared.check == "all")

    def compare(mapping: ParameterMapping) -> None:
        """Compare one parameter with the weights in memory."""
        for name in mapping.hf_names:
            where = _Location(mapping, final_name(partial), written.find_file(name))
            with where.named_in_errors():
                parts = _stored_parts(written, name, mapping.expert)

            for stored_name, part in parts.items():
                expected = weights[stored_name]
                if mapping.expert is not None:
                    expected = expected[mapping.expert]
                where.require_same(stored_name, part, expected)

    return _compare_parameters(
        compare,
        kind="weights",
        config=written.config,
        partial=partial,
        compared=compared,
        progress=progress,
    )


def _stored_parts(written: HfDirectory, name: str, expert: int | None) -> dict[str, torch.Tensor]:
    """Read a tensor or one expert's slice of it, by stored name (blocks and scales for MXFP4)."""
    packed = written.read_mxfp4(name, expert)
    if packed is None:
        return {name: written.get(name, expert)}
    return dict(zip(stored_names(name), packed, strict=True))


# -- comparing ---------------------------------------------------------------------------------


def _compare_parameters[Result](
    compare: Callable[[ParameterMapping], Result],
    *,
    kind: str,
    config: ModelConfig,
    partial: Path,
    compared: ComparedParameters,
    use: Callable[[ParameterMapping, Result], None] = lambda mapping, result: None,
    progress: Progress | None,
) -> ReadBackResult:
    """Call ``compare`` for all ``compared`` parameters, on all cores.

    On return, ``partial`` is synced to the disk.

    Args:
        compare: compares one parameter and raises ConversionError if it differs.
        kind: kind of conversion, for ``compared_parameters.save_compared_layer``.
        config: model configuration.
        partial: directory that does not have its final name yet.
        compared: parameters to compare.
        use: receives each result, in the order of the name table.
        progress: callback that receives the progress.
    """
    mappings = list(parameter_mappings(config).values())
    chosen = [mapping for mapping in mappings if compared.includes(mapping)]

    with torch.no_grad(), directory_syncing(partial) as wait_for_sync:
        # The kernel does not drop dirty pages. Sync first, so that reads come from the disk.
        if compared.check == "all":
            wait_for_sync()

        began = time.perf_counter()
        results = ordered_map(
            compare, chosen, size=lambda mapping: mapping.bf16_bytes, progress=progress
        )
        # closing() ends the threads at the first difference, which raises from this loop.
        with contextlib.closing(results):
            for mapping, result in zip(chosen, results, strict=True):
                use(mapping, result)
        ended = time.perf_counter()
        synced = wait_for_sync()

    # Remember the layer after success only, so that a wrong layer is compared again next time.
    if compared.layer is not None:
        save_compared_layer(kind, config, compared.layer)

    # The sync takes its time without the comparison, too. Count only the time beyond it.
    waited_for_disk = min(max(0.0, synced - began), ended - began)
    return ReadBackResult(
        check=compared.check,
        layer=compared.layer,
        layers=config.num_layers,
        compared=sum(math.prod(mapping.shape) for mapping in chosen),
        parameters=sum(math.prod(mapping.shape) for mapping in mappings),
        seconds=ended - began,
        added_seconds=ended - began - waited_for_disk,
    )


def _same_ranges(written: TensorRange | None, source: TensorRange | None, from_disk: bool) -> bool:
    """Return True if a copied tensor has the same bytes in both files.

    False leaves the decision to a comparison of values, whose error names the difference.
    """
    if written is None or source is None:
        return False
    # An unreadable file counts as different: reading the tensor then names the cause.
    try:
        return same_in_files(written, source, from_disk)
    except OSError:
        return False


@dataclass
class _Location:
    """Place to which a parameter was written, for messages."""

    mapping: ParameterMapping
    directory: Path
    """Final name of the directory."""
    file: str

    def __str__(self) -> str:
        return self._describe(", ".join(self.mapping.hf_names))

    def _describe(self, name: str) -> str:
        """Return file and name of a tensor, for messages."""
        text = f"{self.directory / self.file}: tensor {name}"
        if self.mapping.expert is not None:
            text += f", expert {self.mapping.expert}"
        return text

    @contextlib.contextmanager
    def named_in_errors(self) -> Iterator[None]:
        """Add tensor and expert to a ConversionError from inside."""
        try:
            yield
        except ConversionError as error:
            raise ConversionError(
                f"{self} cannot be read back ({error}). Nothing was kept"
            ) from None

    def require_same(self, name: str, written: torch.Tensor, expected: torch.Tensor) -> None:
        """Raise ConversionError if the two tensors differ in a bit."""
        if not same_bits(written, expected):
            raise ConversionError(
                f"{self._describe(name)} {_difference(written, expected)}. Nothing was kept. "
                "Convert again. If it happens again, check memory and disk of this machine"
            )


def _difference(written: torch.Tensor, expected: torch.Tensor) -> str:
    """Describe the difference of two tensors, as the rest of a sentence about the first."""
    if written.dtype != expected.dtype or written.shape != expected.shape:
        return (
            f"was written as {written.dtype} {list(written.shape)}, not {expected.dtype} "
            f"{list(expected.shape)}"
        )
    # Count values, not bytes: a value differs if one of its bytes does.
    differs = as_bytes(written) != as_bytes(expected)
    differs = differs.reshape(-1, written.element_size()).any(-1)
    return (
        f"differs from the expected values in {int(differs.sum()):,} of {len(differs):,} values, "
        f"first at index {int(differs.argmax()):,}"
    )
