"""Reading and writing of safetensors files piece by piece, with plain file operations.

Memory-mapped reading would count every page of a model as resident, and a file that is truncated
while it is read would end the process. The writer reserves space for the header at the start of the
file.
"""

import errno
import json
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from converters.bits import FileRange
from converters.errors import ConversionError, name_file_in_errors
from megatron_gptoss.untrusted_files import (
    UntrustedFileError,
    check_regular,
    open_regular,
    parse_json,
)

Shape = tuple[int, ...]
DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "U8": torch.uint8,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
LENGTH_BYTES = 8
"""Size of the first field: the length of the JSON header, little-endian."""
MAX_HEADER_BYTES = 100_000_000
"""Size limit of a header. The safetensors library has the same limit."""


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file."""

    dtype_name: str
    """Name of the dtype in safetensors, such as BF16; may be an unsupported dtype."""
    shape: Shape
    offset: int
    """Offset of the first byte in the file."""

    @property
    def dtype(self) -> torch.dtype:
        """Torch dtype. Raises KeyError if it is not supported."""
        return DTYPES[self.dtype_name]

    @property
    def row_bytes(self) -> int:
        """Size of one slice along the first dimension."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize


class SafetensorsFile:
    """Reads tensors or rows of tensors. Thread-safe.

    Methods raise ConversionError naming the file.
    """

    def __init__(self, path: Path, from_disk: bool = False) -> None:
        """Open a file and read its header.

        Args:
            path: file to read.
            from_disk: whether to read values from the disk instead of the page cache. Pages that
                were not synced still come from the cache.
        """
        self.path = path
        self._from_disk = from_disk
        try:
            # open() of a FIFO would block.
            check_regular(path)
            with safe_open(path, framework="pt"):
                pass  # the library checks the header and the length of the file
            self._file = open_regular(path)
            header = _read_header(self._file, path)
        except UntrustedFileError as error:
            raise ConversionError(str(error)) from None
        except (SafetensorError, OSError) as error:
            raise ConversionError(
                f"{path}: truncated or not a safetensors file ({error}{_describe_truncation(path)}). "
                "Copy or download it again"
            ) from None

        self.entries = {
            name: TensorEntry(
                dtype_name=entry["dtype"],
                shape=tuple(entry["shape"]),
                offset=header.data_start + entry["data_offsets"][0],
            )
            for name, entry in header.tensors.items()
        }
        self.metadata = header.metadata
        """Strings by key that the writer stored with the tensors."""

    def file_range(self, name: str, start: int = 0, stop: int | None = None) -> FileRange:
        """Return the byte range of the rows ``start`` to ``stop`` along the first dimension."""
        entry = self.entries[name]
        # A range clips ``stop`` to the number of rows, like a slice.
        rows = range(entry.shape[0])[start:stop]
        return FileRange(
            path=self.path,
            offset=entry.offset + start * entry.row_bytes,
            length=len(rows) * entry.row_bytes,
        )

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Read rows ``start`` to ``stop`` (None: the end) as [rows, ...], in the stored dtype."""
        entry = self.entries[name]
        byte_range = self.file_range(name, start, stop)
        buffer = torch.empty(byte_range.length, dtype=torch.uint8)
        # Drop the pages of this range, so that the read below cannot come from the cache.
        if self._from_disk:
            os.posix_fadvise(
                self._file.fileno(), byte_range.offset, byte_range.length, os.POSIX_FADV_DONTNEED
            )
        try:
            self._fill(memoryview(buffer.numpy()), byte_range.offset)
        except OSError as error:
            raise ConversionError(f"{self.path}: tensor {name} cannot be read ({error})") from None
        rows = byte_range.length // entry.row_bytes
        return buffer.view(entry.dtype).view(rows, *entry.shape[1:])

    def _fill(self, buffer: memoryview, offset: int) -> None:
        """Read until ``buffer`` is full, because one call returns at most 2 GiB."""
        done = 0
        while done < len(buffer):
            count = os.preadv(self._file.fileno(), [buffer[done:]], offset + done)
            # A regular file returns 0 bytes only at its end.
            if count == 0:
                raise OSError(errno.EIO, "the file was truncated")
            done += count


@dataclass(frozen=True)
class _Header:
    tensors: dict[str, dict[str, Any]]
    """JSON entries by tensor name: dtype, shape and data_offsets."""
    metadata: dict[str, str]
    data_start: int
    """Offset from which data_offsets count."""


def _read_header(file: Any, path: Path) -> _Header:
    # A damaged length would otherwise read or allocate any number of bytes.
    (length,) = struct.unpack("<Q", file.read(LENGTH_BYTES))
    if length > MAX_HEADER_BYTES:
        raise ValueError(
            f"{path}: the header declares {length:,} bytes, but at most {MAX_HEADER_BYTES:,} are allowed"
        )
    tensors = parse_json(file.read(length), path)
    metadata = tensors.pop("__metadata__", None) or {}
    return _Header(tensors, metadata, data_start=LENGTH_BYTES + length)


def _describe_truncation(path: Path) -> str:
    """Describe the first incomplete tensor of a truncated file; "" if it cannot be found."""
    try:
        with open(path, "rb") as file:
            header = _read_header(file, path)
        data_bytes = path.stat().st_size - header.data_start

        # The first tensor that ends behind the end of the file was cut.
        by_offset = sorted(header.tensors.items(), key=lambda item: item[1]["data_offsets"])
        for name, entry in by_offset:
            start, stop = entry["data_offsets"]
            if stop > data_bytes:
                return _describe_incomplete_tensor(
                    name, entry["shape"], data_bytes - start, stop - start
                )
    except Exception:  # the header of a damaged file may hold anything
        return ""
    return ""


def _describe_incomplete_tensor(
    name: str, shape: list[int], present_bytes: int, tensor_bytes: int
) -> str:
    rows = shape[0] if shape else 1
    # The index of an expert tells users how much of a download is missing.
    row = max(0, present_bytes) * rows // max(1, tensor_bytes)
    unit = "expert" if ".experts." in name else "row"
    return f"; it ends in tensor {name}, {unit} {row} of {rows}"


class SafetensorsWriter:
    """A new file, to which tensors are appended one by one.

    The file is complete after ``close``, and on the disk after a sync of its directory
    (``new_directory`` syncs it). Methods raise OSError.
    """

    def __init__(
        self,
        path: Path,
        expected: Mapping[str, Shape],
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """Create a file.

        Args:
            path: file to create.
            expected: shape of every tensor that may be added.
            metadata: strings to store with the tensors. Loaders ignore them.
        """
        self._metadata = {"format": "pt", **(metadata or {})}
        # Reserve space for the longest possible header: all tensors, with offsets of 14 digits.
        longest = {
            name: self._entry("BF16", shape, 10**13, 10**13) for name, shape in expected.items()
        }
        # The safetensors library also starts values at a multiple of 8 bytes.
        header_bytes = len(self._header(longest))
        self._header_bytes = math.ceil(header_bytes / 8) * 8

        self.path = path

        # Offsets in the header count from the end of the header, so they start at 0.
        self._entries: dict[str, object] = {}
        self.names: list[str] = []
        self.size = 0
        """Size of the tensors added so far, in bytes."""
        self._file = open(path, "wb")  # noqa: SIM115 (closed by close)
        # ``close`` writes the header, when all offsets are known.
        self._file.seek(LENGTH_BYTES + self._header_bytes)

    def add(self, name: str, tensor: torch.Tensor) -> FileRange:
        """Append ``tensor`` [...] from any device and return its byte range in the file."""
        # Values are written in C order, which a transposed view does not have.
        data = tensor.detach().cpu().contiguous().flatten()
        stop = self.size + data.nbytes
        self._entries[name] = self._entry(
            DTYPE_NAMES[data.dtype], tuple(tensor.shape), self.size, stop
        )
        byte_range = FileRange(
            path=self.path,
            offset=LENGTH_BYTES + self._header_bytes + self.size,
            length=data.nbytes,
        )
        self.names.append(name)
        self.size = stop
        self._write(data.view(torch.uint8).numpy())
        return byte_range

    def close(self) -> None:
        """Write the header and close the file."""
        self._file.seek(0)
        # The format allows spaces after the JSON.
        header = self._header(self._entries).ljust(self._header_bytes)
        self._write(struct.pack("<Q", self._header_bytes) + header)
        with name_file_in_errors(self.path):
            self._file.close()

    def _write(self, data: object) -> None:
        with name_file_in_errors(self.path):
            self._file.write(data)  # type: ignore[arg-type]

    @staticmethod
    def _entry(dtype_name: str, shape: Shape, start: int, stop: int) -> dict[str, object]:
        return {"dtype": dtype_name, "shape": list(shape), "data_offsets": [start, stop]}

    def _header(self, entries: Mapping[str, object]) -> bytes:
        content = {"__metadata__": self._metadata, **entries}
        # Without spaces, as the library writes it.
        return json.dumps(content, separators=(",", ":")).encode()
