"""Page cache control during conversions.

A conversion moves more bytes through the page cache than most machines have memory, and the kernel
evicts the oldest pages first. The sample that is read back at the end is spread over the whole
model. Pages that are not read again, such as the experts of all other layers, would evict most of
it. On 24 GB of memory, reading back the sample of a 12-layer import fetched 4 of its 5.6 GB from
the disk.
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
    """Return how many bytes of read pages to keep cached, 1/16 of the memory."""
    return host_memory.total_bytes() // 16


def write_window() -> int:
    """Return how many bytes of written pages to keep cached, 1/8 of the memory.

    The kernel begins to write dirty pages back at 10% of the memory (the default of
    ``vm.dirty_background_ratio``), so older pages are mostly clean.
    """
    return host_memory.total_bytes() // 8


class StreamedPages:
    """Drops file ranges from the page cache after enough later ranges were used.

    Thread-safe. A file may be renamed after its first range was added. Dropping is a hint: the
    kernel keeps pages that another process has mapped.
    """

    def __init__(self, window_bytes: int) -> None:
        """Keep the newest ``window_bytes`` of the added ranges cached."""
        self._descriptors: dict[Path, int] = {}
        self._lock = threading.Lock()
        # The kernel does not drop dirty pages, but starts to write them. Pages that were dirty
        # when they left the first window are clean when they leave the second one.
        self._used = _Window(window_bytes)
        self._dropped_once = _Window(window_bytes)

    def add(self, ranges: Iterable[FileRange]) -> None:
        """Add file ranges that were read or written and will not be needed again."""
        with self._lock:
            for used in ranges:
                # The descriptor stays valid when the file is renamed.
                if used.path not in self._descriptors:
                    self._descriptors[used.path] = os.open(used.path, os.O_RDONLY)
                for left_first in self._used.add(used):
                    self._drop(left_first)
                    for left_second in self._dropped_once.add(left_first):
                        self._drop(left_second)

    def _drop(self, pages: FileRange) -> None:
        """Ask the kernel to drop cached pages."""
        descriptor = self._descriptors[pages.path]
        os.posix_fadvise(descriptor, pages.offset, pages.length, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close the files. Cached pages stay cached."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _Window:
    """The newest ranges, up to a limited number of bytes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._bytes = 0
        self._ranges: deque[FileRange] = deque()

    def add(self, newest: FileRange) -> Iterator[FileRange]:
        """Add a range and yield the oldest ranges, which leave the window."""
        self._ranges.append(newest)
        self._bytes += newest.length
        while self._bytes > self._limit:
            oldest = self._ranges.popleft()
            self._bytes -= oldest.length
            yield oldest
