"""Hugging Face model directories: lazy, checked reading and complete writing.

A directory holds ``config.json`` and either ``model.safetensors`` or
``model.safetensors.index.json`` with the files it names. A directory in OpenAI's original format
may instead hold ``model--00001-of-00007.safetensors`` and so on without an index. Only headers are
read when a directory is opened.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from converters import hf_layouts
from converters.bits import FileRange, TensorRange, require_finite, same_bits
from converters.errors import (
    ConversionError,
    check_directory_exists,
    check_not_partial,
    count_tensors,
)
from converters.hf_layouts import BLOCK, Shape, StoredTensor, is_expert_matrix, mxfp4_shapes
from converters.hf_shards import ShardWriter, write_json
from converters.mapping import NamedTensor
from converters.model_extras import (
    CONFIG_FILE,
    GENERATION_FILE,
    ModelExtras,
    read_object,
    write_files,
)
from converters.names import hf_shapes
from converters.safetensors_files import SafetensorsFile, TensorEntry
from converters.weight_files import INDEX_FILE, SINGLE_FILE, read_index, weight_files
from gptoss_kernels import mxfp4
from megatron_gptoss.config import ModelConfig
from megatron_gptoss.config.hf_config import TOKEN_IDS
from megatron_gptoss.families.registry import read_hf_config
from megatron_gptoss.new_directory import new_directory

EMBEDDING = "model.embed_tokens.weight"
OUTPUT_LAYER = "lm_head.weight"
LARGEST_FINITE_SCALE = 252
"""Largest scale that is always safe: above it 6 * 2 ** (scale - 127) may overflow bf16."""
FLOATS = ("BF16", "F16", "F32")
ROWS_AT_A_TIME = 8192
"""Rows of the embedding compared at a time, to bound memory."""


@dataclass(frozen=True)
class LazyExpertStack:
    """A tensor [E, ...] of which each expert's slice is read on access."""

    shape: Shape
    read: Callable[[int], torch.Tensor]

    def __getitem__(self, expert: int) -> torch.Tensor:
        return self.read(expert)


# -- reading -----------------------------------------------------------------------------------


