"""Hugging Face model directories: lazy reading with checks, and writing that is complete or did not happen.

A directory holds ``config.json`` and either ``model.safetensors`` or ``model.safetensors.index.json`` with the files it
names; one in OpenAI's original format may also hold ``model--00001-of-00007.safetensors`` and so on without an index.
Nothing is read before it is asked for except headers."""

import json
import math
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from converters import hf_layouts
from converters.bits import FileRange
from converters.errors import ConversionError
from converters.hf_layouts import BLOCK, Shape, Stored, is_expert_matrix, mxfp4_shapes
from converters.names import NamedTensor, hf_shapes
from converters.new_directory import new_directory, refuse_partial
from converters.safetensors_files import DTYPES, SafetensorsFile, SafetensorsWriter
from gptoss_kernels import mxfp4
from megatron_gptoss.config import ModelConfig

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
GENERATION_FILE = "generation_config.json"
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"
)  # fmt: skip
LARGEST_FINITE_SCALE = 252
"""Above it 6 * 2 ** (scale - 127) may overflow bf16."""


@dataclass(frozen=True)
class ExpertStack:
    """A tensor [E, ...] of which each expert's slice is read when it is asked for."""

    shape: Shape
    read: Callable[[int], torch.Tensor]

    def __getitem__(self, expert: int) -> torch.Tensor:
        return self.read(expert)


