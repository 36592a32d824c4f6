"""Runs functions that may never return, use all memory or hold the interpreter.

Every question has a worker process to itself, and a time limit that begins with the question, so
slow questions do not delay others. Workers are forked from a server that has imported everything
(``forked_server``), so a further worker costs milliseconds.
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

from rl_loop.forked_server import READY, ServerSettings, receive, send
from rl_loop.out_of_memory import out_of_memory_kills

START_SECONDS = 180.0
"""Time limit for the start of a worker. Imports take seconds on a busy machine."""
REPLY_SECONDS = 180.0
"""Time limit for a reply. With many concurrent questions, one takes several times its processor
time."""
STOP_SECONDS = 5.0
"""Time limit for a clean exit of the server."""


class CallLimitError(Exception):
    """The question has no answer within its limits, or kills every process that receives it."""


class PoolError(Exception):
    """The pool cannot start a process, or its processes do not answer any question.

    The question is not the cause.
    """


class _WorkerDiedError(Exception):
    """A worker died before it answered."""


class ForkedPool:
    """Calls one function, from any number of threads, in separate processes.

    The processes start with the first question, and end with the calling process.
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
            name: name of the processes in messages, such as "the process that compares answers".
            function: MODULE:FUNCTION of one argument, the question. Questions, answers and errors
                are pickled.
            seconds: processor time of one question.
            control: question that a working function answers.
            memory_bytes: address space of a worker.
            workers: maximum number of concurrent questions. Further questions wait.
            idle_workers: workers that are kept for the next question.
            niceness: added to the niceness of this process.
            prepare: MODULE:FUNCTION that runs once, before workers are forked.
            argument: argument of ``prepare``.
        """
        self.seconds = seconds
        self.control = control
        self._name = name
        self._function = function
        self._setup = ServerSettings(
            seconds, memory_bytes, niceness, prepare, pickle.dumps(argument)
        )
        self._idle_workers = idle_workers
        self._slots = threading.BoundedSemaphore(workers)
        # One thread per worker, so that no question waits for a thread while a worker is free.
        self.threads = ThreadPoolExecutor(workers, thread_name_prefix="forked-pool")

        self._lock = threading.Lock()
        """Guards everything below."""
        self._idle: list[socket.socket] = []
        self._server: subprocess.Popen[bytes] | None = None
        self._requests: socket.socket | None = None
        """Socket for requests of new workers."""
        self._errors: IO[bytes] | None = None
        """Standard error of the server and its workers."""
        self._last_error = ""
        """Last error of the last server that died."""
        self._closings = 0
        """Calls of ``close``."""

    def ask(self, question: Any, control: Any = None) -> Any:
        """Return the answer to a question. Exceptions of the function are raised here.

        Args:
            question: argument of the function.
            control: similar question that is answered unless the function is broken. Default: the
                pool's control question, which shows only that processes run.

        Raises:
            CallLimitError: the question exceeds its time or memory, or kills 2 processes while the
                machine has memory and the control question is answered.
            PoolError: no process starts, no process answers any question, or ``close`` was
                called.
        """
        # `close` during the question must not be followed by the start of new processes.
        closings = self._closings
        # If the kernel kills processes during the question, the machine lacks memory, and the
        # question is not the cause.
        killed_before = out_of_memory_kills()
        with self._slots:
            # An idle worker may have died since its last question. The second worker is new.
            for worker in (self._idle_worker(), None):
                try:
                    return self._ask(worker or self._new_worker(closings), question)
                except _WorkerDiedError:
                    continue
                except CallLimitError:
                    # A function that answers nothing looks like an expensive question.
                    if control is None or self._is_healthy(closings, control):
                        raise
                    raise PoolError(
                        f"{self._name} answers no question within its limits, not even the control "
                        f"question {control!r:.500}. The machine may be overloaded"
                    ) from None

            # Text of a policy or a client must not be able to cause a PoolError.
            is_well = self._is_healthy(closings, self.control if control is None else control)
            if is_well and out_of_memory_kills() == killed_before:
                raise CallLimitError("processing it crashed two worker processes")
        raise PoolError(
            f"{self._name}: two worker processes died. Their question was {question!r:.500}. Memory may "
            "be short"
        )

    def ask_async(self, question: Any, control: Any = None) -> Awaitable[Any]:
        """Call ``ask`` on a thread and return an awaitable of the answer."""
        loop = asyncio.get_running_loop()
        return loop.run_in_executor(self.threads, self.ask, question, control)

    def close(self) -> None:
        """End all processes. The next question starts new ones."""
        self._closings += 1
        with self._lock:
            self._stop_server()

    def _is_healthy(self, closings: int, control: Any) -> bool:
        # A new worker, because an idle one may have died.
        worker = self._new_worker(closings)
        try:
            self._ask(worker, control)
        except PoolError:
            raise
        except Exception:
            return False
        return True

    def _ask(self, worker: socket.socket, question: Any) -> Any:
        """Return a worker's answer. Exceptions of the function are raised here.

        Raises:
            CallLimitError: the worker exceeded its time or memory.
            _WorkerDiedError: the worker died before it answered.
            PoolError: the worker does not reply.
        """
        began = time.monotonic()
        worker.settimeout(REPLY_SECONDS)
        try:
            send(worker, question)
            kind, content = receive(worker)
        except TimeoutError:
            worker.close()
            raise PoolError(
                f"{self._name} did not reply within {REPLY_SECONDS:.0f} s. The machine may be "
                "overloaded"
            ) from None
        except (EOFError, OSError):
            worker.close()
            # A process uses at most one core, so a worker that lived for less than the limit was
            # not killed by the limit.
            if time.monotonic() - began >= self.seconds:
                raise CallLimitError(f"processing it takes more than {self.seconds:g} s") from None
            raise _WorkerDiedError from None

        if kind == "memory":
            worker.close()
            raise CallLimitError("processing it takes too much memory")
        # An exception of the function leaves the worker usable.
        self._return_worker(worker)
        if kind == "error":
            raise content
        return content

    # ---- workers

    def _idle_worker(self) -> socket.socket | None:
        """Return an idle worker, or None if there is none."""
        with self._lock:
            return self._idle.pop() if self._idle else None

    def _return_worker(self, worker: socket.socket) -> None:
        """Keep a worker for the next question, or end it if enough workers are idle."""
        with self._lock:
            # After `close` there is no server, and the worker is about to be killed.
            if len(self._idle) < self._idle_workers and self._server is not None:
                self._idle.append(worker)
                return
        worker.close()

    def _new_worker(self, closings: int) -> socket.socket:
        """Start a worker and wait until it accepts questions.

        Args:
            closings: ``close`` calls before the question.

        Raises:
            PoolError: no worker starts, or ``close`` was called.
        """
        # The second attempt asks the same server if only the worker died. The third one has a new
        # server.
        for attempt in range(3):
            with self._lock:
                if self._closings != closings:
                    raise PoolError(f"{self._name} was closed")
                if self._server is None or self._server.poll() is not None:
                    self._start_server()
                assert self._requests is not None
                server = self._server
                worker = _request_worker(self._requests)
            if worker is not None and _is_ready(worker):
                return worker

            if worker is not None:
                worker.close()
            if attempt == 0 and server is not None and server.poll() is None:
                # Only the worker died. The server's other workers may be answering questions.
                continue

            with self._lock:
                # Another thread may have started the next one.
                if self._server is server:
                    self._stop_server()
        reason = self._last_error or "its process exits without a message"
        raise PoolError(f"{self._name} does not start: {reason}")

    # ---- the server, with the lock held by the caller

    def _start_server(self) -> None:
        """Start a server in place of the last one. Raises PoolError if that fails."""
        self._stop_server()

        # sympy orders terms by hashes of strings, and verdicts must not differ between runs. A
        # library's threads do not survive a fork.
        environment = os.environ | {"PYTHONHASHSEED": "0", "TOKENIZERS_PARALLELISM": "false"}

        # The server's standard input is its end of the socket. When this process closes its end or
        # dies, the server reads the end of its input and exits, together with its workers.
        self._requests, servers_end = socket.socketpair()
        # Standard input is taken by the socket, so the settings come through an open file.
        with tempfile.TemporaryFile() as setup:
            pickle.dump(self._setup, setup)
            setup.seek(0)
            number = str(setup.fileno())
            command = [sys.executable, "-m", "rl_loop.forked_server", self._function, number]
            try:
                # A file instead of a pipe, because a full pipe would stop the server.
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
                raise PoolError(
                    f"{self._name} does not start: {' '.join(command)}: {error}"
                ) from None
            finally:
                # The child has its copy. An open copy here would hide the server's death, because
                # the socket would stay connected.
                servers_end.close()

    def _stop_server(self) -> None:
        """End the server and its workers, and keep the server's last error."""
        for worker in self._idle:
            worker.close()
        self._idle.clear()

        # The server takes the closed socket as the request to end, and kills its busy workers.
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
    """Wait until a server with a closed socket exits. Kill it after STOP_SECONDS."""
    # The server may still import modules, which takes seconds.
    server.terminate()
    try:
        server.wait(timeout=STOP_SECONDS)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


def _last_error(errors: IO[bytes]) -> str:
    """Return the last line that names an error, else the last line. Empty without output."""
    errors.seek(0)
    lines = errors.read().decode(errors="replace").strip().splitlines()
    # Other output may follow the traceback.
    named = [line for line in lines if "Error" in line] or lines
    return named[-1].strip() if named else ""


def _request_worker(requests: socket.socket) -> socket.socket | None:
    """Request a worker from the server.

    Returns:
        Socket for questions to the worker, or None if the server is gone.
    """
    our_end, their_end = socket.socketpair()
    try:
        socket.send_fds(requests, [b"w"], [their_end.fileno()])
        return our_end
    except OSError:
        our_end.close()
        return None
    finally:
        # The server has its own copy. With a copy here the worker's death would not end the
        # connection.
        their_end.close()


def _is_ready(worker: socket.socket) -> bool:
    """Wait until a worker accepts questions. Return False if it died or does not start."""
    worker.settimeout(START_SECONDS)
    try:
        kind, _ = receive(worker)
    except (EOFError, OSError):
        return False
    return bool(kind == READY)
