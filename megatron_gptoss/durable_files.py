"""What must be on the disk before a name says that it is there.

A rename may reach the disk before the contents of the files that it makes visible. After a power cut the new name then
stands for empty or shortened files, and nothing says so."""

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path


def sync_directory(directory: Path) -> None:
    """Wait until ``directory`` and all files in it are on the disk; call it before the rename that makes it visible.

    Raises OSError, which names the file."""
    for folder, _, files in os.walk(directory, onerror=_raise):
        for file in files:
            _sync(Path(folder) / file)
        _sync(Path(folder))


@contextmanager
def directory_syncing(directory: Path) -> Iterator[Callable[[], float]]:
    """``sync_directory`` in a thread while the block does something else; has ended when the block is left.

    Gives a function that waits for the end and says when that was (``time.perf_counter``). Raises OSError."""

    def sync() -> float:
        sync_directory(directory)
        return time.perf_counter()

    with ThreadPoolExecutor(1, "sync") as pool:
        ended = pool.submit(sync)
        yield ended.result
        ended.result()


def sync_names(directory: Path) -> None:
    """Wait until the names in ``directory`` are on the disk; call it after a rename. Raises OSError."""
    _sync(directory)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        error.filename = str(path)
        raise
    finally:
        os.close(descriptor)


def _raise(error: OSError) -> None:
    raise error
