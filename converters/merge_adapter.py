"""Merge of adapters into a Hugging Face model, to the same bits that the trainer computed with."""

import contextlib
from collections.abc import Generator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch

from converters.adapter_base import parameter_digest, read_base
from converters.adapter_checkpoint import (
    Adapters,
    adapters_digest,
    base_warnings,
    check_base_digest,
    open_adapters,
)
from converters.bits import same_bits
from converters.errors import ConversionError
from converters.hf_directory import HfDirectory, write_hf_directory, written_shapes
from converters.hf_layouts import is_expert_matrix
from converters.mapping import NamedParts, ParameterMapping
from converters.model_extras import ModelExtras, read_extras
from converters.mxfp4_export import quantize
from converters.names import parameter_mappings, stack_experts
from converters.ordered_map import Progress, ordered_map
from converters.reference.mxfp4 import defined_values, nearest, sampled_rows
from converters.reports import MergeReport, MergeRoundingError, UpdateRoundingError
from converters.torch_dist import ExportFormat
from gptoss_kernels import mxfp4
from megatron_gptoss.config.hf_config import MERGED_KEY
from megatron_gptoss.config.precision import torch_dtype
from megatron_gptoss.layers.merge import merge_in_pieces
from megatron_gptoss.new_directory import final_name
from megatron_gptoss.tensor_hash import as_digits

KINDS = {
    "embedding.word_embeddings.weight": ("embedding",),
    "self_attention.linear_qkv.weight": ("q", "k", "v"),
    "self_attention.linear_proj.weight": ("o",),
    "mlp.router.weight": ("router",),
    # All experts have the same end.
    "linear_fc1.weight": ("gate_up",),
    "linear_fc2.weight": ("down",),
    "output_layer.weight": ("head",),
}
"""Kinds of adapters that may change a parameter, by the end of its Megatron name."""


def merge_adapter(
    hf_dir: Path,
    adapter_dir: Path,
    merged_dir: Path,
    dtype: ExportFormat = "bf16",
    progress: Progress | None = None,
    check_progress: Progress | None = None,
) -> MergeReport:
    """Write a Hugging Face model whose weights are merged with an adapter, and read it back.

    Args:
        hf_dir: directory of the base; experts may be MXFP4.
        adapter_dir: checkpoint of a trainer, or an adapter in PEFT's format.
        merged_dir: directory to write. It is renamed to this name after all checks.
        dtype: dtype of the result, and of the base before the merge. Use the dtype of the training.
            With "mxfp4", weights are merged in bf16 and experts are then quantized, which is lossy.
        progress: callback that receives the progress of writing.
        check_progress: callback that receives the progress of reading back.

    Returns:
        The rounding errors, if any, and warnings.

    Raises:
        ConversionError: naming the file, key or tensor. Also if the adapter was trained on another
            base, or is already merged into this one. An adapter written by PEFT has no digest of
            its base. If it names a different base, the report has a warning.
    """
    source = HfDirectory(hf_dir)
    quantized = dtype == "mxfp4"
    # Rejects widths that do not fit MXFP4 blocks before anything is written.
    written_shapes(source.config, quantized)
    # Wrong adapters fail here, before the base is read.
    adapters = open_adapters(adapter_dir, source)
    extras = _add_to_merged(read_extras(hf_dir), adapters, hf_dir)
    merger = _Merger(
        source,
        adapters,
        torch.bfloat16 if quantized else torch_dtype(dtype),
        quantized,
    )

    report = MergeReport(warnings=base_warnings(adapters, Path(hf_dir)))

    def check(partial: Path) -> None:
        # Known only after the whole base was read. No directory appears if it fails.
        merger.check_base()
        merger.read_back(partial, report, check_progress)

    with contextlib.closing(merger.parts(report, progress)) as parts:
        write_hf_directory(
            merged_dir,
            source.config,
            stack_experts(source.config, parts),
            extras=extras,
            quantized=quantized,
            check=check,
        )
    return report


def _add_to_merged(extras: ModelExtras, adapters: Adapters, hf_dir: Path) -> ModelExtras:
    """Add the adapter's digest to the list of merged adapters in config.json.

    Args:
        extras: extras of the base.
        adapters: adapter to merge.
        hf_dir: directory of the base, for errors.

    Raises:
        ConversionError: if the adapter is already in the list, or the list is invalid.
    """
    merged_before = extras.config.get(MERGED_KEY) or []
    if not isinstance(merged_before, list):
        raise ConversionError(
            f"{hf_dir}: {MERGED_KEY} in config.json is {merged_before!r}, expected a list of "
            "digests. Remove the key if no adapter was merged"
        )

    identity = adapters_digest(adapters)
    # A second merge would add the update twice, without any other sign.
    if identity in merged_before:
        raise ConversionError(
            f"{adapters.path}: is already merged into {hf_dir} ({MERGED_KEY} in its config.json). "
            "Merge it into the base on which it was trained"
        )
    return replace(extras, config={**extras.config, MERGED_KEY: [*merged_before, identity]})


