"""Where compiled kernels and tuning results are kept between processes, and how a file appears whole."""

import os
import threading
from pathlib import Path


def cache_directory() -> Path:
    """$GPTOSS_KERNELS_CACHE, else gptoss_kernels under $XDG_CACHE_HOME or ~/.cache. Created when missing."""
    chosen = os.environ.get("GPTOSS_KERNELS_CACHE")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = Path(chosen) if chosen else base / "gptoss_kernels"
    path.mkdir(parents=True, exist_ok=True)
    return path


def write_atomically(path: Path, content: bytes) -> None:
    """Replace ``path`` whole or not at all: other processes and crashes see the old or the new. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)  # the rename itself must survive a power cut
        finally:
            os.close(directory)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
