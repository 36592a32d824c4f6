"""Ends what a test run has started when pytest is killed: a program that waits for that beside it.

    python end_with_pytest.py PID ID

PID is pytest's process, ID that of the run (``tests/support/leftover_processes.py``). A test whose process is
killed cannot end anything, and what it has started in the background, such as a local launch, would
go on for as long as it likes. pytest ends this program when it ends in order.

A program by itself, and not the signal that Linux sends at a parent's death: the parent of what a
launch starts is a command that has ended long ago.
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
"""In the environment of whatever the suite starts: the id of the run, a slash and the worker of pytest-xdist."""

SETTLE_SECONDS = 1.0
"""Without a process of the run, after which none is about to start another."""


def main() -> None:
    try:
        pytest = os.pidfd_open(int(sys.argv[1]))
    except ProcessLookupError:
        pass  # it has ended already
    else:
        select.select([pytest], [], [])
    end_all(sys.argv[2])


def end_all(run: str) -> None:
    """Kill the processes of a run until there are none for SETTLE_SECONDS."""
    last_seen = time.monotonic()
    while time.monotonic() < last_seen + SETTLE_SECONDS:
        for pid in processes_of(run):
            last_seen = time.monotonic()
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


def processes_of(run: str) -> list[int]:
    """Return the processes whose environment says that they are of this run."""
    mark = f"{RUN}={run}/".encode()
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        # It has ended, or it is another user's. Of a zombie the environment is empty.
        with suppress(OSError):
            entries = (directory / "environ").read_bytes().split(b"\0")
            if any(entry.startswith(mark) for entry in entries):
                found.append(int(directory.name))
    return found


if __name__ == "__main__":
    main()
