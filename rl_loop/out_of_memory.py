"""Counter of the kernel's out-of-memory killer."""

from pathlib import Path

VMSTAT = Path("/proc/vmstat")


def out_of_memory_kills() -> int:
    """Return how many processes of this machine the kernel has killed for want of memory.

    0 where the kernel does not count them."""
    try:
        lines = VMSTAT.read_text().splitlines()
    except OSError:
        return 0
    counts = [line.split()[1] for line in lines if line.startswith("oom_kill ")]
    return int(counts[0]) if counts else 0
