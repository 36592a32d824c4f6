"""Starts Ray's agent of runtime environments with its first request.

    python lazy_agent.py COMMAND_OF_THE_AGENT...

Only tasks with a ``runtime_env`` send requests, and runs have none. Ray's agent needs a second of
CPU time for its imports. This program listens at the agent's port and then becomes the agent. The
raylet repeats a request that fails. Without requests, this program exits with its raylet.
"""

import os
import socket
import sys

POLL_SECONDS = 0.5
INIT_PID = 1


def main(command: list[str]) -> None:
    raylet = os.getppid()
    address = (_option(command, "node-ip-address"), int(_option(command, "runtime-env-agent-port")))
    with socket.create_server(address) as listener:
        listener.settimeout(POLL_SECONDS)
        # The raylet may have died before this line. Then init is the parent, which never exits.
        while raylet != INIT_PID and os.getppid() == raylet:
            try:
                listener.accept()
            except TimeoutError:
                continue
            break
        else:
            return
    os.execv(command[0], command)


def _option(command: list[str], name: str) -> str:
    """Return the value of an option ``--name=value``."""
    prefix = f"--{name}="
    return next(part.removeprefix(prefix) for part in command if part.startswith(prefix))


if __name__ == "__main__":
    main(sys.argv[1:])
