"""Asks questions of functions that may run forever, use all memory or hold the interpreter.

Every question has a worker process to itself, and a limit that begins when the question does:
questions that take long do not queue before the others. Workers are forked from a server that has
imported everything (``forked_server``), so that one more costs milliseconds.
"""

import asyncio
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any

from rl_loop.forked_server import READY, Setup, receive, send
from rl_loop.out_of_memory import out_of_memory_kills

START_SECONDS = 180.0
"""Imports take seconds on a busy machine."""
REPLY_SECONDS = 180.0
"""A question may take its processor time many times over if there are many."""
STOP_SECONDS = 5.0
"""Time for the server to end by itself."""


class TooExpensive(Exception):
    """A question has no answer within its limits, or kills every process that is asked."""


class PoolFailure(Exception):
    """No process can be started, or none answers any question. The question is not the cause."""


class _Died(Exception):
    """A worker died before it answered."""


class ForkedPool:
    """Asks one function, from any number of threads, in processes of its own.

    The processes start when first needed, or with ``start``, and end with the process that asks.
    """

    def __init__(
        self,
        name: str,
        function: str,
        *,
        seconds: float,
        control: Any,
        memory_bytes: int = 1 << 30,
        workers: int = 32,
        idle_workers: int = 4,
        niceness: int = 0,
        prepare: str | None = None,
        argument: Any = None,
    ) -> None:
        """Describe the processes.

        Args:
            name: the processes in messages, such as "the process that compares answers".
            function: MODULE:FUNCTION of one argument, the question. Questions, answers and errors
                are pickled.
            seconds: processor time of one question.
            control: a question that is answered if the function works at all.
            memory_bytes: address space of a worker.
            workers: questions at the same time; further ones wait.
            idle_workers: workers that stay for the next question.
            niceness: added to the niceness of this process.
            prepare: MODULE:FUNCTION that runs once, before workers are forked.
            argument: argument of ``prepare``.
        """
        self.seconds = seconds
        self.control = control
        self._name = name
        self._function = function
        self._setup = Setup(seconds, memory_bytes, niceness, prepare, pickle.dumps(argument))
        self._idle_workers = idle_workers
        self._vacancies = threading.BoundedSemaphore(workers)
        # One for each question that has a worker: none waits for a thread longer than for a worker.
        self.threads = ThreadPoolExecutor(workers, thread_name_prefix="forked-pool")

        self._lock = threading.Lock()
        """Guards everything below."""
        self._idle: list[socket.socket] = []
        self._server: subprocess.Popen[bytes] | None = None
        self._requests: socket.socket | None = None
        """Socket on which the server is asked for workers."""
        self._errors: IO[bytes] | None = None
        """Standard error of the server and its workers."""
        self._last_error = ""
        """Last error of the last server that died."""
        self._closings = 0
        """Number of calls of ``close``."""

    def start(self) -> None:
        """Start the server, without waiting for its imports. Raises PoolFailure."""
        with self._lock:
            if self._server is None:
                self._start_server()

    def ask(self, question: Any, control: Any = None) -> Any:
        """Return the answer to a question. Raises what the function raises.

        Args:
            question: argument of the function.
            control: a question like this one that is answered unless the function is broken; None
                for the pool's own, which shows only that processes run.

        Raises:
            TooExpensive: the question uses up its time or memory, or two processes die over it
                while the machine has memory and the control question is answered.
            PoolFailure: no process can be started, none answers any question, or ``close`` was
                called.
        """
        closings = self._closings
        killed_before = out_of_memory_kills()
        with self._vacancies:
            # An idle worker may have died since it was last asked; the second one is fresh.
            for worker in (self._idle_worker(), None):
                try:
                    return self._ask(worker or self._new_worker(closings), question)
                except _Died:
                    continue
                except TooExpensive:
                    if control is None or self._is_well(closings, control):
                        raise
                    raise PoolFailure(
                        f"{self._name} answers no question: {control!r:.500}"
                    ) from None

            # A policy or a client must not be able to cause a failure with what it writes.
            is_well = self._is_well(closings, self.control if control is None else control)
            if is_well and out_of_memory_kills() == killed_before:
                raise TooExpensive(f"{self._name} died twice over it")
        raise PoolFailure(f"{self._name} died twice over {question!r:.500}")

    def asked(self, question: Any, control: Any = None) -> Awaitable[Any]:
        """Ask a question off the event loop: see ``ask``."""
        loop = asyncio.get_running_loop()
        return loop.run_in_executor(self.threads, self.ask, question, control)

    def close(self) -> None:
        """End all processes; the next question starts new ones."""
        self._closings += 1
        with self._lock:
            self._stop_server()

    def _is_well(self, closings: int, control: Any) -> bool:
        worker = self._new_worker(closings)
        try:
            self._ask(worker, control)
        except PoolFailure:
            raise
        except Exception:
            return False
        return True

    def _ask(self, worker: socket.socket, question: Any) -> Any:
        """Return a worker's answer.

        Raises TooExpensive if the worker used up its time or memory, _Died if it died before,
        PoolFailure if it does not answer, and what the function raises.
        """
        began = time.monotonic()
        worker.settimeout(REPLY_SECONDS)
        try:
            send(worker, question)
            kind, content = receive(worker)
        except TimeoutError:
            worker.close()
            raise PoolFailure(
                f"{self._name} did not reply within {REPLY_SECONDS:.0f} s; "
                "is the machine overloaded?"
            ) from None
        except (EOFError, OSError):
            worker.close()
            # A process has at most one core: one that lived for less than the limit was not killed
            # by the limit.
            if time.monotonic() - began >= self.seconds:
                raise TooExpensive(f"it takes more than {self.seconds:g} s") from None
            raise _Died from None

        if kind == "memory":
            worker.close()
            raise TooExpensive("it takes too much memory")
        self._keep(worker)
        if kind == "error":
            raise content
        return content

    # ---- workers

    def _idle_worker(self) -> socket.socket | None:
        """Take a worker that waits for its next question, if there is one."""
        with self._lock:
            return self._idle.pop() if self._idle else None

    def _keep(self, worker: socket.socket) -> None:
        """Let a worker wait for its next question, or end it if enough of them do."""
        with self._lock:
            if len(self._idle) < self._idle_workers and self._server is not None:
                self._idle.append(worker)
                return
        worker.close()

    def _new_worker(self, closings: int) -> socket.socket:
        """Start a worker and wait until it can be asked.

        ``closings``: number of calls of ``close`` before the question. Raises PoolFailure.
        """
        for _ in range(2):
            with self._lock:
                if self._closings != closings:
                    raise PoolFailure(f"{self._name} was ended")
                if self._server is None or self._server.poll() is not None:
                    self._start_server()
                assert self._requests is not None
                server = self._server
                worker = _request_worker(self._requests)
            if worker is not None and _is_ready(worker):
                return worker

            # The server died since it was last seen.
            if worker is not None:
                worker.close()
            with self._lock:
                # Another thread may have started the next one.
                if self._server is server:
                    self._stop_server()
        reason = self._last_error or "its process dies without a word"
        raise PoolFailure(f"{self._name} does not start: {reason}")

    # ---- the server; the caller holds the lock

    def _start_server(self) -> None:
        """Start a server in place of the last one. Raises PoolFailure."""
        self._stop_server()

        # sympy's order of terms depends on the hashes of texts: verdicts must not differ between
        # runs. Threads of a library do not survive a fork.
        environment = os.environ | {"PYTHONHASHSEED": "0", "TOKENIZERS_PARALLELISM": "false"}

        # The server's standard input is its end of the socket: when ours is closed, or this process
        # dies, it reads the end of its input and goes, and its workers with it.
        self._requests, servers_end = socket.socketpair()
        with tempfile.TemporaryFile() as setup:
            pickle.dump(self._setup, setup)
            setup.seek(0)
            number = str(setup.fileno())
            command = [sys.executable, "-m", "rl_loop.forked_server", self._function, number]
            try:
                # A file and no pipe: a full pipe would stop the server.
                self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the server
                self._server = subprocess.Popen(
                    command,
                    stdin=servers_end.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=self._errors,
                    env=environment,
                    pass_fds=(setup.fileno(),),
                )
            except OSError as error:
                raise PoolFailure(
                    f"{self._name} does not start: {' '.join(command)}: {error}"
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
    """Wait for a server whose socket is closed, and kill it if it does not end."""
    # It may be at its imports, which take seconds.
    server.terminate()
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

    Returns the socket to ask it on, or None if the server is gone.
    """
    our_end, their_end = socket.socketpair()
    try:
        socket.send_fds(requests, [b"w"], [their_end.fileno()])
        return our_end
    except OSError:
        our_end.close()
        return None
    finally:
        their_end.close()


def _is_ready(worker: socket.socket) -> bool:
    """Wait until a worker can be asked. Returns False if it has died."""
    worker.settimeout(START_SECONDS)
    try:
        kind, _ = receive(worker)
    except (EOFError, OSError):
        return False
    return bool(kind == READY)
