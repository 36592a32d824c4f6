"""Reading and writing of a torch_dist checkpoint, tensor by tensor, without process groups.

    .metadata       pickled torch.distributed.checkpoint Metadata: keys, shapes, places of chunks
    __0_0.distcp    the chunks, each written by torch.save
    metadata.json   marks the directory as a torch_dist checkpoint

The format is that of megatron-core 0.19.2's dist_checkpointing, which loads it at any tensor-,
pipeline- and expert-parallel size.
"""

import contextlib
import io
import json
import math
import os
import pickle
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Self, cast

import torch
import xxhash
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.utils import _create_file_view

from converters.bits import FileRange, TensorRange
from converters.errors import (
    ConversionError,
    check_directory_exists,
    check_not_partial,
    name_file_in_errors,
)
from megatron_gptoss.checkpoint.checksums import FileChecksum, compare_checksums
from megatron_gptoss.checkpoint.directory import describe_earlier, latest_checkpoint
from megatron_gptoss.checkpoint.errors import CheckpointError
from megatron_gptoss.checkpoint.pickled_metadata import METADATA_FILE, read_metadata
from megatron_gptoss.untrusted_files import check_regular

DATA_FILE = "__0_0.distcp"
FORMAT_FILE = "metadata.json"
Shape = tuple[int, ...]


class TorchDistWriter:
    """Appends chunks to a new checkpoint in ``directory``.

    The checkpoint is complete after ``close``, and on the disk after a sync of the directory
    (``new_directory`` syncs it). Methods raise OSError.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._file = open(directory / DATA_FILE, "wb")  # noqa: SIM115 (closed by close)
        self._metadata: dict[str, Any] = {}
        self._byte_ranges: dict[dcp.MetadataIndex, _StorageInfo] = {}
        # Hash the data in memory: a hash of read bytes would miss faults of the disk.
        self._hash = xxhash.xxh3_128()
        self._size = 0

    def add_tensor(
        self, key: str, leading_shape: Shape, leading_index: Shape, tensor: torch.Tensor
    ) -> FileRange:
        """Append one element of a stacked tensor and return its byte range in the file.

        Args:
            key: key of the stacked tensor, whose shape is [*leading_shape, *tensor.shape].
            leading_shape: (), (layers,) or (layers, experts).
            leading_index: index of the element along the leading dimensions.
            tensor: values of the element, on any device.

        Raises:
            ConversionError: if its dtype differs from the dtype of earlier elements.
        """
        # [1, 1, *shape] for an expert's tensor: Megatron's chunks have the leading dimensions.
        chunk = tensor.detach().cpu().contiguous()[(None,) * len(leading_shape)]
        if chunk.untyped_storage().nbytes() != chunk.nbytes:
            # torch.save would write the whole storage of a view
            chunk = chunk.clone()

        shape = torch.Size((*leading_shape, *tensor.shape))
        properties = dcp.TensorProperties(chunk.dtype)
        new_entry = dcp.TensorStorageMetadata(properties, shape, chunks=[])
        entry = self._metadata.setdefault(key, new_entry)
        if entry.properties.dtype != chunk.dtype:
            raise ConversionError(
                f"{key}: element {list(leading_index)} is {chunk.dtype}, but earlier elements are "
                f"{entry.properties.dtype}, and a checkpoint has one dtype per key. Convert all "
                "weights to one dtype"
            )

        # Like Megatron's sharded tensors: an element is a chunk of size 1 along leading dimensions.
        offsets = torch.Size((*leading_index, *(0 for _ in tensor.shape)))
        entry.chunks.append(dcp.ChunkStorageMetadata(offsets, chunk.shape))
        chunk_number = len(entry.chunks) - 1
        return self._write(dcp.MetadataIndex(key, offsets, chunk_number), chunk)

    def add_object(self, key: str, leading_shape: Shape, leading_index: Shape, value: Any) -> None:
        """Store an object that is not a tensor, as a ShardedObject of Megatron.

        Args:
            key: key of the object.
            leading_shape: number of objects along each leading dimension.
            leading_index: index of this object.
            value: object to pickle.
        """
        # The name of Megatron's ShardedObject.unique_key.
        index = ".".join(map(str, leading_index))
        shape = ".".join(map(str, leading_shape))
        unique_key = f"{key}/shard_{index}_{shape}"
        self._metadata[unique_key] = dcp.BytesStorageMetadata()
        self._write(dcp.MetadataIndex(unique_key), [value])

    def _write(self, index: dcp.MetadataIndex, value: Any) -> FileRange:
        # Every chunk is a separate zip archive, concatenated as torch's FileSystemWriter does.
        start = self._file.tell()
        sink = _ErrorKeepingFile(self._file, self._hash)

        # No reader checks the CRCs of torch's zip entries, and computing them is slower than a
        # disk.
        torch.serialization.set_crc32_options(False)
        try:
            torch.save(value, cast(Any, sink))
        finally:
            # The option is global to the process, so restore torch's default.
            torch.serialization.set_crc32_options(True)

        path = self.directory / DATA_FILE
        with name_file_in_errors(path):
            if sink.error is not None:
                raise sink.error
            # tell() counts the buffered bytes, too.
            length = self._file.tell() - start
        self._size += length
        self._byte_ranges[index] = _StorageInfo(DATA_FILE, start, length)
        return FileRange(path, start, length)

    def close(self) -> None:
        """Close the data file and write the metadata."""
        with name_file_in_errors(self.directory / DATA_FILE):
            self._file.close()
        # Written after all chunks: readers take a directory with these two files for complete.
        storage: Any = {"storage_data": self._byte_ranges, "storage_meta": dcp.StorageMeta()}
        metadata = dcp.Metadata(self._metadata, **storage, version="1.0.0")
        (self.directory / METADATA_FILE).write_bytes(pickle.dumps(metadata))
        content = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
        (self.directory / FORMAT_FILE).write_text(json.dumps(content))

    def checksum(self) -> dict[str, FileChecksum]:
        """Return the checksum of the data file. Call it after all chunks are written."""
        return {DATA_FILE: FileChecksum(self._size, self._hash.hexdigest())}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is None:
            self.close()
            return
        # On a full disk, flushing the buffer fails once more. Raise the first error.
        with contextlib.suppress(OSError):
            self._file.close()


class _ErrorKeepingFile:
    """Output of torch.save that keeps an exception, whose message torch's C++ code would hide."""

    def __init__(self, file: io.BufferedWriter, checksum: xxhash.xxh3_128) -> None:
        """Write to ``file`` and update ``checksum`` with the written bytes."""
        self._file = file
        self._checksum = checksum
        self.error: OSError | None = None

    def write(self, data: memoryview) -> int:
        # After the first error, drop the rest. torch ends the archive with further writes.
        if self.error is None:
            try:
                self._file.write(data)
                self._checksum.update(data)
            except OSError as error:
                # Frames of the traceback hold ``data``, whose memory torch frees.
                self.error = error.with_traceback(None)
        return len(data)

    def flush(self) -> None:
        """Do nothing. torch.save calls it at the end."""


