"""Progress of a call's programs, written by their process and read by the supervisor."""

import mmap
import struct
import time
from dataclasses import dataclass

from rl_loop.sandbox.inside.messages import ProgramCall


@dataclass(frozen=True)
class CallProgress:
    """Progress of a call's programs."""

    begun: int
    """Number of programs that have started."""
    reached_end: bool
    """True if the last of them has reached its end."""
    begun_at: float
    """Start time of the last one on the monotonic clock, in seconds."""


class SharedProgress:
    """Memory page that the program's process shares with the supervisor to report progress.

    The program can write anything into it. That can end its own session or change the reported
    time. It cannot get more than ``timeout_seconds`` for each program of the call.
    """

    # The fields of ``CallProgress``.
    _FORMAT = "=IId"
    _REACHED_END_OFFSET = 4

    def __init__(self) -> None:
        self._page = mmap.mmap(-1, mmap.PAGESIZE)

    def begin(self, program: int) -> None:
        """Record the start of program number ``program``, counted from 1."""
        struct.pack_into(self._FORMAT, self._page, 0, program, 0, time.monotonic())

    def reach_end(self) -> None:
        """Record that the program reached its end, or an exception that keeps the interpreter."""
        struct.pack_into("=I", self._page, self._REACHED_END_OFFSET, 1)

    def read(self) -> CallProgress:
        begun, reached_end, begun_at = struct.unpack_from(self._FORMAT, self._page)
        return CallProgress(begun, reached_end == 1, begun_at)


class ProgramDeadline:
    """Deadline of a call's running program. Each program has ``timeout_seconds``."""

    def __init__(self, call: ProgramCall, progress: SharedProgress, timeout_seconds: float) -> None:
        self._programs = call.programs
        self._progress = progress
        self._timeout = timeout_seconds
        self.begun_at = time.monotonic()
        self.program = 0

    def update(self) -> float:
        """Return the deadline on the monotonic clock. The next program's start extends it."""
        reached = self._progress.read()
        if self.program < reached.begun <= self._programs:
            # The program can write the page, so accept only times between the known start and now.
            self.begun_at = max(self.begun_at, min(reached.begun_at, time.monotonic()))
            self.program = reached.begun
        return self.begun_at + self._timeout
