"""Orderly stop of a run on a signal, and protection of Ray's processes from that signal.

A terminal sends SIGINT (Ctrl-C) and SIGHUP (on closing) to every process in its foreground. Only
the driver may receive them, because it finishes the step and saves. Ray blocks SIGINT in its
daemons, but SIGHUP would end them and their workers. Therefore a local Ray starts in a separate
session. Slurm sends SIGTERM and SIGUSR1 to every process of a job, so Ray's daemons do not receive
them there.

If the driver is killed, the kernel ends Ray's daemons (Ray requests this), workers exit with their
daemon, and servers and sandboxes exit with the worker that started them.
"""

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from types import FrameType
from typing import Any, Self

from rl_loop.cluster.placement import is_in_slurm_job, shield_from_slurm

REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
EXIT_STATUSES = tuple(128 + number for number in REQUESTS)
"""Exit statuses of a run that a signal stopped, by the shell's convention."""

SAME_REQUEST_SECONDS = 0.3
"""Signals within this time count as one request.

coreutils' ``timeout`` and systemd signal a process, and then its process group.
"""

CLEAN_UP_SECONDS = 15.0
"""Time for cleaning up. After it, another Ctrl-C ends the process immediately."""


def run_until_interrupted[T](coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine like ``asyncio.run``, and cancel it at Ctrl-C even while it waits.

    The handler of ``asyncio.run`` runs between two instructions of Python. A signal that arrives
    just before the event loop waits, or in another thread, takes effect at the next event, which
    may never come. A handler of the event loop wakes it.

    Raises:
        KeyboardInterrupt: at Ctrl-C, after the coroutine was cancelled.
    """

    async def run() -> T:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        interrupted = asyncio.Event()

        def interrupt() -> None:
            interrupted.set()
            task.cancel()

        loop.add_signal_handler(signal.SIGINT, interrupt)
        try:
            return await coroutine
        except asyncio.CancelledError:
            if interrupted.is_set():
                raise KeyboardInterrupt from None
            raise
        finally:
            loop.remove_signal_handler(signal.SIGINT)

    previous = signal.getsignal(signal.SIGINT)
    try:
        return asyncio.run(run())
    finally:
        # The event loop leaves Python's default handler.
        signal.signal(signal.SIGINT, previous)


class InterruptHandler:
    """Handler of the signals that ask a run to stop.

    - The first SIGINT, SIGTERM or SIGHUP stops the run after the current step. If no step is
      running, it stops the run immediately.
    - The second SIGINT or SIGTERM stops the run immediately: it raises KeyboardInterrupt in the
      main thread.
    - SIGUSR1, which ``gptoss launch`` sends before the time limit of a job, also aborts a running
      rollout. It may arrive any number of times.
    """

    def __init__(self) -> None:
        self.requested = False
        self.abort_rollouts = False
        """True if the run should not wait for the running rollout."""
        self.exit_status = 128 + signal.SIGINT
        """Exit status by the shell's convention: 130 after SIGINT or SIGUSR1, 143 after SIGTERM,
        129 after SIGHUP."""
        self._in_step = False

        # Monotonic times of the first request, and of the clean-up's beginning.
        self._requested_at = 0.0
        self._clean_up_began_at: float | None = None

        self._handlers: dict[int, Any] = {}
        # A SimpleQueue, because a signal handler may call its ``put`` while another ``put`` runs.
        self._announcements: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._on_request: Callable[[], None] = lambda: None

    @contextmanager
    def installed(self) -> Iterator[Self]:
        """Handle the signals within the block."""
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
        """Install the handlers. Call it again after ``ray.init``, which replaces one of them."""
        for number in (*REQUESTS, signal.SIGUSR1):
            # nohup ignores SIGHUP, which must stay ignored.
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue
            previous = signal.signal(number, self._handle)
            # A second call finds this handler or Ray's. The first one is restored at the end.
            self._handlers.setdefault(number, previous)

    @contextmanager
    def finishing_steps(self, on_request: Callable[[], None]) -> Iterator[None]:
        """Finish the running step after a first request within the block.

        Args:
            on_request: called in another thread on the first request, to inform the user.
        """
        self._on_request = on_request
        self._in_step = True
        try:
            yield
        finally:
            self._in_step = False
            if self.requested:
                self.begin_clean_up()

    def begin_clean_up(self) -> None:
        """Begin the clean-up. Signals interrupt it only after CLEAN_UP_SECONDS."""
        if self._clean_up_began_at is None:
            self._clean_up_began_at = time.monotonic()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        first = not self.requested
        if first:
            self.requested = True
            self._requested_at = now
            # The launcher's request is no failure, so it has the status of Ctrl-C.
            reported = signal.SIGINT if number == signal.SIGUSR1 else number
            self.exit_status = 128 + reported
        if number == signal.SIGUSR1:
            self.abort_rollouts = True

        # The clean-up has begun, and a signal must not interrupt it.
        if self._clean_up_began_at is not None:
            self._end_if_stuck(number, now)
        # Nothing would be lost, so stop at once.
        elif not self._in_step:
            self._stop(now)
        elif first:
            # Another thread prints, because the main thread may be writing to the same stream.
            self._announcements.put(self._on_request)
        elif (
            number in (signal.SIGINT, signal.SIGTERM)
            and now - self._requested_at > SAME_REQUEST_SECONDS
        ):
            # A second SIGHUP is not a request: the shell and the kernel both send one when a
            # terminal closes.
            self._stop(now)

    def _stop(self, now: float) -> None:
        self._clean_up_began_at = now
        raise KeyboardInterrupt

    def _end_if_stuck(self, number: int, now: float) -> None:
        assert self._clean_up_began_at is not None
        if number == signal.SIGINT and now - self._clean_up_began_at > CLEAN_UP_SECONDS:
            # Not print, because the interrupted code may hold the lock of the stream.
            os.write(2, b"gptoss: stopping took too long; ended without waiting for Ray\n")
            os._exit(self.exit_status)

    def _announce(self) -> None:
        while (announcement := self._announcements.get()) is not None:
            announcement()


class SeparateSessions:
    """Context in which every process starts in a separate session, until ``all_started``.

    On exit, remaining processes of these sessions are killed. These are workers that have not yet
    noticed the exit of their daemon.
    """

    def __init__(self) -> None:
        self._leaders: set[int] = set()
        self._popen: Any = subprocess.Popen
        self._start = self._popen.__init__

    def __enter__(self) -> Self:
        start = self._start
        leaders = self._leaders

        def start_in_session(process: Any, *arguments: Any, **options: Any) -> None:
            options["start_new_session"] = True
            # A separate session does not protect from Slurm, which signals every process of a job.
            if is_in_slurm_job():
                options["preexec_fn"] = _shielded(options.get("preexec_fn"))
            start(process, *arguments, **options)
            leaders.add(process.pid)

        # Ray has no such option. Its class for processes is a subclass of Popen.
        self._popen.__init__ = start_in_session
        return self

    def all_started(self) -> None:
        """Start later processes in the session of this process."""
        self._popen.__init__ = self._start

    def __exit__(self, *_: object) -> None:
        self.all_started()
        # Ray's own shutdown has ended its daemons before. Their workers end a little later.
        for process in processes():
            with suppress(ProcessLookupError):
                # Workers inherit the session of the daemon that started them.
                if os.getsid(process) in self._leaders:
                    os.kill(process, signal.SIGKILL)


def _shielded(prepare: Callable[[], None] | None) -> Callable[[], None]:
    """Return a function between fork and exec that also keeps Slurm's signals away."""

    def prepare_child() -> None:
        if prepare is not None:
            prepare()
        shield_from_slurm()

    return prepare_child


def processes() -> list[int]:
    """Return the ids of all visible processes."""
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
