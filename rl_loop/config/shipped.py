"""Finds the project's configurations, from any working directory and without a checkout."""

import sysconfig
from collections.abc import Iterator
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2] / "configs"
INSTALLED = Path("share/gptoss/configs")
"""Folder of a wheel's configurations, relative to the environment's prefix (``data-files`` in
pyproject.toml)."""
UNTESTED = "untested"
"""Folder of configurations that have never run. It has folders rl and sft."""


def find_config(path: Path, folder: str) -> Path:
    """Return the file of a configuration: ``path``, or else the shipped file of that name.

    Args:
        path: a file, ``configs/rl/NAME.yaml`` from any working directory, or NAME.
        folder: shipped folder that is searched for NAME: rl, sft or cluster. The untested
            configurations of this folder come last.

    Returns:
        ``path`` itself if neither exists. Reading it then fails.

    Example:
        >>> find_config(Path("tiny_retool"), "rl").name
        'tiny_retool.yaml'
    """
    if path.exists():
        return path
    # Not ``with_suffix``, because a name may contain a dot, such as qwen2.5-32b.
    relative = path if path.suffix in (".yaml", ".yml") else path.with_name(f"{path.name}.yaml")
    if relative.parts[0] == "configs":
        relative = Path(*relative.parts[1:])

    for directory in shipped_directories():
        # ``relative`` may name the folder itself, such as rl/NAME.yaml.
        for parent in (directory, directory / folder, directory / UNTESTED / folder):
            if (parent / relative).is_file():
                return parent / relative
    return path


def find_section(file: Path, folder: str, name: str) -> Path | None:
    """Return the file of a section in a configuration, or None if there is none.

    The file next to the configuration comes first: ``../FOLDER/NAME.yaml``, relative to ``file``.
    Therefore a copy of a shipped configuration finds its sections anywhere.

    Args:
        file: file of the configuration.
        folder: model or algorithm.
        name: value of the section's key.
    """
    # A user's own section has precedence over a shipped one of that name.
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
    """Yield the existing folders of shipped configurations: of a checkout, of an installation."""
    # pip installs the ``data-files`` of a wheel below this path.
    for directory in (CHECKOUT, Path(sysconfig.get_path("data")) / INSTALLED):
        if directory.is_dir():
            yield directory


def shipped_files(folder: str) -> list[Path]:
    """List the shipped configurations of a folder. Untested ones come last."""
    for directory in shipped_directories():
        parents = (directory / folder, directory / UNTESTED / folder)
        # A checkout and an installation have the same files, so list only the first.
        return [file for parent in parents for file in sorted(parent.glob("*.yaml"))]
    return []


def shipped_names(folder: str) -> list[str]:
    """List the names of a folder's shipped configurations, including untested ones."""
    return sorted(file.stem for file in shipped_files(folder))
