"""Compares answers in separate processes, because an answer can make algebra run forever or use all
memory.

Every comparison that is going on has a worker process to itself, and a limit that begins when it
does: answers that are slow to compare do not queue before the others. Workers are forked from a
server that has imported sympy (``comparison_server``), so that one more costs milliseconds."""

import atexit
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from typing import IO

from rl_loop.out_of_memory import out_of_memory_kills
from rl_loop.rewards.comparison_server import READY
from rl_loop.rewards.failure import CheckerFailure

SECONDS = 2.0
"""Processor time of one comparison, which usually takes a thousandth of that; a slower one counts
as not equivalent."""
WORKERS = 32
"""Comparisons at the same time; more wait until one of these is over."""
IDLE_WORKERS = 4
"""Workers that stay for the next comparison."""
START_SECONDS = 180.0
"""Importing sympy takes seconds on a busy machine."""
REPLY_SECONDS = 180.0
"""A comparison may take its processor time many times over if there are many."""
STOP_SECONDS = 5.0
"""The server gets to end by itself."""
CONTROL = b'["1/2", "0.5"]\n'
"""A question whose answer is yes if a comparison works at all."""
LONGEST = 2000
"""Characters of an expression; a longer one counts as not equivalent."""


class ComparisonPool:
    """Compares expressions, from any number of threads.

    Started when first needed, gone with the parent."""

    def __init__(self, seconds: float = SECONDS, workers: int = WORKERS) -> None:
        self._seconds = seconds
        self._vacancies = threading.BoundedSemaphore(workers)

        self._lock = threading.Lock()
        """Guards everything below."""
        self._idle: list[socket.socket] = []
        self._server: subprocess.Popen[bytes] | None = None
        self._requests: socket.socket | None = None
        """On which the server is asked for workers."""
        self._errors: IO[bytes] | None = None
        """Standard error of the server and its workers."""
        self._last_error = ""
        """Last error of the last server that died."""

    def equivalent(self, answer: str, truth: str) -> bool:
        """Return True if two answers in standard notation say the same.

        An answer over which two processes die says something else, unless the machine is out of memory.

        Raises:
            CheckerFailure: no process can be started, none answers any question, or two die while
                the machine is out of memory.
        """
        if max(len(answer), len(truth)) > LONGEST:
            return False

        question = json.dumps([answer, truth]).encode() + b"\n"
        killed_before = out_of_memory_kills()
        with self._vacancies:
            # An idle worker may have died since it was last asked; the second one is fresh.
            for worker in (self._idle_worker(), None):
                verdict = self._ask(worker or self._new_worker(), question)
                if verdict is not None:
                    return verdict

            # A policy must not be able to leave an episode by an answer that crashes sympy.
            is_well = self._ask(self._new_worker(), CONTROL) is True
            if is_well and out_of_memory_kills() == killed_before:
                return False
        raise CheckerFailure(
            f"the process that compares answers died twice over {answer!r} against {truth!r}"
        )

    def close(self) -> None:
        """End all processes; the next comparison starts new ones."""
        with self._lock:
            self._stop_server()

    def _ask(self, worker: socket.socket, question: bytes) -> bool | None:
        """Return a worker's verdict: False if it used up its time, None if it died before.

        Raises CheckerFailure if it does not answer."""
        began = time.monotonic()
        reply = _exchange(worker, question, REPLY_SECONDS)
        if reply:
            self._keep(worker)
            return reply == b"true\n"

        worker.close()
        if reply is None:
            raise CheckerFailure(
                f"the process that compares answers did not reply within {REPLY_SECONDS:.0f} s; "
                "is the machine overloaded?"
            )
        # A process has at most one core: one that lived for less than the limit was not killed by
        # the limit.
        had_its_time = time.monotonic() - began >= self._seconds
        return False if had_its_time else None

    # ---- workers

    def _idle_worker(self) -> socket.socket | None:
        """Take a worker that waits for its next question, if there is one."""
        with self._lock:
            return self._idle.pop() if self._idle else None

    def _keep(self, worker: socket.socket) -> None:
        """Let a worker wait for its next question, or end it if enough of them do."""
        with self._lock:
            if len(self._idle) < IDLE_WORKERS and self._server is not None:
                self._idle.append(worker)
                return
        worker.close()

    def _new_worker(self) -> socket.socket:
        """Start a worker and wait until it can be asked. Raises CheckerFailure."""
        for _ in range(2):
            with self._lock:
                if self._server is None or self._server.poll() is not None:
                    self._start_server()
                assert self._requests is not None
                server = self._server
                worker = _request_worker(self._requests)
            if worker is not None and _exchange(worker, b"", START_SECONDS) == READY:
                return worker

            # The server died since it was last seen.
            if worker is not None:
                worker.close()
            with self._lock:
                # Another thread may have started the next one.
                if self._server is server:
                    self._stop_server()
        raise CheckerFailure(
            f"the process that compares answers does not start: {self._last_error or 'its process dies without a word'}"
        )

    # ---- the server; the caller holds the lock

    def _start_server(self) -> None:
        """Start a server in place of the last one. Raises CheckerFailure."""
        self._stop_server()
        command = [sys.executable, "-m", "rl_loop.rewards.comparison_server", str(self._seconds)]

        # sympy's order of terms depends on the hashes of texts: verdicts must not differ between
        # runs.
        environment = os.environ | {"PYTHONHASHSEED": "0"}

        # The server's standard input is its end of the socket: when ours is closed, or this process
        # dies, it reads the end of its input and goes, and its workers with it.
        self._requests, servers_end = socket.socketpair()
        try:
            # A file and no pipe: nobody reads while the server runs, and a full pipe would stop it.
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - it stays as long as the server
            self._server = subprocess.Popen(
                command,
                stdin=servers_end.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                env=environment,
            )
        except OSError as error:
            raise CheckerFailure(
                f"the process that compares answers does not start: {' '.join(command)}: {error}"
            ) from None
        finally:
            # The child has its copy. With another one open here the server's death would not be
            # seen on the socket.
            servers_end.close()

    def _stop_server(self) -> None:
        """End the server, and with it its workers, and keep its last error."""
        for worker in self._idle:
            worker.close()
        self._idle.clear()

        if self._requests is not None:
            self._requests.close()
            self._requests = None
        if self._server is not None:
            _end(self._server)
            self._server = None
        if self._errors is not None:
            self._last_error = _last_error(self._errors)
            self._errors.close()
            self._errors = None