class HfDirectory:
    """The weights of a GPT-OSS directory by Hugging Face name, in the layout of Hugging Face's bf16 models.

    They may be stored as bf16, fp16 or fp32, or with the experts in MXFP4, which are read as bf16; under Hugging Face's
    names or under OpenAI's. Opening checks that every tensor of the architecture is there with its shape, and nothing
    else. Raises ConversionError naming the file, key or tensor. Reading is safe from several threads."""

    def __init__(self, path: Path, unfinished: bool = False, from_disk: bool = False) -> None:
        """``unfinished``: the directory has not got its name yet. ``from_disk``: what is read comes from the disk
        itself, not from the system's cache (which holds on to what was not synced)."""
        self.path, self._from_disk = Path(path), from_disk
        if not self.path.is_dir():
            raise ConversionError(f"{self.path}: no such directory; expected a Hugging Face GPT-OSS model")
        if not unfinished:
            refuse_partial(self.path)
        where = self.path / "config.json"
        try:
            raw = _read_json(where) if where.exists() else {}
            openai = "num_experts" in raw and "model_type" not in raw
            self.config = ModelConfig.from_hf_config(hf_layouts.openai_config(raw) if openai else self.path)
        except KeyError as error:
            raise ConversionError(f"{where}: key {error} is missing") from None
        except ValueError as error:
            message = str(error)
            raise ConversionError(message if str(where) in message else f"{where}: {message}") from None
        self._files: dict[str, SafetensorsFile] = {}
        self._file_of = self._locate()
        self._stored = hf_layouts.stored_tensors(self.config, self._file_of)
        self._check()

    def names(self) -> list[str]:
        """All tensors, in the order of ``names.hf_shapes``."""
        return list(hf_shapes(self.config))

    def dtype(self, name: str) -> torch.dtype:
        stored = list(self._stored[name].shapes)
        return torch.bfloat16 if len(stored) > 1 else DTYPES[self._entry(stored[0]).dtype]

    def file_of(self, name: str) -> str:
        """Name of the file that holds a tensor, by Hugging Face's name or by the name that it is stored under."""
        if name in self._file_of:
            return self._file_of[name]
        return self._file_of[next(iter(self._stored[name].shapes))]

    def file_range(self, name: str) -> FileRange | None:
        """Where in a file the values of a tensor lie; None if it is stored in another form."""
        stored = self._stored[name]
        part, *more = stored.shapes
        if more or stored.output_major or stored.rows != slice(0, None):
            return None
        file, entry = self._files[self._file_of[part]], self._entry(part)
        dtype = DTYPES[entry.dtype]
        return FileRange(file.path, entry.offset, math.prod(entry.shape) * dtype.itemsize, dtype)

    def get(self, name: str, expert: int | None = None) -> torch.Tensor:
        """The tensor, or only the ``expert``-th slice along its first dimension. KeyError if there is no such name.

        An expert matrix that is stored output-major is returned as a transposed view."""
        stored = self._stored[name]
        packed = self.quantised(name, expert)
        tensor = self._rows(next(iter(stored.shapes)), stored, expert) if packed is None else mxfp4.dequantize(*packed)
        if packed is not None and (packed[1] > LARGEST_FINITE_SCALE).any() and not tensor.isfinite().all():
            scales = list(stored.shapes)[1]
            raise ConversionError(
                f"{self.path / self._file_of[scales]}: tensor {scales} has scales above {LARGEST_FINITE_SCALE}, whose "
                "values are beyond bf16"
            )
        return tensor.transpose(-1, -2) if stored.output_major else tensor

    def quantised(self, name: str, expert: int | None = None) -> tuple[torch.Tensor, torch.Tensor] | None:
        """MXFP4 blocks [..., out, in / 32, 16] and scales [..., out, in / 32] as stored; None if it is not MXFP4."""
        stored = self._stored[name]
        if len(stored.shapes) == 1:
            return None
        blocks, scales = (self._rows(part, stored, expert) for part in stored.shapes)
        return blocks, scales

    def view(self, name: str) -> torch.Tensor | ExpertStack:
        """Like ``get``, but experts are read one by one as they are indexed."""
        shape = hf_shapes(self.config)[name]
        return ExpertStack(shape, lambda expert: self.get(name, expert)) if ".experts." in name else self.get(name)

    def _rows(self, part: str, stored: Stored, expert: int | None) -> torch.Tensor:
        file = self._files[self._file_of[part]]
        if expert is None:
            return file.read(part, stored.rows.start, stored.rows.stop)
        return file.read(part, expert, expert + 1)[0]

    def _entry(self, part: str) -> Any:
        return self._files[self._file_of[part]].entries[part]

    def _locate(self) -> dict[str, str]:
        """File of every stored tensor."""
        index = self.path / INDEX_FILE
        if not index.exists():
            files = [SINGLE_FILE] if (self.path / SINGLE_FILE).exists() else []
            files = files or sorted(path.name for path in self.path.glob("model--*.safetensors"))
            if not files:
                raise ConversionError(f"{self.path}: holds neither {SINGLE_FILE} nor {INDEX_FILE}")
            self._files = {file: SafetensorsFile(self.path / file, self._from_disk) for file in files}
            return {name: file for file in files for name in self._files[file].entries}
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ConversionError(f"{index}: key weight_map is missing or not a table of tensor names and files")
        for file in sorted(set(weight_map.values())):
            if not (self.path / file).exists():
                raise ConversionError(f"{index}: names the file {file}, which is not there; download it again")
            self._files[file] = SafetensorsFile(self.path / file, self._from_disk)
        for name, file in weight_map.items():
            if name not in self._files[file].entries:
                raise ConversionError(f"{self.path / file}: tensor {name} is not in it, against what {index.name} says")
        for file, content in self._files.items():
            unlisted = [name for name in content.entries if name not in weight_map]
            if unlisted:
                raise ConversionError(f"{self.path / file}: {_some(unlisted)} in it, but not in {index.name}")
        return weight_map

    def _check(self) -> None:
        shapes = {part: (shape, stored) for stored in self._stored.values() for part, shape in stored.shapes.items()}
        where = self.path / (INDEX_FILE if (self.path / INDEX_FILE).exists() else SINGLE_FILE)
        missing = [part for part in shapes if part not in self._file_of]
        if missing:
            raise ConversionError(f"{where}: {_some(missing)} missing, but config.json describes a model with it")
        unknown = [part for part in self._file_of if part not in shapes]
        if unknown:
            raise ConversionError(f"{where}: {_some(unknown)} unknown to GPT-OSS as config.json describes it")
        for part, file in self._file_of.items():
            entry, (shape, stored) = self._entry(part), shapes[part]
            named = f"{self.path / file}: tensor {part}"
            if entry.shape != shape:
                raise ConversionError(f"{named} has shape {list(entry.shape)}, but config.json describes {list(shape)}")
            if entry.dtype not in (("U8",) if len(stored.shapes) > 1 else ("BF16", "F16", "F32")):
                raise ConversionError(f"{named} has the unsupported dtype {entry.dtype}")


