"""Unpacking of a layer: a tar archive with the whiteouts of OCI images.

The archive is not trusted. Every directory on the way to a file is opened without following links,
so no member can leave the target.
"""

import contextlib
import os
import stat
import tarfile
from pathlib import Path, PurePosixPath
from typing import IO

from megatron_gptoss.user_error import UserError
from rl_loop.sandbox.shell.inside.files import (
    FOLDER_FLAGS,
    OPAQUE_ATTRIBUTE,
    OPAQUE_NAME,
    WHITEOUT_PREFIX,
)


class ImageError(UserError, ValueError):
    """Image that cannot be used. The message names it and a remedy."""


def unpack_layer(archive: IO[bytes], target: Path, owner: int | None, name: str) -> None:
    """Unpack an archive into an empty directory.

    Owners, device nodes, sockets, and setuid bits are left out.

    Args:
        archive: tar archive: plain, or compressed by gzip, bzip2 or xz.
        target: existing, empty directory.
        owner: user id of the files. None for the user of this process.
        name: name of the archive, for messages.

    Raises:
        ImageError: if the archive cannot be read, or if a member leaves the target.
        OSError: if the file system cannot store a member.
    """
    unpacker = _Unpacker(target, owner)
    try:
        with tarfile.open(fileobj=archive, mode="r|*") as members:
            for member in members:
                try:
                    unpacker.add(members, member)
                except (NotADirectoryError, FileExistsError, IsADirectoryError) as error:
                    reason = f"{member.name}: {error.strerror}"
                    raise ImageError(f"image {name}: {reason} on the way to this member") from error
    except (tarfile.TarError, EOFError) as error:
        raise ImageError(
            f"image {name}: not a readable tar archive ({error}). Archives may be plain, gzip, bzip2 "
            "or xz"
        ) from error
    finally:
        unpacker.close()


class _Unpacker:
    def __init__(self, target: Path, owner: int | None) -> None:
        self._owner = owner
        self._top = os.open(target, FOLDER_FLAGS)
        self._own(self._top)
        # Members of a directory are next to each other.
        self._folder = os.dup(self._top)
        self._folder_parts: tuple[str, ...] = ()

    def close(self) -> None:
        os.close(self._folder)
        os.close(self._top)

    def add(self, archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        parts = _parts(member.name)
        if not parts:
            return
        folder, name = self._open(parts[:-1]), parts[-1]
        if name == OPAQUE_NAME:
            os.setxattr(folder, OPAQUE_ATTRIBUTE, b"y")
        elif name.startswith(WHITEOUT_PREFIX):
            hidden = name.removeprefix(WHITEOUT_PREFIX)
            if hidden in ("", ".", ".."):
                raise ImageError(f"{member.name!r} is not the name of a whiteout")
            # Every user may make this one device.
            os.mknod(hidden, stat.S_IFCHR, os.makedev(0, 0), dir_fd=folder)
        elif member.isdir():
            self._make_folder(folder, name, member.mode)
        elif member.issym():
            _remove(folder, name)
            os.symlink(member.linkname, name, dir_fd=folder)
            if self._owner is not None:
                os.chown(name, self._owner, self._owner, dir_fd=folder, follow_symlinks=False)
        elif member.islnk():
            self._link(folder, name, member)
        elif member.isreg():
            self._write(archive, member, folder, name)

    def _open(self, parts: tuple[str, ...]) -> int:
        """Return an open directory. Missing ones are created."""
        if parts == self._folder_parts:
            return self._folder
        folder = os.dup(self._top)
        for part in parts:
            with contextlib.suppress(FileExistsError):
                os.mkdir(part, 0o755, dir_fd=folder)
            try:
                inner = os.open(part, FOLDER_FLAGS, dir_fd=folder)
            finally:
                os.close(folder)
            folder = inner
            self._own(folder)
        os.close(self._folder)
        self._folder, self._folder_parts = folder, parts
        return folder

    def _make_folder(self, folder: int, name: str, mode: int) -> None:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o755, dir_fd=folder)
        inner = os.open(name, FOLDER_FLAGS, dir_fd=folder)
        try:
            os.fchmod(inner, (mode & 0o1777) | 0o700)
            self._own(inner)
        finally:
            os.close(inner)

    def _link(self, folder: int, name: str, member: tarfile.TarInfo) -> None:
        *way, source = _parts(member.linkname) or ("",)
        source_folder = os.dup(self._top)
        try:
            for part in way:
                inner = os.open(part, FOLDER_FLAGS, dir_fd=source_folder)
                os.close(source_folder)
                source_folder = inner
            _remove(folder, name)
            os.link(
                source, name, src_dir_fd=source_folder, dst_dir_fd=folder, follow_symlinks=False
            )
        except FileNotFoundError as error:
            raise ImageError(
                f"{member.name}: linked to {member.linkname}, which does not exist"
            ) from error
        finally:
            os.close(source_folder)

    def _write(
        self, archive: tarfile.TarFile, member: tarfile.TarInfo, folder: int, name: str
    ) -> None:
        _remove(folder, name)
        content = archive.extractfile(member)
        assert content is not None
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        descriptor = os.open(name, flags, 0o600, dir_fd=folder)
        with open(descriptor, "wb") as file:
            while data := content.read(1 << 20):
                file.write(data)
            file.flush()
            os.fchmod(descriptor, (member.mode & 0o777) | 0o600)
            self._own(descriptor)
            os.utime(descriptor, (member.mtime, member.mtime))

    def _own(self, descriptor: int) -> None:
        if self._owner is not None:
            os.fchown(descriptor, self._owner, self._owner)


def _remove(folder: int, name: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)


def _parts(name: str) -> tuple[str, ...]:
    parts = tuple(part for part in PurePosixPath("/", name).parts[1:] if part != ".")
    if ".." in parts:
        raise ImageError(f"{name!r} leaves the image")
    return parts
