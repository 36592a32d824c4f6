"""Wheels of this project, and environments that have only some of the installed distributions."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement

from tests.support.waiting import PATIENCE_SECONDS

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("kernels", "megatron_gptoss", "converters", "rl_loop", "launch", "configs")
FILES = ("pyproject.toml", "README.md", "LICENSE", "gptoss_command.py")
KERNELS = "./kernels"
"""Folder of the distribution gptoss-kernels. Without "./", pip would download a package of this name."""
LEFT_BY_BUILDS = shutil.ignore_patterns("__pycache__", "build", "*.egg-info")


def build_wheels(directory: Path, *folders: str) -> list[Path]:
    """Build wheels in ``directory / "dist"`` from a copy of the sources.

    Args:
        directory: an empty directory.
        folders: "." for megatron-gptoss, KERNELS for gptoss-kernels.

    Returns:
        The wheels, gptoss-kernels first.
    """
    # setuptools leaves files next to the sources.
    source = directory / "source"
    source.mkdir()
    for name in (KERNELS,) if folders == (KERNELS,) else SOURCES:
        shutil.copytree(ROOT / name, source / name, ignore=LEFT_BY_BUILDS)
    for name in FILES:
        shutil.copy(ROOT / name, source / name)
    pip(
        "wheel", "--no-deps", "--no-build-isolation", "-w", directory / "dist", *folders, cwd=source
    )
    shutil.rmtree(source)
    return sorted((directory / "dist").glob("*.whl"))


def pip(*arguments: str | Path, cwd: Path) -> None:
    """Run pip of this environment."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "-q",
        "--disable-pip-version-check",
        *map(str, arguments),
    ]
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=4 * PATIENCE_SECONDS
    )
    assert done.returncode == 0, done.stdout + done.stderr


def link_distributions(directory: Path, *names: str) -> None:
    """Link installed distributions and their requirements into a directory, for ``sys.path``."""
    site = Path(sysconfig.get_path("purelib"))
    for name in _with_requirements(names):
        # A name without a folder, such as ../../bin/x, belongs to a directory of programs.
        parts = {file.parts[0] for file in distribution(name).files or ()}
        for part in parts - {"..", "__pycache__"}:
            if not (directory / part).exists():
                (directory / part).symlink_to(site / part)


def _with_requirements(names: tuple[str, ...]) -> Iterator[str]:
    """Yield distributions and all their installed requirements, without those of extras."""
    waiting, seen = list(names), set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        yield name
        required = distribution(name).requires or []
        for requirement in map(Requirement, required):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting.append(requirement.name)


def run_isolated(program: str, *path: Path) -> str:
    """Run a program that can import only the standard library and modules in ``path``.

    Returns:
        Standard output.
    """
    entries = [str(entry) for entry in path]
    # -I ignores PYTHONPATH and the working directory, -S ignores site-packages.
    start = f"import sys; sys.path += {entries}\n"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", start + program],
        cwd=path[0],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
