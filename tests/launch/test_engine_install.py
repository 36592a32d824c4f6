"""Installation of SGLang's environment: rejected inputs, failures, continuation, hash checks.

pip and the virtual environment are real. The packages are two small wheels built here.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import re
import subprocess
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from launch import engine_install
from launch.engine_install import (
    PINNED,
    PROGRESS_FILE,
    InstallError,
    WheelPlatform,
    install_engine,
    read_requirements,
    this_machine,
    unsupported_reason,
)

GOOD = WheelPlatform("Linux", "x86_64", (2, 36), (3, 12), free_bytes=100e9)


def make_wheel(folder: Path, name: str) -> Path:
    """Write a wheel of one module, whose ``__version__`` is 1.0."""
    info = f"{name}-1.0.dist-info"
    files = {
        f"{name}.py": '__version__ = "1.0"\n',
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for path, text in files.items():
        digest = hashlib.sha256(text.encode()).digest()
        encoded = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
        record += f"{path},sha256={encoded},{len(text)}\n"
    wheel = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in {**files, f"{info}/RECORD": record}.items():
            archive.writestr(path, text)
    return wheel


def pin(wheel: Path) -> str:
    name = wheel.name.split("-")[0]
    return f"{name}==1.0 \\\n    --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n"


def test_failed_installation_continues_and_checks_hashes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    monkeypatch.setattr(engine_install, "PACKAGES_PER_CALL", 1)
    first, second = make_wheel(shelf, "helper"), make_wheel(tmp_path, "sglang")
    pinned = tmp_path / "pinned.txt"
    pinned.write_text(pin(first) + pin(second))
    engine = tmp_path / "engine"
    said: list[str] = []

    with pytest.raises(InstallError, match=r"sglang\. Repeat the command to continue: ERROR: No"):
        install_engine(engine, said.append, pinned)
    assert [re.sub(", .:..", "", line) for line in said] == [
        "[1-1 of 2] helper",
        "[2-2 of 2] sglang",
    ]

    # The wheel exists now, but its hash differs from the pinned one.
    (shelf / second.name).write_bytes(second.read_bytes() + b"\0")
    with pytest.raises(InstallError, match="pip could not install sglang"):
        install_engine(engine, said.append, pinned)

    (shelf / second.name).write_bytes(second.read_bytes())
    said.clear()
    python = install_engine(engine, said.append, pinned)
    assert said[0] == "1 of 2 packages are already installed"
    assert len(said) == 3 and said[1].endswith("sglang")
    program = "import helper, sglang; print(sglang.__version__)"
    assert subprocess.check_output([python, "-c", program], text=True) == "1.0\n"

    said.clear()
    assert install_engine(engine, said.append, pinned) == python
    assert said == [f"{engine}: already complete"]

    # Other pinned versions need a new environment.
    pinned.write_text(pin(second))
    said.clear()
    install_engine(engine, said.append, pinned)
    assert len(said) == 2 and said[0].startswith("[1-1 of 1")
    assert subprocess.run([python, "-c", "import helper"], capture_output=True).returncode


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architecture": "aarch64"}, "this machine is Linux aarch64, but the pinned versions"),
        ({"system": "Darwin"}, "this machine is Darwin x86_64"),
        ({"glibc": (2, 31)}, "need glibc 2.34 or later, but this system has 2.31"),
        ({"glibc": None}, "this system has none"),
        ({"python": (3, 11)}, "are for Python 3.12, but this is Python 3.11"),
        ({"free_bytes": 5e9}, "GB more on this disk, but 5 GB are free"),
    ],
)
def test_unsuitable_machine_error_names_the_reason(changes: dict[str, object], reason: str) -> None:
    assert not unsupported_reason(GOOD)
    assert reason in unsupported_reason(replace(GOOD, **changes))


def test_installed_packages_need_no_free_disk(tmp_path: Path) -> None:
    assert not unsupported_reason(replace(GOOD, free_bytes=5e9), share=0.2)
    assert this_machine(tmp_path / "not" / "there" / "yet").free_bytes > 0


def test_unrelated_directory_is_not_changed(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(InstallError, match="not empty, and not an environment of this command"):
        install_engine(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(InstallError, match="is a file"):
        install_engine(tmp_path / "thesis.tex")


def test_concurrent_installation_into_a_directory_is_rejected(tmp_path: Path) -> None:
    with open(tmp_path / PROGRESS_FILE, "a") as notes:
        fcntl.flock(notes, fcntl.LOCK_EX)
        with pytest.raises(InstallError, match="another process is installing"):
            install_engine(tmp_path)


def test_pinned_file_has_all_hashes_and_no_address() -> None:
    requirements = read_requirements(PINNED)
    pins = {requirement.pin for requirement in requirements}
    assert len(pins) == len(requirements) > 200
    assert "sglang==0.5.17" in pins
    assert "://" not in PINNED.read_text()


def test_a_requirement_without_a_hash_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "pinned.txt").write_text("helper==1.0\n")
    with pytest.raises(InstallError, match=r"helper==1\.0 has no version or no hash"):
        read_requirements(tmp_path / "pinned.txt")
