"""What a job runs: a copy of this checkout, uncommitted and untracked files included."""

import io
import subprocess
import tarfile
from pathlib import Path

from rl_loop.config.errors import ConfigError

PROJECT = Path(__file__).resolve().parents[1]
JOB_FOLDER = ".gptoss"
"""Folder of the snapshot that holds the configurations of the job and git.txt."""


def write_snapshot(archive: Path, texts: dict[str, str]) -> Path:
    """Pack the checkout, without what git ignores, into a tar.gz file and return its path.

    ``texts`` are further files in JOB_FOLDER, by name. git.txt there names the commit and holds
    the difference to it. Raises ConfigError outside a git checkout."""
    listed = _git("ls-files", "--cached", "--others", "--exclude-standard", "-z").split("\0")
    # So that the job's code can be had again after the checkout has moved on.
    state = _git("rev-parse", "HEAD") + _git("status", "--short") + _git("diff", "HEAD")

    # Fast compression: the user waits for it, and the code is a few megabytes.
    with tarfile.open(archive, "w:gz", compresslevel=1) as tar:
        for name in listed:
            # A deleted file is still listed, and the list ends with an empty name.
            if name and (PROJECT / name).is_file():
                tar.add(PROJECT / name, arcname=name)
        for name, text in {"git.txt": state, **texts}.items():
            _add_text(tar, f"{JOB_FOLDER}/{name}", text)
    return archive


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
