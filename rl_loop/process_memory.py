"""Settings of this process's memory allocator and garbage collector."""

import ctypes
import gc
from functools import cache

# From glibc's malloc.h. The values are unchanged since 1996.
M_TRIM_THRESHOLD = -1
M_MMAP_MAX = -4

NEVER = 2**31 - 1
"""Free bytes at the end of the heap that malloc keeps. mallopt takes an int."""


def keep_freed_memory() -> bool:
    """Keep freed memory for reuse by this process instead of returning it to the system.

    Each column of a step has tens of megabytes. By default malloc requests every column from the
    system and returns it afterwards. A driver of 64 ranks spent more time on obtaining pages than
    on writing to them. The process keeps as much memory as its largest step needed.

    Returns:
        False if the C library is not glibc. Nothing is changed then.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # Disable separate mappings for large allocations, because malloc unmaps them when they are
    # freed. Their size threshold cannot be raised above 32 MiB.
    return bool(mallopt(M_MMAP_MAX, 0) and mallopt(M_TRIM_THRESHOLD, NEVER))


@cache
def exempt_from_collection() -> None:
    """Freeze all current objects so that the garbage collector skips them. Runs once per process.

    A search of these objects takes up to 0.5 s, in which nothing else runs: a training step waits
    for every rank, and an engine waits for its rollout worker's event loop.
    """
    # Collect first, because garbage that is frozen would never be freed.
    gc.collect()
    gc.freeze()


def collect_rarely() -> None:
    """Let the garbage collector run 30 times less often than by default, also in forks.

    With Python's defaults it takes a fifth of the processor time of a start, whose imports create
    a million objects and no garbage. Cycles of garbage may then hold up to 20,000 objects.
    """
    gc.set_threshold(20_000, 10, 10)
