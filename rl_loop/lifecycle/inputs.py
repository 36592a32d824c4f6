"""Digests of the files on which the result of a run depends, recorded at its start.

A resume compares them, because a path may have other content by then: a task file with one more
row, or ``initial_weights: runs/sft`` after that run has saved another checkpoint.

Digests of data cover the whole content. Digests of weights must not read 240 GB, so they detect:

- in a checkpoint with checksums, any change, because they are a digest of the checksums;
- in safetensors files, other names, sizes, shapes or dtypes, and other values in the middle
  WEIGHT_BLOCK bytes of any tensor;
- in other files above WHOLE_FILE bytes, another size, and other values in BLOCKS evenly spread
  blocks.

Training, merging and quantizing change values all over a tensor.
"""

import json
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from megatron_gptoss.checkpoint.checksums import CHECKSUMS_FILE, checksum_file
from megatron_gptoss.checkpoint.directory import latest_checkpoint
from megatron_gptoss.checkpoint.errors import CheckpointError
from rl_loop.config.errors import StartError
from rl_loop.config.tasks import TaskConfig
from rl_loop.conversations.config import CorpusConfig
from rl_loop.conversations.rows import hub_files
from rl_loop.data.hub import is_hub_dataset
from rl_loop.environments.registry import environment_class
from rl_loop.environments.tool_servers.config import ToolServerConfig

WEIGHT_BLOCK = 1 << 14
WHOLE_FILE = 1 << 24
BLOCKS = 256
MAX_HEADER_BYTES = 1 << 28
"""Maximum bytes of a safetensors header. Real headers have a few megabytes."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
DATA_SUFFIXES = (".jsonl", ".json", ".parquet")
"""Suffixes by which options of an environment count as data, if the file exists."""

TOOL_SERVERS = "options.servers"
"""Option with tool servers, whose scripts are inputs."""
WEIGHTS = ("initial_weights", "initial_adapter")
"""Keys of the policy's weights."""
TEACHERS = ("loss.teacher", "algorithm.distillation.teacher")
"""Beginnings of the keys of teachers' weights."""


@dataclass(frozen=True)
class RunInput:
    """A file, a directory of weights, or a data set of the hub."""

    path: str
    """Path that is read. For a run directory, its newest checkpoint."""
    digest: str
    """XXH3 of 128 bits, hexadecimal."""


def read_inputs(paths: Mapping[str, str]) -> dict[str, RunInput]:
    """Return the inputs at some paths by configuration key.

    Missing inputs are left out.

    Raises:
        StartError: an input cannot be read.
    """
    inputs = {}
    for key, path in paths.items():
        # ``check_run_requirements`` reports missing inputs.
        if not is_hub_dataset(path) and not Path(path).exists():
            continue
        try:
            inputs[key] = _read_input(key, path)
        # A damaged ``latest``, which ``check_run_requirements`` reports, too.
        except CheckpointError:
            continue
        except OSError as error:
            raise StartError(
                f"{key}: {path} cannot be read ({error.strerror}). Name a file that this user "
                "can read"
            ) from error
    return inputs


def task_input_paths(tasks: TaskConfig) -> dict[str, Any]:
    """Return the paths in ``tasks`` by key. None for keys without a path."""
    paths: dict[str, Any] = {}
    for name, source in tasks.sources.items():
        key = f"tasks.sources.{name}"
        paths[f"{key}.train_path"] = source.train_path
        paths[f"{key}.held_out_path"] = source.held_out_path
        if source.pass_rate is not None:
            paths[f"{key}.pass_rate.episodes"] = source.pass_rate.episodes
        for option, value in source.options.items():
            if isinstance(value, str) and value.endswith(DATA_SUFFIXES) and Path(value).is_file():
                paths[f"{key}.options.{option}"] = value
        options = environment_class(source.environment).Options.model_validate(source.options)
        # Only environments with tool servers have this option.
        for server, config in getattr(options, "servers", {}).items():
            if isinstance(config, ToolServerConfig):
                for number, script in enumerate(config.scripts()):
                    paths[f"{key}.{TOOL_SERVERS}.{server}.script_{number}"] = script
    return paths


