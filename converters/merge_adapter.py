"""Merging adapters into a Hugging Face model, to the bits that the trainer multiplied with."""

import contextlib
from collections.abc import Generator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from converters.adapter_checkpoint import CheckpointAdapters, open_adapters
from converters.errors import ConversionError
from converters.hf_directory import HfDirectory, tokenizer_and_generation, write_hf_directory
from converters.names import NamedParts, ParameterMapping, parameter_mappings, stack_experts
from converters.peft_format import PeftDirectory
from converters.pipeline import Progress, ordered_map
from converters.torch_dist import DTYPES, Precision
from megatron_gptoss.checkpoint.base_digest import as_digits, digest_of_values
from megatron_gptoss.layers.merge import merge

KINDS = {
    "self_attention.linear_qkv.weight": ("q", "k", "v"),
    "self_attention.linear_proj.weight": ("o",),
    "mlp.router.weight": ("router",),
    "linear_fc1.weight": ("gate_up",),
    "linear_fc2.weight": ("down",),
}
"""The adapters that may change a parameter, by the end of its Megatron name."""


def merge_adapter(
    hf_dir: Path,
    adapter_dir: Path,
    merged_dir: Path,
    dtype: Precision = "bf16",
    progress: Progress | None = None,
    check_progress: Progress | None = None,
) -> None:
    """Write a Hugging Face model whose weights are merged with an adapter, and read it back.

    Args:
        hf_dir: the base; experts may be in MXFP4, and are not afterwards.
        adapter_dir: a checkpoint of a trainer, or an adapter in PEFT's format.
        merged_dir: the directory to write; it appears in one move at the end.
        dtype: of the result, and of the base before it is merged: that of the training.
        progress: told how far writing is.
        check_progress: told how far reading back is.

    Raises:
        ConversionError: naming the file, key or tensor, also when the checkpoint was trained on
            another base. An adapter in PEFT's format does not say on which it was.
    """
    source = HfDirectory(hf_dir)
    merger = _Merger(source, open_adapters(adapter_dir, source.config), DTYPES[dtype])
    tokenizer_files, generation_config = tokenizer_and_generation(hf_dir)

    def check(partial: Path) -> None:
        merger.check_base()
        merger.read_back(partial, check_progress)

    with contextlib.closing(merger.parts(progress)) as parts:
        write_hf_directory(
            merged_dir,
            source.config,
            stack_experts(source.config, parts),
            tokenizer_files=tokenizer_files,
            generation_config=generation_config,
            check=check,
        )


@dataclass(frozen=True)
class _Merged:
    """What became of one parameter."""

    parts: dict[str, torch.Tensor]
    """Merged, by Hugging Face name."""
    digest: torch.Tensor
    """Of its base."""


class _Merger:
    """Merges the parameters of a model one by one, on all cores."""

    def __init__(
        self,
        source: HfDirectory,
        adapters: PeftDirectory | CheckpointAdapters,
        dtype: torch.dtype,
    ) -> None:
        self._source = source
        self._adapters = adapters
        self._dtype = dtype
        self._table = list(parameter_mappings(source.config).values())
        self._mappings = {(mapping.layer, mapping.kind): mapping for mapping in adapters.mappings}
        self._digest = torch.zeros((), dtype=torch.int64)
        # The experts of a layer share two tensors; threads work on neighbouring parameters.
        self._read = lru_cache(maxsize=8)(adapters.read)

    def parts(self, progress: Progress | None) -> Generator[NamedParts, None, None]:
        """Yield every parameter's merged parts, in the order of the table."""
        self._digest.zero_()
        results = ordered_map(
            self._merge, self._table, size=lambda mapping: mapping.bf16_bytes, progress=progress
        )
        with contextlib.closing(results):
            for mapping, merged in zip(self._table, results, strict=True):
                self._digest += merged.digest
                yield mapping, merged.parts

    def check_base(self) -> None:
        """Raise ConversionError if the adapters were trained on another base."""
        if not isinstance(self._adapters, CheckpointAdapters):
            return
        digest = as_digits(self._digest)
        if digest != self._adapters.base:
            raise ConversionError(
                f"{self._adapters.path}: was trained on another base than {self._source.path}, or "
                f"in another dtype than {self._dtype}: its base's digest is {self._adapters.base}, "
                f"not {digest}"
            )

    def read_back(self, directory: Path, progress: Progress | None) -> None:
        """Compare the unfinished ``directory`` with what is merged a second time."""
        written = HfDirectory(directory, unfinished=True)
        with contextlib.closing(self.parts(progress)) as parts:
            for mapping, expected in parts:
                for name, part in expected.items():
                    if not torch.equal(written.get(name, mapping.expert), part):
                        raise ConversionError(
                            f"{directory}: tensor {name} does not come back as it was written; the "
                            "disk or the memory is damaged"
                        )

    def _merge(self, mapping: ParameterMapping) -> _Merged:
        parts = [self._load(mapping, name) for name in mapping.hf_names]
        base = mapping.to_megatron(*parts)
        layer = 0 if mapping.layer is None else mapping.layer + 1
        digest = digest_of_values(base, layer)

        kinds = self._kinds(mapping)
        if len(kinds) > 1:
            # Queries, keys and values have the same orientation in both layouts.
            merged = [
                self._merge_one(mapping, kind, part)
                for kind, part in zip(kinds, parts, strict=True)
            ]
        elif kinds:
            merged = list(mapping.to_hf(self._merge_one(mapping, kinds[0], base)))
        else:
            merged = parts

        converted = [part.to(self._dtype).contiguous() for part in merged]
        return _Merged(dict(zip(mapping.hf_names, converted, strict=True)), digest)

    def _load(self, mapping: ParameterMapping, name: str) -> torch.Tensor:
        """Read a tensor, or an expert's slice, in the dtype in which a trainer holds it."""
        dtype = self._dtype
        if mapping.name.endswith(".router.bias"):
            dtype = torch.promote_types(dtype, torch.float32)
        return self._source.get(name, mapping.expert).to(dtype)

    def _kinds(self, mapping: ParameterMapping) -> tuple[str, ...]:
        for ending, kinds in KINDS.items():
            if mapping.name.endswith(ending):
                return kinds
        return ()

    def _merge_one(
        self, mapping: ParameterMapping, kind: str, weight: torch.Tensor
    ) -> torch.Tensor:
        """Merge ``weight`` [out, in] with the adapter of this kind, if there is one."""
        assert mapping.layer is not None
        adapter = self._mappings.get((mapping.layer, kind))
        if adapter is None:
            return weight

        a, b = self._read(adapter)
        if mapping.expert is not None:
            a = a[mapping.expert]
            b = b[mapping.expert]
        return merge(weight, a, b, self._adapters.adapter.alpha / adapter.rank)
