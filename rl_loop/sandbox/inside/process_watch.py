"""Watches the resources of one call's processes.

The supervisor of a call checks 10 times per second. If the server has a cgroup, the kernel limits
memory and shares processors by weight, and this module only reads whether a process was killed.
Otherwise memory is the sum of

- anonymous pages of all processes, with shared pages counted once (proportional set sizes);
- page tables, and ``MAPPING_BYTES`` per mapping, because a million empty mappings use a gigabyte of
  kernel memory;
- ``DESCRIPTOR_BYTES`` per open descriptor;
- the contents of the call's /tmp, mapped or not;
- sockets of the call's network namespace, with full buffers.

Limits of the process (descriptors, queued signals and timers, locked memory) and the system-call
filter bound all other kernel memory.

Without a cgroup, the niceness of a call with several busy tasks is increased until all of them
together have the weight of one task.
"""

import contextlib
import ctypes
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass

CHECK_SECONDS = 0.1
# Every tenth check is exact. The kernel's fast counters may be off by a megabyte per processor and
# process.
CHECKS_PER_EXACT_CHECK = 10
# Processes are read in sequence, and pages may move between them in the meantime. Therefore check
# again before killing.
CONFIRM_SECONDS = 0.02

# struct vm_area_struct with its share of trees, rounded up.
MAPPING_BYTES = 1024
# struct anon_vma_chain: each mapping links to the mappings of the process's ancestors, on average
# half of all processes.
LINK_BYTES = 32
# A full pipe, which one descriptor keeps. The largest buffer of an open file, of /proc/stat, grows
# with the number of processors.
DESCRIPTOR_BYTES = (1 << 16) + 256 * (os.cpu_count() or 1)
# Filters and other options of one socket (net.core.optmem_max).
MAX_OPTION_MEMORY = 1 << 17
# File locks of all processes in the call. They are kernel memory that not even a cgroup counts.
LOCKS = 1000
READ_BYTES = 1 << 16

# One level of niceness reduces the weight by a factor of 1.25 (sched_prio_to_weight in the kernel).
NICE_LEVEL_WEIGHT = 1.25
MAX_NICE = 19

# Number of the system call, and its type for comparing address spaces.
KCMP = {"x86_64": 312, "aarch64": 272}
KCMP_VM = 1

libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class OutOfMemoryKills:
    """Counters of the kernel's out-of-memory killer."""

    own_limit: int
    """Number of times the server's cgroup was full."""
    total: int
    """Number of processes killed, for any limit."""


