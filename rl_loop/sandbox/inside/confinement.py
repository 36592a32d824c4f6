"""The inner walls: namespaces, mounts, limits, capabilities and the system-call filter, straight
from the kernel.

bubblewrap has built the outer walls around the server. These functions build those around a single
call."""

import ctypes
import os
import resource
import signal
import struct

from rl_loop.sandbox.inside.messages import ServerSettings

NOBODY = 65534

# from linux/sched.h, linux/mount.h, linux/prctl.h, linux/seccomp.h and linux/capability.h
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
    # 0 would still hand the dump to a program of the host where core_pattern names one; 1 does not
    # (core(5))
    resource.RLIMIT_CORE: 1,
    # memory of the kernel: queued signals and timers, pages kept from being reclaimed, message
    # queues
    resource.RLIMIT_SIGPENDING: 256,
    resource.RLIMIT_MEMLOCK: 0,
    resource.RLIMIT_MSGQUEUE: 0,
    resource.RLIMIT_NICE: 0,
    resource.RLIMIT_RTPRIO: 0,
}

libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> None:
    """Turn the C library's -1 into an OSError that names the step."""
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


def die_with_parent() -> None:
    """Have the kernel kill this process when the one that forked it ends."""
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def drop_root() -> None:
    """Become nobody. Only needed when bubblewrap was started by root, without a user namespace of
    its own."""
    if os.getuid() == 0:
        # as root, bubblewrap covers parts of its /proc, and the kernel then refuses the calls'
        # namespaces a fresh one
        mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)

        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)

        # changing the user made /proc/self/uid_map belong to root; the supervisors must write it
        check(libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0), "prctl(PR_SET_DUMPABLE)")

    if os.getresuid() != (NOBODY,) * 3 or os.getresgid() != (NOBODY,) * 3:
        raise PermissionError(
            f"the sandbox server runs as {os.getresuid()}/{os.getresgid()}, not as nobody"
        )


def enter_namespaces() -> None:
    """Enter new user, process, mount and IPC namespaces; the process namespace holds for the next
    fork."""
    check(libc.unshare(CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWIPC), "unshare")
    write_file("/proc/self/setgroups", "deny")
    write_file("/proc/self/uid_map", f"{NOBODY} {NOBODY} 1")
    write_file("/proc/self/gid_map", f"{NOBODY} {NOBODY} 1")


def mount_own_files(settings: ServerSettings) -> None:
    """Give the call a /tmp, /dev/shm and /proc of its own."""
    tmp_options = f"size={settings.tmp_bytes},nr_inodes={settings.tmp_files},mode=1777"
    mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, tmp_options)
    mount("/tmp", "/dev/shm", None, MS_BIND)

    # read-only, so that nothing set here (oom_score_adj, autogroup) can be set back
    mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC | MS_RDONLY)
    # it lists locks of files by all processes of the machine
    mount("/dev/null", "/proc/locks", None, MS_BIND)


def set_resource_limits(settings: ServerSettings, programs: int) -> None:
    """Limit process 1 of a call; what it starts inherits that. Processor time is that of all the
    call's programs."""
    configured = {
        resource.RLIMIT_AS: settings.memory_bytes,
        resource.RLIMIT_CPU: settings.cpu_seconds * programs,
        resource.RLIMIT_NPROC: settings.processes,
        resource.RLIMIT_FSIZE: settings.file_bytes,
        resource.RLIMIT_NOFILE: settings.open_files,
    }
    for limit, value in configured.items():
        resource.setrlimit(limit, (value, value))

    for limit, value in FIXED_LIMITS.items():
        # the machine may allow even less, and nobody can raise that
        _, most = resource.getrlimit(limit)
        if most != resource.RLIM_INFINITY:
            value = min(value, most)
        resource.setrlimit(limit, (value, value))


def drop_capabilities() -> None:
    """Keep none of the capabilities that a new user namespace gave over itself, and never gain one
    again."""
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
        """Filter the system calls of this process, and of all that it starts, from now on."""
        address = ctypes.c_void_p(ctypes.addressof(self._program))
        check(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, address, 0, 0), "seccomp filter")
