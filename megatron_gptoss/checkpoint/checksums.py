"""Checksums of a checkpoint's files, written with it and compared before it is loaded.

The hash is XXH3 with 128 bits. It detects damage by disks, networks and incomplete copies. It is
not a signature: a user who can write to the directory can write matching checksums.
"""

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from megatron_gptoss.untrusted_files import (
    MAX_LISTING_BYTES,
    UntrustedFileError,
    check_regular,
    is_plain_name,
    read_json,
)

CHECKSUMS_FILE = "checksums.json"
"""Name of the file that lists the checksums. A checkpoint without it is loaded unchecked."""
PIECE_BYTES = 1 << 24
"""Bytes that a thread reads at a time, which bounds its memory."""
# Hashing is faster than a disk, so a few files at a time are enough.
THREADS = 4
"""Files that one process reads concurrently."""


@dataclass(frozen=True)
class FileChecksum:
    """Expected size and hash of a file."""

    size: int
    """Size in bytes."""
    xxh3_128: str
    """XXH3-128 of the content, hexadecimal."""


def compute_checksum(content: bytes) -> FileChecksum:
    """Return the checksum of a file with this content."""
    return FileChecksum(len(content), xxhash.xxh3_128(content).hexdigest())


def checksum_file(path: Path) -> FileChecksum:
    """Read a file and return its checksum.

    Raises:
        OSError: the file cannot be read.
    """
    # One buffer, read into without Python's own: a large file needs no allocation per piece.
    state = xxhash.xxh3_128()
    size = 0
    buffer = memoryview(bytearray(min(PIECE_BYTES, max(1, path.stat().st_size))))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            state.update(buffer[:count])
            size += count
    return FileChecksum(size, state.hexdigest())


def checksum_files(paths: list[Path]) -> dict[str, FileChecksum]:
    """Return the checksums of the files that exist, by file name.

    Raises:
        OSError: a file cannot be read.
    """
    existing = [path for path in paths if path.exists()]
    with ThreadPoolExecutor(THREADS, "checksum") as pool:
        checksums = list(pool.map(checksum_file, existing))
    return {path.name: checksum for path, checksum in zip(existing, checksums, strict=True)}


def write_checksums(directory: Path, known: Mapping[str, FileChecksum]) -> None:
    """Write CHECKSUMS_FILE with the checksums of all files in ``directory``.

    Args:
        directory: checkpoint; it has no subdirectories.
        known: checksums by file name that are known already. The file may not exist yet.

    Raises:
        OSError: a file cannot be read or written.
    """
    # The writers hash large files while these are still in the page cache.
    others = [path for path in directory.iterdir() if path.name not in known]
    checksums = {**known, **checksum_files(others)}
    content = {name: asdict(checksums[name]) for name in sorted(checksums)}
    (directory / CHECKSUMS_FILE).write_text(json.dumps(content, indent=1))


def compare_checksums(directory: Path, share: int = 0, shares: int = 1) -> str | None:
    """Compare the files of a checkpoint with their checksums.

    Args:
        directory: checkpoint.
        share: index of this process. It compares every ``shares``-th file, from this index on.
        shares: number of processes that divide the files among them.

    Returns:
        Description of the first damage, or None if all files match or there are no checksums.
    """
    listing = directory / CHECKSUMS_FILE
    try:
        # open() of a FIFO blocks. Check every file, because loading reads unlisted files, too.
        for path in directory.iterdir():
            if not path.is_dir():
                check_regular(path)
        expected = _parse(read_json(listing, MAX_LISTING_BYTES))
    except UntrustedFileError as error:
        reason = str(error).removeprefix(f"{listing}: ")
        return str(error) if reason == str(error) else f"{listing}: damaged ({reason})"
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return f"{listing}: damaged ({error})"

    # Sorted, so that all processes divide the files in the same way.
    names = sorted(expected)[share::shares]
    with ThreadPoolExecutor(THREADS, "checksum") as pool:
        damages = pool.map(lambda name: _difference(directory / name, expected[name]), names)
        return next((damage for damage in damages if damage is not None), None)


def _parse(content: Any) -> dict[str, FileChecksum]:
    """Return the checksums of a parsed CHECKSUMS_FILE; raise ValueError for an unsafe file name."""
    checksums = {name: FileChecksum(**values) for name, values in content.items()}
    for name in checksums:
        # The file may be untrusted. A name such as ../x would read outside of the checkpoint.
        if not is_plain_name(name):
            raise ValueError(f"{name!r} is not the name of a file in this directory")
    return checksums


def _difference(path: Path, expected: FileChecksum) -> str | None:
    """Return how a file differs from its checksum; None if it matches."""
    try:
        # The size costs no reading, and it is the difference after an interrupted copy.
        size = path.stat().st_size
        if size != expected.size:
            return f"{path}: damaged; it has {size} bytes, and {expected.size} were written"
        if checksum_file(path) != expected:
            return f"{path}: damaged; its content is not what was written (its checksum differs)"
    except FileNotFoundError:
        return f"{path}: missing"
    except OSError as error:
        return f"{path}: cannot be read ({error.strerror or error})"
    return None
