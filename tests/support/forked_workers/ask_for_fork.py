"""Stands for a worker towards Ray's raylet: asks the server for a fork, hands it its own arguments, environment,
directory and standard streams, and ends as it does. Without a server it becomes the worker as Ray would have it.

    python ask_for_fork.py DEFAULT_WORKER ARGUMENT... --serialized-runtime-env-context=JSON --language=PYTHON
"""

import json
import os
import socket
import sys

NOT_FOR_THE_WORKER = ("--serialized-runtime-env-context", "--language")
"""Options of ``setup_worker.py`` in Ray, for which this program stands."""


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

    # The status of the worker's end; nothing if the server ends.
    status = server.recv(16)
    sys.exit(int(status or 1))


if __name__ == "__main__":
    main()
