"""Hugging Face model directories: lazy reading with checks, and writing that is complete or did not happen.

A directory holds ``config.json`` and either ``model.safetensors`` or ``model.safetensors.index.json`` with the files it
names. Tensors are read one at a time from memory-mapped files; nothing is read before it is asked for except headers.
"""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from converters.errors import ConversionError
from converters.names import hf_shapes
from megatron_gptoss.config import ModelConfig

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
GENERATION_FILE = "generation_config.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
FLOAT_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


class HfDirectory:
    """The weights of a Hugging Face GPT-OSS directory in bf16, fp16 or fp32, by name.

    Opening checks that every tensor of the architecture is there with its shape, and nothing else. Raises
    ConversionError naming the file, key or tensor.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise ConversionError(f"{self.path}: no such directory; expected a Hugging Face GPT-OSS model")
        try:
            self.config = ModelConfig.from_hf_config(self.path)
        except ValueError as error:
            where = self.path / "config.json"
            message = str(error)
            raise ConversionError(message if str(where) in message else f"{where}: {message}") from None
        self._files: dict[str, Any] = {}
        self._file_of = self._locate()
        self._check()

    def names(self) -> list[str]:
        """All tensors, in the order of ``names.hf_shapes``."""
        return list(hf_shapes(self.config))

    def dtype(self, name: str) -> torch.dtype:
        return FLOAT_DTYPES[self._slice(name).get_dtype()]

    def get(self, name: str, expert: int | None = None) -> torch.Tensor:
        """The tensor, or only the ``expert``-th slice along its first dimension. KeyError if there is no such name."""
        file = self._file_of[name]
        try:
            return self._files[file].get_tensor(name) if expert is None else self._slice(name)[expert]
        except SafetensorError as error:
            raise ConversionError(f"{self.path / file}: tensor {name} cannot be read ({error})") from None

    def _slice(self, name: str) -> Any:
        return self._files[self._file_of[name]].get_slice(name)

    def _locate(self) -> dict[str, str]:
        index, single = self.path / INDEX_FILE, self.path / SINGLE_FILE
        if not index.exists():
            if not single.exists():
                raise ConversionError(f"{self.path}: holds neither {SINGLE_FILE} nor {INDEX_FILE}")
            self._open(SINGLE_FILE)
            return {name: SINGLE_FILE for name in self._files[SINGLE_FILE].keys()}  # noqa: SIM118 (not a dict)
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ConversionError(f"{index}: key weight_map is missing or not a table of tensor names and files")
        for file in sorted(set(weight_map.values())):
            if not (self.path / file).exists():
                raise ConversionError(f"{index}: names the file {file}, which is not there; download it again")
            self._open(file)
        for name, file in weight_map.items():
            if name not in self._files[file].keys():  # noqa: SIM118
                raise ConversionError(f"{self.path / file}: tensor {name} is not in it, against what {index.name} says")
        return weight_map

    def _open(self, file: str) -> None:
        try:
            self._files[file] = safe_open(self.path / file, framework="pt")
        except (SafetensorError, OSError) as error:
            raise ConversionError(
                f"{self.path / file}: truncated or not a safetensors file ({error}); copy or download it again"
            ) from None

    def _check(self) -> None:
        shapes = hf_shapes(self.config)
        quantised = next((name for name in self._file_of if name.endswith("_blocks")), None)
        if quantised:
            raise ConversionError(
                f"{self.path / self._file_of[quantised]}: tensor {quantised} is MXFP4; only bf16, fp16 and fp32 "
                "weights can be read. Save the model with dequantised weights first"
            )
        where = self.path / (INDEX_FILE if (self.path / INDEX_FILE).exists() else SINGLE_FILE)
        missing = [name for name in shapes if name not in self._file_of]
        if missing:
            raise ConversionError(f"{where}: {_some(missing)} missing, but config.json describes a model with it")
        unknown = [name for name in self._file_of if name not in shapes]
        if unknown:
            raise ConversionError(f"{where}: {_some(unknown)} unknown to GPT-OSS as config.json describes it")
        for name, file in self._file_of.items():
            view = self._slice(name)
            if tuple(view.get_shape()) != shapes[name]:
                raise ConversionError(
                    f"{self.path / file}: tensor {name} has shape {view.get_shape()}, "
                    f"but config.json describes {list(shapes[name])}"
                )
            if view.get_dtype() not in FLOAT_DTYPES:
                raise ConversionError(f"{self.path / file}: tensor {name} has the unsupported dtype {view.get_dtype()}")


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
    named_tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    tokenizer_files: Sequence[Path] = (),
    eos_token_ids: Sequence[int] = (),
    generation_config: dict[str, Any] | None = None,
    max_shard_bytes: int = 5_000_000_000,
    overwrite: bool = False,
) -> None:
    """Write weights, config.json, generation_config.json and copies of ``tokenizer_files`` (under their own names).

    Tensors go to files of at most ``max_shard_bytes`` (a larger tensor has its own), one of which is in memory at a
    time. ``eos_token_ids`` are stored where ``generate`` looks for them. The directory appears in one move at the end.
    Raises ConversionError naming the file when the disk is full, a tensor is missing, unknown or of another shape, or
    the directory exists and ``overwrite`` is false; whatever was there before stays as it was.
    """
    with new_directory(Path(directory), overwrite) as partial:
        dtype = _write_shards(partial, config, named_tensors, max_shard_bytes)
        extra: dict[str, Any] = {"dtype": str(dtype).removeprefix("torch.")}
        generation = dict(generation_config or {})
        if eos_token_ids:
            generation["eos_token_id"] = list(eos_token_ids)
        if "eos_token_id" in generation:
            extra["eos_token_id"] = generation["eos_token_id"]
        if "pad_token_id" in generation:
            extra["pad_token_id"] = generation["pad_token_id"]
        _write_json(partial / "config.json", config.to_hf_config(**extra))
        if generation:
            _write_json(partial / GENERATION_FILE, generation)
        for file in tokenizer_files:
            shutil.copyfile(file, partial / Path(file).name)


@contextmanager
def new_directory(final: Path, overwrite: bool = False) -> Iterator[Path]:
    """A directory to fill, which takes the name ``final`` when the block ends well and is deleted when it does not.

    An OSError inside becomes a ConversionError that names the file and the free space.
    """
    if final.exists() and not overwrite:
        raise ConversionError(f"{final}: exists already; delete it or choose another name")
    partial, old = final.with_name(final.name + ".partial"), final.with_name(final.name + ".old")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        if final.exists():
            shutil.rmtree(old, ignore_errors=True)
            final.rename(old)
        partial.rename(final)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        parent = next(p for p in final.absolute().parents if p.exists())
        free = shutil.disk_usage(parent).free >> 20
        raise ConversionError(
            f"{error.filename or final}: cannot be written ({error.strerror or error}); {free} MiB are free in "
            f"{parent}. {final} is as it was"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        if old.exists() and not final.exists():
            old.rename(final)


def _write_shards(
    directory: Path, config: ModelConfig, named_tensors: Iterable[tuple[str, torch.Tensor]], max_shard_bytes: int
) -> torch.dtype:
    """Returns the dtype of the weights."""
    expected = hf_shapes(config)
    shard: dict[str, torch.Tensor] = {}
    shards: list[list[str]] = []
    sizes: dict[str, int] = {}
    dtype: torch.dtype | None = None

    def flush() -> None:
        path = directory / f"shard-{len(shards)}"
        try:
            save_file(shard, path, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(errno.EIO, str(error), str(path)) from None
        path.chmod(directory.stat().st_mode & 0o666)  # safetensors lets only the owner read, whatever the umask
        shards.append(list(shard))
        shard.clear()

    for name, tensor in named_tensors:
        if name in sizes:
            raise ConversionError(f"tensor {name} was given twice")
        if tuple(tensor.shape) != expected.get(name):
            raise ConversionError(f"tensor {name} has shape {list(tensor.shape)}, expected {expected.get(name)}")
        if shard and sum(sizes[other] for other in shard) + tensor.nbytes > max_shard_bytes:
            flush()
        # independent of its source: that may change before the file is written, or share memory with another tensor
        shard[name] = tensor.detach().to("cpu", copy=True).contiguous()
        sizes[name], dtype = tensor.nbytes, dtype or tensor.dtype
    missing = [name for name in expected if name not in sizes]
    if missing or dtype is None:
        raise ConversionError(f"{_some(missing)} missing from the weights to write")
    flush()
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
