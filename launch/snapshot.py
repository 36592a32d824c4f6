"""What a job runs: a copy of this checkout, uncommitted and untracked files included, or of the installed
packages where there is no checkout."""

import io
import subprocess
import tarfile
from importlib.metadata import version
from pathlib import Path

from rl_loop.config.errors import ConfigError
from rl_loop.config.shipped import shipped_directories

PROJECT = Path(__file__).resolve().parents[1]
PACKAGES = ("megatron_gptoss", "converters", "rl_loop", "launch", "kernels/gptoss_kernels")
"""Where a checkout has the packages; a wheel puts all of them side by side."""
JOB_FOLDER = ".gptoss"
"""Folder of the snapshot that holds the configurations of the job and git.txt."""


def write_snapshot(archive: Path, texts: dict[str, str]) -> Path:
    """Pack the checkout, without what git ignores, or the installed packages into a tar.gz file and
    return its path.

    ``texts`` are further files in JOB_FOLDER, by name. git.txt there names the commit and holds
    the difference to it, or the installed version. Raises ConfigError in a checkout without git."""
    # So that the job's code can be had again after the checkout has moved on.
    is_installed = (PROJECT / "gptoss_kernels").is_dir()
    if is_installed:
        files = _files_of_installation()
        state = f"installed: megatron-gptoss {version('megatron-gptoss')}\n"
    else:
        files = _files_of_checkout()
        state = _git("rev-parse", "HEAD") + _git("status", "--short") + _git("diff", "HEAD")

    # Fast compression: the user waits for it, and the code is a few megabytes.
    with tarfile.open(archive, "w:gz", compresslevel=1) as tar:
        for name, file in files.items():
            tar.add(file, arcname=name)
        for name, text in {"git.txt": state, **texts}.items():
            _add_text(tar, f"{JOB_FOLDER}/{name}", text)
    return archive


def _files_of_checkout() -> dict[str, Path]:
    """Return what git knows or does not ignore, by its path in the checkout."""
    listed = _git("ls-files", "--cached", "--others", "--exclude-standard", "-z").split("\0")
    # A deleted file is still listed, and the list ends with an empty name.
    return {name: PROJECT / name for name in listed if name and (PROJECT / name).is_file()}


def _files_of_installation() -> dict[str, Path]:
    """Return the files of the installed packages and configurations, by their path in a checkout."""
    sources = {place: PROJECT / Path(place).name for place in PACKAGES}
    for directory in shipped_directories():
        sources["configs"] = directory

    files = {}
    for place, folder in sources.items():
        for file in sorted(folder.rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts:
                files[f"{place}/{file.relative_to(folder)}"] = file
    return files


def _add_text(tar: tarfile.TarFile, name: str, text: str) -> None:
    content = text.encode()
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    tar.addfile(entry, io.BytesIO(content))


def node_arguments(command: str, group: int, code: str = "") -> list[str]:
    """Return the arguments of ``launch.node`` for a snapshot that lies in ``code``, by default the
    working directory.

    Its configurations must have been packed as run.yaml and cluster.yaml."""
    folder = f"{code}/{JOB_FOLDER}" if code else JOB_FOLDER
    return [f"{folder}/run.yaml", f"{folder}/cluster.yaml", command, str(group)]


def _git(*arguments: str) -> str:
    """Return the output of a git command in this checkout."""
    command = ["git", "-C", str(PROJECT), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        reason = result.stderr.strip()
        raise ConfigError(
            f"a launch needs a git checkout to take its code from; in {PROJECT}: {reason}",
        )
    return result.stdout
