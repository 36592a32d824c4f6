"""How far the programs of a call have come, told by their process and read by the supervisor."""

import mmap
import struct
import time
from dataclasses import dataclass

from rl_loop.sandbox.inside.messages import Call


@dataclass(frozen=True)
class Reached:
    """How far the programs of a call have come."""

    begun: int
    """Programs that have begun."""
    reached_end: bool
    """The last of them has come to its end."""
    begun_at: float
    """When it began, monotonic seconds."""


class Progress:
    """A page that the program's process shares with the supervisor, to tell how far the call has
    come.

    The program may write what it likes into it. That can end its own session or change the time
    that is reported, and give it no more than ``timeout_seconds`` for each program of the call."""

    _FORMAT = "=IId"  # the fields of ``Reached``
    _REACHED_END_OFFSET = 4

    def __init__(self) -> None:
        self._page = mmap.mmap(-1, mmap.PAGESIZE)

    def begin(self, program: int) -> None:
        """Record that program number ``program``, from 1, begins now."""
        struct.pack_into(self._FORMAT, self._page, 0, program, 0, time.monotonic())

    def reach_end(self) -> None:
        """Record that the program has come to its end, or to an exception: it did not end the
        interpreter."""
        struct.pack_into("=I", self._page, self._REACHED_END_OFFSET, 1)

    def read(self) -> Reached:
        begun, reached_end, begun_at = struct.unpack_from(self._FORMAT, self._page)
        return Reached(begun, reached_end == 1, begun_at)


class Deadline:
    """When the running program of a call must have ended: each has ``timeout_seconds`` of its
    own."""

    def __init__(self, call: Call, progress: Progress, timeout_seconds: float) -> None:
        self._programs = call.programs
        self._progress = progress
        self._timeout = timeout_seconds
        self.begun_at = time.monotonic()
        self.program = 0

    def update(self) -> float:
        """Return the deadline on the monotonic clock. It moves on when another program of the call
        has begun."""
        reached = self._progress.read()
        if self.program < reached.begun <= self._programs:
            # no earlier than what is known, no later than now: the page is the program's
            self.begun_at = max(self.begun_at, min(reached.begun_at, time.monotonic()))
            self.program = reached.begun
        return self.begun_at + self._timeout
