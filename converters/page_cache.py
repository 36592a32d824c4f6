"""Leaves the page cache to what a conversion reads again.

A conversion moves more bytes through the page cache than most machines have memory, and the kernel
evicts the oldest pages first. What is read back at the end is spread over the whole model, so most
of it would have been evicted by what nobody reads again: the experts of all other layers. On 24 GB
of memory, reading back the sample of a 12-layer import fetched 4 of its 5.6 GB from the disk.
"""

import os
import threading
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Self

from converters.bits import FileRange


class StreamedPages:
    """Drops parts of files from the page cache once enough others were used after them.

    Usable from several threads. A file may be renamed after its first range was added. Dropping is
    advice: the kernel keeps pages that another process has mapped.
    """

    def __init__(self, window_bytes: int | None = None) -> None:
        """``window_bytes`` of what was added last stay cached; None: a sixth of the memory.

        The kernel begins to write dirty pages back at a tenth of the memory (its default of
        ``vm.dirty_background_ratio``). Pages outside a larger window are clean already, so that
        dropping them neither waits for the disk nor changes when it is written. A machine whose
        memory holds the model six times keeps everything.
        """
        if window_bytes is None:
            window_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 6
        self._window_bytes = window_bytes
        self._cached_bytes = 0
        self._ranges: deque[FileRange] = deque()
        self._descriptors: dict[Path, int] = {}
        self._lock = threading.Lock()

    def add(self, ranges: Iterable[FileRange]) -> None:
        """Note that parts of files were read or written and will not be needed again."""
        with self._lock:
            for used in ranges:
                if used.path not in self._descriptors:
                    self._descriptors[used.path] = os.open(used.path, os.O_RDONLY)
                self._ranges.append(used)
                self._cached_bytes += used.length

            while self._cached_bytes > self._window_bytes:
                oldest = self._ranges.popleft()
                self._cached_bytes -= oldest.length
                os.posix_fadvise(
                    self._descriptors[oldest.path],
                    oldest.offset,
                    oldest.length,
                    os.POSIX_FADV_DONTNEED,
                )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
