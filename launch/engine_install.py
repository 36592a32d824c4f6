"""Installation of SGLang in a separate environment: ``gptoss doctor --install-engine DIR``.

Versions and hashes are in ``pinned/sglang.txt``, made by `uv pip compile` (docs/installing.md).
Packages are installed in batches. Completed packages are recorded, so that an interrupted
installation can continue.
"""

import fcntl
import hashlib
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from launch.progress import format_seconds
from megatron_gptoss.user_error import UserError

PINNED = Path(__file__).parent / "pinned" / "sglang.txt"
DISK_BYTES = 12e9
"""Disk space for the environment with SGLang 0.5.17.

10 GB in total, of which 9.1 GB before compilation, plus the temporary copy of the largest package.
"""
PACKAGES_PER_CALL = 8
"""Packages per call of pip, which takes 1 s to start."""
GLIBC = (2, 34)
"""Minimum version of glibc for SGLang's wheels (manylinux_2_34)."""

PROGRESS_FILE = ".gptoss-engine"
"""File in the environment: the hash of the pinned file, then each completed package."""
COMPLETE = "complete"

LogLine = Callable[[str], None]


class InstallError(UserError):
    """SGLang cannot be installed here. The message has the reason and the remedy."""


@dataclass(frozen=True)
class PinnedPackage:
    """One package of a pinned file."""

    pin: str
    """``NAME==VERSION``."""
    text: str
    """Lines of the package in the file, including hashes."""


@dataclass(frozen=True)
class WheelPlatform:
    """Properties that decide whether the wheels can be installed."""

    system: str
    """Operating system, such as Linux."""
    architecture: str
    """Processor architecture, such as x86_64."""
    glibc: tuple[int, int] | None
    """Version of glibc; None for another C library."""
    python: tuple[int, int]
    free_bytes: float
    """Free space in bytes on the disk of the environment."""


def install_engine(directory: Path, log_line: LogLine = print, pinned: Path = PINNED) -> Path:
    """Create an environment with SGLang, or complete an interrupted installation.

    Args:
        directory: new or empty directory, or one of an earlier call.
        log_line: receives a line per batch of packages.
        pinned: requirements with hashes.

    Returns:
        Interpreter of the environment, for ``rollout.engine.python``.

    Raises:
        InstallError: if the machine is not supported, the directory has other contents, or pip
            fails.
    """
    directory = directory.absolute()
    requirements = read_requirements(pinned)
    # Check before the lock, which creates a file in the directory.
    check_directory(directory)
    python = directory / "bin" / "python"

    with _lock_directory(directory) as lock:
        # Read after the lock is held, because another process may just have completed packages.
        done = _completed_packages(directory, pinned)
        if COMPLETE in done:
            log_line(f"{directory}: already complete")
            return python

        missing = [requirement for requirement in requirements if requirement.pin not in done]
        # Check before the installation. Only missing packages need space.
        if reason := unsupported_reason(
            this_machine(directory), share=len(missing) / len(requirements)
        ):
            raise InstallError(reason)
        _make_environment(directory, pinned)
        _install(directory, missing, len(requirements), lock, log_line)
        _compile(python, log_line)
        _check_import(python)
        # Record this last, because the next call skips everything if the entry exists.
        _record_completed(directory, [COMPLETE])
    return python


def read_requirements(pinned: Path) -> list[PinnedPackage]:
    """Return the packages of a file written by `uv pip compile --generate-hashes`.

    Raises:
        InstallError: for a package without a version or a hash.
    """
    # A package's hashes follow in indented lines.
    blocks = re.split(r"\n(?=\S)", pinned.read_text().strip())
    requirements = []
    for block in blocks:
        # Skip uv's header and comments between packages.
        if block.startswith("#"):
            continue
        pin = block.split()[0]
        if "==" not in pin or "--hash=" not in block:
            raise InstallError(f"{pinned}: {pin} has no version or no hash")
        requirements.append(PinnedPackage(pin, block))
    return requirements


def this_machine(directory: Path) -> WheelPlatform:
    """Describe this machine, and the disk of ``directory``, which may not exist yet."""
    library, version = platform.libc_ver()
    glibc = None
    if library == "glibc":
        major, minor = version.split(".")[:2]
        glibc = (int(major), int(minor))

    # A directory that does not exist yet will use the free space of its nearest existing parent.
    parent = directory
    while not parent.exists():
        parent = parent.parent
    return WheelPlatform(
        system=platform.system(),
        architecture=platform.machine(),
        glibc=glibc,
        python=sys.version_info[:2],
        free_bytes=shutil.disk_usage(parent).free,
    )


def unsupported_reason(machine: WheelPlatform, share: float = 1.0) -> str:
    """Return the reason why SGLang cannot be installed, or "".

    Args:
        machine: machine to check.
        share: fraction of the packages that are missing, which scales the disk space.
    """
    if (machine.system, machine.architecture) != ("Linux", "x86_64"):
        return (
            f"this machine is {machine.system} {machine.architecture}, but the pinned versions are "
            "for Linux x86_64. Install SGLang 0.5.17 by hand (docs/installing.md)"
        )
    # pip would fail later, with a message about missing versions.
    if machine.glibc is None or machine.glibc < GLIBC:
        installed = "none" if machine.glibc is None else ".".join(map(str, machine.glibc))
        required = ".".join(map(str, GLIBC))
        return (
            f"SGLang's wheels need glibc {required} or later, but this system has {installed}. Use the "
            "image of the Dockerfile, or Debian 12, Ubuntu 22.04 or later"
        )
    # Pinned wheels are built for one version of Python.
    if machine.python != (3, 12):
        installed = f"{machine.python[0]}.{machine.python[1]}"
        return f"the pinned versions are for Python 3.12, but this is Python {installed}. Use Python 3.12"

    needed = DISK_BYTES * share
    if machine.free_bytes < needed:
        return (
            f"SGLang needs {needed / 1e9:.0f} GB more on this disk, but "
            f"{machine.free_bytes / 1e9:.0f} GB are free. Use another directory, or delete files"
        )
    return ""


