"""Hugging Face model directories: lazy reading with checks, and writing of complete ones.

A directory holds ``config.json`` and either ``model.safetensors`` or
``model.safetensors.index.json`` with the files it names; one in OpenAI's original format may also
hold ``model--00001-of-00007.safetensors`` and so on without an index. Nothing is read before it is
asked for except headers.
"""

import json
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from converters import hf_layouts
from converters.bits import FileRange, TensorRange
from converters.errors import ConversionError, count_tensors
from converters.hf_layouts import BLOCK, Shape, StoredTensor, is_expert_matrix, mxfp4_shapes
from converters.hf_shards import INDEX_FILE, SINGLE_FILE, ShardWriter, write_json
from converters.mapping import NamedTensor
from converters.names import hf_shapes
from converters.new_directory import new_directory, refuse_missing, refuse_partial
from converters.safetensors_files import Entry, SafetensorsFile
from gptoss_kernels import mxfp4
from megatron_gptoss.config import ModelConfig
from megatron_gptoss.families.registry import read_hf_config
from megatron_gptoss.untrusted_files import is_plain_name

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
LARGEST_FINITE_SCALE = 252
"""Above it 6 * 2 ** (scale - 127) may overflow bf16."""


@dataclass(frozen=True)
class ExpertStack:
    """A tensor [E, ...] of which each expert's slice is read when it is asked for."""

    shape: Shape
    read: Callable[[int], torch.Tensor]

    def __getitem__(self, expert: int) -> torch.Tensor:
        return self.read(expert)


# -- reading -----------------------------------------------------------------------------------