class ProcessWatch:
    """All processes of one call except its supervisor.

    Create it in the supervisor, before the program mounts its /proc.
    """

    def __init__(
        self,
        memory_bytes: int,
        socket_buffer_bytes: int,
        memory_events: int | None,
        has_cpu_weight: bool,
        proc: str = "/proc",
    ) -> None:
        """
        Open the counters.

        Args:
            memory_bytes: memory limit of the call, used without a cgroup.
            socket_buffer_bytes: net.core.wmem_default of the host's network namespace.
            memory_events: open descriptor of the cgroup's memory.events; None without a cgroup.
            has_cpu_weight: True if the cgroup shares processors.
            proc: mount point of the /proc to read.
        """
        self._limit = memory_bytes
        # A message may start while its buffer has space, and so fill the buffer twice.
        self._socket_bytes = 2 * socket_buffer_bytes + MAX_OPTION_MEMORY
        self._memory_events = memory_events
        self._has_cpu_weight = has_cpu_weight

        # /proc of the server's process namespace. It also shows the call's processes, and they
        # cannot cover it.
        self._proc = os.open(proc, os.O_RDONLY | os.O_DIRECTORY)
        # Process 1 is bubblewrap's.
        self._outsiders = {"1", str(os.getppid()), str(os.getpid())}
        self._sockets_file = os.open("self/net/sockstat", os.O_RDONLY, dir_fd=self._proc)
        self._sockets_before = self._count_sockets()
        self._kills_before = self._count_kills()
        self._tmp: int | None = None

        self._checks = 0
        self._busy_before = 0
        self._counted_bytes = 0
        """Kernel memory for mappings and descriptors at the last exact check."""

    def begin_call(self) -> None:
        """Forget earlier processes and kills, if one watch serves several calls."""
        self._kills_before = self._count_kills()
        self._counted_bytes = 0

    def memory_bytes(self) -> int:
        """Return the memory of all processes, exactly."""
        self._counted_bytes = self._mappings_bytes() + self._descriptors_bytes()
        return self._memory_bytes(exact=True)

    def watch_tmp(self) -> None:
        """Open the call's /tmp. Call it after the program has mounted it."""
        self._tmp = os.open("/tmp", os.O_RDONLY | os.O_DIRECTORY)

    def check(self) -> str | None:
        """Check the limits, and increase the niceness of a call with many busy tasks.

        Returns:
            The reason for killing the call, "memory" or "locks"; None if there is none.
        """
        self._checks += 1
        if not self._has_cpu_weight:
            self._share_processors()

        if self._count_lines("locks", LOCKS) > LOCKS:
            return "locks"
        if self._memory_events is not None:
            return self.killed_by_own_limit()

        exact = self._checks % CHECKS_PER_EXACT_CHECK == 0
        if exact:
            self._counted_bytes = self._mappings_bytes() + self._descriptors_bytes()
        if self._memory_bytes(exact) <= self._limit:
            return None
        time.sleep(CONFIRM_SECONDS)
        if self._memory_bytes(exact=True) > self._limit:
            return "memory"
        return None

    def killed_by_own_limit(self) -> str | None:
        """Return "memory" if the kernel killed a process because the server's cgroup was full."""
        kills = self._count_kills()
        was_full = kills.own_limit > self._kills_before.own_limit
        return "memory" if was_full and kills.total > self._kills_before.total else None

    def killed_by_machine(self) -> bool:
        """Return True if the kernel killed a process because the machine is out of memory.

        Without a cgroup this counts all processes of the machine. Then it is evidence only about a
        process that ended with SIGKILL.
        """
        kills = self._count_kills()
        was_full = kills.own_limit > self._kills_before.own_limit
        return kills.total > self._kills_before.total and not was_full

    # ---- memory

    def _memory_bytes(self, exact: bool) -> int:
        """Return the memory of the call.

        ``exact`` reads every page table. Otherwise page tables are read only for a sum above the
        limit.
        """
        processes = self._memory_of_processes()
        other = self._counted_bytes + self._tmp_bytes()
        other += max(0, self._count_sockets() - self._sockets_before) * self._socket_bytes

        total = other + sum(resident + page_tables for _, resident, page_tables in processes)
        if not exact and total <= self._limit:
            return total
        total = other
        for path, resident, page_tables in with_own_memory(processes):
            total += self._proportional_bytes(path, resident) + page_tables
        return total

    def _memory_of_processes(self) -> list[tuple[str, int, int]]:
        """Return data of every process: a task's directory, anonymous resident bytes, page table
        bytes.

        The task is alive.
        """
        found = []
        for process in self._processes():
            for path in self._with_memory(process):
                status = self._read(f"{path}/status")
                if b"\nRssAnon:" in status:
                    found.append((path, _field(status, b"RssAnon"), _field(status, b"VmPTE")))
                    break
        return found

    def _with_memory(self, process: str) -> Iterator[str]:
        """Yield directories with a process's memory data."""
        # The directory of the first thread, which has no data after that thread has ended.
        yield process
        for task in self._list(f"{process}/task"):
            yield f"{process}/task/{task}"

    def _proportional_bytes(self, path: str, otherwise: int) -> int:
        """Return anonymous bytes, with each page divided by its number of mappings.

        Returns ``otherwise`` if they cannot be read. A process is unreadable if its executable file
        is.
        """
        rollup = self._read(f"{path}/smaps_rollup")
        if b"\nPss_Anon:" in rollup:
            return _field(rollup, b"Pss_Anon")
        return otherwise

    def _mappings_bytes(self) -> int:
        """Return kernel memory for all processes' mappings. Counting stops above the limit."""
        processes = self._processes()
        bytes_each = MAPPING_BYTES + LINK_BYTES * len(processes)
        most = self._limit // bytes_each
        count = 0
        for process in processes:
            for path in self._with_memory(process):
                mappings = self._count_lines(f"{path}/maps", most)
                if mappings > 0:
                    count += mappings
                    break
            if count > most:
                break
        return count * bytes_each

    def _descriptors_bytes(self) -> int:
        """Return kernel memory for open descriptors, each counted as a full pipe."""
        count = 0
        for process in self._processes():
            # The process may have ended.
            with contextlib.suppress(OSError):
                size = os.stat(f"{process}/fd", dir_fd=self._proc).st_size
                # Since 6.2 Linux reports the number of descriptors as the size.
                count += size or len(self._list(f"{process}/fd"))
        return count * DESCRIPTOR_BYTES

    def _tmp_bytes(self) -> int:
        if self._tmp is None:
            return 0
        usage = os.fstatvfs(self._tmp)
        return (usage.f_blocks - usage.f_bfree) * usage.f_frsize

    def _count_sockets(self) -> int:
        """Return the number of sockets in the network namespace.

        A socket with a closed descriptor counts until its data is read.
        """
        first_line, _, _ = os.pread(self._sockets_file, 4096, 0).partition(b"\n")
        return int(first_line.split()[-1])

    def _count_kills(self) -> "OutOfMemoryKills":
        """Return the kernel's kill counters: of the cgroup if there is one, else of the machine.

        The kernel increases both counters before it kills.
        """
        if self._memory_events is None:
            return OutOfMemoryKills(0, _counter(self._read("vmstat"), b"oom_kill"))
        events = os.pread(self._memory_events, READ_BYTES, 0)
        return OutOfMemoryKills(_counter(events, b"oom"), _counter(events, b"oom_kill"))

    # ---- processors

    def _share_processors(self) -> None:
        """Increase the niceness of all tasks until the busy ones together weigh no more than one
        task.
        """
        busy = 0
        niceness: dict[int, int] = {}
        for process in self._processes():
            for task in self._list(f"{process}/task"):
                # The name in parentheses may contain anything. The fields begin after the last
                # parenthesis.
                fields = self._read(f"{process}/task/{task}/stat").rpartition(b")")[2].split()
                if len(fields) > 16:
                    busy += fields[0] == b"R"
                    niceness[int(task)] = int(fields[16])

        # Unprivileged processes cannot decrease niceness. Therefore a program that once had 30 busy
        # tasks keeps its niceness. Require busy tasks in two consecutive checks, because the effect
        # of a short burst is permanent.
        steadily_busy = min(busy, self._busy_before)
        self._busy_before = busy
        if steadily_busy < 2:
            return
        level = min(MAX_NICE, math.ceil(math.log(steadily_busy, NICE_LEVEL_WEIGHT)))
        # Sleeping tasks, too, because their children inherit it.
        for task_id, nice in niceness.items():
            if nice < level:
                try:
                    os.setpriority(os.PRIO_PROCESS, task_id, level)
                except OSError:
                    # The task has ended.
                    continue

    # ---- /proc

    def _processes(self) -> list[str]:
        return [
            name
            for name in os.listdir(self._proc)
            if name.isdigit() and name not in self._outsiders
        ]

    def _list(self, path: str) -> list[str]:
        try:
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY, dir_fd=self._proc)
        except OSError:
            return []
        try:
            return os.listdir(folder)
        except OSError:
            return []
        finally:
            os.close(folder)

    def _read(self, path: str) -> bytes:
        """Return the beginning of a file of /proc. Empty if it cannot be read."""
        try:
            file = os.open(path, os.O_RDONLY, dir_fd=self._proc)
        except OSError:
            return b""
        try:
            return os.read(file, READ_BYTES)
        except OSError:
            return b""
        finally:
            os.close(file)

    def _count_lines(self, path: str, most: int) -> int:
        """Return a file's number of lines. Counting stops above ``most``."""
        try:
            file = os.open(path, os.O_RDONLY, dir_fd=self._proc)
        except OSError:
            return 0
        lines = 0
        try:
            while lines <= most and (part := os.read(file, READ_BYTES)):
                lines += part.count(b"\n")
        except OSError:
            pass
        finally:
            os.close(file)
        return lines


def with_own_memory(processes: list[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    """Return processes with separate memory. A child of vfork shares its parent's until exec."""
    kept: list[tuple[str, int, int]] = []
    for entry in processes:
        task = int(entry[0].rpartition("/")[2])
        if not any(_same_memory(task, int(other[0].rpartition("/")[2])) for other in kept):
            kept.append(entry)
    return kept


def _same_memory(one: int, other: int) -> bool:
    """Return True if two tasks have the same address space.

    Returns False if the kernel has no kcmp, or if a task has ended.
    """
    number = KCMP.get(os.uname().machine)
    if number is None:
        return False
    arguments = [ctypes.c_long(value) for value in (number, one, other, KCMP_VM, 0, 0)]
    return bool(libc.syscall(*arguments) == 0)


def _field(text: bytes, name: bytes) -> int:
    """Return the bytes that a line such as ``RssAnon:    1234 kB`` reports; 0 without it."""
    words = text.partition(b"\n" + name + b":")[2].split(None, 1)
    return int(words[0]) * 1024 if words else 0


def _counter(text: bytes, name: bytes) -> int:
    """Return the number of a line such as ``oom_kill 3``; 0 without it."""
    words = text.split()
    return int(words[words.index(name) + 1]) if name in words else 0
