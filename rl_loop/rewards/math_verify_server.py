"""The side of ``math_verify_pool`` that runs math-verify: one process that imports it, and
workers forked from it.

``python -m rl_loop.rewards.math_verify_server SECONDS`` reads requests for workers from a Unix
socket, its standard input. A request is one byte with a file descriptor: the socket on which the
new worker is asked questions. Importing sympy takes a second or more, forking a process that has
imported it takes milliseconds: a worker that ran out of time is replaced at once. When the socket
closes, every worker is killed and the process ends."""

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

MEMORY_BYTES = 1 << 30
"""Address space of a worker; sympy needs 60 MB."""
READY = b"ready\n"
"""What a worker says once it can be asked."""
DOUBLE_PRECISION = Fraction(1, 10**12)
"""Relative error of decimals, which sympy computes with as doubles."""
PR_SET_PDEATHSIG = 1
"""From linux/prctl.h."""


def serve(requests: socket.socket, seconds: float) -> None:
    """Fork a worker for every file descriptor that arrives, until the other end is closed."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C in a terminal reaches the whole process group
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    _compare("1/2", "0.5")  # imports and first use, which every worker then has
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
                # math-verify and sympy raise all sorts of things over what is no mathematics.
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
    """Say whether two expressions are equivalent, by math-verify and what it leaves out."""
    from math_verify import parse, verify

    # Without math-verify's own timeouts, which are Python signal handlers.
    gold = parse(rf"\boxed{{{truth}}}", parsing_timeout=None)
    parsed = parse(rf"\boxed{{{answer}}}", parsing_timeout=None)
    if not verify(gold, parsed, timeout_seconds=None) and not _same_after_simplifying(gold, parsed):
        return False
    return _same_digits(truth, parsed)


def _same_after_simplifying(gold: list[Any], answer: list[Any]) -> bool:
    """Do what math-verify leaves out: cancel in fractions, and take i for the imaginary unit."""
    from sympy import Expr, I, simplify

    if not (gold and answer and isinstance(gold[0], Expr) and isinstance(answer[0], Expr)):
        return False
    difference = gold[0] - answer[0]
    imaginary = {symbol: I for symbol in difference.free_symbols if symbol.name == "i"}
    return bool(simplify(difference.subs(imaginary)) == 0)


def _same_digits(truth: str, answer: list[Any]) -> bool:
    """Say whether a decimal ``truth`` has the digits of the answer.

    math-verify rounds to six places, so that it takes 10^-9 for 0.000000002."""
    from sympy import Expr, Number

    number = parse_number(truth)
    if number is None or number.places == 0 or not (answer and isinstance(answer[0], Expr)):
        return True

    value = answer[0].doit().evalf(40)
    if not isinstance(value, Number) or not value.is_finite:
        return True
    digits = parse_number(str(value))
    if digits is None or same_number(digits, number):
        return True
    return abs(digits.value - number.value) <= abs(number.value) * DOUBLE_PRECISION


if __name__ == "__main__":
    serve(socket.socket(fileno=sys.stdin.fileno()), float(sys.argv[1]))
