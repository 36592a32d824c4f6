"""Finds the configurations that the project ships, from any working directory and without a checkout."""

import sysconfig
from collections.abc import Iterator
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2] / "configs"
INSTALLED = Path("share/gptoss/configs")
"""Folder below the environment's prefix for a wheel's configurations (``data-files`` in pyproject.toml)."""
UNTESTED = "untested"
"""Folder of configurations that have never run, with folders rl and sft of its own."""


def find_config(path: Path, folder: str) -> Path:
    """Return a configuration's file: ``path``, or else what the project ships under that name.

    Args:
        path: a file, ``configs/rl/NAME.yaml`` from any working directory, or NAME.
        folder: shipped folder that is searched for NAME: rl, sft or cluster. The untested
            configurations of this folder come last.

    Returns:
        ``path`` itself if there is neither; reading it says so.
    """
    if path.exists():
        return path
    relative = path if path.suffix in (".yaml", ".yml") else path.with_name(f"{path.name}.yaml")
    if relative.parts[0] == "configs":
        relative = Path(*relative.parts[1:])

    for directory in shipped_directories():
        for parent in (directory, directory / folder, directory / UNTESTED / folder):
            if (parent / relative).is_file():
                return parent / relative
    return path


def find_section(file: Path, folder: str, name: str) -> Path | None:
    """Return the file of a section that a configuration names, or None if there is none.

    One beside the configuration comes first: ``../FOLDER/NAME.yaml``, seen from ``file``. So a copy
    of a shipped configuration finds what it names, wherever it lies.

    Args:
        file: of the configuration.
        folder: model or algorithm.
    """
    for directory in (file.parent.parent, *shipped_directories()):
        section = directory / folder / f"{name}.yaml"
        if section.is_file():
            return section
    return None


def section_names(file: Path, folder: str) -> list[str]:
    """List the names that ``find_section`` finds."""
    directories = (file.parent.parent, *shipped_directories())
    return sorted(
        {found.stem for place in directories for found in (place / folder).glob("*.yaml")}
    )


def shipped_directories() -> Iterator[Path]:
    """Yield the folders of shipped configurations that are there: a checkout's, an installation's."""
    for directory in (CHECKOUT, Path(sysconfig.get_path("data")) / INSTALLED):
        if directory.is_dir():
            yield directory


def shipped_files(folder: str) -> list[Path]:
    """List the shipped configurations of a folder, the untested ones last."""
    for directory in shipped_directories():
        parents = (directory / folder, directory / UNTESTED / folder)
        return [file for parent in parents for file in sorted(parent.glob("*.yaml"))]
    return []


def shipped_names(folder: str) -> list[str]:
    """List the names of the shipped configurations of a folder, the untested ones included."""
    return sorted(file.stem for file in shipped_files(folder))
