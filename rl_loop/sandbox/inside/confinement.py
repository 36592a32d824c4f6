"""Inner isolation by direct system calls: namespaces, mounts, limits, capabilities and the filter.

bubblewrap isolates the server. These functions isolate a single call.
"""

import ctypes
import os
import resource
import signal
import struct

from rl_loop.sandbox.inside.messages import SandboxServerSettings

NOBODY = 65534

# From linux/sched.h, linux/mount.h, linux/prctl.h, linux/seccomp.h and linux/capability.h.
CLONE_NEWNS = 0x00020000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_BIND = 4096
PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_SECCOMP = 22
PR_SET_NO_NEW_PRIVS = 38
SECCOMP_MODE_FILTER = 2
CAPABILITY_VERSION_3 = 0x20080522

FIXED_LIMITS = {
    # With 0, a core_pattern that names a program would still give the dump to a program of the
    # host. With 1 it does not (core(5)).
    resource.RLIMIT_CORE: 1,
    # Kernel memory: queued signals and timers, locked pages, message queues.
    resource.RLIMIT_SIGPENDING: 256,
    resource.RLIMIT_MEMLOCK: 0,
    resource.RLIMIT_MSGQUEUE: 0,
    resource.RLIMIT_NICE: 0,
    resource.RLIMIT_RTPRIO: 0,
}

libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> None:
    """Raise an OSError that names the step if a C function returned -1."""
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def mount(
    source: str, target: str, kind: str | None, flags: int, options: str | None = None
) -> None:
    """Call mount(2). Raises OSError naming the target."""
    result = libc.mount(
        source.encode(),
        target.encode(),
        None if kind is None else kind.encode(),
        ctypes.c_ulong(flags),
        None if options is None else options.encode(),
    )
    check(result, f"mount {target}")


def write_file(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def exit_with_parent() -> None:
    """Let the kernel kill this process when its parent exits."""
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def drop_root() -> None:
    """Become ``nobody``. Only needed if root started bubblewrap, without a user namespace."""
    if os.getuid() == 0:
        # For root, bubblewrap covers parts of its /proc. The kernel would then not permit a new
        # /proc in the calls' namespaces.
        mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)

        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)

        # After the change of user /proc/self/uid_map belongs to root, but supervisors must write
        # it.
        check(libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0), "prctl(PR_SET_DUMPABLE)")

    if os.getresuid() != (NOBODY,) * 3 or os.getresgid() != (NOBODY,) * 3:
        raise PermissionError(
            f"the sandbox server must run as user and group {NOBODY} (nobody), but its ids are "
            f"{os.getresuid()} and {os.getresgid()}"
        )


def enter_namespaces() -> None:
    """Enter new user, process, mount and IPC namespaces.

    The process namespace applies to the next fork.
    """
    check(libc.unshare(CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWIPC), "unshare")
    # The kernel requires this before an ordinary user writes gid_map (user_namespaces(7)).
    write_file("/proc/self/setgroups", "deny")
    write_file("/proc/self/uid_map", f"{NOBODY} {NOBODY} 1")
    write_file("/proc/self/gid_map", f"{NOBODY} {NOBODY} 1")


def mount_own_files(settings: SandboxServerSettings) -> None:
    """Mount the call's private /tmp, /dev/shm and /proc."""
    tmp_options = f"size={settings.max_tmp_bytes},nr_inodes={settings.max_tmp_files},mode=1777"
    mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, tmp_options)
    mount("/tmp", "/dev/shm", None, MS_BIND)

    # Read-only, so that the program cannot undo settings (oom_score_adj, autogroup).
    mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC | MS_RDONLY)
    # It lists the file locks of all processes on the machine.
    mount("/dev/null", "/proc/locks", None, MS_BIND)


def set_resource_limits(settings: SandboxServerSettings, programs: int) -> None:
    """Set the limits of a call's process 1. Child processes inherit them.

    The limit of processor time is for all ``programs`` of the call.
    """
    configured = {
        resource.RLIMIT_AS: settings.max_address_space_bytes,
        resource.RLIMIT_CPU: settings.max_cpu_seconds * programs,
        resource.RLIMIT_NPROC: settings.max_processes,
        resource.RLIMIT_FSIZE: settings.max_file_bytes,
        resource.RLIMIT_NOFILE: settings.max_open_files,
    }
    for limit, value in configured.items():
        resource.setrlimit(limit, (value, value))

    for limit, value in FIXED_LIMITS.items():
        # The machine's limit may be lower and cannot be raised.
        _, most = resource.getrlimit(limit)
        if most != resource.RLIM_INFINITY:
            value = min(value, most)
        resource.setrlimit(limit, (value, value))


def drop_capabilities() -> None:
    """Drop all capabilities in the new user namespace, and prevent gaining new ones."""
    # Version 3 has three masks of 64 bits, each in two halves: 24 bytes.
    header = struct.pack("Ii", CAPABILITY_VERSION_3, 0)
    check(libc.capset(header, bytes(24)), "capset")
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(PR_SET_NO_NEW_PRIVS)")


class SeccompProgram:
    """A ``struct sock_fprog`` that stays alive for the forked children."""

    def __init__(self, instructions: bytes) -> None:
        self._instructions = ctypes.create_string_buffer(instructions, len(instructions))
        packed = struct.pack("@HP", len(instructions) // 8, ctypes.addressof(self._instructions))
        self._program = ctypes.create_string_buffer(packed, len(packed))

    def install(self) -> None:
        """Filter the system calls of this process and its children from this point."""
        address = ctypes.c_void_p(ctypes.addressof(self._program))
        check(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, address, 0, 0), "seccomp filter")