def _end(server: "subprocess.Popen[bytes]") -> None:
    """Wait for a process that was told to end, and kill it if it does not."""
    try:
        server.wait(timeout=STOP_SECONDS)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


def _last_error(errors: IO[bytes]) -> str:
    """Return the last line that names an error, or the last one; empty if nothing was written."""
    errors.seek(0)
    lines = errors.read().decode(errors="replace").strip().splitlines()
    named = [line for line in lines if "Error" in line] or lines
    return named[-1].strip() if named else ""


def _request_worker(requests: socket.socket) -> socket.socket | None:
    """Ask the server for a worker.

    Returns the socket to ask it on, or None if the server is gone."""
    our_end, their_end = socket.socketpair()
    try:
        socket.send_fds(requests, [b"w"], [their_end.fileno()])
        return our_end
    except OSError:
        our_end.close()
        return None
    finally:
        their_end.close()


def _exchange(worker: socket.socket, question: bytes, seconds: float) -> bytes | None:
    """Return a worker's line: empty if it has died, None if it says nothing for ``seconds``."""
    worker.settimeout(seconds)
    reply = b""
    try:
        worker.sendall(question)
        while not reply.endswith(b"\n"):
            received = worker.recv(64)
            if not received:
                return b""
            reply += received
        return reply
    except TimeoutError:
        return None
    except OSError:
        return b""


_pool = ComparisonPool()
atexit.register(_pool.close)
equivalent = _pool.equivalent
