"""Where compiled kernels and tuning results are kept, and how a file appears whole."""

import os
import threading
from pathlib import Path


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
    """Replace ``path`` whole or not at all: other processes and crashes see the old or the new.

    Raises:
        OSError: when the disk refuses; nothing is left behind then.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)

        # the rename itself must survive a power cut
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
