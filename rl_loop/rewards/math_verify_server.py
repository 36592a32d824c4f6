"""The side of ``math_verify_pool`` that runs math-verify: one process that imports it, and workers forked from it.

``python -m rl_loop.rewards.math_verify_server SECONDS`` reads requests for workers from a Unix socket, its standard
input. A request is one byte with a file descriptor: the socket on which the new worker is asked questions. Importing
sympy takes a second or more, forking a process that has imported it takes milliseconds: a worker that ran out of time
is replaced at once. When the socket closes, every worker is killed and the process ends."""

import ctypes
import json
import logging
import os
import resource
import signal
import socket
import sys
from fractions import Fraction
from types import FrameType
from typing import Any

from rl_loop.rewards.number import parse_number, same_number

# address space of a worker; sympy needs 60 MB
MEMORY_BYTES = 1 << 30
# what a worker says once it can be asked
READY = b"ready\n"

# relative error of decimals, which sympy computes with as doubles
DOUBLE_PRECISION = Fraction(1, 10**12)

PR_SET_PDEATHSIG = 1


def serve(requests: socket.socket, seconds: float) -> None:
    """Fork a worker for every file descriptor that arrives, until the other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal reaches the whole process group
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    _compare("1/2", "0.5")  # imports and first use, which every worker then has
    workers: set[int] = set()

    def reap(_signal: int, _frame: FrameType | None) -> None:
        for pid in list(workers):
            if os.waitpid(pid, os.WNOHANG)[0] == pid:
                workers.discard(pid)

    signal.signal(signal.SIGCHLD, reap)
    server_pid = os.getpid()

    while True:
        data, descriptors, _, _ = socket.recv_fds(requests, 1, 1)
        if not data:
            break

        # without this a worker that ends before its pid is known would never be reaped
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

    A question is a line of JSON, [given, wanted], and its answer is ``true`` or ``false``. One that takes more than
    ``seconds`` of processor time kills the worker: sympy computes 9^(9^(9^9)) in one call into C, which nothing
    inside Python can interrupt. Processor time, since a busy machine must not make an answer wrong."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

        # a worker must not outlive the server, even if that is killed
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != server_pid:
            os._exit(1)

        questions.sendall(READY)
        for line in questions.makefile("rb"):
            given, wanted = json.loads(line)
            signal.setitimer(signal.ITIMER_PROF, seconds)
            try:
                same = _compare(given, wanted)
            except (Exception, RecursionError, MemoryError):
                same = False  # math-verify and sympy raise all sorts of things over what is no mathematics
            signal.setitimer(signal.ITIMER_PROF, 0)
            questions.sendall(b"true\n" if same else b"false\n")
    except ConnectionError:
        pass
    finally:
        os._exit(0)


def _compare(given: str, wanted: str) -> bool:
    """Whether two expressions are equivalent, by math-verify and what it leaves out."""
    from math_verify import parse, verify

    # without math-verify's own timeouts, which are Python signal handlers
    gold = parse(rf"\boxed{{{wanted}}}", parsing_timeout=None)
    answer = parse(rf"\boxed{{{given}}}", parsing_timeout=None)
    same = bool(verify(gold, answer, timeout_seconds=None)) or _same_after_simplifying(gold, answer)
    return same and _same_digits(wanted, answer)


def _same_after_simplifying(gold: list[Any], answer: list[Any]) -> bool:
    """What math-verify leaves out: cancelling in fractions, and i as the imaginary unit."""
    from sympy import Expr, I, simplify

    if not (gold and answer and isinstance(gold[0], Expr) and isinstance(answer[0], Expr)):
        return False
    rest = gold[0] - answer[0]
    return bool(simplify(rest.subs({symbol: I for symbol in rest.free_symbols if symbol.name == "i"})) == 0)


def _same_digits(wanted: str, answer: list[Any]) -> bool:
    """Whether a decimal ``wanted`` has the digits of the answer: math-verify rounds to six places, so that it takes
    10^-9 for 0.000000002."""
    from sympy import Expr, Number

    number = parse_number(wanted)
    if number is None or number.places == 0 or not (answer and isinstance(answer[0], Expr)):
        return True
    value = answer[0].doit().evalf(40)
    digits = parse_number(str(value)) if isinstance(value, Number) and value.is_finite else None
    if digits is None or same_number(digits, number):
        return True
    return abs(digits.value - number.value) <= abs(number.value) * DOUBLE_PRECISION


if __name__ == "__main__":
    serve(socket.socket(fileno=sys.stdin.fileno()), float(sys.argv[1]))
