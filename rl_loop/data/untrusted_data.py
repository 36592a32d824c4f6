"""Limits on data that strangers have written: what a small file must not become in memory."""

import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

from rl_loop.data import parquet_size

MAX_LINE_BYTES = 1 << 26
"""Of a line of JSONL: 64 MiB, ten million tokens of text."""
ALWAYS_ALLOWED_BYTES = 1 << 30
"""That a Parquet file may become, however small it is."""
MAX_EXPANSION = 200
"""Times its own size that a Parquet file may become beyond that; text becomes 2 to 10 times."""
ALWAYS_ALLOWED_ROWS = 1_000_000
"""Beyond them a row needs a byte of the file."""
MOST_MEMORY = 6 << 30
"""Bytes of address space of the process that counts."""
LEAST_SECONDS = 60.0
"""That counting may take, however small the file is."""
BYTES_PER_SECOND = 50e6
"""Of what it may become, beyond that; a core decodes ten times as many."""


def check_parquet(path: Path) -> None:
    """Refuse a Parquet file that becomes far more than it is. Decodes it once, in another process.

    Raises:
        ValueError: saying what is wrong with it.
        OSError, pyarrow.ArrowException: when it cannot be read.
    """
    import pyarrow.parquet as parquet

    size = path.stat().st_size
    limit = max(ALWAYS_ALLOWED_BYTES, MAX_EXPANSION * size)
    metadata = parquet.read_metadata(path)

    # Neither number needs decoding, and both bound the work below.
    groups = range(metadata.num_row_groups)
    declared = sum(metadata.row_group(group).total_byte_size for group in groups)
    if declared > limit:
        raise _too_much(size, limit, f"says that it becomes {declared:,}")
    if metadata.num_rows > max(ALWAYS_ALLOWED_ROWS, size):
        raise ValueError(
            f"{metadata.num_rows:,} rows in {size:,} bytes cannot be text; it was not read"
        )

    numbers = [str(limit), str(MOST_MEMORY)]
    command = [sys.executable, "-m", parquet_size.__name__, str(path), *numbers]
    seconds = LEAST_SECONDS + limit / BYTES_PER_SECOND
    try:
        counted = subprocess.run(command, capture_output=True, timeout=seconds, text=True)
    except subprocess.TimeoutExpired:
        raise ValueError(f"it is not decoded within {seconds:.0f} s; it was not read") from None
    if counted.returncode == parquet_size.TOO_MUCH:
        raise _too_much(size, limit, "becomes more than that")
    if counted.returncode != 0:
        lines = counted.stderr.strip().splitlines() or [f"status {counted.returncode}"]
        raise ValueError(
            f"it cannot be decoded within {MOST_MEMORY >> 20} MiB of memory: {lines[-1]}"
        )


def _too_much(size: int, limit: int, what: str) -> ValueError:
    return ValueError(
        f"{size:,} bytes may become {limit:,} at most, and it {what}; it was not read. If you trust "
        "whoever made it, write it anew with another compression or as JSONL"
    )


def read_line(file: Any, number: int) -> bytes:
    """Read the next line of a binary file, the empty string at its end.

    Raises ValueError naming line ``number`` if it is longer than MAX_LINE_BYTES."""
    line: bytes = file.readline(MAX_LINE_BYTES + 1)
    if len(line) > MAX_LINE_BYTES:
        raise ValueError(f"line {number} is longer than {MAX_LINE_BYTES >> 20} MiB")
    return line


def check_archive(path: Path) -> None:
    """Refuse a ZIP archive (or .npz) whose members become more than the archive is.

    Raises:
        ValueError: naming the member.
        zipfile.BadZipFile, OSError: when it cannot be read.
    """
    size = path.stat().st_size
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            if member.file_size > size:
                raise ValueError(
                    f"{member.filename} would become {member.file_size:,} bytes, and the archive has "
                    f"{size:,}; what is written here is not compressed"
                )
