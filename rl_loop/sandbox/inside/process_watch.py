"""Watches what the processes of one call hold and use. Runs inside bubblewrap, on the standard
library alone.

The supervisor of a call looks ten times a second. Where the server has a cgroup of its own the
kernel limits memory and shares processors by weight, and this only reads whether something was
killed. Where it has none, memory is the sum of

- anonymous pages of every process, each page once however many processes share it (proportional
set sizes);
- page tables, and ``MAPPING_BYTES`` for each mapping: a million empty mappings are a gigabyte of
the kernel's;
- ``DESCRIPTOR_BYTES`` for each open descriptor;
- what lies in the call's own /tmp, mapped or not;
- sockets that exist in the call's network namespace, each as if its buffers were full.

What else holds the kernel's memory is bounded by limits of the process (descriptors, queued
signals and timers, locked memory), or refused by the system-call filter.

Processors without a cgroup: a call with several busy tasks is made nicer, until together they
weigh as much as one."""

import contextlib
import ctypes
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass

LOOK_SECONDS = 0.1
# every tenth look is exact: the kernel's quick counters may be off by a megabyte for each
# processor and process
LOOKS_PER_EXACT_LOOK = 10
# processes are read one after the other, and pages may move between them meanwhile: look again
# before killing
CONFIRM_SECONDS = 0.02

# struct vm_area_struct with its share of trees, rounded up
MAPPING_BYTES = 1024
# struct anon_vma_chain: each mapping links to those of its process's ancestors, half of all processes
# on average
LINK_BYTES = 32
# A pipe that is full, which one descriptor keeps. The largest buffer of an open file, that of
# /proc/stat, grows with the processors.
DESCRIPTOR_BYTES = (1 << 16) + 256 * (os.cpu_count() or 1)
LARGEST_OPTION_MEMORY = 1 << 17  # filters and the like attached to one socket (net.core.optmem_max)
LOCKS = 1000  # of files, by all processes of the call; each is memory of the kernel that not even a cgroup counts
READ_BYTES = 1 << 16

# nice 1 more weighs 1.25 times less (kernel/sched/core.c, sched_prio_to_weight)
WEIGHT_OF_A_NICE_LEVEL = 1.25
LARGEST_NICE = 19

# the number of the system call, and its question for the address space
KCMP = {"x86_64": 312, "aarch64": 272}
KCMP_VM = 1

libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class OutOfMemoryKills:
    """Counters of the kernel's out-of-memory killer."""

    own_limit: int
    """Times that the server's own cgroup was full."""
    total: int
    """Processes killed, for whichever limit."""


