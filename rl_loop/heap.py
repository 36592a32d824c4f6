"""What this process does with memory that it has freed, and how often it looks for more."""

import ctypes
import gc
from functools import cache

# From glibc's malloc.h, which defines no others for these since 1996.
M_TRIM_THRESHOLD = -1
M_MMAP_MAX = -4

NEVER = 2**31 - 1
"""Bytes free at the heap's end from which they go back to the system; mallopt takes an int."""


def keep_freed_memory() -> bool:
    """Let freed memory be used again by this process instead of going back to the system.

    A step's columns have tens of megabytes each, which malloc otherwise asks of the system one by
    one and gives back: a driver of 64 ranks spent more time on getting the same pages, step after
    step, than on what it wrote to them. The process keeps as much as its largest step needed.

    Returns False where the C library is not glibc, whose settings these are: nothing is changed.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # No allocation by a mapping of its own, however large: those are unmapped when they are freed.
    # The threshold for them cannot be raised above 32 MiB.
    return bool(mallopt(M_MMAP_MAX, 0) and mallopt(M_TRIM_THRESHOLD, NEVER))


@cache
def exempt_from_collection() -> None:
    """Freeze long-lived objects so that the collector skips them; once in a process.

    Searching them for garbage takes up to half a second, in which nothing else runs: a training step
    waits for every rank, and an engine for its rollout worker's event loop."""
    gc.collect()
    gc.freeze()