def check_not_run(path: Path) -> None:
    """Raise ConversionError, naming the newest checkpoint, if ``path`` is a run's directory."""
    # A user may give the run's directory or its folder of checkpoints.
    for root in (path / "checkpoints", path):
        try:
            newest = latest_checkpoint(root)
        except CheckpointError as error:
            raise ConversionError(str(error)) from None
        if newest is not None:
            raise ConversionError(
                f"{path}: is a run, not a checkpoint. Its newest checkpoint is {newest}"
            )


class TorchDistReader:
    """Reads tensors of a checkpoint by key and leading index, for any layer specification."""

    def __init__(
        self,
        directory: Path,
        unfinished: bool = False,
        from_disk: bool = False,
        verify: bool = True,
    ) -> None:
        """Read the metadata of a checkpoint.

        Args:
            directory: directory of the checkpoint.
            unfinished: whether the checkpoint is still being written.
            from_disk: whether to read values from the disk instead of the page cache. Pages that
                were not synced still come from the cache.
            verify: whether to compare all files of a finished checkpoint with its checksums, which
                reads them.

        Raises:
            ConversionError: naming the missing or damaged file.
        """
        self.directory = Path(directory)
        self._from_disk = from_disk

        # The most likely mistakes first: a wrong path, a run instead of a checkpoint, an
        # unfinished one.
        check_directory_exists(self.directory, "a torch_dist checkpoint")
        check_not_run(self.directory)
        if not unfinished:
            check_not_partial(self.directory)
        for name in (FORMAT_FILE, METADATA_FILE):
            if not (self.directory / name).exists():
                raise ConversionError(
                    f"{self.directory}: not a complete torch_dist checkpoint, {name} is missing"
                )

        if verify and not unfinished:
            damage = compare_checksums(self.directory)
            if damage is not None:
                raise ConversionError(f"{damage}; {describe_earlier(self.directory)}")
        try:
            metadata = read_metadata(self.directory / METADATA_FILE)
        except ValueError as error:
            raise ConversionError(str(error)) from None
        self._byte_ranges: dict[dcp.MetadataIndex, _StorageInfo] = metadata.storage_data
        # Objects such as ``_extra_state`` have no values to convert.
        self._tensors: dict[str, dcp.TensorStorageMetadata] = {
            key: entry
            for key, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, dcp.TensorStorageMetadata)
        }
        self._chunks_by_index: dict[str, dict[Shape, list[dcp.ChunkStorageMetadata]]] = {}

    def keys(self) -> set[str]:
        """Return the keys of all tensors."""
        return set(self._tensors)

    def shape(self, key: str) -> Shape:
        """Return the shape including the leading dimensions.

        Raises:
            ConversionError: if there is no such key.
        """
        if key not in self._tensors:
            raise ConversionError(
                f"{self.directory}: key {key} is missing. Check that gptoss_config.json belongs to this "
                "checkpoint"
            )
        return tuple(self._tensors[key].size)

    def get(self, key: str, leading_index: Shape, shape: Shape) -> torch.Tensor:
        """Read one element [shape] of a stacked tensor, assembled from its chunks.

        Args:
            key: key of the stacked tensor.
            leading_index: index of the element along the leading dimensions.
            shape: expected shape of the element.

        Raises:
            ConversionError: naming the key or the file.
        """
        self._check_element(key, leading_index, shape)
        axes = len(leading_index)
        # A trainer with tensor parallelism saves one chunk per rank, an import saves one chunk.
        result = torch.empty(shape, dtype=self._tensors[key].properties.dtype)
        filled = 0
        for chunk in self._chunks(key, leading_index):
            part = self._read(key, chunk)[(0,) * axes]
            # An import stores the element in one chunk.
            if tuple(part.shape) == shape:
                return part

            starts = chunk.offsets[axes:]
            ranges = zip(starts, part.shape, strict=True)
            result[tuple(slice(start, start + count) for start, count in ranges)] = part
            filled += part.numel()

        # Chunks of one element do not overlap, so counting values finds a missing chunk.
        if filled != result.numel():
            raise ConversionError(
                f"{self.directory}: {METADATA_FILE} places only {filled:,} of the {result.numel():,} "
                f"values of {key}{list(leading_index)} in files. Copy the checkpoint again"
            )
        return result

    def find_file(self, key: str, leading_index: Shape) -> str:
        """Return the name of the file that holds the first chunk of an element."""
        chunks = self._chunks(key, leading_index)
        if not chunks:
            # The metadata lacks the element, so it is the file to name.
            return METADATA_FILE
        return self._byte_range(key, chunks[0]).relative_path

    def chunk_ranges(self, key: str, leading_index: Shape) -> list[FileRange]:
        """Return the byte ranges of an element's chunks, each including its zip archive."""
        ranges = []
        for chunk in self._chunks(key, leading_index):
            byte_range = self._byte_range(key, chunk)
            ranges.append(
                FileRange(
                    self.directory / byte_range.relative_path, byte_range.offset, byte_range.length
                )
            )
        return ranges

    def tensor_range(self, key: str, leading_index: Shape, shape: Shape) -> TensorRange | None:
        """Return the byte range of an element's values; None unless they are one whole chunk."""
        chunks = self._chunks(key, leading_index)
        # Chunks of several ranks are not one range of the file.
        if len(chunks) != 1 or tuple(chunks[0].sizes[len(leading_index) :]) != shape:
            return None

        byte_range = self._byte_range(key, chunks[0])
        path = self.directory / byte_range.relative_path
        dtype = self._tensors[key].properties.dtype
        length = math.prod(shape) * dtype.itemsize
        try:
            check_regular(path)
            with open(path, "rb") as file:
                # torch.save writes a tensor's values, uncompressed, to the record "data/0" of
                # its archive.
                view = cast(Any, _create_file_view(file, byte_range.offset, byte_range.length))
                archive: Any = torch._C.PyTorchFileReader(view)
                start = byte_range.offset + archive.get_record_offset("data/0")
        except (
            Exception
        ):  # a damaged archive raises anything; reading the tensor gives a clear error
            return None

        # The archive's own table may be damaged, too.
        if start + length > byte_range.offset + byte_range.length:
            return None
        return TensorRange(path, start, length, dtype)

    def check_chunk_ranges(self) -> None:
        """Check that every chunk, of tensors and objects, lies in its file and overlaps no other.

        Raises:
            ConversionError: naming the key and its leading index.
        """
        by_file: dict[str, list[_NamedRange]] = {}
        for index, byte_range in self._byte_ranges.items():
            name = index.fqn
            if index.offset is not None:
                # Objects have no offset.
                name += str(list(index.offset))
            named_range = _NamedRange(
                byte_range.offset, byte_range.offset + byte_range.length, name
            )
            by_file.setdefault(byte_range.relative_path, []).append(named_range)

        for file, byte_ranges in by_file.items():
            _check_ranges_in_file(self.directory / file, sorted(byte_ranges))

    def _check_element(self, key: str, leading_index: Shape, shape: Shape) -> None:
        size = self.shape(key)
        leading_shape = size[: len(leading_index)]
        is_inside = all(i < n for i, n in zip(leading_index, leading_shape, strict=False))
        if not is_inside or size[len(leading_index) :] != shape:
            raise ConversionError(
                f"{self.directory}: {key} has shape {list(size)}, which has no element "
                f"{list(leading_index)} of shape {list(shape)}. Check that gptoss_config.json "
                "belongs to this checkpoint"
            )

    def _chunks(self, key: str, leading_index: Shape) -> list[dcp.ChunkStorageMetadata]:
        """Return the chunks of an element. Each chunk belongs to one layer and one expert."""
        if key not in self._chunks_by_index:
            axes = len(leading_index)
            by_index: dict[Shape, list[dcp.ChunkStorageMetadata]] = {}
            for chunk in self._tensors[key].chunks:
                if any(size != 1 for size in chunk.sizes[:axes]):
                    raise ConversionError(
                        f"{self.directory}: {key} is not stored layer by layer, like this "
                        "project's checkpoints"
                    )
                by_index.setdefault(tuple(chunk.offsets[:axes]), []).append(chunk)
            # Indexed once: a key of a large model has thousands of chunks, one per layer and
            # expert.
            self._chunks_by_index[key] = by_index
        return self._chunks_by_index[key].get(leading_index, [])

    def _byte_range(self, key: str, chunk: dcp.ChunkStorageMetadata) -> _StorageInfo:
        return self._byte_ranges[dcp.MetadataIndex(key, chunk.offsets)]

    def _read(self, key: str, chunk: dcp.ChunkStorageMetadata) -> torch.Tensor:
        byte_range = self._byte_range(key, chunk)
        path = self.directory / byte_range.relative_path
        try:
            # open() of a FIFO would block.
            check_regular(path)
            with open(path, "rb") as file:
                # Drop the pages of this range, so that the read below cannot come from the cache.
                if self._from_disk:
                    os.posix_fadvise(
                        file.fileno(), byte_range.offset, byte_range.length, os.POSIX_FADV_DONTNEED
                    )
                view = _create_file_view(file, byte_range.offset, byte_range.length)
                # weights_only: an untrusted pickle could run any code.
                tensor = torch.load(cast(Any, view), map_location="cpu", weights_only=True)
        except FileNotFoundError:
            raise ConversionError(
                f"{path}: missing, but {METADATA_FILE} places {key} in it"
            ) from None
        except Exception as error:  # torch.load of damaged bytes raises many kinds of errors
            raise ConversionError(
                f"{path}: truncated or damaged where {key} should be ({error})"
            ) from None

        # An intact archive may still hold another tensor than the metadata says.
        if tensor.shape != chunk.sizes:
            raise ConversionError(
                f"{path}: the stored part of {key} has shape {list(tensor.shape)}, but {METADATA_FILE} "
                f"says {list(chunk.sizes)}. Copy the checkpoint again"
            )
        return tensor


@dataclass(frozen=True, order=True)
class _NamedRange:
    """Byte range of a chunk according to the metadata, ordered by offset."""

    start: int
    end: int
    name: str


def _check_ranges_in_file(path: Path, byte_ranges: list[_NamedRange]) -> None:
    """Raise ConversionError if sorted ranges overlap or lie outside the file."""
    try:
        file_bytes = path.stat().st_size
    except FileNotFoundError:
        raise ConversionError(
            f"{path}: missing, but {METADATA_FILE} places {byte_ranges[0].name} in it"
        ) from None

    # Sorted by start, so that two ranges overlap only if neighbors do.
    for before, byte_range in pairwise(byte_ranges):
        if byte_range.start < before.end:
            raise ConversionError(f"{path}: {byte_range.name} and {before.name} overlap")
    for byte_range in byte_ranges:
        if byte_range.end > file_bytes:
            raise ConversionError(
                f"{path}: truncated or damaged where {byte_range.name} should be: it has {file_bytes} "
                f"bytes, expected at least {byte_range.end}"
            )
