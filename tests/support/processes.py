"""Functions on processes that may end at any moment, for which psutil raises an error."""

from __future__ import annotations

from contextlib import suppress

import psutil


def list_children(process: psutil.Process, recursive: bool = False) -> list[psutil.Process]:
    """Return the children of a process; none if it has ended."""
    with suppress(psutil.NoSuchProcess):
        return process.children(recursive=recursive)
    return []


def read_command(process: psutil.Process) -> str:
    """Return the command line of a process; an empty text if it has ended."""
    with suppress(psutil.NoSuchProcess):
        return " ".join(process.cmdline())
    return ""


def read_environment(process: psutil.Process) -> dict[str, str]:
    """Return the variables at the start of a process; none if it has ended."""
    with suppress(psutil.NoSuchProcess):
        return dict(process.environ())
    return {}


def kill(process: psutil.Process) -> None:
    """Kill a process unless it has ended."""
    with suppress(psutil.NoSuchProcess):
        process.kill()
