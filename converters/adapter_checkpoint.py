"""Conversion of adapters between checkpoints and PEFT's format.

``adapter_weights`` loads adapters into a running model.
"""

import json
import os
from pathlib import Path
from typing import Protocol

import torch
import xxhash

from converters.adapter_base import directory_digest
from converters.bits import as_bytes, require_finite, same_bits
from converters.errors import ConversionError, check_directory_exists
from converters.hf_directory import HfDirectory
from converters.mapping import Shape
from converters.megatron_checkpoint import read_model_config
from converters.ordered_map import Progress
from converters.peft_directory import PeftDirectory
from converters.peft_format import (
    BASE_KEY,
    MERGE_KEY,
    WEIGHTS_FILE,
    AdapterMapping,
    adapter_mappings,
)
from converters.peft_settings import EXPERTS, PEFT_CONFIG_FILE, peft_config
from converters.safetensors_files import SafetensorsWriter
from converters.torch_dist_files import TorchDistReader, TorchDistWriter, check_not_run
from megatron_gptoss.checkpoint.checksums import write_checksums
from megatron_gptoss.checkpoint.directory import ADAPTER_FILE, MODEL_CONFIG_FILE
from megatron_gptoss.config import AdapterConfig, ModelConfig
from megatron_gptoss.config.precision import Precision, torch_dtype
from megatron_gptoss.new_directory import final_name, new_directory
from megatron_gptoss.untrusted_files import read_json


class CheckpointAdapters:
    """The adapters of a trainer's checkpoint, joined over its ranks."""

    def __init__(self, path: Path, unfinished: bool = False) -> None:
        """Open a checkpoint.

        Args:
            path: directory of the checkpoint.
            unfinished: whether ``path`` is a directory that is still being written.

        Raises:
            ConversionError: naming the missing file.
        """
        check_directory_exists(path, "a torch_dist checkpoint of adapters")
        check_not_run(path)
        self.path = path
        self.model = read_model_config(path / MODEL_CONFIG_FILE)
        self.adapter, self.base = _read_adapter_file(path / ADAPTER_FILE)
        """Adapter settings, and the digest of the base model."""
        self.mappings = list(adapter_mappings(self.model, self.adapter))
        self._reader = TorchDistReader(path, unfinished)

    def rounds(self, kind: str) -> bool:
        """Return True if the trainer rounded merged weights of a kind."""
        return self.adapter.merge_experts or kind not in EXPERTS

    def read(self, mapping: AdapterMapping) -> tuple[torch.Tensor, torch.Tensor]:
        """Read the factors A [rank, in] and B [out, rank]; those of experts are stacked."""
        # A rank saves its experts of a layer as one chunk. Old checkpoints have one per expert.
        a_shape, b_shape = mapping.factor_shapes
        index = mapping.checkpoint_index
        a = self._reader.get(f"{mapping.checkpoint_key}.a", index, a_shape)
        b = self._reader.get(f"{mapping.checkpoint_key}.b", index, b_shape)
        for name, factor in zip(mapping.names, (a, b), strict=True):
            require_finite(factor, name, self.path)
        return a, b


Adapters = CheckpointAdapters | PeftDirectory


class AdapterSource(Protocol):
    """Adapters that ``write_peft`` writes."""

    path: Path
    """Directory of the adapters, for messages."""
    model: ModelConfig
    """Configuration of the base."""
    adapter: AdapterConfig
    """Settings of the adapters."""
    base: str
    """Digest of the base."""
    mappings: list[AdapterMapping]
    """Entries of all adapters, in the order of the model's weights."""

    def read(self, mapping: AdapterMapping) -> tuple[torch.Tensor, torch.Tensor]: ...


