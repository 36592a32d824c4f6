"""Functions for process trees on this machine."""

from contextlib import suppress

import psutil


def kill_tree(pid: int) -> None:
    """Kill a process and its descendants. Processes that have exited are ignored."""
    with suppress(psutil.NoSuchProcess):
        parent = psutil.Process(pid)
        # List the children first, because orphans get another parent.
        for process in [*parent.children(recursive=True), parent]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
