"""Control group (v2) for each server of the Python sandbox, and for each shell sandbox, if the
kernel permits this user to create one.

The *base* is a cgroup whose files this user may write: the cgroup of ``systemd-run --user --scope
-p Delegate=yes``, or, for root, any writable cgroup2 mount. Every server and every shell sandbox has
a separate cgroup below the base. The kernel then limits its memory, including kernel memory, and
gives each the same processor weight.

A cgroup that contains processes cannot distribute resources among children (the "no internal
processes" rule). Therefore the processes of a base move into a child named MAIN first.
"""

import contextlib
import os
import re
import threading
import time
from dataclasses import dataclass
from itertools import count
from pathlib import Path

MAIN = "gptoss-main"
SERVER_NAME = re.compile(r"gptoss-sandbox-(\d+)-\d+")
# The kernel releases the memory of ended processes a moment after their end.
REMOVE_SECONDS = 2.0
# The kernel's default weight. MAIN has it, too, for all other processes of the owner.
WEIGHT = 100

_base_lock = threading.Lock()
_numbers = count()


def find_base() -> Path | None:
    """Return the nearest usable cgroup at or above this process's cgroup; None if there is none.

    Processes of the base are moved into its child MAIN, and ``memory`` and ``cpu`` are enabled for
    its children.
    """
    with _base_lock:
        own = own_cgroup()
        if own is None:
            return None
        mount, path = own
        if path.name == MAIN:
            path = path.parent
        while path.is_relative_to(mount):
            if _is_writable(path) and _enable_controllers(path):
                return path
            path = path.parent
        return None


@dataclass(frozen=True)
class ResourceLimit:
    """Method of limiting memory and sharing processors on this machine."""

    memory: str
    processors: str
    advice: str
    """Way to get the missing features. Empty if none is missing."""


def describe_protection() -> ResourceLimit:
    """Return the protection of this machine, for ``gptoss doctor``."""
    base = find_base()
    if base is None:
        return ResourceLimit(
            memory="memory checked 10 times per second",
            processors="CPU shared by niceness",
            advice="For limits enforced by the kernel, start runs in a delegated cgroup (v2): "
            "systemd-run --user --scope -p Delegate=yes gptoss ...",
        )
    memory = f"memory limited by cgroup v2 ({base})"
    if "cpu" in _enabled(base):
        return ResourceLimit(memory, "CPU shared by cgroup weights", advice="")
    advice = (
        "the cpu controller is not delegated. Run systemctl edit user@.service, and add "
        "[Service] Delegate=cpu memory pids"
    )
    return ResourceLimit(memory, "CPU shared by niceness", advice)


def own_cgroup(proc: Path = Path("/proc/self")) -> tuple[Path, Path] | None:
    """Return the mount of cgroup2 and this process's directory below it.

    Returns None if cgroup2 has no memory controller.
    """
    mount = None
    for line in (proc / "mountinfo").read_text().splitlines():
        # Optional fields end with " - ". Then come the type of the file system and its source
        # (proc(5)).
        fields, _, source = line.partition(" - ")
        if source.split()[0] == "cgroup2":
            mount = Path(fields.split()[4])

    entries = [
        line for line in (proc / "cgroup").read_text().splitlines() if line.startswith("0::")
    ]
    if mount is None or not entries:
        return None

    path = mount / entries[0].removeprefix("0::").lstrip("/")
    try:
        # None if the memory controller belongs to cgroup v1.
        controllers = (mount / "cgroup.controllers").read_text().split()
    except OSError:
        return None
    if "memory" not in controllers or not path.is_dir():
        return None
    return mount, path


def _is_writable(path: Path) -> bool:
    files = (path, path / "cgroup.procs", path / "cgroup.subtree_control")
    return all(os.access(file, os.W_OK) for file in files)


def _enable_controllers(base: Path) -> bool:
    """Enable memory limits for children of ``base``, and processor weights if possible.

    Returns:
        True if memory limits are enabled.
    """
    available = (base / "cgroup.controllers").read_text().split()
    if "memory" not in available:
        return False
    for controller in ("memory", "cpu", "pids"):
        if controller not in available or controller in _enabled(base):
            continue
        try:
            _enable(base, controller)
        except OSError:
            if controller == "memory":
                return False
    return True


def _enabled(base: Path) -> list[str]:
    return (base / "cgroup.subtree_control").read_text().split()


