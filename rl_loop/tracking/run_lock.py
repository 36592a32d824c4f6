"""Lock for one process per run. The kernel releases it whenever its holder exits."""

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
"""Maximum time in seconds that an NFS server keeps the lock of a dead node.

It consists of Linux's lease of 90 s and the time for detection.
"""


class RunLockedError(RunDirectoryError):
    """Run that another process uses. The message names the process."""


@contextmanager
def locked_run(path: Path, wait_seconds: float = 0.0) -> Iterator[None]:
    """Hold the lock of the run at ``path``.

    A missing directory is created. If it is still empty at the end, it is removed again.

    The lock is flock(2) on LOCK_FILE. On NFS the server has the lock (since Linux 2.6.12), and
    releases a dead node's lock when its lease ends, after 1 or 2 minutes. A mount with
    ``local_lock=flock`` protects only against a second run on the same node. A file system without
    locks does not protect.

    Args:
        path: directory of the run.
        wait_seconds: time to wait for another process.

    Raises:
        RunLockedError: if another process has the lock.
        RunDirectoryError: if the directory cannot be created.
    """
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        make_run_directory(path)
        file = _acquire(path / LOCK_FILE, wait_seconds)
        try:
            yield
        finally:
            if missing and os.listdir(path) == [LOCK_FILE]:
                # Delete the file while the lock is held. A waiting process then sees that it is
                # gone, and creates another one.
                (path / LOCK_FILE).unlink()
            os.close(file)
    finally:
        for folder in missing:
            # The folder was not created, or is not empty.
            with suppress(OSError):
                folder.rmdir()


def _acquire(path: Path, wait_seconds: float) -> int:
    """Return a file descriptor that holds the lock until closed. Raises as ``locked_run``."""
    deadline = time.monotonic() + wait_seconds
    while True:
        try:
            # The lock belongs to the open file. A child that inherited it would hold the lock after
            # the death of this process.
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise RunDirectoryError(f"cannot write in {path.parent}: {error.strerror}") from None

        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            # Linux turns flock on NFS into a lock of fcntl, which may report EACCES.
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                # The file system has no locks.
                return file
            # The holder has written its name, unless it acquired the lock just now.
            holder = os.read(file, 1000).decode(errors="replace").strip() or "another process"
            os.close(file)
            if time.monotonic() < deadline:
                time.sleep(1)
                continue
            raise RunLockedError(
                f"{path.parent} is in use by {holder}. Wait until it has ended, or choose "
                "another name for this run"
            ) from None

        if _is_current(path, file):
            _name_holder(file)
            return file
        os.close(file)


def _is_current(path: Path, file: int) -> bool:
    """Return True if ``path`` is still the opened file. Its last holder may have removed it."""
    try:
        return os.stat(path).st_ino == os.fstat(file).st_ino
    except FileNotFoundError:
        return False


def _name_holder(file: int) -> None:
    """Write the holder into the lock's file, for the error of a second run."""
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    os.ftruncate(file, 0)
    os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()} since {since}\n".encode(), 0)
