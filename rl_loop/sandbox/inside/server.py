"""Fork-server: the first process of this project inside bubblewrap.

There are three kinds of processes:

- The *server* imports modules once, then forks a supervisor per call. It reads no program and no
  output, so its memory, from which calls are forked, has no data of earlier calls.
- The *supervisor* of a call (``supervisor.py``) reads the program, enters new user, process, mount
  and IPC namespaces, forks the program and watches time, memory and output.
- The *program* (``program.py``) is process 1 of its namespace.

A call includes the history of its session. These programs run again before the new one, in the same
interpreter, with separate limits. Their output is discarded.
"""

import gc
import importlib
import os
import select
import sys

from rl_loop.sandbox.inside.confinement import SeccompProgram, drop_root
from rl_loop.sandbox.inside.messages import CONTROL, READY, SandboxServerSettings, receive, send
from rl_loop.sandbox.inside.supervisor import supervise


def main() -> None:
    """Set up the server, then serve calls in sequence until the host closes the socket."""
    settings = SandboxServerSettings.from_json(receive())
    drop_root()
    # The filter of programs has no epoll. Modules that choose at import, such as ``selectors``,
    # must not choose it.
    del select.epoll
    for name in settings.preload_modules:
        importlib.import_module(name)
    seccomp = SeccompProgram(bytes.fromhex(settings.seccomp))

    # Line buffering keeps the output of a program that is killed.
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, encoding="utf-8", errors="backslashreplace")  # type: ignore[union-attr]

    # Collections in a program do not touch frozen objects, so their memory stays shared.
    gc.collect()
    gc.freeze()
    send(READY)
    while select.select([CONTROL], [], []):
        serve_call(settings, seccomp)


def serve_call(settings: SandboxServerSettings, seccomp: SeccompProgram) -> None:
    """Fork the supervisor of the next call and wait for it. Exit if the supervisor failed."""
    supervisor = os.fork()
    if supervisor == 0:
        # The child must never return into the loop of the server, whatever happens.
        try:
            supervise(settings, seccomp)
            os._exit(0)
        finally:
            os._exit(1)

    _, status = os.waitpid(supervisor, 0)
    if status != 0:
        sys.exit(f"the supervisor of a call ended with status {status}")


if __name__ == "__main__":
    main()
