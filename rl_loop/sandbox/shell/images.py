"""Images of shell sandboxes: stacks of directories in a store on the node's disk."""

import contextlib
import hashlib
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from rl_loop.sandbox.inside.confinement import NOBODY, check, libc
from rl_loop.sandbox.shell.host_image import write_host_archive
from rl_loop.sandbox.shell.layers import ImageError, unpack_layer

HOST_IMAGE, HOST_PYTHON_IMAGE = "host", "host-python"
"""Names of the images that consist of programs of this machine, the second one with Python."""
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
MAX_LAYERS = 120
DIGEST_LENGTH = 32
SNAPSHOT_PREFIX = "snapshot-"


@dataclass(frozen=True)
class Image:
    """File system of new sandboxes."""

    layers: tuple[str, ...]
    """Directories, uppermost first. Names in the store, or absolute paths."""
    environment: dict[str, str] = field(default_factory=dict)
    working_directory: str = "/"

    def with_layer(self, layer: str) -> "Image":
        """Return this image with a further layer above it."""
        return replace(self, layers=(layer, *self.layers))


class ImageStore:
    """Directory with unpacked layers, named by their contents. Processes may share it."""

    def __init__(self, folder: Path) -> None:
        """Create the directory.

        Raises:
            ImageError: if the file system cannot hold layers.
        """
        self.folder = folder.expanduser().absolute()
        self.owner = NOBODY if os.geteuid() == 0 else None
        """User id of the files. None for the user of this process."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            # The fork server of root runs as another user.
            self.folder.chmod(0o755)
        except OSError as error:
            raise ImageError(
                f"image store {self.folder}: cannot be used: {error.strerror}"
            ) from error
        with tempfile.TemporaryDirectory(dir=self.folder, prefix="check-") as probe:
            try:
                os.setxattr(probe, "user.gptoss", b"y")
            except OSError as error:
                raise ImageError(
                    f"image store {self.folder}: no extended attributes "
                    f"({error.strerror}). Name a directory on the node's own disk, such as /var/tmp"
                ) from error

    def load(self, source: str | Path) -> Image:
        """Return an image, and unpack it if the store does not have it.

        Args:
            source: "host" or "host-python" for programs of this machine; a directory with a root file system; a tar
                archive of one; or a directory in the OCI layout, with ":TAG" if it has several
                images.

        Raises:
            ImageError: if there is no such image, or if it cannot be used.
        """
        text = str(source)
        if text in (HOST_IMAGE, HOST_PYTHON_IMAGE):
            with self.temporary_file() as archive:
                write_host_archive(archive, python=text == HOST_PYTHON_IMAGE)
                archive.seek(0)
                return Image((self.add_layer(archive, text),))

        path, _, tag = text.partition(":")
        folder = Path(path).expanduser().absolute()
        if (folder / "index.json").is_file():
            return self._load_oci(folder, tag or None)
        folder = Path(text).expanduser().absolute()
        if folder.is_dir():
            return self._use_directory(folder)
        if folder.is_file():
            with folder.open("rb") as archive:
                return Image((self.add_layer(archive, text),))
        raise ImageError(
            f"image {text}: does not exist. Name a directory, a tar archive, a directory in the OCI "
            f"layout, {HOST_IMAGE!r} or {HOST_PYTHON_IMAGE!r}"
        )

    def add_layer(self, archive: IO[bytes], name: str) -> str:
        """Unpack a seekable tar archive, and return the layer's name.

        Equal archives are one layer.

        Raises:
            ImageError: if the archive is not readable.
        """
        start = archive.tell()
        digest = _digest(archive)[:DIGEST_LENGTH]
        archive.seek(start)
        target = self.folder / digest
        if target.is_dir():
            return digest
        part = Path(tempfile.mkdtemp(dir=self.folder, prefix=f"{digest}.part-"))
        try:
            part.chmod(0o755)
            unpack_layer(archive, part, self.owner, name)
            # After a power failure, the name must not belong to truncated files.
            with self._opened() as store:
                check(libc.syncfs(store), f"syncfs {self.folder}")
            # Another process may have been faster.
            with contextlib.suppress(OSError):
                part.rename(target)
        finally:
            if part.exists():
                remove_tree(part)
        if not target.is_dir():
            raise ImageError(f"image store {self.folder}: {target.name} could not be created")
        return digest

    def add_snapshot(self, archive: IO[bytes]) -> str:
        """Unpack a tar archive as a temporary layer, and return its name."""
        layer = Path(tempfile.mkdtemp(dir=self.folder, prefix=SNAPSHOT_PREFIX))
        try:
            layer.chmod(0o755)
            unpack_layer(archive, layer, self.owner, "snapshot")
        except BaseException:
            remove_tree(layer)
            raise
        return layer.name

    def delete_snapshot(self, layer: str) -> None:
        """Delete a snapshot. Sandboxes that use it fail."""
        if not layer.startswith(SNAPSHOT_PREFIX) or "/" in layer:
            raise ValueError(f"{layer!r} is not a snapshot")
        with contextlib.suppress(FileNotFoundError):
            remove_tree(self.folder / layer)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        descriptor = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def temporary_file(self) -> IO[bytes]:
        """Return an unnamed file on the store's disk."""
        return tempfile.TemporaryFile(dir=self.folder)

    def _use_directory(self, folder: Path) -> Image:
        """Return an image of a directory, which stays where it is."""
        wanted = os.geteuid() if self.owner is None else self.owner
        if not os.path.lexists(folder / "bin" / "bash"):
            raise ImageError(f"image {folder}: has no /bin/bash, so it is not a root file system")
        owner = folder.stat().st_uid
        if owner != wanted:
            raise ImageError(
                f"image {folder}: belongs to user {owner}, but sandboxes run as user {wanted}. "
                f"Run chown -R {wanted}:{wanted} {folder}, or name a tar archive of it"
            )
        for parent in folder.parents:
            if self.owner is not None and not parent.stat().st_mode & 0o001:
                raise ImageError(
                    f"image {folder}: user {wanted} of the sandboxes cannot enter {parent}. Move the "
                    "image, or name a tar archive of it"
                )
        return Image((str(folder),))

    def _load_oci(self, layout: Path, tag: str | None) -> Image:
        manifest = _manifest(layout, tag)
        config = _read_json(_blob(layout, manifest["config"]["digest"])).get("config") or {}
        layers: list[str] = []
        for description in manifest["layers"]:
            with _blob(layout, description["digest"]).open("rb") as archive:
                layers.insert(0, self.add_layer(archive, f"{layout} ({description['digest']})"))
        if len(layers) > MAX_LAYERS:
            raise ImageError(
                f"image {layout}: has {len(layers)} layers, more than {MAX_LAYERS}. Combine them, for "
                "example with podman build --squash-all"
            )
        entries = (entry.partition("=") for entry in config.get("Env") or ())
        environment = {name: value for name, _, value in entries}
        return Image(tuple(layers), environment, config.get("WorkingDir") or "/")


