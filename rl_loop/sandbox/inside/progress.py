"""Progress of a call's programs, written by their process and read by the supervisor."""

import mmap
import struct
import time
from dataclasses import dataclass

from rl_loop.sandbox.inside.messages import ProgramCall


@dataclass(frozen=True)
class CallProgress:
    """Progress of a call's programs."""

    started_programs: int
    """Number of programs that have started. The last of them is the current program."""
    reached_end: bool
    """True if the current program has ended and the interpreter is still usable."""
    started_at: float
    """Start time of the current program on the monotonic clock, in seconds."""


class SharedProgress:
    """Memory page that the program's process shares with the supervisor to report progress.

    The program can write anything into it. That can end its own session or change the reported
    time. It cannot get more than ``timeout_seconds`` for each program of the call.
    """

    # The fields of ``CallProgress``: two uint32 and a float64. The offset is in bytes.
    _FORMAT = "=IId"
    _REACHED_END_OFFSET = 4

    def __init__(self) -> None:
        self._page = mmap.mmap(-1, mmap.PAGESIZE)

    def begin(self, program: int) -> None:
        """Record the start of program number ``program``, counted from 1."""
        struct.pack_into(self._FORMAT, self._page, 0, program, 0, time.monotonic())

    def record_end(self) -> None:
        """Record that the program has ended and the interpreter is still usable.

        The program reached its last line, or raised an exception.
        """
        struct.pack_into("=I", self._page, self._REACHED_END_OFFSET, 1)

    def read(self) -> CallProgress:
        started_programs, reached_end, started_at = struct.unpack_from(self._FORMAT, self._page)
        return CallProgress(started_programs, reached_end == 1, started_at)


class ProgramDeadline:
    """Deadline of a call's running program. Each program has ``timeout_seconds``."""

    def __init__(self, call: ProgramCall, progress: SharedProgress, timeout_seconds: float) -> None:
        self._program_count = call.program_count
        self._progress = progress
        self._timeout = timeout_seconds
        self.started_at = time.monotonic()
        """Start time of the current program on the monotonic clock, in seconds."""
        self.program = 0
        """Number of the current program, counted from 1. 0 before the first one."""

    def refresh(self) -> float:
        """Read the progress, and return the deadline on the monotonic clock, in seconds.

        The start of the next program extends it.
        """
        progress = self._progress.read()
        if self.program < progress.started_programs <= self._program_count:
            # The program can write the page, so accept only times between the known start and now.
            self.started_at = max(self.started_at, min(progress.started_at, time.monotonic()))
            self.program = progress.started_programs
        return self.started_at + self._timeout
