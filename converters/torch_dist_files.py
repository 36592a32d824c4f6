"""Files of a torch_dist checkpoint, written and read tensor by tensor, without a model and without process groups.

    .metadata       pickled torch.distributed.checkpoint Metadata: keys, shapes, and where each chunk lies
    __0_0.distcp    the chunks, each as torch.save wrote it
    metadata.json   says that it is a torch_dist checkpoint

This is what megatron-core 0.19.2's dist_checkpointing writes and what it loads at any tensor, pipeline and expert
parallel size."""

import contextlib
import io
import json
import math
import os
import pickle
from pathlib import Path
from typing import Any, Self, cast

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.utils import _create_file_view

from converters.bits import FileRange
from converters.errors import ConversionError, errors_name
from converters.new_directory import refuse_partial

DATA_FILE = "__0_0.distcp"
METADATA_FILE = ".metadata"
FORMAT_FILE = "metadata.json"
Shape = tuple[int, ...]


class TorchDistWriter:
    """Appends chunks to a new checkpoint in ``directory``; complete once ``close`` has returned, and on the disk once
    the directory was synced (``new_directory`` does). Raises OSError."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._file = open(directory / DATA_FILE, "wb")  # noqa: SIM115 (closed by close)
        self._metadata: dict[str, Any] = {}
        self._places: dict[dcp.MetadataIndex, _StorageInfo] = {}

    def add_tensor(self, key: str, leading_shape: Shape, leading_index: Shape, tensor: torch.Tensor) -> None:
        """Store ``tensor`` as element ``leading_index`` of the tensor ``key`` of shape [*leading_shape, *tensor.shape].

        Raises ConversionError if its dtype is not that of the elements before it."""
        offsets = torch.Size((*leading_index, *(0 for _ in tensor.shape)))
        chunk = tensor.detach().cpu().contiguous()[(None,) * len(leading_shape)]
        shape = torch.Size((*leading_shape, *tensor.shape))
        entry = self._metadata.setdefault(key, dcp.TensorStorageMetadata(dcp.TensorProperties(chunk.dtype), shape, []))
        if entry.properties.dtype != chunk.dtype:
            raise ConversionError(
                f"{key}: part {list(leading_index)} is {chunk.dtype}, earlier ones are {entry.properties.dtype}; "
                "a checkpoint keeps one dtype per key: convert all weights to one dtype"
            )
        entry.chunks.append(dcp.ChunkStorageMetadata(offsets, chunk.shape))
        if chunk.untyped_storage().nbytes() != chunk.nbytes:
            chunk = chunk.clone()  # a view would take its whole storage along
        self._write(dcp.MetadataIndex(key, offsets, len(entry.chunks) - 1), chunk)

    def add_object(self, key: str, leading_shape: Shape, leading_index: Shape, value: Any) -> None:
        """Store what is no tensor, as Megatron's ShardedObject of that key, shape and index."""
        place = f"{'.'.join(map(str, leading_index))}_{'.'.join(map(str, leading_shape))}"
        unique_key = f"{key}/shard_{place}"
        self._metadata[unique_key] = dcp.BytesStorageMetadata()
        self._write(dcp.MetadataIndex(unique_key), [value])

    def _write(self, index: dcp.MetadataIndex, value: Any) -> None:
        start = self._file.tell()
        sink = _ErrorKeepingFile(self._file)
        # nothing reads the checksums of torch's zip entries, and computing them is slower than a disk
        torch.serialization.set_crc32_options(False)
        try:
            torch.save(value, cast(Any, sink))
        finally:
            torch.serialization.set_crc32_options(True)
        with errors_name(self.directory / DATA_FILE):
            if sink.error is not None:
                raise sink.error
            self._places[index] = _StorageInfo(DATA_FILE, start, self._file.tell() - start)

    def close(self) -> None:
        with errors_name(self.directory / DATA_FILE):
            self._file.close()
        places: Any = {"storage_data": self._places, "storage_meta": dcp.StorageMeta()}
        metadata = dcp.Metadata(self._metadata, **places, version="1.0.0")
        (self.directory / METADATA_FILE).write_bytes(pickle.dumps(metadata))
        content = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
        (self.directory / FORMAT_FILE).write_text(json.dumps(content))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is None:
            self.close()
        else:
            with contextlib.suppress(OSError):  # what is still buffered finds no place either
                self._file.close()


