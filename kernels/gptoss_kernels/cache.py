"""The directory of compiled kernels and tuning results, and files that appear whole."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


def cache_directory() -> Path:
    """Return $GPTOSS_KERNELS_CACHE, else gptoss_kernels under $XDG_CACHE_HOME or ~/.cache.

    Creates the directory when it is missing.
    """
    chosen = os.environ.get("GPTOSS_KERNELS_CACHE")
    if chosen:
        path = Path(chosen)
    else:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        path = Path(base) / "gptoss_kernels"

    path.mkdir(parents=True, exist_ok=True)
    return path


def write_atomically(path: Path, content: bytes) -> None:
    """Replace ``path`` by a file with this content. See ``atomic_file``."""
    with atomic_file(path) as file:
        file.write(content)


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file that replaces ``path`` when the block ends.

    Other processes, and a crash, see the old file or the whole new one. If the block raises, the
    old file stays and the new one is deleted.

    Raises:
        OSError: if the disk refuses.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)

        # the rename itself must survive a power cut
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
