"""Checksums of a checkpoint's files: written with it, compared before it is loaded.

XXH3 of 128 bits: a disk, a cable or a copy that went wrong is noticed. It is no signature; who can
write to the directory can write another checksum, too.
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
"""Not there in checkpoints of versions that wrote none; these are loaded unchecked."""
PIECE_BYTES = 1 << 24
"""Read at a time; bounds the memory of a thread."""
THREADS = 4
"""Files that one process reads at the same time; hashing itself is faster than any disk."""


@dataclass(frozen=True)
class FileChecksum:
    """What a file's content must be."""

    size: int
    """Bytes."""
    xxh3_128: str
    """Of all of them, hexadecimal."""


def checksum_of(content: bytes) -> FileChecksum:
    """Compute the checksum of a file that holds ``content``."""
    return FileChecksum(len(content), xxhash.xxh3_128(content).hexdigest())


def checksum_file(path: Path) -> FileChecksum:
    """Read a file and compute its checksum. Raises OSError."""
    state = xxhash.xxh3_128()
    size = 0
    buffer = memoryview(bytearray(min(PIECE_BYTES, max(1, path.stat().st_size))))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            state.update(buffer[:count])
            size += count
    return FileChecksum(size, state.hexdigest())


def checksum_files(paths: list[Path]) -> dict[str, FileChecksum]:
    """Compute the checksums of the files that exist, by name."""
    existing = [path for path in paths if path.exists()]
    with ThreadPoolExecutor(THREADS, "checksum") as pool:
        checksums = list(pool.map(checksum_file, existing))
    return {path.name: checksum for path, checksum in zip(existing, checksums, strict=True)}


def write_checksums(directory: Path, known: Mapping[str, FileChecksum]) -> None:
    """Write the checksums of all files of ``directory``.

    Args:
        directory: of the checkpoint, flat.
        known: checksums by name that need not be computed; a file among them may be yet to come.

    Raises:
        OSError: naming the file.
    """
    others = [path for path in directory.iterdir() if path.name not in known]
    checksums = {**known, **checksum_files(others)}
    content = {name: asdict(checksums[name]) for name in sorted(checksums)}
    (directory / CHECKSUMS_FILE).write_text(json.dumps(content, indent=1))


def damage_in(directory: Path, share: int = 0, shares: int = 1) -> str | None:
    """Compare files with their checksums and describe the first that differs; None if none does.

    Args:
        directory: of the checkpoint.
        share: of the files, sorted by name, every ``shares``-th from this one on is compared.
        shares: how many processes share the work.

    Nothing is wrong with a checkpoint that has no checksums.
    """
    listing = directory / CHECKSUMS_FILE
    try:
        # A FIFO would block whoever opens it, also in a checkpoint without checksums.
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

    names = sorted(expected)[share::shares]
    with ThreadPoolExecutor(THREADS, "checksum") as pool:
        damages = pool.map(lambda name: _difference(directory / name, expected[name]), names)
        return next((damage for damage in damages if damage is not None), None)


def _parse(content: Any) -> dict[str, FileChecksum]:
    checksums = {name: FileChecksum(**values) for name, values in content.items()}
    for name in checksums:
        if not is_plain_name(name):
            raise ValueError(f"{name!r} is no name of a file in this directory")
    return checksums


def _difference(path: Path, expected: FileChecksum) -> str | None:
    """Say how a file differs from what was written; None if it does not."""
    try:
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
