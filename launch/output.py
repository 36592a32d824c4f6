"""Standard output that may go away while a run goes on."""

import io
import os
import sys
from pathlib import Path
from typing import Any, TextIO


def outlive_output(log: Path) -> None:
    """Write to ``log`` what can no longer be printed from now on, or drop it if that fails too.

    A terminal that is closed, ``gptoss rl ... | tee`` whose tee dies of the same Ctrl-C, or a full
    disk under a redirected output would otherwise end a run in the middle of a step: its next line
    would raise OSError."""
    sys.stdout.flush()
    sys.stdout = _wrap(sys.stdout, log)
    sys.stderr.flush()
    sys.stderr = _wrap(sys.stderr, log)


def _wrap(stream: TextIO, log: Path) -> TextIO:
    """Return a stream for the same file descriptor that goes on in ``log`` when that fails."""
    buffer: Any = io.BufferedWriter(ResilientOutput(stream.fileno(), log))
    return io.TextIOWrapper(
        buffer,
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=True,
    )


class ResilientOutput(io.FileIO):
    """A file descriptor that is redirected to ``log`` when it can no longer be written to."""

    def __init__(self, descriptor: int, log: Path) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._log = log

    def write(self, data: bytes) -> int:  # type: ignore[override]
        # EIO: the terminal was closed. EPIPE: the reader is gone. ENOSPC: the disk is full.
        try:
            return super().write(data)
        except OSError:
            self._redirect_to_log()

        try:
            return super().write(data)
        except OSError:
            return len(data)  # the log's disk is full as well

    def _redirect_to_log(self) -> None:
        """Make the descriptor refer to the log, or to nothing if the log cannot be opened."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        try:
            file = os.open(self._log, flags, 0o600)
        except OSError:
            file = os.open(os.devnull, flags)

        # Under the same number, so that code which writes to descriptor 1 or 2 goes on as well.
        os.dup2(file, self.fileno(), inheritable=False)
        os.close(file)


def make_files_private() -> None:
    """Close what this process and its children create to other users: episodes, weights, settings."""
    os.umask(0o077)
