"""Reading of files in a run directory, which may be untrusted."""

import os
import stat
from io import BufferedReader
from pathlib import Path


def open_own_file(path: Path) -> BufferedReader:
    """Open a regular file for reading.

    Raises:
        OSError: for a link, which could point to any file of this user, or for a pipe or a device,
            which could block.
    """
    if path.is_symlink():
        raise OSError(f"{path} is a link. Copy the file there")
    # O_NOFOLLOW: the path may have become a link since the check. O_NONBLOCK: a pipe without a
    # writer would block.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is not a regular file")
    return os.fdopen(descriptor, "rb")


def read_own_file(path: Path) -> bytes:
    """Return the content of a regular file. Raises OSError like ``open_own_file``."""
    with open_own_file(path) as file:
        return file.read()