class HfDirectory:
    """The weights of a model's directory by Hugging Face name, laid out as in its bf16 models.

    They may be stored as bf16, fp16 or fp32, or with the experts in MXFP4, which are read as bf16;
    under Hugging Face's names or under OpenAI's. Reading is safe from several threads.
    """

    def __init__(self, path: Path, unfinished: bool = False, from_disk: bool = False) -> None:
        """Open ``path`` and check that it holds every tensor of its model, and nothing else.

        Args:
            path: of the directory.
            unfinished: it has not got its name yet.
            from_disk: read values from the disk itself, not from the page cache (which holds on to
                what was not synced).

        Raises:
            ConversionError: naming the file, key or tensor.
        """
        self.path = Path(path)
        refuse_missing(self.path, "a Hugging Face model")
        if not unfinished:
            refuse_partial(self.path)

        self.config = _read_model_config(self.path)
        weight_map = _read_index(self.path)
        if weight_map is None:
            file_names = _files_without_index(self.path)
        else:
            file_names = sorted(set(weight_map.values()))
        self._files = {file: SafetensorsFile(self.path / file, from_disk) for file in file_names}
        self._file_of = weight_map or {
            name: file for file, content in self._files.items() for name in content.entries
        }
        self._stored = hf_layouts.stored_tensors(self.config, self._file_of)
        self._check_index()
        self._check_tensors()

    def names(self) -> list[str]:
        """Return the names of all tensors, in the order of ``names.hf_shapes``."""
        return list(hf_shapes(self.config))

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype that ``get`` returns."""
        stored = self._stored[name]
        if stored.is_mxfp4:
            return torch.bfloat16
        return self._entry(stored.names[0]).dtype

    def file_of(self, name: str) -> str:
        """Return the name of the file that holds a tensor, by Hugging Face's or its stored
        name."""
        if name in self._file_of:
            return self._file_of[name]
        return self._file_of[self._stored[name].names[0]]

    def file_ranges(self, name: str, expert: int | None = None) -> list[FileRange]:
        """Return the bytes that ``get`` reads."""
        stored = self._stored[name]
        first, stop = _rows(stored, expert)
        return [
            self._file(stored_name).file_range(stored_name, first, stop)
            for stored_name in stored.names
        ]

    def tensor_range(self, name: str) -> TensorRange | None:
        """Return the place of a tensor's values; None if it is stored in another form."""
        stored = self._stored[name]
        if stored.is_mxfp4 or stored.output_major or stored.rows != slice(0, None):
            return None

        [place] = self.file_ranges(name)
        return TensorRange(place.path, place.offset, place.length, self.dtype(name))

    def get(self, name: str, expert: int | None = None) -> torch.Tensor:
        """Read a tensor, or only its ``expert``-th slice along the first dimension.

        An expert matrix that is stored output-major is returned as a transposed view.

        Raises:
            KeyError: if there is no such name.
            ConversionError: if it cannot be read, or holds numbers beyond bf16.
        """
        stored = self._stored[name]
        packed = self.read_mxfp4(name, expert)
        if packed is None:
            tensor = self._read(stored.names[0], stored, expert)
        else:
            blocks, scales = packed
            tensor = mxfp4.dequantize(blocks, scales)
            # Looking at the scales first is cheap; large ones of zeros are harmless.
            if (scales > LARGEST_FINITE_SCALE).any() and not tensor.isfinite().all():
                scales_name = stored.names[1]
                raise ConversionError(
                    f"{self.path / self._file_of[scales_name]}: tensor {scales_name} has scales "
                    f"above {LARGEST_FINITE_SCALE}, whose values are beyond bf16"
                )

        if stored.output_major:
            return tensor.transpose(-1, -2)
        return tensor

    def read_mxfp4(
        self, name: str, expert: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Read blocks and scales as they are stored; None if the tensor is not MXFP4.

        Returns:
            blocks uint8 [..., out, in / 32, 16] and scales uint8 [..., out, in / 32].
        """
        stored = self._stored[name]
        if not stored.is_mxfp4:
            return None
        blocks_name, scales_name = stored.names
        blocks = self._read(blocks_name, stored, expert)
        scales = self._read(scales_name, stored, expert)
        return blocks, scales

    def view(self, name: str) -> torch.Tensor | ExpertStack:
        """Read a tensor; of experts, return a stack that reads each one as it is indexed."""
        if ".experts." not in name:
            return self.get(name)
        shape = hf_shapes(self.config)[name]
        return ExpertStack(shape, read=lambda expert: self.get(name, expert))

    def _read(self, stored_name: str, stored: StoredTensor, expert: int | None) -> torch.Tensor:
        start, stop = _rows(stored, expert)
        rows = self._file(stored_name).read(stored_name, start, stop)
        if expert is None:
            return rows
        return rows[0]

    def _file(self, stored_name: str) -> SafetensorsFile:
        return self._files[self._file_of[stored_name]]

    def _entry(self, stored_name: str) -> Entry:
        return self._file(stored_name).entries[stored_name]

    def _check_index(self) -> None:
        """Check that the files hold what the index says, and nothing else."""
        for name, file in self._file_of.items():
            if name not in self._files[file].entries:
                raise ConversionError(
                    f"{self.path / file}: tensor {name} is not in it, against what {INDEX_FILE} "
                    "says"
                )
        for file, content in self._files.items():
            unlisted = [name for name in content.entries if name not in self._file_of]
            if unlisted:
                raise ConversionError(
                    f"{self.path / file}: {count_tensors(unlisted)} in it, but not in {INDEX_FILE}"
                )

    def _check_tensors(self) -> None:
        """Check that the stored tensors are those of the configuration."""
        where = self.path / INDEX_FILE
        if not where.exists():
            where = self.path / SINGLE_FILE

        expected = {
            stored_name: stored for stored in self._stored.values() for stored_name in stored.names
        }
        missing = [name for name in expected if name not in self._file_of]
        if missing:
            raise ConversionError(
                f"{where}: {count_tensors(missing)} missing, but config.json describes a model "
                "with it"
            )
        unknown = [name for name in self._file_of if name not in expected]
        if unknown:
            raise ConversionError(
                f"{where}: {count_tensors(unknown)} unknown to a {self.config.model_type} model as "
                "config.json describes it"
            )
        for name in self._file_of:
            self._check_entry(name, expected[name])

    def _check_entry(self, name: str, stored: StoredTensor) -> None:
        entry = self._entry(name)
        where = f"{self.path / self._file_of[name]}: tensor {name}"
        shape = stored.shapes[name]
        if entry.shape != shape:
            raise ConversionError(
                f"{where} has shape {list(entry.shape)}, but config.json describes {list(shape)}"
            )

        supported = ("U8",) if stored.is_mxfp4 else ("BF16", "F16", "F32")
        if entry.dtype_name not in supported:
            raise ConversionError(f"{where} has the unsupported dtype {entry.dtype_name}")


def _rows(stored: StoredTensor, expert: int | None) -> tuple[int, int | None]:
    """Return the first row to read along dim 0, and the one to stop before (None: the end)."""
    if expert is not None:
        return expert, expert + 1
    return stored.rows.start, stored.rows.stop


def _read_model_config(directory: Path) -> ModelConfig:
    path = directory / CONFIG_FILE
    try:
        # Without a file, from_hf_config below says what is missing.
        raw = _read_json(path) if path.exists() else {}
        is_openai = "num_experts" in raw and "model_type" not in raw
        if is_openai:
            return read_hf_config(hf_layouts.openai_config(raw))
        return read_hf_config(directory)
    except KeyError as error:
        raise ConversionError(f"{path}: key {error} is missing") from None
    except ValueError as error:
        message = str(error)
        if str(path) not in message:
            message = f"{path}: {message}"
        raise ConversionError(message) from None


def _read_index(directory: Path) -> dict[str, str] | None:
    """Return the file name of every stored tensor; None without an index."""
    index = directory / INDEX_FILE
    if not index.exists():
        return None

    # An index that was edited or cut short may be any JSON.
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ConversionError(
            f"{index}: key weight_map is missing or not a table of tensor names and files"
        )
    # Said before opening any file: half a download is the usual reason.
    for file in sorted(set(weight_map.values()), key=str):
        if not is_plain_name(file):
            raise ConversionError(
                f"{index}: names the file {file!r}, which is not in its directory"
            )
        if not (directory / file).exists():
            raise ConversionError(
                f"{index}: names the file {file}, which is not there; download it again"
            )
    return weight_map


def _files_without_index(directory: Path) -> list[str]:
    if (directory / SINGLE_FILE).exists():
        return [SINGLE_FILE]
    files = sorted(path.name for path in directory.glob("model--*.safetensors"))
    if not files:
        raise ConversionError(f"{directory}: holds neither {SINGLE_FILE} nor {INDEX_FILE}")
    return files


def tokenizer_and_generation(directory: Path) -> tuple[list[Path], dict[str, Any]]:
    """Return the tokenizer files of a Hugging Face directory and its generation_config.json.

    The latter is {} without one. Raises ConversionError if there is no such directory.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise ConversionError(f"{directory}: no such directory; expected one with tokenizer files")

    files = [directory / name for name in TOKENIZER_FILES if (directory / name).exists()]
    generation = directory / GENERATION_FILE
    if not generation.exists():
        return files, {}
    return files, _read_json(generation)


def vocabulary_size(directory: Path) -> int | None:
    """Return vocab_size of config.json; None where a directory has no such file or key."""
    path = Path(directory) / CONFIG_FILE
    if not path.exists():
        return None
    return _read_json(path).get("vocab_size")


# -- writing -----------------------------------------------------------------------------------


def write_hf_directory(
    directory: Path,
    config: ModelConfig,
    named_tensors: Iterable[NamedTensor],
    *,
    tokenizer_files: Sequence[Path] = (),
    eos_token_ids: Sequence[int] = (),
    generation_config: dict[str, Any] | None = None,
    max_shard_bytes: int = 5_000_000_000,
    overwrite: bool = False,
    quantized: bool = False,
    on_written: Callable[[str, FileRange], object] | None = None,
    check: Callable[[Path], object] | None = None,
) -> None:
    """Write a complete directory, which appears in one move at the end.

    Args:
        directory: to write.
        config: of the model.
        named_tensors: all weights, written as they come.
        tokenizer_files: copied under their own names.
        eos_token_ids: stored where ``generate`` looks for them.
        generation_config: content of generation_config.json.
        max_shard_bytes: of a file; a larger tensor has its own.
        overwrite: replace a directory that exists, once the new one is complete.
        quantized: the experts' matrices come as MXFP4 blocks and scales.
        on_written: called with name and place of every tensor that was written.
        check: called with the directory when all its files are written; raises ConversionError if
            they are not right.

    Raises:
        ConversionError: naming the file when the disk is full, a tensor is missing, unknown or of
            another shape, or the directory exists and ``overwrite`` is false. Whatever was there
            before stays as it was.
    """
    with new_directory(Path(directory), overwrite) as partial:
        shards = ShardWriter(
            partial,
            expected=written_shapes(config, quantized),
            max_bytes=max_shard_bytes,
        )
        for name, tensor in named_tensors:
            place = shards.add(name, tensor)
            if on_written is not None:
                on_written(name, place)
            del tensor  # or two would be held while the next one is made
        dtype = shards.finish()

        generation = dict(generation_config or {})
        if eos_token_ids:
            generation["eos_token_id"] = list(eos_token_ids)
        _write_settings(partial, config, dtype, quantized, generation)

        for file in tokenizer_files:
            shutil.copyfile(file, partial / Path(file).name)
        if check is not None:
            check(partial)


def _write_settings(
    directory: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    quantized: bool,
    generation: dict[str, Any],
) -> None:
    """Write config.json, and generation_config.json unless ``generation`` is empty."""
    if generation:
        write_json(directory / GENERATION_FILE, generation)

    extra: dict[str, Any] = {"dtype": str(dtype).removeprefix("torch.")}
    if quantized:
        extra["quantization_config"] = hf_layouts.QUANTIZATION_CONFIG
    # Engines read these from config.json where there is no generation_config.json.
    for key in ("eos_token_id", "pad_token_id"):
        if key in generation:
            extra[key] = generation[key]
    write_json(directory / CONFIG_FILE, config.to_hf_config(**extra))


def written_shapes(config: ModelConfig, quantized: bool) -> dict[str, Shape]:
    """Return the shape of every tensor of a directory to write, by stored name.

    Raises:
        ConversionError: if ``quantized`` and the model has no experts, or widths that MXFP4 blocks do
            not fit.
    """
    if not quantized:
        return hf_shapes(config)

    if not config.num_experts:
        raise ConversionError(
            f"mxfp4 is a format of experts, and {config.model_type} has none; export to bf16"
        )
    for key in ("hidden_size", "intermediate_size"):
        size = getattr(config, key)
        if size % BLOCK:
            raise ConversionError(
                f"{key} is {size}: MXFP4 needs a multiple of {BLOCK}; export to bf16"
            )

    shapes: dict[str, Shape] = {}
    for name, shape in hf_shapes(config).items():
        if is_expert_matrix(name):
            shapes |= mxfp4_shapes(name, shape)
        else:
            shapes[name] = shape
    return shapes


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConversionError(f"{path}: cannot be read as JSON ({error})") from None
    if not isinstance(content, dict):
        raise ConversionError(f"{path}: holds no JSON object")
    return content
