"""The fork-server, the first process inside bubblewrap that is ours.

Three kinds of process:

- the *server* imports modules once, then forks a supervisor per call. It reads no program and no
output, so nothing of
  one call is left in the memory that the next call is forked from;
- the *supervisor* of a call (``supervisor.py``) reads the program, enters new user, process, mount
and IPC namespaces,
  forks the program and watches time, memory and output;
- the *program* (``program.py``) is process 1 of its namespace.

A call of a session brings its history: programs that run again, in the same interpreter, before
the new one, with their output thrown away and limits of their own."""

import gc
import importlib
import os
import select
import sys

from rl_loop.sandbox.inside.confinement import SeccompProgram, drop_root
from rl_loop.sandbox.inside.messages import CONTROL, READY, ServerSettings, receive, send
from rl_loop.sandbox.inside.supervisor import supervise


def main() -> None:
    """Get ready, then serve one call after the other until the host closes the socket."""
    settings = ServerSettings.from_json(receive())
    drop_root()
    # The system-call filter of programs has no epoll. Modules that choose when they are imported,
    # such as ``selectors``, must not choose it.
    del select.epoll
    for name in settings.preload_modules:
        importlib.import_module(name)
    seccomp = SeccompProgram(bytes.fromhex(settings.seccomp))

    # line buffering, so that a program killed in the middle has shown what it printed
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, encoding="utf-8", errors="backslashreplace")  # type: ignore[union-attr]

    # what is frozen is not touched by a collection in a program, and so stays shared with the
    # server
    gc.collect()
    gc.freeze()
    send(READY)
    while select.select([CONTROL], [], []):
        serve_call(settings, seccomp)


def serve_call(settings: ServerSettings, seccomp: SeccompProgram) -> None:
    """Fork the supervisor of the next call and wait until it ends. Exits if the supervisor
    failed."""
    supervisor = os.fork()
    if supervisor == 0:
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
