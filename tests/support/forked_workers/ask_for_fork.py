"""Runs a Python program in a fork of the server, which has imported the modules of workers.

    python ask_for_fork.py DEFAULT_WORKER ARGUMENT... --serialized-runtime-env-context=JSON --language=PYTHON

Ray's raylet starts this program as a worker. It asks the server for a fork, hands over its arguments, environment,
directory and standard streams, and ends with the status of the fork. Without a server it becomes the worker itself.
"""

import json
import os
import runpy
import signal
import socket
import sys
from collections.abc import Sequence
from typing import NoReturn

ADDRESS = "GPTOSS_TEST_FORKED_WORKERS"
"""Environment variable with the name of the server's socket."""
MARKS = "GPTOSS_TEST_MARKS"
"""Environment variable of the server whose memory gets the marks of a fork."""
MARKS_BYTES = 400
NOT_FOR_THE_WORKER = ("--serialized-runtime-env-context", "--language")
"""Options for Ray's ``setup_worker.py``, which this program replaces."""


def main() -> None:
    arguments = [a for a in sys.argv[1:] if not a.startswith(NOT_FOR_THE_WORKER)]
    status = run_in_fork(arguments)
    if status is None:
        setup_worker = os.path.join(os.path.dirname(arguments[0]), "setup_worker.py")
        os.execv(sys.executable, [sys.executable, setup_worker, *sys.argv[1:]])
    sys.exit(status)


def run_program(program: str) -> NoReturn:
    """Run a program with the arguments of this process: in a fork if there is a server, else here."""
    status = run_in_fork([program, *sys.argv[1:]])
    if status is None:
        sys.argv[0] = program
        runpy.run_path(program, run_name="__main__")
    sys.exit(status)


def run_in_fork(arguments: list[str], forwarded: Sequence[int] = ()) -> int | None:
    """Run a program and its arguments in a fork until it ends.

    Args:
        arguments: path of the program, and its arguments.
        forwarded: signals that the fork gets instead of this process.

    Returns:
        The status of the fork, 1 if the server has ended, None without a server.
    """
    request = {
        "arguments": arguments,
        "environment": dict(os.environ),
        "directory": os.getcwd(),
    }
    server = socket.socket(socket.AF_UNIX)
    try:
        server.connect("\0" + os.environ[ADDRESS])
    except (KeyError, ConnectionRefusedError):
        return None

    message = json.dumps(request).encode() + b"\n"
    sent = socket.send_fds(server, [message], [0, 1, 2])
    server.sendall(message[sent:])
    for number in forwarded:
        signal.signal(number, lambda number, _: server.sendall(bytes([number])))
    return int(server.recv(16) or 1)


if __name__ == "__main__":
    main()
