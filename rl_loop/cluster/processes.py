"""Processes of this machine and what they have started."""

from contextlib import suppress

import psutil


def kill_tree(pid: int) -> None:
    """Kill a process, if there still is one, and all that it has started."""
    with suppress(psutil.NoSuchProcess):
        parent = psutil.Process(pid)
        for process in [*parent.children(recursive=True), parent]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