class HfDirectory:
    """The weights of a model directory by Hugging Face name, in the layout of bf16 models.

    The weights may be stored as bf16, fp16 or fp32, or with experts in MXFP4, which are read as
    bf16. Hugging Face's and OpenAI's names are supported. Reading is thread-safe.
    """

    def __init__(self, path: Path, unfinished: bool = False, from_disk: bool = False) -> None:
        """Open a directory and check that it holds exactly the tensors of its model.

        Args:
            path: model directory.
            unfinished: whether ``path`` is a directory that is still being written.
            from_disk: whether to read values from the disk instead of the page cache. Pages that
                were not synced still come from the cache.

        Raises:
            ConversionError: naming the file, key or tensor.
        """
        self.path = Path(path)
        check_directory_exists(self.path, "a Hugging Face model")
        if not unfinished:
            check_not_partial(self.path)

        # Headers and JSON only, because models are too large to read for a check.
        self.config, raw_config = _read_model_config(self.path)
        weight_map = read_index(self.path)
        file_names = weight_files(self.path, weight_map)
        self._files = {file: SafetensorsFile(self.path / file, from_disk) for file in file_names}
        # Without an index, the headers name the tensors of each file.
        self._file_of = weight_map or {
            name: file for file, content in self._files.items() for name in content.entries
        }
        # Each check relies on the earlier ones: the files hold the tensors of the index, the names
        # are known, and shapes and dtypes are those of the model.
        self._check_index()
        self._drop_tied_output_layer()
        self._stored = hf_layouts.stored_tensors(self.config, self._file_of)
        self._check_tensors()
        self._check_quantization(raw_config)

    def names(self) -> list[str]:
        """Return the names of all tensors, in the order of ``names.hf_shapes``."""
        return list(hf_shapes(self.config))

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of the tensor returned by ``get``."""
        stored = self._stored[name]
        if stored.is_mxfp4:
            return torch.bfloat16
        return self._entry(stored.names[0]).dtype

    def find_file(self, name: str) -> str:
        """Return the name of the file that holds a tensor, given by Hugging Face or stored name."""
        if name in self._file_of:
            return self._file_of[name]
        return self._file_of[self._stored[name].names[0]]

    def file_ranges(self, name: str, expert: int | None = None) -> list[FileRange]:
        """Return the byte ranges that ``get`` reads."""
        stored = self._stored[name]
        first, stop = _rows(stored, expert)
        return [
            self._file(stored_name).file_range(stored_name, first, stop)
            for stored_name in stored.names
        ]

    def tensor_range(self, name: str) -> TensorRange | None:
        """Return the byte range of a tensor's values; None if they are stored in another layout."""
        # Callers compare bytes, so the range must hold exactly the values of this tensor, in order.
        stored = self._stored[name]
        # Packed, transposed or partial tensors have other bytes than the tensor itself.
        if stored.is_mxfp4 or stored.output_major or stored.rows != slice(0, None):
            return None

        [byte_range] = self.file_ranges(name)
        return TensorRange(byte_range.path, byte_range.offset, byte_range.length, self.dtype(name))

    def get(self, name: str, expert: int | None = None) -> torch.Tensor:
        """Read a tensor [hf_shapes], or one expert's slice of it without the first dimension.

        The dtype is the stored one, bf16 for MXFP4. An expert matrix that is stored output-major is
        returned as a transposed view.

        Args:
            name: Hugging Face name.
            expert: index along the first dimension; None for the whole tensor.

        Raises:
            KeyError: if the model has no such tensor.
            ConversionError: if it cannot be read, or holds NaN, infinity or values beyond bf16.
        """
        stored = self._stored[name]
        packed = self.read_mxfp4(name, expert)
        if packed is None:
            tensor = self._read(stored.names[0], stored, expert)
            stored_name = stored.names[0]
            require_finite(tensor, stored_name, self.path / self._file_of[stored_name], expert)
        else:
            blocks, scales = packed
            tensor = mxfp4.dequantize(blocks, scales)
            # Checking the scales first is cheap. A large scale is harmless if all codes are zero.
            if (scales > LARGEST_FINITE_SCALE).any() and not tensor.isfinite().all():
                scales_name = stored.names[1]
                raise ConversionError(
                    f"{self.path / self._file_of[scales_name]}: tensor {scales_name} has scales "
                    f"above {LARGEST_FINITE_SCALE}, which give values beyond bf16"
                )

        # A view: converting it to contiguous memory here would copy every expert once more.
        if stored.output_major:
            return tensor.transpose(-1, -2)
        return tensor

    def read_mxfp4(
        self, name: str, expert: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Read MXFP4 blocks and scales unmodified; return None if the tensor is not MXFP4.

        Args:
            name: Hugging Face name.
            expert: index of the expert; None for all, which adds a leading dimension.

        Returns:
            Blocks, uint8 [..., out, in / 32, 16], and scales, uint8 [..., out, in / 32].
        """
        stored = self._stored[name]
        if not stored.is_mxfp4:
            return None
        blocks_name, scales_name = stored.names
        blocks = self._read(blocks_name, stored, expert)
        scales = self._read(scales_name, stored, expert)
        return blocks, scales

    def view(self, name: str) -> torch.Tensor | LazyExpertStack:
        """Read a tensor [hf_shapes]. For experts, return a stack that reads each on access."""
        if ".experts." not in name:
            return self.get(name)
        # No read yet: an expert-parallel rank needs only some of the experts.
        shape = hf_shapes(self.config)[name]
        return LazyExpertStack(shape, read=lambda expert: self.get(name, expert))

    def _read(self, stored_name: str, stored: StoredTensor, expert: int | None) -> torch.Tensor:
        """Read a stored tensor, or the slice of one expert."""
        start, stop = _rows(stored, expert)
        # Experts are rows of a stacked tensor, so one expert's slice is contiguous in the file.
        rows = self._file(stored_name).read(stored_name, start, stop)
        if expert is None:
            return rows
        return rows[0]

    def _file(self, stored_name: str) -> SafetensorsFile:
        """Return the file of a stored tensor."""
        return self._files[self._file_of[stored_name]]

    def _entry(self, stored_name: str) -> TensorEntry:
        """Return the header's entry of a stored tensor."""
        return self._file(stored_name).entries[stored_name]

    def _check_index(self) -> None:
        """Check that the files hold exactly the tensors of the index."""
        # A file of an interrupted download or of another revision may lack tensors of the index.
        for name, file in self._file_of.items():
            if name not in self._files[file].entries:
                raise ConversionError(
                    f"{self.path / file}: tensor {name} is missing, but {INDEX_FILE} places it "
                    "there"
                )

        # The opposite direction: tensors that no entry of the index names.
        for file, content in self._files.items():
            twice = [name for name in content.entries if self._file_of.get(name, file) != file]
            if twice:
                raise ConversionError(
                    f"{self.path / file}: {count_tensors(twice)} also in "
                    f"{self._file_of[twice[0]]}, and loaders disagree about which one to read. "
                    "Remove one"
                )
            unlisted = [name for name in content.entries if name not in self._file_of]
            if unlisted:
                raise ConversionError(
                    f"{self.path / file}: {count_tensors(unlisted)} in it, but not in {INDEX_FILE}"
                )

    def _drop_tied_output_layer(self) -> None:
        """Ignore a stored output layer that is tied to the embedding, if both are equal."""
        # Some writers save the tied output layer, too. The model has no such parameter.
        if not self.config.tied_embeddings or OUTPUT_LAYER not in self._file_of:
            return
        stored = self._file(OUTPUT_LAYER)
        where = f"{stored.path}: tensor {OUTPUT_LAYER}"
        if EMBEDDING not in self._file_of:
            raise ConversionError(f"{where} is tied to {EMBEDDING}, which is missing")
        entries = (self._entry(OUTPUT_LAYER), self._entry(EMBEDDING))
        if any(entry.dtype_name not in FLOATS for entry in entries):
            return  # _check_tensors reports the wrong dtype

        same_form = entries[0].shape == entries[1].shape and entries[0].dtype == entries[1].dtype
        rows = entries[0].shape[0] if entries[0].shape else 0
        same_values = same_form and all(
            same_bits(
                stored.read(OUTPUT_LAYER, start, start + ROWS_AT_A_TIME),
                self._file(EMBEDDING).read(EMBEDDING, start, start + ROWS_AT_A_TIME),
            )
            for start in range(0, rows, ROWS_AT_A_TIME)
        )
        if not same_values:
            raise ConversionError(
                f"{where} differs from {EMBEDDING}, but config.json has tie_word_embeddings true, "
                "so loaders disagree about which one to read. Set it to false, or remove the tensor"
            )
        self._file_of = {name: f for name, f in self._file_of.items() if name != OUTPUT_LAYER}

    def _check_quantization(self, raw_config: dict[str, Any]) -> None:
        """Check that config.json declares MXFP4 if and only if experts are stored in it."""
        # OpenAI's original config.json has no such key.
        packed = [name for name, stored in self._stored.items() if stored.is_mxfp4]
        is_declared = raw_config.get("quantization_config") is not None
        if self._is_openai or is_declared == bool(packed):
            return
        if packed:
            problem = "is missing, but experts are stored in MXFP4"
        else:
            problem = "says MXFP4, but experts are stored as floats"
        raise ConversionError(
            f"{self.path / CONFIG_FILE}: quantization_config {problem}, so transformers would read "
            "a different model. Correct config.json"
        )

    @property
    def _is_openai(self) -> bool:
        """True if the directory has OpenAI's format."""
        # OpenAI's format has another name for the embedding.
        return EMBEDDING not in self._file_of

    def _check_tensors(self) -> None:
        """Check that the stored tensors are those of the model configuration."""
        where = self.path / INDEX_FILE
        if not where.exists():
            where = self.path / SINGLE_FILE

        expected = {
            stored_name: stored for stored in self._stored.values() for stored_name in stored.names
        }
        # Missing tensors first: a renamed tensor is missing and unknown, and config.json names the
        # right one.
        missing = [name for name in expected if name not in self._file_of]
        if missing:
            raise ConversionError(
                f"{where}: {count_tensors(missing)} missing, but required by config.json"
            )
        unknown = [name for name in self._file_of if name not in expected]
        if unknown:
            raise ConversionError(
                f"{where}: {count_tensors(unknown)} not part of the {self.config.model_type} model "
                "that config.json describes"
            )
        for name in self._file_of:
            self._check_entry(name, expected[name])

    def _check_entry(self, name: str, stored: StoredTensor) -> None:
        """Raise ConversionError if shape or dtype of a stored tensor is wrong."""
        entry = self._entry(name)
        where = f"{self.path / self._file_of[name]}: tensor {name}"
        shape = stored.shapes[name]
        if entry.shape != shape:
            raise ConversionError(
                f"{where} has shape {list(entry.shape)}, but config.json describes {list(shape)}"
            )

        # Integer and fp8 weights of other quantizations have scales that would be ignored.
        supported = ("U8",) if stored.is_mxfp4 else FLOATS
        if entry.dtype_name not in supported:
            raise ConversionError(f"{where} has the unsupported dtype {entry.dtype_name}")


def _rows(stored: StoredTensor, expert: int | None) -> tuple[int, int | None]:
    """Return the first row to read along dim 0 and the row to stop before (None: the end)."""
    if expert is not None:
        # Experts are slices along dim 0 in every layout, so ``rows`` does not apply.
        return expert, expert + 1
    return stored.rows.start, stored.rows.stop


def _read_model_config(directory: Path) -> tuple[ModelConfig, dict[str, Any]]:
    """Read config.json, as a model configuration and as raw JSON."""
    path = directory / CONFIG_FILE
    try:
        # A missing file gives {} here; read_hf_config below raises the error.
        raw = read_object(path)
        return read_hf_config(directory), raw
    except ConversionError:
        raise
    except (ValueError, OSError) as error:
        # An error about a key does not name the file.
        message = str(error)
        if str(path) not in message:
            message = f"{path}: {message.removeprefix('config: ')}"
        raise ConversionError(message) from None


def vocabulary_size(directory: Path) -> int | None:
    """Return ``vocab_size`` of config.json; None if the file or the key is missing."""
    return read_object(Path(directory) / CONFIG_FILE).get("vocab_size")


# -- writing -----------------------------------------------------------------------------------


def write_hf_directory(
    directory: Path,
    config: ModelConfig,
    named_tensors: Iterable[NamedTensor],
    *,
    extras: ModelExtras | None = None,
    eos_token_ids: Sequence[int] = (),
    max_shard_bytes: int = 5_000_000_000,
    overwrite: bool = False,
    quantized: bool = False,
    further_shapes: Mapping[str, Shape] | None = None,
    on_written: Callable[[str, FileRange], object] | None = None,
    check: Callable[[Path], object] | None = None,
) -> None:
    """Write a complete directory. It appears in one move at the end.

    Args:
        directory: directory to write.
        config: model configuration.
        named_tensors: all weights, with ``written_shapes`` and ``further_shapes``, written in their
            order and dtypes.
        extras: tokenizer, generation settings and token ids to write; none by default.
        eos_token_ids: end tokens that replace those of ``extras``, if any are given.
        max_shard_bytes: maximum size of a file. A larger tensor gets a file alone.
        overwrite: whether to replace an existing directory, after the new one is complete.
        quantized: whether ``named_tensors`` has expert matrices as MXFP4 blocks and scales.
        further_shapes: {name: shape} of tensors that the model does not have.
        on_written: called with stored name and byte range of every written tensor.
        check: called with the unfinished directory after all files are written. It raises
            ConversionError if they are wrong.

    Raises:
        ConversionError: naming the file if the disk is full, a tensor is missing, unknown or of
            a different shape, or the directory exists and ``overwrite`` is False. Existing files stay
            unmodified.
    """
    with new_directory(Path(directory), overwrite) as partial:
        shards = ShardWriter(
            partial,
            expected=written_shapes(config, quantized) | dict(further_shapes or {}),
            max_bytes=max_shard_bytes,
        )
        for name, tensor in named_tensors:
            byte_range = shards.add(name, tensor)
            if on_written is not None:
                on_written(name, byte_range)
            del tensor  # otherwise two tensors are in memory while the next one is computed
        dtype = shards.finish()

        # After the weights, because config.json contains their dtype.
        extras = extras or ModelExtras()
        _write_settings(partial, config, dtype, quantized, extras, list(eos_token_ids))
        write_files(extras.files, partial)
        if check is not None:
            check(partial)


def _write_settings(
    directory: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    quantized: bool,
    extras: ModelExtras,
    eos_token_ids: list[int],
) -> None:
    """Write config.json, and generation_config.json if there are generation settings."""
    # A copy, because the end tokens may be replaced below.
    generation = dict(extras.generation)
    keys: dict[str, Any] = {"dtype": str(dtype).removeprefix("torch.")}
    if quantized:
        keys["quantization_config"] = hf_layouts.QUANTIZATION_CONFIG
    keys |= extras.config
    # Engines read generation_config.json or config.json, so write the same end tokens to both.
    if eos_token_ids:
        generation["eos_token_id"] = keys["eos_token_id"] = eos_token_ids
    # Engines read these keys from config.json if there is no generation_config.json.
    for key in TOKEN_IDS:
        if keys.get(key) is None and key in generation:
            keys[key] = generation[key]

    if generation:
        write_json(directory / GENERATION_FILE, generation)
    write_json(directory / CONFIG_FILE, config.to_hf_config(**keys))


def written_shapes(config: ModelConfig, quantized: bool) -> dict[str, Shape]:
    """Return the shape of every tensor in a directory to write, by stored name.

    Args:
        config: model configuration.
        quantized: whether expert matrices are stored as MXFP4 blocks and scales.

    Raises:
        ConversionError: if ``quantized`` and the model has no experts, or has widths that are not
            a multiple of an MXFP4 block.
    """
    if not quantized:
        return hf_shapes(config)

    if not config.num_experts:
        raise ConversionError(
            f"mxfp4: is a format of experts, and {config.model_type} has none. Export to bf16"
        )
    # The input widths of the two expert matrices, along which blocks run.
    for key in ("hidden_size", "intermediate_size"):
        size = getattr(config, key)
        if size % BLOCK:
            raise ConversionError(
                f"{key}: {size} is not a multiple of {BLOCK}, which MXFP4 requires. Export to bf16"
            )

    shapes: dict[str, Shape] = {}
    for name, shape in hf_shapes(config).items():
        if is_expert_matrix(name):
            shapes |= mxfp4_shapes(name, shape)
        else:
            shapes[name] = shape
    return shapes
