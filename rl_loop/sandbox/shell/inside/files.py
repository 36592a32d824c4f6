"""Files into and out of a sandbox, as tar archives.

Files out are read below the directory of changed files, without following links, while all
processes are stopped. Therefore, commands cannot redirect or change a file that is read.
"""

import contextlib
import errno
import io
import os
import stat
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

WHITEOUT_PREFIX = ".wh."
OPAQUE_NAME = ".wh..wh..opq"
OPAQUE_ATTRIBUTE = "user.overlay.opaque"
MAX_DEPTH = 200
"""Nested directories of a snapshot. Each open directory needs a descriptor."""
FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class FilesError(Exception):
    """Files that cannot be written or read because of what commands did."""


def warm_up() -> None:
    """Import everything that archives need, because a sandbox may not have Python's library."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        member = tarfile.TarInfo("ä" * 300)
        member.mtime = 1.5
        archive.addfile(member)
    buffer.seek(0)
    with tarfile.open(fileobj=buffer, mode="r:") as archive:
        assert len(archive.getmembers()) == 1


def write_archive(payload: bytes) -> None:
    """Write the files of an archive. Existing files are replaced, and directories are created.

    Raises:
        FilesError: if a file cannot be written.
    """
    with tarfile.open(fileobj=io.BytesIO(payload), mode="r:") as archive:
        for member in archive:
            path = str(PurePosixPath("/", member.name))
            try:
                _write_member(archive, member, path)
            except OSError as error:
                raise FilesError(f"{path}: {error.strerror}") from error


def _write_member(archive: tarfile.TarFile, member: tarfile.TarInfo, path: str) -> None:
    if member.isdir():
        os.makedirs(path, exist_ok=True)
        os.chmod(path, member.mode)
        return
    os.makedirs(os.path.dirname(path), exist_ok=True)
    # Never open an existing file, which may be a pipe.
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    content = archive.extractfile(member)
    assert content is not None
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with open(descriptor, "wb") as file:
        file.write(content.read())
        os.fchmod(descriptor, member.mode)


@dataclass
class _Budget:
    """Remaining bytes and files of an archive."""

    bytes: int
    files: int

    def take(self, size: int) -> bool:
        if size > self.bytes or self.files < 1:
            return False
        self.bytes -= size
        self.files -= 1
        return True


class ArchiveWriter:
    """Writes changed files to an archive."""

    def __init__(
        self, upper: int, send: Callable[[bytes], object], max_bytes: int, max_files: int
    ) -> None:
        """
        Create the archive.

        Args:
            upper: open directory of the changed files.
            send: receives the bytes of the archive.
            max_bytes: maximum size of all files.
            max_files: maximum number of files and directories.
        """
        self._upper = upper
        self._budget = _Budget(max_bytes, max_files)
        sink: Any = _Sink(send)
        self._archive = tarfile.open(  # noqa: SIM115  (``close`` closes it)
            fileobj=sink, mode="w|", format=tarfile.PAX_FORMAT, bufsize=1 << 16
        )
        self._links: dict[int, str] = {}
        """First name of each file with several names, by inode."""
        self.skipped: dict[str, str] = {}
        """Reason why a requested file is not in the archive, by path."""

    def close(self) -> None:
        self._archive.close()

    # ---- declared files

    def add_regular_files(self, paths: Sequence[str]) -> None:
        """Add the regular files at and below the given paths. Others are skipped with a reason."""
        for path in paths:
            parts = PurePosixPath("/", path).parts[1:]
            if not parts or ".." in parts:
                self.skipped[path] = "not a path below /"
                continue
            try:
                folder = self._open_parent(parts[:-1])
            except OSError as error:
                if error.errno not in (errno.ENOENT,):
                    self.skipped[path] = f"{error.strerror} on the way"
                continue
            try:
                self._add_regular(folder, parts[-1], "/".join(parts), depth=0)
            finally:
                os.close(folder)

    def _open_parent(self, parts: Sequence[str]) -> int:
        folder = os.dup(self._upper)
        for part in parts:
            try:
                inner = os.open(part, FOLDER_FLAGS, dir_fd=folder)
            finally:
                os.close(folder)
            folder = inner
        return folder

    def _add_regular(self, folder: int, name: str, path: str, depth: int) -> None:
        try:
            info = os.stat(name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            return
        if stat.S_ISDIR(info.st_mode):
            if depth > MAX_DEPTH:
                self.skipped[f"/{path}"] = "too many nested directories"
                return
            inner = os.open(name, FOLDER_FLAGS, dir_fd=folder)
            try:
                for child in sorted(os.listdir(inner)):
                    self._add_regular(inner, child, f"{path}/{child}", depth + 1)
            finally:
                os.close(inner)
        elif not stat.S_ISREG(info.st_mode):
            self.skipped[f"/{path}"] = "not a regular file"
        elif not self._budget.take(info.st_size):
            self.skipped[f"/{path}"] = "above the limit of size or number"
        else:
            self._add_file(folder, name, path)

    # ---- everything

    def add_layer(self) -> None:
        """Add every changed file as a layer of an OCI image.

        Raises:
            FilesError: if the files exceed a limit.
        """
        # A list in place of recursion: each entry is an open directory and its remaining names.
        stack: list[tuple[int, str, Iterator[str]]] = []
        try:
            top = os.dup(self._upper)
            stack.append((top, "", iter(sorted(os.listdir(top)))))
            while stack:
                folder, prefix, names = stack[-1]
                name = next(names, None)
                if name is None:
                    os.close(folder)
                    stack.pop()
                    continue
                inner = self._add_entry(folder, name, prefix + name)
                if inner is not None:
                    if len(stack) > MAX_DEPTH:
                        os.close(inner)
                        raise FilesError(f"more than {MAX_DEPTH} nested directories")
                    children = iter(sorted(os.listdir(inner)))
                    stack.append((inner, f"{prefix}{name}/", children))
        finally:
            for folder, _, _ in stack:
                os.close(folder)

    def _add_entry(self, folder: int, name: str, path: str) -> int | None:
        """Add one entry. Return an open descriptor if it is a directory."""
        info = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if name.startswith(WHITEOUT_PREFIX):
            return None  # it would delete other files of the layer
        if not self._budget.take(info.st_size if stat.S_ISREG(info.st_mode) else 0):
            raise FilesError("the changed files exceed the limit of size or number")
        member = _member(path, info)
        if stat.S_ISDIR(info.st_mode):
            return self._add_folder(folder, name, path, member)
        if stat.S_ISLNK(info.st_mode):
            member.type, member.linkname = tarfile.SYMTYPE, os.readlink(name, dir_fd=folder)
            self._archive.addfile(member)
        elif stat.S_ISCHR(info.st_mode) and info.st_rdev == 0:
            parent, _, _ = path.rpartition("/")
            self._archive.addfile(tarfile.TarInfo(f"{parent}/{WHITEOUT_PREFIX}{name}".lstrip("/")))
        elif stat.S_ISREG(info.st_mode) and info.st_nlink > 1 and info.st_ino in self._links:
            member.type, member.linkname = tarfile.LNKTYPE, self._links[info.st_ino]
            self._archive.addfile(member)
        elif stat.S_ISREG(info.st_mode):
            self._links[info.st_ino] = path
            self._add_file(folder, name, path)
        return None  # pipes, sockets and devices are left out

    def _add_folder(self, folder: int, name: str, path: str, member: tarfile.TarInfo) -> int:
        member.type = tarfile.DIRTYPE
        self._archive.addfile(member)
        inner = os.open(name, FOLDER_FLAGS, dir_fd=folder)
        try:
            if os.getxattr(inner, OPAQUE_ATTRIBUTE) == b"y":
                self._archive.addfile(tarfile.TarInfo(f"{path}/{OPAQUE_NAME}"))
        except OSError:
            pass  # the attribute is not set
        return inner

    def _add_file(self, folder: int, name: str, path: str) -> None:
        descriptor = os.open(name, FILE_FLAGS, dir_fd=folder)
        with open(descriptor, "rb") as file:
            member = _member(path, os.fstat(descriptor))
            member.size = os.fstat(descriptor).st_size
            self._archive.addfile(member, file)


class _Sink:
    def __init__(self, send: Callable[[bytes], object]) -> None:
        self._send = send

    def write(self, data: bytes) -> int:
        self._send(data)
        return len(data)


def _member(path: str, info: os.stat_result) -> tarfile.TarInfo:
    member = tarfile.TarInfo(path)
    member.mode = stat.S_IMODE(info.st_mode) & 0o777
    member.mtime = info.st_mtime_ns / 1e9
    return member
