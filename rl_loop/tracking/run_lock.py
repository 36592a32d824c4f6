"""One process per run: a lock that the kernel frees when its holder ends, however that happens."""

import errno
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rl_loop.tracking.run_directory import RunDirectoryError, make_run_directory

LOCK_FILE = "run.lock"

LEASE_SECONDS = 150.0
"""How long an NFS server may keep the lock of a node that has died: Linux's lease of 90 s, and
time to notice."""


class RunLocked(RunDirectoryError):
    """Another process works on the run; the message says which."""


@contextmanager
def locked_run(path: Path, wait_seconds: float = 0.0) -> Iterator[None]:
    """Hold the lock of the run at ``path``, whose directory is made if it is missing.

    Raises RunLocked if another process has it, and still has it after ``wait_seconds``;
    RunDirectoryError if the directory cannot be made. A directory that was made here and in which
    nothing was put is removed again.

    The lock is flock(2) on LOCK_FILE. On NFS the server keeps it (Linux does so since 2.6.12) and
    frees that of a dead node when its lease ends, after a minute or two; a mount with
    ``local_lock=flock``, or a file system without locks, protects against a second run on the same
    node only, or not at all."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        make_run_directory(path)
        file = _acquire(path / LOCK_FILE, wait_seconds)
        try:
            yield
        finally:
            if missing and os.listdir(path) == [LOCK_FILE]:
                (path / LOCK_FILE).unlink()  # while it is held: nobody else can begin in between
            os.close(file)
    finally:
        for folder in missing:
            with suppress(OSError):  # it was not made, or something is in it
                folder.rmdir()


def _acquire(path: Path, wait_seconds: float) -> int:
    """Return a file descriptor that holds the lock; closing it frees the lock. Raises as
    ``locked_run`` does."""
    deadline = time.monotonic() + wait_seconds
    while True:
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise RunDirectoryError(f"cannot write in {path.parent}: {error.strerror}") from None

        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                return file  # a file system without locks
            holder = os.read(file, 1000).decode(errors="replace").strip() or "another process"
            os.close(file)
            if time.monotonic() < deadline:
                time.sleep(1)
                continue
            raise RunLocked(
                f"{path.parent} is in use by {holder}; wait for it, or give this run another name"
            ) from None

        if _is_current(path, file):
            _name_holder(file)
            return file
        os.close(file)


def _is_current(path: Path, file: int) -> bool:
    """Whether ``path`` is still the file that was opened: its last holder may have removed it
    since."""
    try:
        return os.stat(path).st_ino == os.fstat(file).st_ino
    except FileNotFoundError:
        return False


def _name_holder(file: int) -> None:
    """Write into the lock's file who holds it, for the error of a second run."""
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    os.ftruncate(file, 0)
    os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()} since {since}\n".encode(), 0)
