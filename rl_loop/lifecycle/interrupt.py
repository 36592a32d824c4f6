"""Stops a run on a signal, and keeps Ray's processes from hearing the same signal.

A terminal sends Ctrl-C, and its own closing, to every process in its foreground. Only the driver
may hear them: it finishes the step and saves. Ray blocks Ctrl-C (SIGINT) in the daemons that it
starts, but not the SIGHUP of a terminal that closes, which ends them and the workers. So a local Ray
is started in a session of its own, which no terminal signals. The kernel
still ends Ray's daemons when the driver is killed (Ray asks for that itself), workers end with
their daemon, and servers and sandboxes with the worker that started them."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from types import FrameType
from typing import Any, Self

REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
EXIT_STATUSES = tuple(128 + number for number in REQUESTS)
"""Of a run that was asked to stop, by the shell's convention."""

SAME_REQUEST_SECONDS = 0.3
"""Signals that follow each other so fast are one request: coreutils' ``timeout`` and systemd
signal a process and then its group."""

CLEAN_UP_SECONDS = 15.0
"""What stopping may take before a further Ctrl-C ends the process without ceremony."""


class Interrupt:
    """Listens to the signals that ask a run to stop.

    The first Ctrl-C (or SIGTERM, or SIGHUP) asks to stop after the current step. The second one
    stops at once, as does the first one where no step is under way.

    To stop at once is to raise KeyboardInterrupt in the main thread. SIGUSR1, which ``gptoss
    launch`` sends when the time on a cluster ends, also abandons a rollout that is under way. It
    may come any number of times."""

    def __init__(self) -> None:
        self.requested = False
        self.abort_rollouts = False
        """The rollout that is under way is not to be waited for."""
        self.exit_status = 128 + signal.SIGINT
        """By the shell's convention 130 after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP; also
        130 after SIGUSR1."""
        self._in_step = False

        # monotonic clock: of the first request, and of the moment from which on everything only
        # ends
        self._asked_at = 0.0
        self._stopped_at: float | None = None

        self._handlers: dict[int, Any] = {}
        self._announcements: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._on_request: Callable[[], None] = lambda: None

    @contextmanager
    def installed(self) -> Iterator[Self]:
        """Listen to the signals inside."""
        self.install()
        announcer = Thread(target=self._announce, name="interrupt", daemon=True)
        announcer.start()
        try:
            yield self
        finally:
            self._announcements.put(None)
            for number, handler in self._handlers.items():
                signal.signal(number, handler)

    def install(self) -> None:
        """Handle the signals, from now on or again: ``ray.init`` sets a handler of its own for
        SIGTERM."""
        for number in (*REQUESTS, signal.SIGUSR1):
            # nohup has had SIGHUP ignored, and that is to stay so
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue
            previous = signal.signal(number, self._handle)
            self._handlers.setdefault(number, previous)

    @contextmanager
    def waiting_for_steps(self, on_request: Callable[[], None]) -> Iterator[None]:
        """Inside, a first request lets the step under way end; ``on_request`` tells the user so,
        in another thread."""
        self._on_request = on_request
        self._in_step = True
        try:
            yield
        finally:
            self._in_step = False
            if self.requested:
                self.leave()

    def leave(self) -> None:
        """Note that the run is ending: from now on a signal interrupts no clean-up, unless the
        clean-up gets stuck."""
        if self._stopped_at is None:
            self._stopped_at = time.monotonic()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        first = not self.requested
        if first:
            self.requested = True
            self._asked_at = now
            reported = signal.SIGINT if number == signal.SIGUSR1 else number
            self.exit_status = 128 + reported
        if number == signal.SIGUSR1:
            self.abort_rollouts = True

        if self._stopped_at is not None:
            self._end_if_stuck(number, now)
        elif not self._in_step:
            self._stop(now)
        elif first:
            # not from here: the main thread may be in the middle of writing to the same stream
            self._announcements.put(self._on_request)
        elif (
            number in (signal.SIGINT, signal.SIGTERM)
            and now - self._asked_at > SAME_REQUEST_SECONDS
        ):
            # not SIGHUP, which a shell and the kernel both send when a terminal closes
            self._stop(now)

    def _stop(self, now: float) -> None:
        self._stopped_at = now
        raise KeyboardInterrupt

    def _end_if_stuck(self, number: int, now: float) -> None:
        assert self._stopped_at is not None
        if number == signal.SIGINT and now - self._stopped_at > CLEAN_UP_SECONDS:
            os.write(2, b"gptoss: stopping took too long; ended without waiting for Ray\n")
            os._exit(self.exit_status)

    def _announce(self) -> None:
        while (announcement := self._announcements.get()) is not None:
            announcement()


class SeparateSessions:
    """A context in which every process that is started gets a session of its own, until
    ``all_started``.

    On leaving, what remains in these sessions is killed: workers that have not noticed yet that
    their daemon is gone."""

    def __init__(self) -> None:
        self._leaders: set[int] = set()
        self._popen: Any = subprocess.Popen
        self._start = self._popen.__init__

    def __enter__(self) -> Self:
        start = self._start
        leaders = self._leaders

        def start_in_session(process: Any, *arguments: Any, **options: Any) -> None:
            start(process, *arguments, **options | {"start_new_session": True})
            leaders.add(process.pid)

        # Ray has no option for it, and its own class of processes is a subclass of this one
        self._popen.__init__ = start_in_session
        return self

    def all_started(self) -> None:
        """Start processes as usual again."""
        self._popen.__init__ = self._start

    def __exit__(self, *_: object) -> None:
        self.all_started()
        for process in processes():
            with suppress(ProcessLookupError):
                if os.getsid(process) in self._leaders:
                    os.kill(process, signal.SIGKILL)


def processes() -> list[int]:
    """List the ids of all processes that this one can see."""
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
