"""Limits on untrusted data files, because a small file may expand to a large size in memory."""

import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

from rl_loop.data import parquet_size

MAX_LINE_BYTES = 1 << 26
"""Maximum bytes of a JSONL line: 64 MiB, about 10 million tokens of text."""
ALWAYS_ALLOWED_BYTES = 1 << 30
"""Decoded size in bytes that is allowed for every Parquet file, however small."""
MAX_EXPANSION = 200
"""Maximum decoded size of larger Parquet files, as a multiple of the file size. Text expands 2 to
10 times."""
ALWAYS_ALLOWED_ROWS = 1_000_000
"""Number of rows that is allowed for every Parquet file. Files with more bytes may have one row per
byte."""
MAX_MEMORY_BYTES = 6 << 30
"""Address space of the process that measures the decoded size, in bytes."""
MIN_SECONDS = 60.0
"""Base of the measurement's time limit, in seconds."""
BYTES_PER_SECOND = 50e6
"""Decoded bytes that extend the time limit by 1 s. A core decodes 10 times faster."""


def check_parquet(path: Path) -> None:
    """Refuse a Parquet file with an excessive decoded size. Decodes it once, in another process.

    Raises:
        ValueError: the file is refused. The message has the reason.
        OSError, pyarrow.ArrowException: the file cannot be read.
    """
    import pyarrow.parquet as parquet

    size = path.stat().st_size
    limit = max(ALWAYS_ALLOWED_BYTES, MAX_EXPANSION * size)
    metadata = parquet.read_metadata(path)

    # Both numbers are known without decoding, and bound the work below.
    groups = range(metadata.num_row_groups)
    declared = sum(metadata.row_group(group).total_byte_size for group in groups)
    if declared > limit:
        raise _too_much(size, limit, f"declares {declared:,}")
    if metadata.num_rows > max(ALWAYS_ALLOWED_ROWS, size):
        raise ValueError(
            f"the file declares {metadata.num_rows:,} rows in only {size:,} bytes, so it may be "
            "damaged or malicious. The file was not read"
        )

    # Declared sizes can be wrong, so decode the file within limits of memory and time.
    numbers = [str(limit), str(MAX_MEMORY_BYTES)]
    command = [sys.executable, "-m", parquet_size.__name__, str(path), *numbers]
    seconds = MIN_SECONDS + limit / BYTES_PER_SECOND
    try:
        counted = subprocess.run(command, capture_output=True, timeout=seconds, text=True)
    except subprocess.TimeoutExpired:
        raise ValueError(
            f"decoding takes more than {seconds:.0f} s. The file was not read"
        ) from None
    if counted.returncode == parquet_size.TOO_MUCH:
        raise _too_much(size, limit, "has more")
    if counted.returncode != 0:
        # The last line of Python's traceback names the error.
        lines = counted.stderr.strip().splitlines() or [f"status {counted.returncode}"]
        raise ValueError(
            f"decoding needs more than {MAX_MEMORY_BYTES >> 20} MiB of memory: {lines[-1]}"
        )


def _too_much(size: int, limit: int, what: str) -> ValueError:
    return ValueError(
        f"a file of {size:,} bytes may decode to at most {limit:,} bytes, but it {what}. The "
        "file was not read. If you trust its source, rewrite it with another compression or as "
        "JSONL"
    )


def read_line(file: Any, number: int) -> bytes:
    """Return the next line of a binary file, or an empty string at its end.

    Raises:
        ValueError: the line is longer than MAX_LINE_BYTES. The message has its ``number``.
    """
    # One byte more than allowed shows that the line is too long.
    line: bytes = file.readline(MAX_LINE_BYTES + 1)
    if len(line) > MAX_LINE_BYTES:
        raise ValueError(f"line {number} is longer than {MAX_LINE_BYTES >> 20} MiB")
    return line


def check_archive(path: Path) -> None:
    """Refuse a ZIP archive (or .npz) with a member that decompresses to more than the archive.

    Raises:
        ValueError: the message names the member.
        zipfile.BadZipFile, OSError: the archive cannot be read.
    """
    size = path.stat().st_size
    with zipfile.ZipFile(path) as archive:
        # The list has the declared sizes. Nothing is decompressed.
        for member in archive.infolist():
            # Without compression, no member is larger than its archive.
            if member.file_size > size:
                raise ValueError(
                    f"{member.filename} would decompress to {member.file_size:,} bytes, more than the "
                    f"{size:,} bytes of the archive. Write the archive without compression"
                )
