"""Leaves the page cache to what a conversion reads again.

A conversion moves more bytes through the page cache than most machines have memory, and the kernel
evicts the oldest pages first. What is read back at the end is spread over the whole model, so most
of it would have been evicted by what nobody reads again: the experts of all other layers. On 24 GB
of memory, reading back the sample of a 12-layer import fetched 4 of its 5.6 GB from the disk.
"""

import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Self

from converters.bits import FileRange
from megatron_gptoss import host_memory


def read_window() -> int:
    """Return bytes that were read and stay cached: few, unless memory holds many models."""
    return host_memory.total_bytes() // 16


def write_window() -> int:
    """Return bytes that were written and stay cached: most of what can be dirty.

    The kernel begins to write dirty pages back at a tenth of the memory (its default of
    ``vm.dirty_background_ratio``), so that older pages are mostly clean.
    """
    return host_memory.total_bytes() // 8


class StreamedPages:
    """Drops parts of files from the page cache once enough others were used after them.

    Usable from several threads. A file may be renamed after its first range was added. Dropping is
    advice: the kernel keeps pages that another process has mapped.
    """

    def __init__(self, window_bytes: int) -> None:
        """``window_bytes`` of what was added last stay cached."""
        self._descriptors: dict[Path, int] = {}
        self._lock = threading.Lock()
        # The kernel does not drop dirty pages, but begins to write them: what was still dirty when
        # it left the first window is clean when it leaves the second.
        self._used = _Window(window_bytes)
        self._dropped_once = _Window(window_bytes)

    def add(self, ranges: Iterable[FileRange]) -> None:
        """Note that parts of files were read or written and will not be needed again."""
        with self._lock:
            for used in ranges:
                if used.path not in self._descriptors:
                    self._descriptors[used.path] = os.open(used.path, os.O_RDONLY)
                for left_first in self._used.add(used):
                    self._drop(left_first)
                    for left_second in self._dropped_once.add(left_first):
                        self._drop(left_second)

    def _drop(self, pages: FileRange) -> None:
        descriptor = self._descriptors[pages.path]
        os.posix_fadvise(descriptor, pages.offset, pages.length, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close the files; what is cached now stays."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _Window:
    """The newest ranges, of a limited number of bytes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._bytes = 0
        self._ranges: deque[FileRange] = deque()

    def add(self, newest: FileRange) -> Iterator[FileRange]:
        """Add a range and yield the oldest ones, which leave the window for it."""
        self._ranges.append(newest)
        self._bytes += newest.length
        while self._bytes > self._limit:
            oldest = self._ranges.popleft()
            self._bytes -= oldest.length
            yield oldest