class ProcessWatch:
    """All processes of one call but its supervisor. Make it in the supervisor, before the program
    mounts its /proc."""

    def __init__(
        self,
        memory_bytes: int,
        socket_buffer_bytes: int,
        memory_events: int | None,
        has_cpu_weight: bool,
    ) -> None:
        """
        memory_bytes: most that the call may hold, if there is no cgroup.
        socket_buffer_bytes: net.core.wmem_default, which only the host's network namespace tells.
        memory_events: open descriptor of the cgroup's memory.events, None without a cgroup.
        has_cpu_weight: the cgroup shares processors, so that nothing need be done here.
        """
        self._limit = memory_bytes
        # a message may begin while its buffer has room, and so fill it twice
        self._socket_bytes = 2 * socket_buffer_bytes + LARGEST_OPTION_MEMORY
        self._memory_events = memory_events
        self._has_cpu_weight = has_cpu_weight

        # /proc of the server's process namespace: it shows the call's processes too, and none can
        # cover it
        self._proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
        # process 1 is bubblewrap's
        self._outsiders = {"1", str(os.getppid()), str(os.getpid())}
        self._sockets_file = os.open("self/net/sockstat", os.O_RDONLY, dir_fd=self._proc)
        self._sockets_before = self._count_sockets()
        self._kills_before = self._count_kills()
        self._tmp: int | None = None

        self._looks = 0
        self._busy_before = 0
        self._counted_bytes = 0
        """Memory of the kernel for mappings and descriptors, at the last exact look."""

    def watch_tmp(self) -> None:
        """Find the call's own /tmp, as soon as the program has mounted it."""
        self._tmp = os.open("/tmp", os.O_RDONLY | os.O_DIRECTORY)

    def look(self) -> str | None:
        """Why the call must be killed, "memory" or "locks", or None. Makes it nicer where it has
        many busy tasks."""
        self._looks += 1
        if not self._has_cpu_weight:
            self._share_processors()

        if self._count_lines("locks", LOCKS) > LOCKS:
            return "locks"
        if self._memory_events is not None:
            return self.killed_by_own_limit()

        exact = self._looks % LOOKS_PER_EXACT_LOOK == 0
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
        """Return True if the kernel killed a process for want of memory, not by the call's limit.

        Without a cgroup this counts all processes of the machine, and is evidence only about a
        process that a SIGKILL has ended."""
        kills = self._count_kills()
        was_full = kills.own_limit > self._kills_before.own_limit
        return kills.total > self._kills_before.total and not was_full

    # ---- memory

    def _memory_bytes(self, exact: bool) -> int:
        """What the call holds. ``exact`` reads every page table; else that is done only for a sum
        above the limit."""
        processes = self._memory_of_processes()
        other = self._counted_bytes + self._tmp_bytes()
        other += max(0, self._count_sockets() - self._sockets_before) * self._socket_bytes

        total = other + sum(resident + page_tables for _, resident, page_tables in processes)
        if not exact and total <= self._limit:
            return total
        total = other
        for path, resident, page_tables in without_borrowers(processes):
            total += self._proportional_bytes(path, resident) + page_tables
        return total

    def _memory_of_processes(self) -> list[tuple[str, int, int]]:
        """For every process: the folder of a living task of it, anonymous resident bytes, bytes of
        page tables."""
        found = []
        for process in self._processes():
            for path in self._with_memory(process):
                status = self._read(f"{path}/status")
                if b"\nRssAnon:" in status:
                    found.append((path, _field(status, b"RssAnon"), _field(status, b"VmPTE")))
                    break
        return found

    def _with_memory(self, process: str) -> Iterator[str]:
        """Folders that may tell of a process's memory. That of its first thread does not once the
        thread has ended."""
        yield process
        for task in self._list(f"{process}/task"):
            yield f"{process}/task/{task}"

    def _proportional_bytes(self, path: str, otherwise: int) -> int:
        """Anonymous bytes, each page divided by the number of its mappings; ``otherwise`` where
        they can not be read: an executable file that nobody may read makes its process unreadable
        too."""
        rollup = self._read(f"{path}/smaps_rollup")
        if b"\nPss_Anon:" in rollup:
            return _field(rollup, b"Pss_Anon")
        return otherwise

    def _mappings_bytes(self) -> int:
        """Memory of the kernel for the mappings of all processes, not far above the limit."""
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
        """Memory of the kernel for open descriptors, each as if it were a full pipe."""
        count = 0
        for process in self._processes():
            with contextlib.suppress(OSError):  # it ended meanwhile
                size = os.stat(f"{process}/fd", dir_fd=self._proc).st_size
                # Linux has the number as a size since 6.2.
                count += size or len(self._list(f"{process}/fd"))
        return count * DESCRIPTOR_BYTES

    def _tmp_bytes(self) -> int:
        if self._tmp is None:
            return 0
        usage = os.fstatvfs(self._tmp)
        return (usage.f_blocks - usage.f_bfree) * usage.f_frsize

    def _count_sockets(self) -> int:
        """Sockets of the network namespace. One whose descriptor is closed counts until what it
        sent is read."""
        first_line, _, _ = os.pread(self._sockets_file, 4096, 0).partition(b"\n")
        return int(first_line.split()[-1])

    def _count_kills(self) -> "OutOfMemoryKills":
        """Count what the kernel has killed so far: in the cgroup if there is one, else everywhere.

        The kernel raises both counters before it kills."""
        if self._memory_events is None:
            return OutOfMemoryKills(0, _counter(self._read("vmstat"), b"oom_kill"))
        events = os.pread(self._memory_events, READ_BYTES, 0)
        return OutOfMemoryKills(_counter(events, b"oom"), _counter(events, b"oom_kill"))

    # ---- processors

    def _share_processors(self) -> None:
        """Make every task of the call so nice that the busy ones together weigh no more than one
        that is not nice.

        Without privileges no task can be made less nice again: a program that once had thirty busy
        tasks stays modest. Sleeping tasks count as well, because what they fork begins as they
        are."""
        busy = 0
        niceness: dict[int, int] = {}
        for process in self._processes():
            for task in self._list(f"{process}/task"):
                # the name in parentheses may hold anything: what follows begins after the last one
                fields = self._read(f"{process}/task/{task}/stat").rpartition(b")")[2].split()
                if len(fields) > 16:
                    busy += fields[0] == b"R"
                    niceness[int(task)] = int(fields[16])

        # busy in two looks on end, so that a moment's burst has no lasting price
        steadily_busy = min(busy, self._busy_before)
        self._busy_before = busy
        if steadily_busy < 2:
            return
        level = min(LARGEST_NICE, math.ceil(math.log(steadily_busy, WEIGHT_OF_A_NICE_LEVEL)))
        for task_id, nice in niceness.items():
            if nice < level:
                try:
                    os.setpriority(os.PRIO_PROCESS, task_id, level)
                except OSError:
                    continue  # it ended meanwhile

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
        """The beginning of a file of /proc; empty if the process has ended or may not be read."""
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
        """Lines of a file, or a few more than ``most``."""
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


def without_borrowers(processes: list[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    """Those of the processes that have memory of their own: a child of vfork has its parent's
    until it executes."""
    kept: list[tuple[str, int, int]] = []
    for entry in processes:
        task = int(entry[0].rpartition("/")[2])
        if not any(_same_memory(task, int(other[0].rpartition("/")[2])) for other in kept):
            kept.append(entry)
    return kept


def _same_memory(one: int, other: int) -> bool:
    """Whether two tasks have one address space. False where the kernel has no kcmp, or one of them
    has ended."""
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
