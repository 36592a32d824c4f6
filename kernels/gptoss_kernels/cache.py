"""Cache directory for compiled kernels and tuning results, and atomic file replacement."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


def cache_directory() -> Path:
    """Return the cache directory; create it if it is missing.

    It is $GPTOSS_KERNELS_CACHE if that is set, else gptoss_kernels in $XDG_CACHE_HOME or ~/.cache.
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
    """Replace ``path`` by a file with this content.

    Raises:
        OSError: writing fails. See ``atomic_file``.
    """
    with atomic_file(path) as file:
        file.write(content)


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file that replaces ``path`` when the block ends.

    Other processes see either the old file or the complete new file, also after a crash. If the
    block raises, the old file stays and the new file is deleted.

    Raises:
        OSError: writing or renaming fails, for example because the disk is full.
    """
    # Process and thread id: several processes of a node may compile one kernel concurrently.
    # Same directory: a rename is atomic only within a file system.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            # Otherwise a power cut after the rename can leave an empty file under the final name.
            os.fsync(file.fileno())
        os.replace(temporary, path)

        # The rename changes the directory, so the directory needs an fsync, too.
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
