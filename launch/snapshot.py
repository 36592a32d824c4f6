"""What a job runs: a copy of this checkout as it is now, uncommitted and untracked files included."""

import io
import subprocess
import tarfile
from pathlib import Path

from rl_loop.config.errors import ConfigError

PROJECT = Path(__file__).resolve().parents[1]
JOB_FOLDER = ".gptoss"  # in the snapshot: the configurations of the job and ``git.txt``


def write_snapshot(archive: Path, extra: dict[str, str]) -> Path:
    """Pack the checkout (without what git ignores) and ``extra`` {name in JOB_FOLDER: text} into a tar.gz file; git.txt
    names the commit and holds the difference to it. Raises ConfigError outside a git checkout."""
    listed = _git("ls-files", "--cached", "--others", "--exclude-standard", "-z").split("\0")
    texts = {"git.txt": _git("rev-parse", "HEAD") + _git("status", "--short") + _git("diff", "HEAD"), **extra}
    with tarfile.open(archive, "w:gz", compresslevel=1) as tar:
        for name in listed:
            if name and (PROJECT / name).is_file():  # a deleted file is still listed
                tar.add(PROJECT / name, arcname=name)
        for name, text in texts.items():
            entry = tarfile.TarInfo(f"{JOB_FOLDER}/{name}")
            entry.size = len(text.encode())
            tar.addfile(entry, io.BytesIO(text.encode()))
    return archive


def _git(*arguments: str) -> str:
    run = subprocess.run(["git", "-C", str(PROJECT), *arguments], capture_output=True, text=True, check=False)
    if run.returncode:
        raise ConfigError(f"a launch needs a git checkout to take its code from; in {PROJECT}: {run.stderr.strip()}")
    return run.stdout