def data_input_paths(key: str, data: CorpusConfig | None) -> dict[str, Any]:
    """Return the paths in ``data`` or ``vocabulary_data`` by key. None for keys without a path."""
    paths: dict[str, Any] = {}
    if data is not None:
        for name, source in data.sources.items():
            paths[f"{key}.sources.{name}.path"] = source.path
            paths[f"{key}.sources.{name}.validation_path"] = source.validation_path
    return paths


def resolved_weights(path: Path) -> Path:
    """Return the directory of weights at ``path``. For a run directory, its newest checkpoint."""
    if (path / "config.json").exists():
        return path
    return latest_checkpoint(path / "checkpoints") or path


def to_json(inputs: Mapping[str, RunInput]) -> dict[str, Any]:
    """Return inputs as JSON."""
    return {key: asdict(known) for key, known in inputs.items()}


def from_json(content: Mapping[str, Any]) -> dict[str, RunInput]:
    """Return inputs from JSON."""
    return {key: RunInput(**known) for key, known in content.items()}


# -- digests --------------------------------------------------------------------------------------


def _read_input(key: str, path: str) -> RunInput:
    if key in WEIGHTS or key.startswith(TEACHERS):
        directory = resolved_weights(Path(path))
        return RunInput(os.path.abspath(directory), weights_digest(directory))
    if key == "tokenizer":
        files = [Path(path) / name for name in TOKENIZER_FILES]
        return RunInput(os.path.abspath(path), _joined(file for file in files if file.exists()))
    if is_hub_dataset(path):
        return RunInput(path, _joined(Path(file) for file in hub_files(path)))
    return RunInput(os.path.abspath(path), checksum_file(Path(path)).xxh3_128)


def weights_digest(directory: Path) -> str:
    """Return the digest of a weight directory, see the module. Raises OSError."""
    checksums = directory / CHECKSUMS_FILE
    if checksums.exists():
        return checksum_file(checksums).xxh3_128

    state = xxhash.xxh3_128()
    # The file of adapters has their scale, which no tensor shows. A directory lists files in any
    # order.
    files = sorted([*directory.glob("*.safetensors"), *directory.glob("adapter_config.json")])
    if not files:
        files = sorted(path for path in directory.iterdir() if path.is_file())
    for file in files:
        state.update(file.name.encode())
        for block in _blocks(file):
            state.update(block)
    return state.hexdigest()


def _joined(files: Iterator[Path]) -> str:
    state = xxhash.xxh3_128()
    for file in files:
        state.update(checksum_file(file).xxh3_128.encode())
    return state.hexdigest()


def _blocks(path: Path) -> Iterator[bytes]:
    """Yield the bytes of a file that enter its digest, its size first."""
    size = path.stat().st_size
    yield str(size).encode()
    # A buffer would read ahead after every seek.
    with path.open("rb", buffering=0) as file:
        if size <= WHOLE_FILE:
            yield file.read()
            return

        header = _safetensors_header(file, size) if path.suffix == ".safetensors" else None
        if header is not None:
            yield header
            starts = _middle_offsets(header)
        else:
            starts = [(size - WEIGHT_BLOCK) * i // (BLOCKS - 1) for i in range(BLOCKS)]
        for start in starts:
            file.seek(start)
            yield file.read(WEIGHT_BLOCK)


def _safetensors_header(file: Any, size: int) -> bytes | None:
    """Return the header of a safetensors file. None if the file has another format."""
    # The format: the length of the header as a 64-bit number, the header as JSON, then the tensors.
    (length,) = struct.unpack("<Q", file.read(8))
    if length > min(size, MAX_HEADER_BYTES):
        return None
    header: bytes = file.read(length)
    try:
        json.loads(header)
    except (ValueError, RecursionError):
        return None
    return header


def _middle_offsets(header: bytes) -> list[int]:
    """Return the start of each tensor's middle block, in bytes."""
    starts = []
    for name, tensor in json.loads(header).items():
        # The only entry that is not a tensor.
        if name == "__metadata__":
            continue
        # Offsets count from the end of the header.
        begin, end = tensor["data_offsets"]
        offset = max(0, (end - begin - WEIGHT_BLOCK) // 2)
        starts.append(8 + len(header) + begin + offset)
    # In the order of the file, so that disks and network file systems read forward.
    return sorted(starts)
