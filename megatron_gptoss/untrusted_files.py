"""Safe reading of untrusted files.

A path may be a FIFO that blocks, a device without end, or JSON that is larger or nested deeper than
any real file. ``read_bytes`` and ``read_json`` reject these.
"""

import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

from megatron_gptoss.user_error import UserError

MAX_SETTINGS_BYTES = 16 << 20
"""Size limit of settings such as ``config.json``. Real files have a few kilobytes."""
MAX_LISTING_BYTES = 256 << 20
"""Size limit of indexes and tokenizers. The largest tokenizers have about 35 MB."""


class UntrustedFileError(UserError, ValueError):
    """Rejected file. The message begins with its path."""


def is_plain_name(name: object) -> bool:
    """Return True if ``name`` is a file name without a path."""
    if not isinstance(name, str) or name in ("", ".", ".."):
        return False
    # The system's functions end a path at a null character, and Python refuses it.
    return os.path.basename(name) == name and "\0" not in name


def check_regular(path: Path) -> int:
    """Return the size in bytes of a regular file. Symbolic links are followed.

    Raises:
        FileNotFoundError: ``path`` does not exist.
        OSError: it cannot be accessed.
        UntrustedFileError: it is a FIFO, a device, a socket or a directory.
    """
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise UntrustedFileError(
            f"{path}: is {_kind(status.st_mode)}, not a regular file. Replace it by a copy of the "
            "intended file"
        )
    return status.st_size


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading, unbuffered.

    Raises:
        OSError: the file cannot be accessed.
        UntrustedFileError: it is not a regular file.
    """
    check_regular(path)
    # The file may be replaced by a FIFO after the check. O_NONBLOCK keeps open() from blocking.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise UntrustedFileError(f"{path}: is {_kind(mode)}, not a regular file")
        return open(descriptor, "rb", buffering=0)
    except BaseException:
        os.close(descriptor)
        raise


def read_bytes(path: Path, max_bytes: int = MAX_SETTINGS_BYTES) -> bytes:
    """Return the content of a regular file.

    Args:
        path: path of the file.
        max_bytes: size limit.

    Raises:
        OSError: the file cannot be accessed.
        UntrustedFileError: it is not a regular file, or too large.
    """
    size = check_regular(path)
    if size <= max_bytes:
        with open_regular(path) as file:
            content = bytearray()
            # Do not rely on the size: a file may grow, and files in /proc have size 0. Small reads
            # bound the memory, because read() allocates the requested size.
            while len(content) <= max_bytes:
                piece = file.read(max(size + 1 - len(content), 1 << 16))
                if not piece:
                    return bytes(content)
                content += piece
        size = len(content)
    raise UntrustedFileError(
        f"{path}: has {size:,} bytes or more, but the limit is {max_bytes:,}. Check that it is the "
        "intended file"
    )


def read_json(path: Path, max_bytes: int = MAX_SETTINGS_BYTES) -> Any:
    """Return the content of a JSON file.

    Args:
        path: path of the file.
        max_bytes: size limit.

    Raises:
        FileNotFoundError: ``path`` does not exist.
        OSError: it cannot be accessed.
        UntrustedFileError: it is not a regular file, too large, not JSON, nested too deep, or has a
            key twice in one object.
    """
    return parse_json(read_bytes(path, max_bytes), path)


def parse_json(content: bytes | str, path: Path) -> Any:
    """Parse JSON.

    Args:
        content: text to parse.
        path: name of the source in errors.

    Raises:
        UntrustedFileError: it is not JSON, nested too deep, or has a key twice in one object.
    """
    try:
        return json.loads(content, object_pairs_hook=_without_duplicates)
    except RecursionError:
        raise UntrustedFileError(
            f"{path}: the JSON has too many nested levels to be parsed. Copy or download it again"
        ) from None
    except ValueError as error:
        raise UntrustedFileError(
            f"{path}: not valid JSON ({error}). Copy or download it again"
        ) from None


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of a JSON file; raise ValueError if a key appears twice."""
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        # Parsers disagree about the value: Python uses the last, others use the first.
        raise ValueError(f"the key {twice!r} appears twice in an object")
    return result


def _kind(mode: int) -> str:
    """Return the kind of a file in words."""
    kinds = {
        stat.S_IFIFO: "a FIFO",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
        stat.S_IFSOCK: "a socket",
        stat.S_IFDIR: "a directory",
    }
    return kinds.get(stat.S_IFMT(mode), "a special file")
