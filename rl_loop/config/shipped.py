"""Search for shipped configurations, from any working directory, with or without a checkout."""

import sysconfig
from collections.abc import Iterator
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2] / "configs"
"""Folder of configurations in a checkout."""
INSTALLED = Path("share/gptoss/configs")
"""Folder of configurations in an installation, relative to the prefix of the environment.

``data-files`` in pyproject.toml names it.
"""
UNTESTED = "untested"
"""Folder of configurations that have never run. It has folders rl and sft."""


def find_config(path: Path, folder: str) -> Path:
    """Return the file ``path`` if it exists, otherwise the shipped file with this name.

    Args:
        path: a file, ``configs/rl/NAME.yaml`` from any working directory, or NAME.
        folder: folder of shipped configurations in which to search for NAME: rl, sft or cluster.
            Tested configurations have precedence over untested ones.

    Returns:
        The file, or ``path`` if there is none. Reading ``path`` then raises an error.

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
    """Return the file that a configuration names as its model or algorithm.

    Args:
        file: file of the configuration.
        folder: model or algorithm.
        name: value of the key ``model`` or ``algorithm``.

    Returns:
        ``../FOLDER/NAME.yaml`` relative to ``file`` if it exists, otherwise the shipped file. None if
        neither exists.
    """
    # The shipped file is found from any folder, so a copy of a shipped configuration works anywhere.
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
    """Yield the folders of shipped configurations that exist, the checkout before the installation."""
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
