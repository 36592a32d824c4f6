"""Standard output that may go away while a run goes on."""

import io
import os
import sys
from pathlib import Path
from typing import Any


def outlive_output(log: Path) -> None:
    """From now on, what cannot be printed goes to ``log`` instead, or nowhere if that fails too.

    A terminal that is closed, ``gptoss rl ... | tee`` whose tee dies of the same Ctrl-C, or a full disk under a
    redirected output would otherwise end a run in the middle of a step: its next line would raise OSError."""
    for name, stream in (("stdout", sys.stdout), ("stderr", sys.stderr)):
        stream.flush()
        lasting: Any = io.BufferedWriter(LastingOutput(stream.fileno(), log))
        text = io.TextIOWrapper(lasting, encoding=stream.encoding, errors=stream.errors, line_buffering=True)
        setattr(sys, name, text)


class LastingOutput(io.FileIO):
    """A file descriptor that is turned to ``log`` when it can no longer be written to."""

    def __init__(self, descriptor: int, log: Path) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._log = log

    def write(self, data: bytes) -> int:  # type: ignore[override]
        try:
            return super().write(data)
        except OSError:
            self._turn_to_log()
        try:
            return super().write(data)
        except OSError:
            return len(data)

    def _turn_to_log(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        try:
            file = os.open(self._log, flags, 0o644)
        except OSError:
            file = os.open(os.devnull, flags)
        os.dup2(file, self.fileno(), inheritable=False)
        os.close(file)
