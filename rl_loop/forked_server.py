"""The side of ``comparison_pool`` that compares: one process that imports sympy, and workers forked
from it.

``python -m rl_loop.rewards.comparison_server SECONDS`` reads requests for workers from a Unix
socket, its standard input. A request is one byte with a file descriptor: the socket on which the
new worker is asked questions. Importing sympy takes a second or more, forking a process that has
imported it takes milliseconds: a worker that ran out of time is replaced at once. When the socket
closes, every worker is killed and the process ends."""

import ctypes
import json
import os
import resource
import signal
import socket
import sys
from types import FrameType

MEMORY_BYTES = 1 << 30
"""Address space of a worker; sympy needs 60 MB."""
READY = b"ready\n"
"""First reply of a worker."""
PR_SET_PDEATHSIG = 1
"""From linux/prctl.h."""


def serve(requests: socket.socket, seconds: float) -> None:
    """Fork a worker for every file descriptor that arrives, until the other end is closed."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C in a terminal reaches the whole process group
    # Imports and first use, which every worker then has.
    _compare(r"\sin^2 x+\cos^2 x+\sqrt{2}\pi", r"1+\frac{2\pi}{\sqrt{2}}")
    workers: set[int] = set()

    def reap(_signal: int, _frame: FrameType | None) -> None:
        for pid in list(workers):
            ended, _ = os.waitpid(pid, os.WNOHANG)
            if ended == pid:
                workers.discard(pid)

    signal.signal(signal.SIGCHLD, reap)
    server_pid = os.getpid()

    while True:
        data, descriptors, _, _ = socket.recv_fds(requests, 1, 1)
        if not data:
            break

        # Without this a worker that ends before its pid is known would never be reaped.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        pid = os.fork()
        if pid == 0:
            requests.close()
            _run_worker(socket.socket(fileno=descriptors[0]), seconds, server_pid)
        workers.add(pid)
        os.close(descriptors[0])
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for pid in workers:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _run_worker(questions: socket.socket, seconds: float, server_pid: int) -> None:
    """Answer questions until the socket closes; never returns.

    A question is a line of JSON, [answer, truth]; the reply is ``true`` or ``false``. One that
    takes more than ``seconds`` of processor time kills the worker: sympy computes 9^(9^(9^9)) in
    one call into C, which nothing inside Python can interrupt. Processor time, since a busy
    machine must not make an answer wrong."""
    try:
        _set_limits()
        _die_with(server_pid)

        questions.sendall(READY)
        for line in questions.makefile("rb"):
            answer, truth = json.loads(line)
            signal.setitimer(signal.ITIMER_PROF, seconds)
            try:
                same = _compare(answer, truth)
            except (Exception, RecursionError, MemoryError):
                # sympy raises all sorts of things.
                same = False
            signal.setitimer(signal.ITIMER_PROF, 0)
            questions.sendall(b"true\n" if same else b"false\n")
    except ConnectionError:
        pass
    finally:
        # Not sys.exit: what the server registered for its own end must not run here.
        os._exit(0)


def _set_limits() -> None:
    """Limit a worker's memory, and let signals do to it what they do to any process."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _die_with(server_pid: int) -> None:
    """Let the kernel end this worker with the server, even if that is killed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # The server may have died before the call above.
    if os.getppid() != server_pid:
        os._exit(1)


def _compare(answer: str, truth: str) -> bool:
    """Return True if two texts in standard notation say the same."""
    # Imported here: the side that asks needs no sympy.
    from rl_loop.rewards.comparison import says_the_same

    return says_the_same(answer, truth)


if __name__ == "__main__":
    serve(socket.socket(fileno=sys.stdin.fileno()), float(sys.argv[1]))
