"""Server process of ``forked_pool``: it imports everything once and forks workers.

``python -m rl_loop.forked_server MODULE:FUNCTION SETUP_FD`` reads requests for workers from a Unix
socket, its standard input. A request is one byte with a file descriptor: the socket on which the
new worker receives questions. Imports take 1 s or more, but a fork after the imports takes
milliseconds, so a worker that ran out of time is replaced at once. When the socket closes, the
server kills every worker and exits.
"""

import ctypes
import gc
import os
import pickle
import resource
import signal
import socket
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from types import FrameType
from typing import Any, Literal

READY = "ready"
"""First reply of a worker."""
HEADER = struct.Struct("!Q")
"""Length of the message that follows."""
GROWTH_BYTES = 256 << 20
"""Memory growth, in bytes, after which a worker is replaced instead of kept."""
PR_SET_PDEATHSIG = 1
"""Constant from linux/prctl.h."""

Reply = tuple[Literal["ready", "value", "error", "memory"], Any]
"""Kind of a reply, with the value or the error."""


@dataclass(frozen=True)
class ServerSettings:
    """Settings of a server and its workers."""

    seconds: float
    """Processor time of one question."""
    memory_bytes: int
    """Address space of a worker."""
    niceness: int
    """Added to the niceness of the calling process."""
    prepare: str | None
    """MODULE:FUNCTION that runs once, before workers are forked."""
    argument: bytes
    """Pickled argument of ``prepare``."""


def serve(requests: socket.socket, function: str, setup: ServerSettings) -> None:
    """Fork a worker for every received file descriptor, until the other end is closed.

    Args:
        requests: socket on which file descriptors arrive.
        function: MODULE:FUNCTION that answers questions.
        setup: settings of the server and its workers.
    """
    # Ctrl-C in a terminal reaches the whole process group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(setup.niceness)

    answer = _function(function)
    if setup.prepare is not None:
        _function(setup.prepare)(pickle.loads(setup.argument))
    # The garbage collectors of workers must not write to shared pages.
    gc.collect()
    gc.freeze()
    workers: set[int] = set()
    # Before this line SIGTERM ends the process at once. After it, the closed socket does, once the
    # workers are gone.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def reap(_signal: int, _frame: FrameType | None) -> None:
        # One SIGCHLD may stand for several exits, so ask for every worker.
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

        # Without this, a worker that ends before its pid is known would never be reaped.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        pid = os.fork()
        if pid == 0:
            # A copy of the server's end in a worker would keep the socket open after the server's
            # death.
            requests.close()
            _run_worker(socket.socket(fileno=descriptors[0]), answer, setup, server_pid)
        workers.add(pid)
        # The worker has its copy. A copy here would keep the connection open after the worker's
        # death.
        os.close(descriptors[0])
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})

    # This loop reaps the workers, so the handler must not take their exit statuses.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for pid in workers:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def send(connection: socket.socket, message: Any) -> None:
    """Send a pickled message. Raises OSError if the connection is lost."""
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    connection.sendall(HEADER.pack(len(data)))
    connection.sendall(data)


def receive(connection: socket.socket) -> Any:
    """Return the next message. Raises EOFError at the end of the connection, else OSError."""
    [size] = HEADER.unpack(_read(connection, HEADER.size))
    return pickle.loads(_read(connection, size))


def _read(connection: socket.socket, size: int) -> bytearray:
    # ``recv_into`` returns the bytes that have arrived, which may be a part of the message.
    data = bytearray(size)
    view = memoryview(data)
    while view:
        received = connection.recv_into(view)
        if not received:
            raise EOFError
        view = view[received:]
    return data


def _function(path: str) -> Callable[[Any], Any]:
    """Import MODULE:FUNCTION."""
    module, _, name = path.partition(":")
    function: Callable[[Any], Any] = getattr(import_module(module), name)
    return function


def _run_worker(
    questions: socket.socket, answer: Callable[[Any], Any], setup: ServerSettings, server_pid: int
) -> None:
    """Answer questions until the socket closes. Never returns.

    A question that takes more than ``setup.seconds`` of processor time kills the worker.
    """
    try:
        _set_limits(setup.memory_bytes)
        _die_with_server(server_pid)

        send(questions, (READY, None))
        largest = _peak_memory() + GROWTH_BYTES
        while _peak_memory() < largest:
            question = receive(questions)
            # A signal, because sympy computes 9^(9^(9^9)) in one C call, which Python code cannot
            # interrupt. Processor time, because a busy machine must not make an answer wrong.
            # ITIMER_PROF counts the processor time of all threads, in user code and in the kernel.
            signal.setitimer(signal.ITIMER_PROF, setup.seconds)
            reply = _reply(answer, question)
            signal.setitimer(signal.ITIMER_PROF, 0)
            send(questions, reply)
            # Large messages must not stay in memory while the worker waits.
            del question, reply
    except (EOFError, OSError):
        pass
    finally:
        # os._exit skips the server's exit handlers, which must not run here.
        os._exit(0)


def _reply(answer: Callable[[Any], Any], question: Any) -> Reply:
    try:
        return "value", answer(question)
    except MemoryError:
        return "memory", None
    except Exception as error:
        return "error", _picklable(error)


def _picklable(error: Exception) -> Exception:
    """Return the error if it can be pickled and unpickled, else a RuntimeError with its message."""
    # Unpickling fails if the exception's constructor takes other arguments than ``args``.
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}"[:1000])
    return error


def _peak_memory() -> int:
    """Return the largest resident memory of this process so far, in bytes."""
    # Linux reports kilobytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _set_limits(memory_bytes: int) -> None:
    """Limit a worker's memory, and restore the default actions of signals."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    # Expensive questions kill workers on purpose, so a core dump would only fill the disk.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _die_with_server(server_pid: int) -> None:
    """Tell the kernel to kill this worker when the server ends, even if the server is killed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # The server may have died before the call above.
    if os.getppid() != server_pid:
        os._exit(1)


if __name__ == "__main__":
    # Pickles refer to classes of this module by its import name.
    from rl_loop import forked_server

    with open(int(sys.argv[2]), "rb") as file:
        settings = pickle.load(file)
    forked_server.serve(socket.socket(fileno=sys.stdin.fileno()), sys.argv[1], settings)