def check_directory(directory: Path) -> None:
    """Raise InstallError if ``directory`` has other contents."""
    if not directory.exists():
        return
    if not directory.is_dir():
        raise InstallError(f"{directory}: is a file. Give a directory for the environment")
    # The environment is deleted if the pinned file changes, so nothing else may be in it.
    if any(directory.iterdir()) and not (directory / PROGRESS_FILE).exists():
        raise InstallError(
            f"{directory}: not empty, and not an environment of this command. Give another "
            "directory"
        )


@contextmanager
def _lock_directory(directory: Path) -> Iterator[int]:
    """Prevent two concurrent installations into the same directory.

    Yields the file descriptor that holds the lock. pip inherits it, so the directory stays locked
    if this process is killed while pip runs.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / PROGRESS_FILE, "a") as notes:
        # The kernel releases the lock when its last holder exits, also after a kill.
        try:
            fcntl.flock(notes, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InstallError(
                f"{directory}: another process is installing there. Wait until it has finished"
            ) from None
        yield notes.fileno()


def _completed_packages(directory: Path, pinned: Path) -> set[str]:
    """Return the packages that an earlier call installed from the same pinned file."""
    # Entries of another pinned file may be other versions, so they do not count.
    lines = (directory / PROGRESS_FILE).read_text().splitlines()
    if not lines or lines[0] != _digest(pinned):
        return set()
    return set(lines[1:])


def _digest(pinned: Path) -> str:
    return hashlib.sha256(pinned.read_bytes()).hexdigest()


def _record_completed(directory: Path, lines: Sequence[str]) -> None:
    with open(directory / PROGRESS_FILE, "a") as notes:
        notes.writelines(f"{line}\n" for line in lines)


def _make_environment(directory: Path, pinned: Path) -> None:
    """Create the virtual environment. Replace one that was made from another pinned file."""
    notes = directory / PROGRESS_FILE
    lines = notes.read_text().splitlines()
    has_python = (directory / "bin" / "python").exists()
    if has_python and lines and lines[0] == _digest(pinned):
        return

    for entry in directory.iterdir():
        if entry == notes:
            continue
        # A link to a directory is removed, not followed.
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    # Rewrite this file in place, because it holds the lock.
    with open(notes, "r+") as file:
        file.truncate()
        file.write(f"{_digest(pinned)}\n")

    # Use the base interpreter: with the trainer's environment, its packages would be visible.
    base = getattr(sys, "_base_executable", sys.executable)
    _run([base, "-m", "venv", str(directory)], "the environment could not be created")


def _install(
    directory: Path, missing: Sequence[PinnedPackage], total: int, lock: int, log_line: LogLine
) -> None:
    """Install the missing packages, one batch at a time."""
    started = time.monotonic()
    done = total - len(missing)
    if done:
        log_line(f"{done} of {total} packages are already installed")

    batch_file = directory / "batch.txt"
    for start in range(0, len(missing), PACKAGES_PER_CALL):
        batch = missing[start : start + PACKAGES_PER_CALL]
        names = ", ".join(requirement.pin.split("==")[0] for requirement in batch)
        elapsed = format_seconds(time.monotonic() - started)
        log_line(f"[{done + start + 1}-{done + start + len(batch)} of {total}, {elapsed}] {names}")

        batch_file.write_text("\n".join(requirement.text for requirement in batch) + "\n")
        # An interrupted package looks installed but may be incomplete, so reinstall it.
        # The file lists all dependencies with hashes, so pip must not resolve or build any.
        options = ["--no-deps", "--ignore-installed", "--only-binary", ":all:", "--require-hashes"]
        # --no-compile: all packages are compiled at the end, on all cores.
        quiet = ["-q", "--no-input", "--disable-pip-version-check", "--no-compile"]
        pip = [str(directory / "bin" / "python"), "-m", "pip", "install"]
        _run(
            [*pip, *quiet, *options, "-r", str(batch_file)],
            f"pip could not install {names}. Repeat the command to continue",
            keep_open=(lock,),
        )
        # Record packages after pip has returned, so that an entry means a complete package.
        _record_completed(directory, [requirement.pin for requirement in batch])
    batch_file.unlink(missing_ok=True)


def _compile(python: Path, log_line: LogLine) -> None:
    """Compile all packages to byte code on all cores, so that servers start faster."""
    log_line("compiling to byte code")
    # Users without write permission would otherwise compile at every start.
    program = (
        "import compileall, site; "
        "compileall.compile_dir(site.getsitepackages()[0], quiet=2, workers=0)"
    )
    # Errors are ignored, because packages have templates that are not valid Python.
    subprocess.run([str(python), "-c", program], capture_output=True, check=False)


def _check_import(python: Path) -> None:
    """Raise InstallError if Python does not find SGLang in the environment."""
    # find_spec does not import SGLang, which would load torch.
    program = "import importlib.util, sys; sys.exit(importlib.util.find_spec('sglang') is None)"
    _run([str(python), "-c", program], f"{python} does not find SGLang")


def _run(command: Sequence[str], failure: str, keep_open: tuple[int, ...] = ()) -> None:
    """Run a program.

    Args:
        command: program and arguments.
        failure: beginning of the error.
        keep_open: file descriptors that the program inherits.

    Raises:
        InstallError: with the last line of the program's error output.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False, pass_fds=keep_open)
    if done.returncode:
        error_lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise InstallError(f"{failure}: {error_lines[-1] if error_lines else done.returncode}")
