"""The code of a job: a copy of this checkout, or of the installed packages without a checkout.

The copy of a checkout includes uncommitted and untracked files.
"""

import io
import logging
import os
import re
import subprocess
import tarfile
from fnmatch import fnmatch
from importlib.metadata import version
from pathlib import Path

from rl_loop.config.errors import ConfigError
from rl_loop.config.shipped import shipped_directories

PROJECT = Path(__file__).resolve().parents[1]
PACKAGES = ("megatron_gptoss", "converters", "rl_loop", "launch", "kernels/gptoss_kernels")
"""Paths of the packages in a checkout. A wheel installs all of them next to each other."""
JOB_FOLDER = ".gptoss"
"""Folder of the snapshot with the configurations of the job and git.txt."""


SECRET_NAMES = (
    ".env",
    ".env.*",
    "*.env",
    ".envrc",
    "*.pem",
    "*.key",
    "*.p12",
    "*.pfx",
    "*.jks",
    "*.keystore",
    "*.kdbx",
    "*.gpg",
    "*.asc",
    "id_rsa*",
    "id_dsa*",
    "id_ecdsa*",
    "id_ed25519*",
    ".netrc",
    "_netrc",
    ".npmrc",
    ".pypirc",
    ".git-credentials",
    ".pgpass",
    ".htpasswd",
    "*token",
    "*token.txt",
    "*tokens.txt",
    "*secret*",
    "*credential*",
    "*password*",
    "*api_key*",
    "*apikey*",
    "*api-key*",
    "kubeconfig*",
    "service?account*.json",
)
"""Lower-case name patterns of files and folders that hold keys."""
SECRET_CONTENTS = re.compile(
    rb"-----BEGIN [A-Z ]*PRIVATE KEY"
    rb"|\bhf_[A-Za-z0-9]{30,}"
    rb"|\bsk-[A-Za-z0-9_-]{20,}"
    rb"|\bgh[pousr]_[A-Za-z0-9]{30,}"
    rb"|\bgithub_pat_[A-Za-z0-9_]{30,}"
    rb"|\bglpat-[A-Za-z0-9_-]{20,}"
    rb"|\bxox[abprs]-[A-Za-z0-9-]{10,}"
    rb"|\b(AKIA|ASIA)[A-Z0-9]{16}\b"
    rb"|\bAIza[A-Za-z0-9_-]{35}"
)
"""Private keys, and tokens of Hugging Face, OpenAI, GitHub, GitLab, Slack, AWS and Google."""
SEARCHED_BYTES = 1 << 20
"""Number of bytes at the start of an untracked file that are searched for secrets."""

logger = logging.getLogger(__name__)


def write_snapshot(archive: Path, texts: dict[str, str]) -> Path:
    """Pack the checkout, without git-ignored files, or the installed packages into a tar.gz file.

    git.txt in JOB_FOLDER has the commit and the difference to it, or the installed version. It
    makes the job's code reproducible after the checkout has changed. Untracked files that look like
    keys are left out with a warning. Only the user can read the archive and its files.

    Args:
        archive: file to write.
        texts: contents of additional files in JOB_FOLDER by file name.

    Returns:
        ``archive``.

    Raises:
        ConfigError: in a checkout without git.
    """
    # A wheel places gptoss_kernels next to the other packages, a checkout in kernels/.
    is_installed = (PROJECT / "gptoss_kernels").is_dir()
    if is_installed:
        files = _files_of_installation()
        state = f"installed: megatron-gptoss {version('megatron-gptoss')}\n"
    else:
        files = _files_of_checkout()
        # Together, commit and difference reproduce the tracked files.
        state = _git("rev-parse", "HEAD") + _git("status", "--short") + _git("diff", "HEAD")

    # Compression level 1, because the user waits and the code is only a few megabytes.
    # An existing file would keep its permissions, so create another one ("x").
    archive.unlink(missing_ok=True)
    with (
        open(archive, "xb", opener=_open_private) as output,
        tarfile.open(fileobj=output, mode="w:gz", compresslevel=1) as tar,
    ):
        for name, file in files.items():
            tar.add(file, arcname=name, filter=_private)
        for name, text in {"git.txt": state, **texts}.items():
            _add_text(tar, f"{JOB_FOLDER}/{name}", text)
    return archive


def _files_of_checkout() -> dict[str, Path]:
    """Return the checkout's files, except ignored files and keys, by their path in it."""
    # Tracked files are never left out, because the user has added them to git.
    tracked = _list_files("--cached")
    untracked = _list_files("--others", "--exclude-standard")
    secrets = sorted(name for name, file in untracked.items() if _looks_secret(name, file))
    for name in secrets:
        logger.warning(
            "%s: looks like a key and is left out of the job's code. Add it to .gitignore, or to "
            "git if the job needs it",
            name,
        )
    return tracked | {name: untracked[name] for name in untracked if name not in secrets}


def _list_files(*options: str) -> dict[str, Path]:
    """Return files that ``git ls-files`` lists, by their path in the checkout."""
    names = _git("ls-files", *options, "-z").split("\0")
    # A deleted file is still listed, and the list ends with an empty name.
    return {name: PROJECT / name for name in names if name and (PROJECT / name).is_file()}


def _looks_secret(name: str, file: Path) -> bool:
    """Return True if name or contents of an untracked file look like a key."""
    # Exempt source code, which is often named after secrets.
    parts = [part.lower() for part in Path(name).parts]
    is_code = file.suffix in (".py", ".md", ".html", ".js", ".c", ".h")
    # Any component counts, such as a folder named secrets.
    if not is_code and any(fnmatch(part, kind) for part in parts for kind in SECRET_NAMES):
        return True
    with file.open("rb") as content:
        return SECRET_CONTENTS.search(content.read(SEARCHED_BYTES)) is not None


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _private(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Remove the permissions of other users from an archive's entry."""
    # The archive may be unpacked where other users can read.
    entry.mode &= 0o700
    return entry


def _files_of_installation() -> dict[str, Path]:
    """Return the files of the installed packages and configurations, by path in a checkout."""
    # The job expects the layout of a checkout, with kernels/ on its path.
    sources = {place: PROJECT / Path(place).name for place in PACKAGES}
    for directory in shipped_directories():
        sources["configs"] = directory

    files = {}
    for place, folder in sources.items():
        for file in sorted(folder.rglob("*")):
            # Compiled files depend on the interpreter of this machine.
            if file.is_file() and "__pycache__" not in file.parts:
                files[f"{place}/{file.relative_to(folder)}"] = file
    return files


def _add_text(tar: tarfile.TarFile, name: str, text: str) -> None:
    content = text.encode()
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    entry.mode = 0o600
    tar.addfile(entry, io.BytesIO(content))


def node_arguments(command: str, group: int, code: str = "") -> list[str]:
    """Return the arguments of ``launch.node`` for a snapshot.

    The snapshot must contain run.yaml and cluster.yaml.

    Args:
        command: training command, ``rl`` or ``sft``.
        group: number of the node's part in a heterogeneous job, else 0.
        code: directory of the snapshot; "" for the working directory.
    """
    folder = f"{code}/{JOB_FOLDER}" if code else JOB_FOLDER
    return [f"{folder}/run.yaml", f"{folder}/cluster.yaml", command, str(group)]


def _git(*arguments: str) -> str:
    """Return the output of a git command in this checkout."""
    command = ["git", "-C", str(PROJECT), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        reason = result.stderr.strip()
        raise ConfigError(
            f"{PROJECT}: a launch copies its code from a git checkout, but git failed: {reason}",
        )
    return result.stdout
