"""Choice of Triton's assembler by the plugin of SGLang's servers."""

from __future__ import annotations

import importlib
import logging
from pathlib import Path
from types import ModuleType

import pytest
import torch

from rl_loop.engines.sglang.config import PLUGIN, SglangConfig

VARIABLE = "TRITON_PTXAS_PATH"


@pytest.fixture
def assembler(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the plugin's module, on a machine without an assembler."""
    monkeypatch.syspath_prepend(str(PLUGIN))
    for variable in (VARIABLE, "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(variable, raising=False)
    # Set and delete the variable, so that monkeypatch also undoes the module's change.
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.delenv(VARIABLE)
    module = importlib.import_module("gptoss_ptxas")
    monkeypatch.setattr(module, "PACKAGE", "no-such-package")
    monkeypatch.setattr(module, "TOOLKIT", "/nowhere/cuda")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    return module


def write_assembler(path: Path, version: str, *, is_executable: bool = True) -> str:
    """Write a program that prints the version of a ptxas, and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {version}, V{version}.37'\n")
    path.chmod(0o755 if is_executable else 0o644)
    return str(path)


def install_package(
    assembler: ModuleType, monkeypatch: pytest.MonkeyPatch, directory: Path, version: str
) -> str:
    """Install the package that has an assembler in this environment, as pip would."""
    monkeypatch.syspath_prepend(str(directory))
    monkeypatch.setattr(assembler, "PACKAGE", "some-nvcc")
    path = write_assembler(directory / "nvidia/cu13/bin/ptxas", version)
    (directory / "nvidia/cu13/bin/ptxas.profile").touch()
    information = directory / "some_nvcc-1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: some-nvcc\nVersion: 1\n")
    record = "nvidia/cu13/bin/ptxas.profile,,\nnvidia/cu13/bin/ptxas,,\n"
    (information / "RECORD").write_text(record)
    return path


def test_ptxas_of_the_environment_is_preferred_to_a_toolkits(
    assembler: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_package = install_package(assembler, monkeypatch, tmp_path / "site", "13.3")
    write_assembler(tmp_path / "cuda/bin/ptxas", "13.6")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    assembler.install()
    assert assembler.os.environ[VARIABLE] == of_package


def test_ptxas_of_a_toolkit_replaces_a_package_that_is_too_old(
    assembler: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_package(assembler, monkeypatch, tmp_path / "site", "13.2")
    write_assembler(tmp_path / "old/bin/ptxas", "13.5", is_executable=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "old"))
    of_toolkit = write_assembler(tmp_path / "new/bin/ptxas", "13.6")
    monkeypatch.setattr(assembler, "TOOLKIT", str(tmp_path / "new"))
    assembler.install()
    assert assembler.os.environ[VARIABLE] == of_toolkit


def test_ptxas_of_another_major_version_is_ignored(
    assembler: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_assembler(tmp_path / "bin/ptxas", "14.0")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assembler.install()
    assert VARIABLE not in assembler.os.environ

    monkeypatch.setattr(torch.version, "cuda", "14.1")
    assembler.install()
    assert assembler.os.environ[VARIABLE] == str(tmp_path / "bin/ptxas")


def test_server_without_a_ptxas_warns_and_names_the_package(
    assembler: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    assembler.install()
    assert VARIABLE not in assembler.os.environ
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "Install no-such-package >= 13.3 in this environment" in record.getMessage()


@pytest.mark.parametrize(("version", "warns"), [("12.8", True), ("13.3", False)])
def test_ptxas_chosen_by_the_user_is_kept(
    assembler: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    version: str,
    warns: bool,
) -> None:
    chosen = write_assembler(tmp_path / "ptxas", version)
    monkeypatch.setenv(VARIABLE, chosen)
    assembler.install()
    assert assembler.os.environ[VARIABLE] == chosen
    warnings = [record.getMessage() for record in caplog.records]
    expected = f"{VARIABLE}={chosen} is older than CUDA 13.3"
    assert [warning.split(",")[0] for warning in warnings] == [expected] * warns


def test_ptxas_is_chosen_before_mxfp4_kernels_are_compiled() -> None:
    patches = SglangConfig(quantization="mxfp4").environment["GPTOSS_SGLANG_PATCHES"].split(",")
    assert patches.index("ptxas_override") < patches.index("moe_occupancy")
    assert "ptxas_override" not in SglangConfig().environment["GPTOSS_SGLANG_PATCHES"]
