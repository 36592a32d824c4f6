"""Parser of nvidia-smi, tested with programs that print a driver's output."""

from pathlib import Path

import pytest

from megatron_gptoss.nvidia_smi import (
    NvidiaSmiError,
    NvidiaSmiMissingError,
    memory_bytes,
    query_gpus,
)


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "nvidia-smi"
    path.touch(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return path


def test_query_gpus_returns_fields_by_name(program: Path) -> None:
    program.write_text(
        '#!/bin/sh\ntest "$1" = --query-gpu=name,index || exit 2\necho "B200, 180 GB, 0"\n'
    )
    assert query_gpus("name", "index") == [{"name": "B200, 180 GB", "index": "0"}]


@pytest.mark.parametrize("fields", [("uuid",), ("name", "index")])
def test_query_gpus_is_empty_when_driver_finds_none(program: Path, fields: tuple[str, ...]) -> None:
    program.write_text("#!/bin/sh\necho No devices were found\n")
    assert query_gpus(*fields) == []


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("exit 9", "failed: .*exit status 9"),
        ("echo 'Field is not valid'", "does not report name, index, but 'Field is not valid'"),
    ],
)
def test_query_gpus_fails_when_nvidia_smi_fails(program: Path, script: str, message: str) -> None:
    program.write_text(f"#!/bin/sh\n{script}\n")
    with pytest.raises(NvidiaSmiError, match=message):
        query_gpus("name", "index")


def test_query_gpus_raises_without_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NvidiaSmiMissingError):
        query_gpus("name")


def test_memory_bytes_is_none_for_text() -> None:
    assert memory_bytes("3") == 3 << 20
    assert memory_bytes("[N/A]") is None
