"""math-verify in processes of its own, because an answer can make it run for ever or eat the memory.

Every comparison that is going on has a worker process to itself, and a limit that begins when it does: answers that are
slow to compare do not queue before the others. Workers are forked from a server that has imported sympy
(``math_verify_server``), so that one more costs milliseconds."""

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

from rl_loop.rewards.failure import CheckerFailure
from rl_loop.rewards.math_verify_server import READY

# processor time of one comparison, which usually takes a thousandth of that; a slower one counts as not equivalent
SECONDS = 2.0
# comparisons at the same time; more wait until one of these is over
WORKERS = 32
# workers that stay for the next comparison
IDLE_WORKERS = 4
# importing sympy takes seconds on a busy machine; a comparison its processor time, many times over if there are many
START_SECONDS = 180.0
REPLY_SECONDS = 180.0
# characters of an expression; a longer one counts as not equivalent
LONGEST = 2000


class MathVerifyPool:
    """Compares expressions, from any number of threads. Started when first needed, gone with the parent."""

    def __init__(self, seconds: float = SECONDS, workers: int = WORKERS) -> None:
        self._seconds = seconds
        self._places = threading.BoundedSemaphore(workers)
        self._lock = threading.Lock()  # of everything below
        self._idle: list[socket.socket] = []
        self._server: subprocess.Popen[bytes] | None = None
        self._requests: socket.socket | None = None
        self._errors: IO[bytes] | None = None
        self._last_words = ""  # of the last server that died

    def equivalent(self, given: str, wanted: str) -> bool:
        """Whether math-verify finds two mathematical expressions (LaTeX or plain) equivalent.

        Raises CheckerFailure if math-verify cannot be started, or its process dies twice without having had the time
        that a comparison may take."""
        if max(len(given), len(wanted)) > LONGEST:
            return False

        question = json.dumps([given, wanted]).encode() + b"\n"
        with self._places:
            # an idle worker may have died since it was last asked; the second one is fresh
            for worker in (self._idle_worker(), None):
                worker = worker or self._new_worker()
                same = self._ask(worker, question)
                if same is not None:
                    return same
        raise CheckerFailure(f"the process of math-verify died twice over {given!r} against {wanted!r}")

    def close(self) -> None:
        """End all processes; the next comparison starts new ones."""
        with self._lock:
            self._stop_server()

    def _ask(self, worker: socket.socket, question: bytes) -> bool | None:
        """The answer: False if the worker used up its time, None if it died before."""
        # a process has at most one core: who lived for less than the limit was not killed by the limit
        began = time.monotonic()
        reply = _exchange(worker, question)
        if reply:
            self._keep(worker)
            return reply == b"true\n"

        worker.close()
        if reply is None:
            raise CheckerFailure(f"math-verify did not answer within {REPLY_SECONDS:.0f} s; is the machine overloaded?")
        return False if time.monotonic() - began >= self._seconds else None

    def _idle_worker(self) -> socket.socket | None:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def _keep(self, worker: socket.socket) -> None:
        with self._lock:
            if len(self._idle) < IDLE_WORKERS and self._server is not None:
                self._idle.append(worker)
                return
        worker.close()

    def _new_worker(self) -> socket.socket:
        """A worker that is ready to be asked. Raises CheckerFailure."""
        for _ in range(2):
            with self._lock:
                if self._server is None or self._server.poll() is not None:
                    self._start_server()
                assert self._requests is not None
                server = self._server
                worker = _request_worker(self._requests)
            if worker is not None and _exchange(worker, b"", START_SECONDS) == READY:
                return worker

            # the server died since it was last seen
            if worker is not None:
                worker.close()
            with self._lock:
                if self._server is server:  # another thread may have started the next one
                    self._stop_server()
        raise CheckerFailure(f"math-verify does not start: {self._last_words or 'its process dies without a word'}")

    def _start_server(self) -> None:
        self._stop_server()
        self._requests, theirs = socket.socketpair()
        command = [sys.executable, "-m", "rl_loop.rewards.math_verify_server", str(self._seconds)]
        try:
            # sympy's order of terms depends on the hashes of texts: verdicts must not differ between runs
            environment = os.environ | {"PYTHONHASHSEED": "0"}
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - it stays as long as the server
            self._server = subprocess.Popen(
                command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, stderr=self._errors, env=environment
            )
        except OSError as error:
            raise CheckerFailure(f"math-verify does not start: {' '.join(command)}: {error}") from None
        finally:
            theirs.close()

    def _stop_server(self) -> None:
        """The server kills its workers when its socket closes."""
        for worker in self._idle:
            worker.close()
        self._idle.clear()
        if self._requests is not None:
            self._requests.close()
            self._requests = None
        if self._server is not None:
            try:
                self._server.wait(timeout=5)
            except subprocess.TimeoutExpired:
                self._server.kill()
                self._server.wait()
            self._server = None
        if self._errors is not None:
            self._errors.seek(0)
            lines = self._errors.read().decode(errors="replace").strip().splitlines()
            errors = [line for line in lines if "Error" in line] or lines
            self._last_words = errors[-1].strip() if errors else ""
            self._errors.close()
            self._errors = None


def _request_worker(requests: socket.socket) -> socket.socket | None:
    """The socket of a worker that is being started; None if the server is gone."""
    ours, theirs = socket.socketpair()
    try:
        socket.send_fds(requests, [b"w"], [theirs.fileno()])
        return ours
    except OSError:
        ours.close()
        return None
    finally:
        theirs.close()


def _exchange(worker: socket.socket, question: bytes, seconds: float = REPLY_SECONDS) -> bytes | None:
    """The line that a worker answers, empty if it has died, None if it says nothing for ``seconds``."""
    worker.settimeout(seconds)
    reply = b""
    try:
        worker.sendall(question)
        while not reply.endswith(b"\n"):
            part = worker.recv(64)
            if not part:
                return b""
            reply += part
        return reply
    except TimeoutError:
        return None
    except OSError:
        return b""


_pool = MathVerifyPool()
atexit.register(_pool.close)
equivalent = _pool.equivalent
