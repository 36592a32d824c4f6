"""Safetensors files, read and written piece by piece with plain file operations.

Memory-mapped reading would count every page of a model as resident, and a file that is cut short under a running
reader would end the process. Writing needs no list of tensors beforehand: room for the header is left at the start."""

import errno
import json
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from converters.errors import ConversionError, errors_name

Shape = tuple[int, ...]
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "U8": torch.uint8}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Entry:
    """One tensor of a file."""

    dtype: str
    """As safetensors calls it, such as BF16."""
    shape: Shape
    offset: int
    """Of its first byte in the file."""


class SafetensorsFile:
    """Reads tensors, whole or some of their rows, from several threads at once. Raises ConversionError."""

    def __init__(self, path: Path, from_disk: bool = False) -> None:
        """``from_disk``: what is read comes from the disk itself, not from the system's cache
        (which holds on to what was not synced)."""
        self.path, self._from_disk = path, from_disk
        try:
            with safe_open(path, framework="pt"):
                pass  # the library checks the header and that the file is as long as it says
            self._file = open(path, "rb", buffering=0)  # noqa: SIM115 (lives as long as this object)
            (length,) = struct.unpack("<Q", self._file.read(8))
            header = json.loads(self._file.read(length))
        except (SafetensorError, OSError) as error:
            where = _where_it_ends(path)
            raise ConversionError(
                f"{path}: truncated or not a safetensors file ({error}{where}); copy or download it again"
            ) from None
        self.entries = {
            name: Entry(entry["dtype"], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0])
            for name, entry in header.items()
            if name != "__metadata__"
        }

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Rows ``start`` to ``stop`` along the first dimension."""
        entry = self.entries[name]
        shape = (len(range(*slice(start, stop).indices(entry.shape[0]))), *entry.shape[1:])
        dtype = DTYPES[entry.dtype]
        buffer = torch.empty(math.prod(shape) * dtype.itemsize, dtype=torch.uint8)
        offset = entry.offset + start * math.prod(shape[1:]) * dtype.itemsize
        view, done = memoryview(buffer.numpy()), 0
        if self._from_disk:
            os.posix_fadvise(self._file.fileno(), offset, len(view), os.POSIX_FADV_DONTNEED)
        try:
            while done < len(view):
                count = os.preadv(self._file.fileno(), [view[done:]], offset + done)
                if count == 0:
                    raise OSError(errno.EIO, "the file has become shorter")
                done += count
        except OSError as error:
            raise ConversionError(f"{self.path}: tensor {name} cannot be read ({error})") from None
        return buffer.view(dtype).view(shape)


def _where_it_ends(path: Path) -> str:
    """Which tensor of a truncated file is the first that is not whole; nothing if that cannot be said."""
    try:
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        present = path.stat().st_size - 8 - length
        for name, entry in sorted(header.items(), key=lambda item: item[1].get("data_offsets", [0])[0]):
            if name == "__metadata__":
                continue
            start, stop = entry["data_offsets"]
            if stop > present:
                rows = entry["shape"][0] if entry["shape"] else 1
                row = max(0, present - start) * rows // max(1, stop - start)
                unit = "expert" if ".experts." in name else "row"
                return f"; it ends in tensor {name}, {unit} {row} of {rows}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error, MemoryError, OverflowError):
        pass
    return ""


class SafetensorsWriter:
    """A new file, to which tensors are appended as they come; complete once ``close`` has returned, and on the disk
    once its directory was synced (``new_directory`` does). Raises OSError."""

    def __init__(self, path: Path, expected: Mapping[str, Shape]) -> None:
        """``expected`` are all tensors that might come."""
        longest = {name: self._entry("BF16", shape, 10**13, 10**13) for name, shape in expected.items()}
        self._room = -(-len(self._header(longest)) // 8) * 8
        self.path = path
        self._entries: dict[str, object] = {}
        self.names: list[str] = []
        self.size = 0
        self._file = open(path, "wb")  # noqa: SIM115 (closed by close)
        self._file.seek(8 + self._room)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        data = tensor.detach().cpu().contiguous().flatten()
        self._entries[name] = self._entry(NAMES[data.dtype], tuple(tensor.shape), self.size, self.size + data.nbytes)
        self.names.append(name)
        self.size += data.nbytes
        self._write(data.view(torch.uint8).numpy())

    def close(self) -> None:
        self._file.seek(0)
        self._write(struct.pack("<Q", self._room) + self._header(self._entries).ljust(self._room))
        with errors_name(self.path):
            self._file.close()

    def _write(self, data: object) -> None:
        with errors_name(self.path):
            self._file.write(data)  # type: ignore[arg-type]

    @staticmethod
    def _entry(dtype: str, shape: Shape, start: int, stop: int) -> dict[str, object]:
        return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}

    @staticmethod
    def _header(entries: Mapping[str, object]) -> bytes:
        return json.dumps({"__metadata__": {"format": "pt"}, **entries}, separators=(",", ":")).encode()
