"""Sources of the vocabulary file. The tests run the real pip on a folder instead of an index."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest

from rl_loop.harmony import o200k
from rl_loop.harmony.o200k import FILE_NAME, VARIABLE, VocabularyUnavailableError, ensure_o200k


@pytest.fixture
def content() -> bytes:
    return Path(ensure_o200k() or "").read_bytes()


@pytest.fixture
def machine(content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set up a machine without the file and without an index. Return the path of its cache file."""
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setattr(o200k, "_harmony_downloads", lambda: False)
    return tmp_path / "cache" / "megatron-gptoss" / FILE_NAME


def write_wheel(directory: Path, content: bytes) -> None:
    name, version = o200k.WHEEL.split("==")
    info = f"{name}-{version}.dist-info"
    directory.mkdir()
    with zipfile.ZipFile(directory / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(o200k.WHEEL_MEMBER, content)
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


def test_file_is_taken_from_the_wheel_and_cached(
    machine: Path, content: bytes, tmp_path: Path
) -> None:
    write_wheel(tmp_path / "wheels", content)
    assert ensure_o200k() == machine
    assert machine.read_bytes() == content
    assert os.environ[VARIABLE] == str(machine.parent)
    assert [path.name for path in machine.parent.iterdir()] == [FILE_NAME]


def test_cached_file_needs_no_package(machine: Path, content: bytes) -> None:
    machine.parent.mkdir(parents=True)
    machine.write_bytes(content)
    assert ensure_o200k() == machine


def test_damaged_cached_file_is_replaced(machine: Path, content: bytes, tmp_path: Path) -> None:
    machine.parent.mkdir(parents=True)
    machine.write_bytes(content[:1000])
    write_wheel(tmp_path / "wheels", content)
    assert ensure_o200k() == machine
    assert machine.read_bytes() == content


def test_wheel_with_other_bytes_is_rejected(machine: Path, content: bytes, tmp_path: Path) -> None:
    write_wheel(tmp_path / "wheels", content[:-1])
    with pytest.raises(VocabularyUnavailableError, match=VARIABLE):
        ensure_o200k()
    assert not machine.exists()


def test_missing_file_names_the_variable_to_set(machine: Path) -> None:
    with pytest.raises(VocabularyUnavailableError, match=f"set {VARIABLE} to it"):
        ensure_o200k()


def test_folder_of_the_environment_variable_is_used(
    machine: Path, content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    (tmp_path / FILE_NAME).write_bytes(content)
    assert ensure_o200k() == tmp_path / FILE_NAME
    assert not machine.exists()


def test_wrong_file_in_the_folder_of_the_variable_is_an_error(
    machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    (tmp_path / FILE_NAME).write_bytes(b"IQ== 0\n")
    with pytest.raises(VocabularyUnavailableError, match=f"{tmp_path}/{FILE_NAME}"):
        ensure_o200k()


def test_unwritable_cache_is_named(machine: Path, content: bytes, tmp_path: Path) -> None:
    write_wheel(tmp_path / "wheels", content)
    (tmp_path / "cache").write_text("a file where a folder should be")
    with pytest.raises(VocabularyUnavailableError, match="could not be written"):
        ensure_o200k()
