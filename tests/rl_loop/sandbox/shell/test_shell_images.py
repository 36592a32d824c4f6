"""Images: directories, archives, OCI layouts, and damaged or hostile ones."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest

from rl_loop.sandbox.shell import ImageError, ImageStore
from rl_loop.sandbox.shell.host_image import write_host_archive
from tests.support.rl_loop.sandbox.shells import Shells


def archive(*members: tuple[str, dict[str, Any], bytes]) -> bytes:
    """Return a tar archive of (name, attributes, contents)."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, attributes, contents in members:
            member = tarfile.TarInfo(name)
            member.size = len(contents)
            for key, value in attributes.items():
                setattr(member, key, value)
            tar.addfile(member, io.BytesIO(contents))
    return buffer.getvalue()


def file(name: str, contents: bytes = b"x", **attributes: Any) -> tuple[str, dict[str, Any], bytes]:
    return name, attributes, contents


def link(
    name: str, target: str, kind: bytes = tarfile.SYMTYPE
) -> tuple[str, dict[str, Any], bytes]:
    return name, {"type": kind, "linkname": target}, b""


def store_blob(layout: Path, contents: bytes) -> dict[str, Any]:
    digest = hashlib.sha256(contents).hexdigest()
    folder = layout / "blobs" / "sha256"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / digest).write_bytes(contents)
    return {"digest": f"sha256:{digest}", "size": len(contents)}


def make_layout(layout: Path, *layers: bytes, tags: tuple[str, ...] = ("main",)) -> None:
    """Write an image in the OCI layout, lowest layer first."""
    config = {"config": {"Env": ["COLOR=red", "EMPTY="], "WorkingDir": "/app"}}
    manifest = {
        "config": store_blob(layout, json.dumps(config).encode()),
        "layers": [store_blob(layout, layer) for layer in layers],
    }
    entry = store_blob(layout, json.dumps(manifest).encode())
    name = "org.opencontainers.image.ref.name"
    index = {"manifests": [entry | {"annotations": {name: tag}} for tag in tags]}
    (layout / "index.json").write_text(json.dumps(index))


@pytest.fixture(scope="module")
def root_archive() -> bytes:
    buffer = io.BytesIO()
    write_host_archive(buffer)
    return buffer.getvalue()


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "store")


@pytest.mark.parametrize("compress", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_archive_is_an_image(shells: Shells, root_archive: bytes, tmp_path: Path, compress) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "root.tar"
    path.write_bytes(compress(root_archive))
    image = shells.wait_for(shells.pool.load(path))
    with shells.open(image) as shell:
        assert shell.output("cat /etc/group") == "root:x:0:\n"


def test_layout_stacks_layers_with_whiteouts(
    shells: Shells, root_archive: bytes, tmp_path: Path
) -> None:
    middle = archive(file("app/a"), file("app/b"), file("old/c"), file("etc/d", mode=0o4755))
    upper = archive(file("app/.wh.a", b""), file("old/.wh..wh..opq", b""), file("old/e"))
    make_layout(tmp_path, root_archive, gzip.compress(middle), upper)
    image = shells.wait_for(shells.pool.load(f"{tmp_path}:main"))
    assert len(image.layers) == 3
    with shells.open(image) as shell:
        output = shell.output("echo $COLOR-$EMPTY-$PWD; ls; ls /old; stat -c %a /etc/d")
        assert output == "red--/app\nb\ne\n755\n"
        assert shell.output("rm -r /old; mkdir /old; ls -A /old; echo new > b; cat b") == "new\n"


def test_equal_layers_are_stored_once(store: ImageStore) -> None:
    layer = archive(file("a"))
    assert store.add_layer(io.BytesIO(layer), "one") == store.add_layer(io.BytesIO(layer), "two")
    assert len(list(store.folder.iterdir())) == 1


def test_layout_names_missing_tags_and_damaged_blobs(store: ImageStore, tmp_path: Path) -> None:
    layout = tmp_path / "layout"
    make_layout(layout, archive(file("a")), tags=("one", "two"))
    with pytest.raises(ImageError, match="Tags: one, two"):
        store.load(f"{layout}:three")
    with pytest.raises(ImageError, match="2 images for"):
        store.load(layout)
    for blob in (layout / "blobs" / "sha256").iterdir():
        blob.write_bytes(blob.read_bytes() + b" ")
    with pytest.raises(ImageError, match="is damaged"):
        store.load(f"{layout}:one")


HOSTILE = {
    "parent": [file("../../escaped")],
    "link on the way": [link("out", "/tmp"), file("out/escaped")],
    "link through a link": [link("a", "b"), link("b", "/etc"), file("a/escaped")],
    "hard link to the outside": [link("x", "/etc/passwd", tarfile.LNKTYPE)],
    "hard link behind a link": [link("d", "/etc"), link("x", "d/passwd", tarfile.LNKTYPE)],
    "whiteout of a parent": [file(".wh...", b"")],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_archive_is_rejected(name: str, store: ImageStore) -> None:
    before = {path: path.stat().st_mtime_ns for path in (Path("/tmp"), Path("/etc"))}
    del before[Path("/tmp")]  # other programs use it
    with pytest.raises(ImageError):
        store.add_layer(io.BytesIO(archive(*HOSTILE[name])), name)
    assert list(store.folder.iterdir()) == []
    assert not Path("/tmp/escaped").exists() and not (store.folder.parent / "escaped").exists()
    assert all(path.stat().st_mtime_ns == time for path, time in before.items())


def test_members_replace_links_and_devices_are_left_out(store: ImageStore, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("untouched")
    members = [link("a", str(target)), file("a", b"new"), ("dev0", {"type": tarfile.CHRTYPE}, b"")]
    layer = store.folder / store.add_layer(io.BytesIO(archive(*members)), "test")
    assert (layer / "a").read_bytes() == b"new" and not (layer / "a").is_symlink()
    assert target.read_text() == "untouched"
    assert os.listdir(layer) == ["a"]


def test_unusable_images_are_named(store: ImageStore, tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="/nowhere: does not exist"):
        store.load("/nowhere")
    (tmp_path / "text").write_text("no archive")
    with pytest.raises(ImageError, match="not a readable tar archive"):
        store.load(tmp_path / "text")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ImageError, match="has no /bin/bash"):
        store.load(tmp_path / "empty")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make directories of other users")
def test_directory_of_another_user_names_the_remedy(store: ImageStore, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "bash").touch()
    with pytest.raises(ImageError, match=r"Run chown -R 65534:65534"):
        store.load(tmp_path)
    os.chown(tmp_path, 65534, 65534)
    parents = [parent for parent in tmp_path.parents if not parent.stat().st_mode & 1]
    if parents:
        with pytest.raises(ImageError, match=f"cannot enter {parents[0]}"):
            store.load(tmp_path)


def test_store_without_attributes_is_named() -> None:
    # /proc has neither directories to create nor attributes.
    with pytest.raises(ImageError, match=r"image store /proc/store: cannot be used"):
        ImageStore(Path("/proc/store"))
