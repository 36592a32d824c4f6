"""Represents a worker towards Ray's raylet.

    python ask_for_fork.py DEFAULT_WORKER ARGUMENT... \\
        --serialized-runtime-env-context=JSON --language=PYTHON

The program requests a fork from the server, passes its arguments, environment, directory and
standard streams, and ends together with the fork. Without a server it becomes a normal worker.
"""

import json
import os
import socket
import sys

NOT_FOR_THE_WORKER = ("--serialized-runtime-env-context", "--language")
"""Options for Ray's ``setup_worker.py``, which this program replaces."""


def main() -> None:
    arguments = [a for a in sys.argv[1:] if not a.startswith(NOT_FOR_THE_WORKER)]
    request = {
        "arguments": arguments,
        "environment": dict(os.environ),
        "directory": os.getcwd(),
    }
    server = socket.socket(socket.AF_UNIX)
    try:
        server.connect("\0" + os.environ["GPTOSS_TEST_FORKED_WORKERS"])
    except ConnectionRefusedError:
        setup_worker = os.path.join(os.path.dirname(arguments[0]), "setup_worker.py")
        os.execv(sys.executable, [sys.executable, setup_worker, *sys.argv[1:]])

    message = json.dumps(request).encode() + b"\n"
    sent = socket.send_fds(server, [message], [0, 1, 2])
    server.sendall(message[sent:])

    # Exit status of the worker; empty if the server has ended.
    status = server.recv(16)
    sys.exit(int(status or 1))


if __name__ == "__main__":
    main()