class _ErrorKeepingFile:
    """What torch.save writes to. An exception inside its C++ would come out without saying what is wrong."""

    def __init__(self, file: io.BufferedWriter) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, data: memoryview) -> int:
        if self.error is None:
            try:
                self._file.write(data)
            except OSError as error:
                # without the frames that hold the view: torch frees what it shows
                self.error = error.with_traceback(None)
        return len(data)

    def flush(self) -> None:
        """torch.save calls it at the end."""


class TorchDistReader:
    """Tensors of a checkpoint by key and leading index, whichever layout and spec of Megatron wrote it."""

    def __init__(self, directory: Path, unfinished: bool = False, from_disk: bool = False) -> None:
        """``unfinished``: the directory has not got its name yet. ``from_disk``: what is read comes from the disk
        itself, not from the system's cache (which holds on to what was not synced)."""
        self.directory, self._from_disk = Path(directory), from_disk
        if not self.directory.is_dir():
            raise ConversionError(f"{self.directory}: no such directory; expected a torch_dist checkpoint")
        if not unfinished:
            refuse_partial(self.directory)
        for name in (FORMAT_FILE, METADATA_FILE):
            if not (self.directory / name).exists():
                raise ConversionError(f"{self.directory}: not a complete torch_dist checkpoint, {name} is missing")
        path = self.directory / METADATA_FILE
        try:
            metadata = pickle.loads(path.read_bytes())
            self._tensors: dict[str, dcp.TensorStorageMetadata] = {
                key: entry
                for key, entry in metadata.state_dict_metadata.items()
                if isinstance(entry, dcp.TensorStorageMetadata)
            }
            self._places: dict[dcp.MetadataIndex, _StorageInfo] = metadata.storage_data
        except Exception as error:  # unpickling a damaged file raises whatever it likes
            raise ConversionError(f"{path}: damaged ({error}); the checkpoint cannot be read") from None
        self._chunks: dict[str, dict[Shape, list[dcp.ChunkStorageMetadata]]] = {}

    def keys(self) -> set[str]:
        return set(self._tensors)

    def shape(self, key: str) -> Shape:
        """With the leading axes. Raises ConversionError if there is no such key."""
        if key not in self._tensors:
            raise ConversionError(f"{self.directory}: key {key} is missing")
        return tuple(self._tensors[key].size)

    def get(self, key: str, leading_index: Shape, shape: Shape) -> torch.Tensor:
        """Element ``leading_index`` of the tensor ``key``, which must have ``shape``, put together from its chunks.

        Raises ConversionError naming the key or the file."""
        size, axes = self.shape(key), len(leading_index)
        entry = self._tensors[key]
        if size[axes:] != shape or any(i >= n for i, n in zip(leading_index, size, strict=False)):
            raise ConversionError(
                f"{self.directory}: {key} has shape {list(entry.size)}, which holds no {list(leading_index)} of "
                f"shape {list(shape)}; does gptoss_config.json belong to this checkpoint?"
            )
        result = torch.empty(shape, dtype=entry.properties.dtype)
        filled = 0
        for chunk in self._chunks_at(key, axes).get(leading_index, []):
            part = self._read(key, chunk)[(0,) * axes]
            if tuple(part.shape) == shape:
                return part
            starts = chunk.offsets[axes:]
            result[tuple(slice(start, start + n) for start, n in zip(starts, part.shape, strict=True))] = part
            filled += part.numel()
        if filled != result.numel():
            raise ConversionError(f"{self.directory}: {key}{list(leading_index)} is incomplete in the checkpoint")
        return result

    def file_of(self, key: str, leading_index: Shape) -> str:
        """Name of the file that holds (the first part of) an element of the tensor ``key``."""
        chunks = self._chunks_at(key, len(leading_index)).get(leading_index, [])
        return self._places[dcp.MetadataIndex(key, chunks[0].offsets)].relative_path if chunks else METADATA_FILE

    def file_range(self, key: str, leading_index: Shape, shape: Shape) -> FileRange | None:
        """Where in a file the values of an element of ``key`` lie; None unless it has ``shape`` and is in one piece."""
        chunks = self._chunks_at(key, len(leading_index)).get(leading_index, [])
        if len(chunks) != 1 or tuple(chunks[0].sizes[len(leading_index) :]) != shape:
            return None
        place = self._places[dcp.MetadataIndex(key, chunks[0].offsets)]
        path, dtype = self.directory / place.relative_path, self._tensors[key].properties.dtype
        length = math.prod(shape) * dtype.itemsize
        try:
            with open(path, "rb") as file:
                part = cast(Any, _create_file_view(file, place.offset, place.length))
                archive: Any = torch._C.PyTorchFileReader(part)
                start = place.offset + archive.get_record_offset("data/0")
        except Exception:  # a damaged archive raises whatever it likes; reading the tensor says what is wrong
            return None
        if start + length > place.offset + place.length:
            return None
        return FileRange(path, start, length, dtype)

    def check_places(self) -> None:
        """Check that every chunk, of tensors and of objects, lies within its file, and no two in the same place.

        Raises ConversionError naming the key and its place in the leading axes."""
        by_file: dict[str, list[tuple[int, int, str]]] = {}
        for index, place in self._places.items():
            name = index.fqn if index.offset is None else f"{index.fqn}{list(index.offset)}"
            by_file.setdefault(place.relative_path, []).append((place.offset, place.length, name))

        for file, chunks in by_file.items():
            path = self.directory / file
            try:
                size = path.stat().st_size
            except FileNotFoundError:
                raise ConversionError(
                    f"{path}: missing, but {METADATA_FILE} says that it holds {chunks[0][2]}"
                ) from None
            end, before = 0, ""
            for offset, length, name in sorted(chunks):
                if offset < end:
                    raise ConversionError(f"{path}: {name} and {before} are in the same place")
                end, before = offset + length, name
                if end > size:
                    raise ConversionError(
                        f"{path}: truncated or damaged where {name} should be: it ends at {size}, not after {end} bytes"
                    )

    def _chunks_at(self, key: str, axes: int) -> dict[Shape, list[dcp.ChunkStorageMetadata]]:
        """Chunks by leading index. Megatron never puts two layers or two experts into one chunk."""
        if key not in self._chunks:
            by_index: dict[Shape, list[dcp.ChunkStorageMetadata]] = {}
            for chunk in self._tensors[key].chunks:
                if any(size != 1 for size in chunk.sizes[:axes]):
                    raise ConversionError(f"{self.directory}: {key} is not stored layer by layer; not a GPT-OSS model")
                by_index.setdefault(tuple(chunk.offsets[:axes]), []).append(chunk)
            self._chunks[key] = by_index
        return self._chunks[key]

    def _read(self, key: str, chunk: dcp.ChunkStorageMetadata) -> torch.Tensor:
        place = self._places[dcp.MetadataIndex(key, chunk.offsets)]
        path = self.directory / place.relative_path
        try:
            with open(path, "rb") as file:
                if self._from_disk:
                    os.posix_fadvise(file.fileno(), place.offset, place.length, os.POSIX_FADV_DONTNEED)
                part = _create_file_view(file, place.offset, place.length)
                tensor = torch.load(cast(Any, part), map_location="cpu", weights_only=True)
        except FileNotFoundError:
            raise ConversionError(f"{path}: missing, but {METADATA_FILE} says that it holds {key}") from None
        except Exception as error:  # torch.load of damaged bytes raises errors of many kinds
            raise ConversionError(f"{path}: truncated or damaged where {key} should be ({error})") from None
        if tensor.shape != chunk.sizes:
            raise ConversionError(f"{path}: {key} has shape {list(tensor.shape)}, not {list(chunk.sizes)}")
        return tensor
