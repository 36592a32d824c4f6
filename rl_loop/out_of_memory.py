"""Counter of the kernel's out-of-memory killer."""

from pathlib import Path

VMSTAT = Path("/proc/vmstat")


def out_of_memory_kills() -> int:
    """Return the number of processes that this machine's kernel has killed when out of memory.

    The number is 0 if the kernel does not count them.
    """
    try:
        lines = VMSTAT.read_text().splitlines()
    except OSError:
        return 0
    # The counter exists since Linux 4.13.
    counts = [line.split()[1] for line in lines if line.startswith("oom_kill ")]
    return int(counts[0]) if counts else 0