def tokenizer_and_generation(directory: Path) -> tuple[list[Path], dict[str, Any]]:
    """Tokenizer files of a Hugging Face directory, and the content of its generation_config.json ({} without one)."""
    directory = Path(directory)
    if not directory.is_dir():
        raise ConversionError(f"{directory}: no such directory; expected one with tokenizer files")
    generation = directory / GENERATION_FILE
    files = [directory / name for name in TOKENIZER_FILES if (directory / name).exists()]
    return files, _read_json(generation) if generation.exists() else {}


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
    quantised: bool = False,
    check: Callable[[Path], object] | None = None,
) -> None:
    """Write weights, config.json, generation_config.json and copies of ``tokenizer_files`` (under their own names).

    Tensors are written as they come, to files of at most ``max_shard_bytes`` (a larger tensor has its own).
    ``quantised`` says that the experts' matrices come as MXFP4 blocks and scales. ``eos_token_ids`` are stored where
    ``generate`` looks for them. ``check`` is called with the directory when all its files are written, and raises
    ConversionError if they are not right. The directory appears in one move at the end. Raises ConversionError naming
    the file when the disk is full, a tensor is missing, unknown or of another shape, or the directory exists and
    ``overwrite`` is false; whatever was there before stays as it was."""
    with new_directory(Path(directory), overwrite) as partial:
        expected = written_shapes(config, quantised)
        dtype = _write_shards(partial, expected, named_tensors, max_shard_bytes)
        extra: dict[str, Any] = {"dtype": str(dtype).removeprefix("torch.")}
        if quantised:
            extra["quantization_config"] = hf_layouts.QUANTIZATION_CONFIG
        generation = dict(generation_config or {})
        if eos_token_ids:
            generation["eos_token_id"] = list(eos_token_ids)
        extra |= {key: generation[key] for key in ("eos_token_id", "pad_token_id") if key in generation}
        _write_json(partial / "config.json", config.to_hf_config(**extra))
        if generation:
            _write_json(partial / GENERATION_FILE, generation)
        for file in tokenizer_files:
            shutil.copyfile(file, partial / Path(file).name)
        if check is not None:
            check(partial)


def written_shapes(config: ModelConfig, quantised: bool) -> dict[str, Shape]:
    """Every tensor of a Hugging Face directory. ConversionError if MXFP4 blocks do not fit the model's widths."""
    if not quantised:
        return hf_shapes(config)
    for key in ("hidden_size", "intermediate_size"):
        if getattr(config, key) % BLOCK:
            raise ConversionError(f"{key} is {getattr(config, key)}: MXFP4 needs a multiple of {BLOCK}; export to bf16")
    return {
        part: part_shape
        for name, shape in hf_shapes(config).items()
        for part, part_shape in (mxfp4_shapes(name, shape) if is_expert_matrix(name) else {name: shape}).items()
    }


def _write_shards(
    directory: Path, expected: Mapping[str, Shape], named_tensors: Iterable[NamedTensor], max_bytes: int
) -> torch.dtype:
    """Returns the dtype of the weights."""
    shards: list[list[str]] = []
    sizes: dict[str, int] = {}
    dtype: torch.dtype | None = None
    writer: SafetensorsWriter | None = None
    for name, tensor in named_tensors:
        if name in sizes:
            raise ConversionError(f"tensor {name} was given twice")
        if tuple(tensor.shape) != expected.get(name):
            raise ConversionError(f"tensor {name} has shape {list(tensor.shape)}, expected {expected.get(name)}")
        if writer is not None and writer.size + tensor.nbytes > max_bytes:
            writer.close()
            writer = None
        if writer is None:
            writer = SafetensorsWriter(directory / f"shard-{len(shards)}", expected)
            shards.append(writer.names)
        writer.add(name, tensor)
        sizes[name], dtype = tensor.nbytes, dtype or tensor.dtype
    missing = [name for name in expected if name not in sizes]
    if missing or dtype is None or writer is None:
        raise ConversionError(f"{_some(missing)} missing from the weights to write")
    writer.close()
    if len(shards) == 1:
        (directory / "shard-0").rename(directory / SINGLE_FILE)
        return dtype
    weight_map: dict[str, str] = {}
    for i, names in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        (directory / f"shard-{i}").rename(directory / file)
        weight_map |= dict.fromkeys(names, file)
    _write_json(directory / INDEX_FILE, {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map})
    return dtype


def _some(names: list[str]) -> str:
    return f"tensor {names[0]} is" if len(names) == 1 else f"tensor {names[0]} and {len(names) - 1} more are"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConversionError(f"{path}: cannot be read as JSON ({error})") from None
    if not isinstance(content, dict):
        raise ConversionError(f"{path}: holds no JSON object")
    return content


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
