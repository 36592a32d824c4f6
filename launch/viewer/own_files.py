"""Reads files of a run directory, which may be someone else's: no links to other files, no pipes."""

import os
import stat
from io import BufferedReader
from pathlib import Path


def open_own_file(path: Path) -> BufferedReader:
    """Open a regular file to read its bytes.

    Raises OSError for a link, which could lead to any file of this user, and for a pipe or a
    device, which could block."""
    if path.is_symlink():
        raise OSError(f"{path} is a link; copy the file there")
    # A link that appears just now is not followed. A pipe without a writer would block even here.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is not a regular file")
    return os.fdopen(descriptor, "rb")


def read_own_file(path: Path) -> bytes:
    """Return the content of a regular file. Raises OSError as ``open_own_file`` does."""
    with open_own_file(path) as file:
        return file.read()
