"""Untrusted model directories: names that point elsewhere, and gigantic headers."""

from __future__ import annotations

import json
import shutil
import struct
import tracemalloc
from pathlib import Path

import pytest

from converters.errors import ConversionError
from converters.hf_directory import HfDirectory
from converters.safetensors_files import SafetensorsFile
from converters.torch_dist_files import TorchDistReader
from megatron_gptoss import new_directory as new_directory_module
from megatron_gptoss.durable_files import exchange_names
from megatron_gptoss.new_directory import new_directory
from rl_loop.config.errors import StartError
from rl_loop.lifecycle.weight_checks import _check_safetensors


@pytest.mark.parametrize("way", ["../elsewhere/secret.safetensors", "/etc/passwd", "..", 7, "a/b"])
def test_index_outside_its_directory_is_rejected(way: object, tmp_path: Path, hf_dir: Path) -> None:
    model = hf_dir
    (tmp_path / "elsewhere").mkdir()
    shutil.copy(model / "model.safetensors", tmp_path / "elsewhere/secret.safetensors")
    names = HfDirectory(model).names()
    (model / "model.safetensors").unlink()
    (model / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys(names, way)})
    )
    with pytest.raises(
        ConversionError, match=r"index\.json: names the file .*outside of its direct"
    ):
        HfDirectory(model)
    with pytest.raises(StartError, match=r"index\.json: names the file .*outside of its directory"):
        _check_safetensors("initial_weights", model)


@pytest.mark.parametrize("length", [200_000_000, 1 << 40, (1 << 64) - 1])
def test_gigantic_safetensors_header_is_rejected_unread(length: int, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", length) + b"{")
        file.truncate(300_000_000)  # zeros that use no disk space
    tracemalloc.start()
    with pytest.raises(ConversionError, match=r"model\.safetensors: truncated or not .*eader"):
        SafetensorsFile(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10 << 20


# -- replacement of a directory -------------------------------------------------------------------


def fill(final: Path, text: str) -> None:
    with new_directory(final, overwrite=True) as partial:
        (partial / "content").write_text(text)


def test_a_directory_is_replaced_in_one_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    final = tmp_path / "model"
    fill(final, "old")
    seen = []

    def watched(a: Path, b: Path) -> bool:
        before = (b / "content").read_text()
        done = exchange_names(a, b)
        seen.append((before, (b / "content").read_text(), (a / "content").read_text()))
        return done

    monkeypatch.setattr(new_directory_module, "exchange_names", watched)
    fill(final, "new")
    assert seen == [("old", "new", "old")]
    assert (final / "content").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_kill_between_two_moves_is_named_and_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file system cannot exchange names, so the replacement takes two moves."""
    monkeypatch.setattr(new_directory_module, "exchange_names", lambda a, b: False)
    final = tmp_path / "model"
    fill(final, "old")
    fill(final, "new")
    assert (final / "content").read_text() == "new"

    final.rename(tmp_path / "model.old")
    for reader in (HfDirectory, TorchDistReader):
        with pytest.raises(ConversionError, match=r"model: no such directory. .*model\.old is"):
            reader(final)
    with pytest.raises(RuntimeError), new_directory(final, overwrite=True):
        raise RuntimeError("the next attempt fails, too")
    assert (final / "content").read_text() == "new"


def test_exchange_fails_for_missing_paths(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(OSError, match="No such file") as error:
        exchange_names(tmp_path / "a", tmp_path / "b")
    assert error.value.filename == str(tmp_path / "a")