@dataclass(frozen=True)
class _Quantized:
    """An expert's merged matrix in MXFP4."""

    parts: dict[str, torch.Tensor]
    """Blocks and scales by stored name."""
    error: MergeRoundingError
    exact: torch.Tensor
    """``sampled_rows`` of the matrix before quantization, bf16 [rows, in]."""


@dataclass(frozen=True)
class _Merged:
    """Result of merging one parameter."""

    mapping: ParameterMapping
    parts: dict[str, torch.Tensor]
    """Merged parts by stored name."""
    digest: torch.Tensor
    """Contribution of the base's parameter to the digest of the base, int64 []."""
    quantized: _Quantized | None
    """Quantized matrix of an expert, if the result is MXFP4; else None."""
    updates: list[UpdateRoundingError]
    """Rounding error of each adapter's update; empty if the trainer rounds, too."""


class _Merger:
    """Merges the parameters of a model, on all cores."""

    def __init__(
        self, source: HfDirectory, adapters: Adapters, dtype: torch.dtype, quantized: bool
    ) -> None:
        self._source = source
        self._adapters = adapters
        self._dtype = dtype
        self._is_quantized = quantized
        self._parameters = list(parameter_mappings(source.config).values())
        # An adapter may cover only some layers and kinds.
        self._mappings = {(mapping.layer, mapping.kind): mapping for mapping in adapters.mappings}
        self._digest = torch.zeros((), dtype=torch.int64)
        # The experts of a layer share two tensors. Threads work on neighboring parameters.
        self._read = lru_cache(maxsize=8)(adapters.read)

    def parts(
        self, report: MergeReport, progress: Progress | None
    ) -> Generator[NamedParts, None, None]:
        """Yield every parameter's parts, in the order of the table.

        Args:
            report: receives the rounding errors.
            progress: callback that receives the progress.
        """
        self._digest.zero_()
        with contextlib.closing(self._results(report, progress)) as results:
            for merged in results:
                # Results come in table order, and the sum does not depend on it.
                self._digest += merged.digest
                yield merged.mapping, merged.parts

    def check_base(self) -> None:
        """Raise ConversionError if the adapters were trained on a different base.

        Needs the digest computed by ``parts``.
        """
        base = f"{self._source.path} in {self._dtype}"
        check_base_digest(self._adapters, as_digits(self._digest), base)

    def read_back(self, partial: Path, report: MergeReport, progress: Progress | None) -> None:
        """Merge a second time, and compare with the unfinished directory and the report.

        Args:
            partial: directory that does not have its final name yet.
            report: rounding errors of the first computation.
            progress: callback that receives the progress.

        Raises:
            ConversionError: naming a tensor that differs, or if the rounding errors differ.
        """
        written = HfDirectory(partial, unfinished=True)
        # A second computation of all rounding errors, to compare with the first.
        again = MergeReport()
        with contextlib.closing(self._results(again, progress)) as results:
            for merged in results:
                found = self._read_written(written, merged)
                for (name, part), found_part in zip(merged.parts.items(), found, strict=True):
                    if not same_bits(found_part, part.contiguous()):
                        raise ConversionError(
                            f"{final_name(partial)}: tensor {name} differs from the written values "
                            "when read back. Nothing was kept. Check memory and disk of this "
                            "machine"
                        )
                if merged.quantized is not None:
                    _check_by_definition(final_name(partial), merged.mapping, merged.quantized)

        # The user sees only the reported errors, so check them, too.
        if again != report:
            raise ConversionError(
                f"{final_name(partial)}: two computations of the rounding error differ. Nothing "
                "was kept. Check the memory of this machine"
            )

    def _read_written(self, written: HfDirectory, merged: _Merged) -> list[torch.Tensor]:
        """Read the written parts of one parameter, in the order of ``merged.parts``."""
        mapping = merged.mapping
        if merged.quantized is None:
            return [written.get(name, mapping.expert) for name in mapping.hf_names]

        packed = written.read_mxfp4(mapping.hf_names[0], mapping.expert)
        # HfDirectory rejects a directory whose tensors do not match its config.json
        assert packed is not None
        return list(packed)

    def _results(
        self, report: MergeReport, progress: Progress | None
    ) -> Generator[_Merged, None, None]:
        """Yield every parameter's merged parts, and add rounding errors to ``report``."""
        results = ordered_map(
            self._merge,
            self._parameters,
            size=lambda mapping: mapping.bf16_bytes,
            progress=progress,
        )
        with contextlib.closing(results):
            for merged in results:
                layer = merged.mapping.layer
                if merged.quantized is not None and layer is not None:
                    report.add(layer, merged.mapping.hf_names[0], merged.quantized.error)
                for error in merged.updates:
                    report.add_update(merged.mapping.name, error)
                yield merged

    def _merge(self, mapping: ParameterMapping) -> _Merged:
        """Merge all adapters of one parameter."""
        parts = read_base(self._source, mapping, self._dtype)
        # The digest is of the base as the trainer held it: merged QKV, in the trainer's dtype.
        base = mapping.to_megatron(*parts)
        digest = parameter_digest(mapping, base)

        # QKV is one parameter with up to three adapters, every other parameter has at most one.
        kinds = self._adapter_kinds(mapping)
        updates: list[UpdateRoundingError] = []
        if len(kinds) > 1:
            # Queries, keys and values have the same orientation in both layouts.
            merged = [
                self._merge_one(mapping, kind, part, updates)
                for kind, part in zip(kinds, parts, strict=True)
            ]
        elif kinds:
            merged = list(mapping.to_hf(self._merge_one(mapping, kinds[0], base, updates)))
        else:
            merged = parts

        if self._is_quantized and is_expert_matrix(mapping.hf_names[0]):
            # Experts have one part each.
            quantized = self._quantize(mapping, parts[0], merged[0])
            return _Merged(mapping, quantized.parts, digest, quantized, updates)

        # Copy here, in parallel. Otherwise the only writing thread would copy.
        converted = [part.to(self._dtype).contiguous() for part in merged]
        named_parts = dict(zip(mapping.hf_names, converted, strict=True))
        return _Merged(mapping, named_parts, digest, quantized=None, updates=updates)

    def _adapter_kinds(self, mapping: ParameterMapping) -> tuple[str, ...]:
        """Return the kinds of adapters that the parameter may have."""
        for ending, kinds in KINDS.items():
            if mapping.name.endswith(ending):
                return kinds
        return ()

    def _merge_one(
        self,
        mapping: ParameterMapping,
        kind: str,
        weight: torch.Tensor,
        updates: list[UpdateRoundingError],
    ) -> torch.Tensor:
        """Merge a weight with the adapter of a kind, if there is one.

        Args:
            mapping: entry of the parameter.
            kind: kind of adapter.
            weight: [out, in].
            updates: receives the rounding error if the trainer did not round merged weights of
                this kind.

        Returns:
            The merged weight, [out, in].
        """
        adapter = self._mappings.get((mapping.layer, kind))
        if adapter is None:
            return weight

        a, b = self._read(adapter)
        if mapping.expert is not None:
            a = a[mapping.expert]
            b = b[mapping.expert]
        # The trainer's own function, so that the merged weight has the bits of the forward pass.
        merged = merge_in_pieces(weight, a, b, adapter.scale)
        if not self._adapters.rounds(kind):
            update = adapter.scale * (b.float() @ a.float())
            error = (merged.float() - weight.float()) - update
            updates.append(
                UpdateRoundingError(float(error.square().sum()), float(update.square().sum()))
            )
        return merged

    def _quantize(
        self, mapping: ParameterMapping, base: torch.Tensor, merged: torch.Tensor
    ) -> _Quantized:
        """Quantize the merged matrix of an expert.

        Args:
            mapping: entry of the parameter.
            base: matrix before the merge, bf16 [in, out].
            merged: matrix after the merge, bf16 [in, out].
        """
        assert mapping.expert is not None
        # If the base is MXFP4, unchanged blocks keep its bytes.
        parts, _ = quantize(mapping.hf_names[0], mapping.expert, merged, self._source)
        blocks, scales = parts.values()

        # In MXFP4's layout, with blocks along the inputs.
        exact = merged.mT.float()
        difference = mxfp4.dequantize(blocks, scales).float() - exact
        update = exact - base.mT.float()
        error = MergeRoundingError(
            values=difference.numel(),
            changed=int(difference.count_nonzero()),
            squared_error=float(difference.square().sum()),
            squared=float(exact.square().sum()),
            squared_update=float(update.square().sum()),
        )
        # Only these rows are compared later, so the matrix can be freed.
        return _Quantized(parts, error, sampled_rows(merged.mT))


def _check_by_definition(directory: Path, mapping: ParameterMapping, quantized: _Quantized) -> None:
    """Compare some rows with the values that MXFP4's definition gives.

    Raises:
        ConversionError: naming tensor and expert.
    """
    # A comparison with the codec itself would miss a mistake that the codec makes twice.
    blocks, scales = (sampled_rows(tensor) for tensor in quantized.parts.values())
    if not nearest(defined_values(blocks, scales), quantized.exact, scales):
        raise ConversionError(
            f"{directory}: the MXFP4 values of {mapping.hf_names[0]}, expert {mapping.expert}, are "
            "not the nearest ones to the merged weights, so quantization gave a wrong result on this "
            "machine. Nothing was kept. Merge on another machine"
        )
