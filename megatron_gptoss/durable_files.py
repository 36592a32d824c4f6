"""What must be on the disk before a name says that it is there.

A rename may reach the disk before the contents of the files that it makes visible. After a power cut the new name then
stands for empty or shortened files, and nothing says so."""

import os
from pathlib import Path


def sync_directory(directory: Path) -> None:
    """Wait until ``directory`` and all files in it are on the disk; call it before the rename that makes it visible.

    Raises OSError, which names the file."""
    for folder, _, files in os.walk(directory, onerror=_raise):
        for file in files:
            _sync(Path(folder) / file)
        _sync(Path(folder))


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