def _digest(file: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while data := file.read(1 << 20):
        digest.update(data)
    return digest.hexdigest()


def _manifest(layout: Path, tag: str | None) -> dict[str, Any]:
    """Return the manifest of an image for this machine."""
    machine = ARCHITECTURES.get(platform.machine(), platform.machine())
    index = _read_json(layout / "index.json")
    while "manifests" in index:
        names = [
            entry.get("annotations", {}).get("org.opencontainers.image.ref.name")
            for entry in index["manifests"]
        ]
        found = [
            entry
            for entry, name in zip(index["manifests"], names, strict=True)
            if (tag is None or name == tag)
            and entry.get("platform", {}).get("architecture", machine) == machine
        ]
        if len(found) != 1 and (tag is None or not found):
            known = ", ".join(str(name) for name in names)
            raise ImageError(
                f"image {layout}: {len(found)} images for {machine} match the tag {tag}. Tags: {known}"
            )
        index, tag = _read_json(_blob(layout, found[0]["digest"])), None
    return index


def _blob(layout: Path, digest: str) -> Path:
    """Return the file of a digest. Raises ImageError if its contents are different."""
    kind, _, value = digest.partition(":")
    path = layout / "blobs" / kind / value
    if kind not in ("sha256", "sha512") or not value.isalnum() or not path.is_file():
        raise ImageError(f"image {layout}: {digest} is missing")
    with path.open("rb") as file:
        if hashlib.file_digest(file, kind).hexdigest() != value:
            raise ImageError(f"image {layout}: {digest} is damaged")
    return path


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ImageError(f"image: {path} is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise ImageError(f"image: {path} is not a JSON object")
    return value


def remove_tree(folder: Path) -> None:
    """Delete a directory. Modes of directories inside do not matter."""

    def open_and_repeat(function: Any, path: str, _: Any) -> None:
        os.chmod(os.path.dirname(path), 0o700)
        if os.path.isdir(path) and not os.path.islink(path):
            os.chmod(path, 0o700)
        function(path)

    shutil.rmtree(folder, onexc=open_and_repeat)
