"""Syncing of files and directories to the disk, and atomic exchange of names.

A rename may reach the disk before the contents of the renamed files. After a power cut the new name
then refers to empty or truncated files.
"""

import ctypes
import errno
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path


def sync_directory(directory: Path) -> None:
    """Wait until ``directory`` and all files in it are on the disk.

    Call it before the rename that makes the directory visible.

    Raises:
        OSError: a file cannot be written. ``filename`` names it.
    """
    for folder, _, files in os.walk(directory, onerror=_raise):
        for file in files:
            _sync(Path(folder) / file)
        _sync(Path(folder))


@contextmanager
def directory_syncing(directory: Path) -> Iterator[Callable[[], float]]:
    """Run ``sync_directory`` in a thread during the block, and wait for it at the end.

    Yields:
        Function that waits for the thread and returns its end time by ``time.perf_counter``.

    Raises:
        OSError: a file cannot be written. ``filename`` names it.
    """

    def sync() -> float:
        sync_directory(directory)
        return time.perf_counter()

    with ThreadPoolExecutor(1, "sync") as pool:
        end_time = pool.submit(sync)
        yield end_time.result
        # Raises the error of the thread if the block did not ask for its result.
        end_time.result()


def sync_names(directory: Path) -> None:
    """Wait until the names in ``directory`` are on the disk. Call it after a rename.

    Raises:
        OSError: the directory cannot be written. ``filename`` names it.
    """
    _sync(directory)


AT_FDCWD = -100
"""Value of linux/fcntl.h: paths are relative to the working directory."""
RENAME_EXCHANGE = 2
"""Flag of renameat2(2), from linux/fs.h."""
NOT_SUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP)
"""Errors of kernels and file systems that cannot exchange names, such as NFS."""


def exchange_names(a: Path, b: Path) -> bool:
    """Exchange the names of two files or directories atomically.

    Args:
        a: existing path.
        b: existing path on the same file system.

    Returns:
        True on success, False if the file system does not support it. Nothing has changed then.

    Raises:
        OSError: the exchange fails for another reason. ``filename`` is ``a``.
    """
    # Python has no function for renameat2. A C library without it is older than glibc 2.28.
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "renameat2"):
        return False
    status = library.renameat2(
        AT_FDCWD, os.fsencode(a), AT_FDCWD, os.fsencode(b), ctypes.c_uint(RENAME_EXCHANGE)
    )
    if status == 0:
        return True

    code = ctypes.get_errno()
    if code in NOT_SUPPORTED:
        return False
    raise OSError(code, os.strerror(code), str(a))


def _sync(path: Path) -> None:
    """Wait until a file or directory is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Errors of fsync have no file name.
        error.filename = str(path)
        raise
    finally:
        os.close(descriptor)


def _raise(error: OSError) -> None:
    """Raise the error. os.walk ignores errors by default."""
    raise error
