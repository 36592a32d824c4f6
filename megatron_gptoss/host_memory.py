"""Main memory of this machine, or of the container or Slurm job of this process."""

from collections.abc import Iterator
from pathlib import Path

import psutil

CGROUP_MOUNT = Path("/sys/fs/cgroup")
"""Mount point of the cgroup hierarchy."""
PROCESS_CGROUP_FILE = Path("/proc/self/cgroup")
"""File with the cgroups of this process."""


def total_bytes() -> int:
    """Return the physical memory, or the smallest cgroup limit if that is lower."""
    limits = [limit for limit, _ in _limits_and_usage()]
    return min([psutil.virtual_memory().total, *limits])


def available_bytes() -> int:
    """Return the memory that this process can still allocate, considering cgroup limits."""
    remaining = [max(0, limit - used) for limit, used in _limits_and_usage()]
    return min([psutil.virtual_memory().available, *remaining])


def _limits_and_usage() -> Iterator[tuple[int, int]]:
    """Yield limit and usage in bytes of every cgroup (v1 or v2) of this process with a limit."""
    for group in _groups(CGROUP_MOUNT, ""):
        yield from _read_limit(group, "memory.max", "memory.current")
    for group in _groups(CGROUP_MOUNT / "memory", "memory"):
        yield from _read_limit(group, "memory.limit_in_bytes", "memory.usage_in_bytes")


def _groups(mount: Path, controller: str) -> list[Path]:
    """Return the cgroup of this process under ``mount`` and its parent groups.

    Args:
        mount: directory of the hierarchy.
        controller: name of the hierarchy in /proc/self/cgroup; empty for cgroup v2.
    """
    # In a container, ``mount`` is the group of the container, and the path of the process may not
    # exist below it. Reading such a group finds no limit.
    try:
        lines = [line.split(":", 2) for line in PROCESS_CGROUP_FILE.read_text().splitlines()]
    except OSError:
        return [mount]
    path = next((path for _, names, path in lines if controller in names.split(",")), "/")
    group = mount / path.lstrip("/")
    return [group, *(parent for parent in group.parents if parent.is_relative_to(mount))]


def _read_limit(group: Path, limit_file: str, usage_file: str) -> Iterator[tuple[int, int]]:
    """Yield limit and usage of one group.

    Yields nothing if the group has no limit or no memory controller.
    """
    try:
        limit = (group / limit_file).read_text().strip()
        used = int((group / usage_file).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return
    if limit != "max":
        # Inactive page cache counts as free, because the kernel drops it before memory runs out.
        yield int(limit), used - int(stat.get("inactive_file", 0))
