"""Standard output that survives a closed terminal, and private files."""

import io
import os
import sys
from pathlib import Path
from typing import Any, TextIO


def keep_output_in_log(log: Path) -> None:
    """Redirect output to ``log`` as soon as it can no longer be printed; drop it if that fails.

    Otherwise the next printed line would raise OSError and end the run in the middle of a step.
    Causes are a closed terminal, a ``| tee`` that exits at the same Ctrl-C, or a full disk under a
    redirected output.
    """
    # Text in the old buffer would appear after later lines.
    sys.stdout.flush()
    sys.stdout = _wrap(sys.stdout, log)
    sys.stderr.flush()
    sys.stderr = _wrap(sys.stderr, log)


def _wrap(stream: TextIO, log: Path) -> TextIO:
    """Return a stream for the same file descriptor that continues in ``log`` after an error."""
    buffer: Any = io.BufferedWriter(ResilientOutput(stream.fileno(), log))
    return io.TextIOWrapper(
        buffer,
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=True,
    )


class ResilientOutput(io.FileIO):
    """A file descriptor that is redirected to ``log`` when writing fails."""

    def __init__(self, descriptor: int, log: Path) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._log = log

    def write(self, data: bytes) -> int:  # type: ignore[override]
        # EIO: the terminal was closed. EPIPE: the reader has exited. ENOSPC: the disk is full.
        try:
            return super().write(data)
        except OSError:
            self._redirect_to_log()

        try:
            return super().write(data)
        except OSError:
            return len(data)  # the disk of the log is full, too

    def _redirect_to_log(self) -> None:
        """Make the descriptor refer to the log, or to /dev/null if the log cannot be opened."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        try:
            file = os.open(self._log, flags, 0o600)
        except OSError:
            file = os.open(os.devnull, flags)

        # Keep the number, so that code that writes to descriptor 1 or 2 continues to work.
        os.dup2(file, self.fileno(), inheritable=False)
        os.close(file)


def make_files_private() -> None:
    """Deny other users access to new files of this process and its children."""
    os.umask(0o077)
