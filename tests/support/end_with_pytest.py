"""Ends the processes of a test run if pytest is killed.

    python end_with_pytest.py PID ID

PID is the process id of pytest, ID the id of the run (``tests/support/leftover_processes.py``). A
killed test process cannot end its background processes, such as a local launch, which would
continue to run. If pytest exits normally, it ends this program.

A separate program is needed: Linux can signal a process when its parent ends, but the parent of a
launched process is a command that ended long before.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

RUN = "GPTOSS_TEST_RUN"
"""Environment variable of all processes of the suite: id of the run, "/", pytest-xdist worker."""

SETTLE_SECONDS = 1.0
"""Seconds without a process of the run, after which none can start another one."""


def main() -> None:
    try:
        pytest = os.pidfd_open(int(sys.argv[1]))
    except ProcessLookupError:
        pass  # pytest has already ended
    else:
        select.select([pytest], [], [])
    end_all(sys.argv[2])


def end_all(run: str) -> None:
    """Kill the processes of a run until there are none for SETTLE_SECONDS."""
    last_seen = time.monotonic()
    while time.monotonic() < last_seen + SETTLE_SECONDS:
        for pid in find_processes(run):
            last_seen = time.monotonic()
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


def find_processes(run: str) -> list[int]:
    """Return the processes whose environment has the id of the run."""
    mark = f"{RUN}={run}/".encode()
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        # The process has ended, or belongs to another user. A zombie's environment is empty.
        with suppress(OSError):
            entries = (directory / "environ").read_bytes().split(b"\0")
            if any(entry.startswith(mark) for entry in entries):
                found.append(int(directory.name))
    return found


if __name__ == "__main__":
    main()