def _enable(base: Path, controller: str) -> None:
    """Enable a controller for children of ``base``.

    Raises:
        OSError: if processes of the base cannot be moved or the controller is not available.
    """
    for attempt in range(10):
        try:
            _write(base / "cgroup.subtree_control", f"+{controller}")
            return
        except OSError:
            # Busy: the base has processes. More may start while they are moved.
            if attempt == 9:
                raise
            _move_processes(base, base / MAIN)


def _move_processes(source: Path, target: Path) -> None:
    target.mkdir(exist_ok=True)
    for process in (source / "cgroup.procs").read_text().split():
        # The process may have ended.
        with contextlib.suppress(ProcessLookupError):
            _write(target / "cgroup.procs", process)


def _write(file: Path, text: str) -> None:
    with file.open("w") as stream:
        stream.write(text)


class _Cgroup:
    """Cgroup below a base, with an equal share of the processors."""

    def __init__(self, base: Path) -> None:
        """Create the cgroup. Raises OSError if that fails."""
        remove_abandoned(base)
        self.path = base / f"gptoss-sandbox-{os.getpid()}-{next(_numbers)}"
        self.path.mkdir()
        self.has_cpu_weight = (self.path / "cpu.weight").exists()
        if self.has_cpu_weight:
            _write(self.path / "cpu.weight", str(WEIGHT))
        # Open it here, because supervisors run in the sandbox, where no cgroup file is visible.
        self.memory_events = os.open(self.path / "memory.events", os.O_RDONLY)

    def _limit_memory(self, memory_bytes: int) -> None:
        # memory.max does not count swap, so a call could otherwise hold more than its limit.
        if (self.path / "memory.swap.max").exists():
            _write(self.path / "memory.swap.max", "0")
        _write(self.path / "memory.max", str(memory_bytes))

    def remove(self) -> None:
        """Remove the cgroup after its processes have ended. May be called again."""
        if self.memory_events >= 0:
            os.close(self.memory_events)
            self.memory_events = -1
        deadline = time.monotonic() + REMOVE_SECONDS
        while self.path.exists():
            try:
                self.path.rmdir()
            except OSError:
                if time.monotonic() > deadline:
                    # After the end of this process, a server of another process removes it.
                    return
                time.sleep(0.01)


class ServerCgroup(_Cgroup):
    """Cgroup of one server and its calls, which run one at a time."""

    def joining(self, command: list[str]) -> list[str]:
        """Return a command that joins the cgroup and then executes ``command``.

        All children of the command are in the cgroup, too.
        """
        # The shell joins before it executes the command, so no child can be outside of the cgroup.
        script = 'echo $$ > "$0" && exec "$@"'
        return ["/bin/sh", "-c", script, str(self.path / "cgroup.procs"), *command]

    def limit_calls(self, total_memory_bytes: int) -> None:
        """Limit calls to ``total_memory_bytes`` above the present memory of the server.

        Call it when the server is ready. The kernel kills the program instead of the server,
        because the program's oom_score_adj is 1000.
        """
        used = int((self.path / "memory.current").read_text())
        self._limit_memory(used + total_memory_bytes)


class SandboxCgroup(_Cgroup):
    """Cgroup of one shell sandbox."""

    OWN_BYTES = 64 << 20
    """Memory for process 1 of the sandbox and its kernel objects."""
    OWN_PROCESSES = 16

    def admit(self, process: int, memory_bytes: int, processes: int) -> None:
        """Limit the cgroup, and move process 1 of a sandbox into it, before it has children.

        Args:
            process: process id.
            memory_bytes: memory of all processes and of files in memory.
            processes: maximum number of processes and threads.
        """
        self._limit_memory(memory_bytes + self.OWN_BYTES)
        if (self.path / "pids.max").exists():
            _write(self.path / "pids.max", str(processes + self.OWN_PROCESSES))
        _write(self.path / "cgroup.procs", str(process))
        self._kills = self._count_kills()

    def killed_by_limit(self) -> bool:
        """Return True if the kernel killed a process of a full cgroup since the last call."""
        before, self._kills = self._kills, self._count_kills()
        return self._kills > before

    def _count_kills(self) -> int:
        words = os.pread(self.memory_events, 4096, 0).split()
        return int(words[words.index(b"oom_kill") + 1]) if b"oom_kill" in words else 0


def remove_abandoned(base: Path) -> None:
    """Remove the cgroups of processes that ended without removing them."""
    for path in base.glob("gptoss-sandbox-*"):
        match = SERVER_NAME.fullmatch(path.name)
        if match is not None and not Path("/proc", match[1]).exists():
            # A cgroup with a process cannot be removed.
            with contextlib.suppress(OSError):
                path.rmdir()
