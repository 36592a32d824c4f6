"""What must be on the disk before a name says that it is there.

A rename may reach the disk before the contents of the files that it makes visible. After a power
cut the new name then stands for empty or shortened files, and nothing says so.
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
        OSError: naming the file that could not be written.
    """
    for folder, _, files in os.walk(directory, onerror=_raise):
        for file in files:
            _sync(Path(folder) / file)
        _sync(Path(folder))


@contextmanager
def directory_syncing(directory: Path) -> Iterator[Callable[[], float]]:
    """Run ``sync_directory`` in a thread beside the block; it has ended when the block is left.

    Yields:
        A function that waits for the end and returns when that was (``time.perf_counter``).

    Raises:
        OSError: naming the file that could not be written.
    """

    def sync() -> float:
        sync_directory(directory)
        return time.perf_counter()

    with ThreadPoolExecutor(1, "sync") as pool:
        end_time = pool.submit(sync)
        yield end_time.result
        end_time.result()


def sync_names(directory: Path) -> None:
    """Wait until the names in ``directory`` are on the disk; call it after a rename.

    Raises:
        OSError: naming the directory.
    """
    _sync(directory)


AT_FDCWD = -100
RENAME_EXCHANGE = 2
"""Of renameat2(2), in linux/fcntl.h and linux/fs.h."""
NOT_SUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP)
"""What a kernel or a file system says that cannot exchange names, NFS among them."""


def exchange_names(a: Path, b: Path) -> bool:
    """Let two files or directories have each other's names, in one step that no crash can cut.

    Returns:
        False, with nothing changed, where the file system cannot do that.

    Raises:
        OSError: naming ``a``.
    """
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
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # fsync knows no name.
        error.filename = str(path)
        raise
    finally:
        os.close(descriptor)


def _raise(error: OSError) -> None:
    raise error