def _read_adapter_file(file: Path) -> tuple[AdapterConfig, str]:
    """Read the adapter settings and the digest of the base model."""
    try:
        content = read_json(file)
        return AdapterConfig.model_validate(content["settings"]), content["base"]
    except FileNotFoundError:
        raise ConversionError(
            f"{file}: missing. Only checkpoints of adapters have it: of a run that trains "
            "adapters, or of an import"
        ) from None
    # pydantic's errors are ValueErrors of several lines, joined below.
    except (KeyError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ConversionError(
            f"{file}: damaged, or written by another version ({reason})"
        ) from None


def open_adapters(path: Path, base: HfDirectory) -> Adapters:
    """Open adapters in PEFT's format or in a trainer's checkpoint, and check that they fit a base.

    Only architectures are compared here, and the base's tensors that PEFT saved. The digest of all
    values is compared by ``check_base_digest``.

    Args:
        path: adapter in PEFT's format, or a checkpoint of adapters.
        base: model that the adapters change.

    Raises:
        ConversionError: naming the file, setting or tensor that does not fit.
    """
    check_directory_exists(
        path, "a torch_dist checkpoint of adapters, or an adapter in PEFT's format"
    )

    # A checkpoint of adapters has the model's configuration, a PEFT directory does not.
    if not (path / MODEL_CONFIG_FILE).exists():
        check_not_run(path)
        peft = PeftDirectory(path, base.config)
        peft.check_base_copies(base.get)
        return peft

    adapters = CheckpointAdapters(path)
    theirs = adapters.model.model_dump()
    for key, value in base.config.model_dump().items():
        # initializer_std does not affect existing weights
        if theirs[key] != value and key != "initializer_std":
            raise ConversionError(
                f"{path}: holds adapters of a different model: {key} is {theirs[key]}, but {value} in "
                "the base"
            )
    return adapters


def check_base_digest(adapters: Adapters, digest: str, base: str) -> None:
    """Raise ConversionError unless the adapters were trained on the base with this digest.

    Adapters written by PEFT have no digest and pass.

    Args:
        adapters: adapters of a checkpoint or in PEFT's format.
        digest: digest of the base to change.
        base: path and dtype of the base, for the error.
    """
    if adapters.base not in (None, digest):
        raise ConversionError(
            f"{adapters.path}: was trained on a different base than {base}, or in a different dtype: its "
            f"base's digest is {adapters.base}, not {digest}. Give the base and the precision of "
            "the training"
        )


def adapters_digest(adapters: Adapters) -> str:
    """Return a digest of the values and scales of adapters, equal for both formats."""
    state = xxhash.xxh3_128()
    for mapping in adapters.mappings:
        state.update(f"{mapping.kind} {mapping.layer} {mapping.scale!r}".encode())
        for factor in adapters.read(mapping):
            # Dtypes may differ between the two formats. fp32 represents all of them exactly.
            state.update(as_bytes(factor.float()))
    return state.hexdigest()


def base_warnings(adapters: Adapters, base: Path) -> list[str]:
    """Return a warning if an adapter without a digest names a different base than ``base``.

    Args:
        adapters: adapters of a checkpoint or in PEFT's format.
        base: directory of the base.

    Returns:
        At most one warning.
    """
    if not isinstance(adapters, PeftDirectory) or adapters.base is not None:
        return []
    name = adapters.base_name
    if not name:
        return [
            f"{adapters.path}: has no record of its base, so it was not checked that the base is "
            f"{base}"
        ]

    # os.path.exists returns False for strings that cannot be a path.
    if os.path.exists(name) and base.exists():
        is_same = os.path.samefile(name, base)
    else:
        # A name such as openai/gpt-oss-20b: compare its last part with the resolved path.
        is_same = name.rstrip("/").rpartition("/")[2].lower() in str(base.resolve()).lower()
    if is_same:
        return []
    return [
        f"{adapters.path}: was trained on {name} according to its {PEFT_CONFIG_FILE}, whose name "
        f"differs from {base}. Their weights were not compared"
    ]


# -- export ------------------------------------------------------------------------------------


def export_adapter(
    checkpoint: Path, peft_dir: Path, base: str | None = None, *, overwrite: bool = False
) -> None:
    """Write the adapters of a trainer's checkpoint in PEFT's format, and read them back.

    Args:
        checkpoint: checkpoint of a run that trains adapters, or of imported adapters.
        peft_dir: directory to write. It appears in one move at the end.
        base: Hugging Face name or directory of the base, for ``adapter_config.json``.
        overwrite: whether to replace an existing directory, after the new one is complete.

    Raises:
        ConversionError: naming the file, key or tensor.
    """
    source = CheckpointAdapters(checkpoint)
    # The directory appears only after the comparison at the end has succeeded.
    with new_directory(peft_dir, overwrite) as partial:
        write_peft(partial, source, base)


def write_peft(directory: Path, source: AdapterSource, base: str | None = None) -> None:
    """Write adapters in PEFT's format to an existing directory, and read them back.

    Args:
        directory: empty directory, which is still being written.
        source: adapters to write.
        base: Hugging Face name or directory of the base, for ``adapter_config.json``.

    Raises:
        ConversionError: naming the file, key or tensor.
    """
    expected: dict[str, Shape] = {}
    for mapping in source.mappings:
        expected.update(zip(mapping.names, mapping.peft_shapes, strict=True))
    settings = peft_config(source.model, source.adapter, base)
    (directory / PEFT_CONFIG_FILE).write_text(json.dumps(settings, indent=2))
    # The digest lets a merge reject a different base.
    metadata = {BASE_KEY: source.base}
    if not source.adapter.merge_experts:
        metadata[MERGE_KEY] = "false"
    writer = SafetensorsWriter(directory / WEIGHTS_FILE, expected, metadata)
    for mapping in source.mappings:
        factors = mapping.to_peft(*source.read(mapping))
        for name, factor in zip(mapping.names, factors, strict=True):
            writer.add(name, factor)
    writer.close()
    # Open the directory like any adapter of PEFT, with all checks of the import.
    _check_written(PeftDirectory(directory, source.model), source)


def peft_base_name(base: Path | None) -> str | None:
    """Return the name of the base for ``adapter_config.json``; None if PEFT cannot load it.

    Args:
        base: directory of the model with which the run began.
    """
    if base is not None and (base / "config.json").exists():
        # PEFT loads the base from this name. A torch_dist checkpoint is no base for it.
        return str(base)
    return None


def _check_written(written: Adapters, source: AdapterSource | PeftDirectory) -> None:
    """Compare every tensor of an unfinished directory with its source, bit for bit."""
    for mapping in source.mappings:
        pairs = zip(written.read(mapping), source.read(mapping), strict=True)
        if not all(same_bits(found, expected) for found, expected in pairs):
            raise ConversionError(
                f"{final_name(written.path)}: {mapping.names[0]} differs from the written values "
                "when read back. Nothing was kept. Check memory and disk of this machine"
            )


# -- import ------------------------------------------------------------------------------------


def import_adapter(
    peft_dir: Path,
    checkpoint: Path,
    base: Path,
    dtype: Precision = "bf16",
    progress: Progress | None = None,
) -> list[str]:
    """Write an adapter in PEFT's format as a checkpoint of adapters, and read it back.

    Tensors keep their dtypes. The trainer converts them when it loads the checkpoint. The
    checkpoint stores the digest of ``base``. If ``export_adapter`` wrote the adapter, it already
    has a digest, and both must be equal.

    Args:
        peft_dir: directory of the adapter.
        checkpoint: directory to write. It appears in one move at the end.
        base: Hugging Face directory of the model that the adapter changes.
        dtype: dtype in which the trainer will hold the base.
        progress: callback that receives the progress of reading the base.

    Returns:
        Warnings for the user.

    Raises:
        ConversionError: naming the file, setting or tensor that does not fit, before the base's
            weights are read.
    """
    # Reads headers only. The digest of the values follows below.
    source = HfDirectory(base)
    adapters = PeftDirectory(peft_dir, source.config)
    # Fails for adapters that a trainer cannot continue, before the base is read.
    settings = adapters.adapter.model_dump(mode="json")

    with new_directory(checkpoint) as partial:
        adapters.check_base_copies(source.get)
        with TorchDistWriter(partial) as writer:
            for mapping in adapters.mappings:
                _write_factors(writer, source.config, mapping, *adapters.read(mapping))
            state = {"checkpoint_version": 3.0, "iteration": 0}
            writer.add_object("common_state", (1,), (0,), state)

        # Reads the whole base, so it comes after the cheap checks.
        digest = directory_digest(source, torch_dtype(dtype), progress)
        check_base_digest(adapters, digest, f"{base} in {dtype}")
        # A trainer compares both with its own before it loads the adapters.
        content = {"base": digest, "settings": settings}
        (partial / ADAPTER_FILE).write_text(json.dumps(content, indent=1))
        (partial / MODEL_CONFIG_FILE).write_text(source.config.model_dump_json(indent=1))
        write_checksums(partial, writer.checksum())
        _check_written(CheckpointAdapters(partial, unfinished=True), adapters)
    return base_warnings(adapters, base)


def _write_factors(
    writer: TorchDistWriter,
    model: ModelConfig,
    mapping: AdapterMapping,
    a: torch.Tensor,
    b: torch.Tensor,
) -> None:
    """Append A [rank, in] and B [out, rank] in the layout of a trainer's checkpoint.

    The factors of experts are stacked along a leading dimension.
    """
    index = mapping.checkpoint_index
    # Adapters outside of layers have no leading dimension.
    leading_shape = (model.num_layers,)[: len(index)]
    for name, factor in (("a", a), ("b", b)):
        writer.add_tensor(f"{mapping.checkpoint_key}.{name}", leading_shape, index, factor)
