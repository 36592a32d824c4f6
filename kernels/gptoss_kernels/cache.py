"""Where compiled kernels and tuning results are kept between processes."""

import os
import tempfile
from pathlib import Path


def cache_directory() -> Path:
    """$GPTOSS_KERNELS_CACHE, else gptoss_kernels under $XDG_CACHE_HOME or ~/.cache. Created when missing."""
    chosen = os.environ.get("GPTOSS_KERNELS_CACHE")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = Path(chosen) if chosen else base / "gptoss_kernels"
    path.mkdir(parents=True, exist_ok=True)
    return path


def write_atomically(path: Path, content: bytes) -> None:
    """Another process sees the old file, none, or the whole new one."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
    os.replace(temporary, path)
