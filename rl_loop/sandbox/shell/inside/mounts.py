"""Root file system, limits and privileges of a sandbox, by direct system calls in its process 1."""

import ctypes
import fcntl
import os
import resource
import socket
import struct
from dataclasses import dataclass

from rl_loop.sandbox.inside.confinement import (
    CAPABILITY_VERSION_3,
    FIXED_LIMITS,
    MS_BIND,
    MS_NODEV,
    MS_NOEXEC,
    MS_NOSUID,
    MS_RDONLY,
    PR_SET_DUMPABLE,
    PR_SET_NO_NEW_PRIVS,
    SeccompProgram,
    check,
    libc,
    mount,
    write_file,
)
from rl_loop.sandbox.inside.process_watch import ProcessWatch
from rl_loop.sandbox.shell.inside.messages import SandboxSpec

BASE = "/sys"
"""Mount point of the sandbox's tmpfs. Every Linux has the directory, and the mount is private."""

MS_REMOUNT, MS_REC, MS_PRIVATE, MNT_DETACH = 32, 16384, 1 << 18, 2
PR_CAPBSET_DROP = 24
CAP_DAC_OVERRIDE, CAP_SYS_PTRACE, LAST_CAPABILITY = 1, 19, 63
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
SIOCSIFFLAGS, IFF_UP_RUNNING = 0x8914, 0x49

DEVICES = {
    "null": "null",
    "zero": "full",
    "full": "full",
    "random": "random",
    "urandom": "urandom",
    "tty": "tty",
}
"""{device inside: device of the host}. A shared mapping of /dev/zero would be memory that no limit
counts, so /dev/zero is /dev/full, which also reads as zeros."""
DEVICE_LINKS = {
    "fd": "/proc/self/fd",
    "stdin": "fd/0",
    "stdout": "fd/1",
    "stderr": "fd/2",
    "ptmx": "pts/ptmx",
}
COVERED_FILES = ("locks", "keys", "key-users", "timer_list")
"""Files of /proc that show other sandboxes or the host."""
NAMESPACE_SETTINGS = {
    "user/max_user_namespaces": "0",
    "user/max_inotify_instances": "256",
    "user/max_inotify_watches": "65536",
    # Servers may listen on port 80 without a capability.
    "net/ipv4/ip_unprivileged_port_start": "0",
    # The kernel's memory for TCP has one budget for all namespaces.
    "net/ipv4/tcp_rmem": "4096 65536 131072",
    "net/ipv4/tcp_wmem": "4096 65536 131072",
}
"""{setting of the new namespaces: value}."""
SPARE_PROCESSES = 16
"""Processes that process 1 may start above the limit of the sandbox."""


@dataclass(frozen=True)
class SandboxRoot:
    """Open directories that commands cannot reach, and the watch of their memory."""

    upper: int
    """Changed files of the sandbox."""
    proc: int
    """A writable /proc."""
    watch: ProcessWatch


def build(spec: SandboxSpec) -> SandboxRoot:
    """Build the sandbox around this process, which is process 1 of new namespaces.

    Raises:
        OSError: naming the step that failed.
    """
    _map_user(spec)
    check(libc.sethostname(b"sandbox", 7), "sethostname")
    mount("none", "/", None, MS_REC | MS_PRIVATE)

    root = _mount_overlay(spec)
    upper = os.open(f"{BASE}/upper", os.O_RDONLY | os.O_DIRECTORY)
    mount("proc", f"{BASE}/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    for name, value in NAMESPACE_SETTINGS.items():
        write_file(f"{BASE}/proc/sys/{name}", value)
    proc = os.open(f"{BASE}/proc", os.O_RDONLY | os.O_DIRECTORY)
    watch = ProcessWatch(
        spec.memory_bytes, 2 * spec.socket_buffer_bytes, None, False, proc=f"{BASE}/proc"
    )

    _mount_proc(root)
    _mount_devices(root)
    os.chdir(root)
    check(libc.syscall(PIVOT_ROOT[os.uname().machine], b".", b"."), "pivot_root")
    check(libc.umount2(b".", MNT_DETACH), "umount of the host")
    os.chdir("/")

    # The interface flags of lo: up.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as interface:
        fcntl.ioctl(interface, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP_RUNNING))
    if spec.cpus is not None:
        os.sched_setaffinity(0, spec.cpus)
    _set_limits(spec)
    _drop_privileges(bytes.fromhex(spec.seccomp))
    return SandboxRoot(upper, proc, watch)


def _map_user(spec: SandboxSpec) -> None:
    # The kernel requires this before an ordinary user writes gid_map (user_namespaces(7)).
    write_file("/proc/self/setgroups", "deny")
    write_file("/proc/self/uid_map", f"0 {spec.uid} 1")
    write_file("/proc/self/gid_map", f"0 {spec.gid} 1")


def _mount_overlay(spec: SandboxSpec) -> str:
    """Mount the layers below an empty, limited layer in memory. Return the path of the result."""
    # Resolve the layers while the working directory is the image store, and give them short names
    # without a trace of the host: mount options have one page, and programs can read them.
    descriptors = [os.open(layer, os.O_PATH | os.O_DIRECTORY) for layer in spec.layers]
    options = f"size={spec.disk_bytes},nr_inodes={spec.disk_files},mode=755"
    mount("tmpfs", BASE, "tmpfs", MS_NOSUID | MS_NODEV, options)
    for name in ("root", "upper", "work", "proc", "shm"):
        os.mkdir(f"{BASE}/{name}")
    os.chmod(f"{BASE}/shm", 0o1777)
    try:
        os.setxattr(f"{BASE}/upper", "user.gptoss", b"y")
        os.removexattr(f"{BASE}/upper", "user.gptoss")
    except OSError as error:
        reason = f"extended attributes of tmpfs: {error.strerror}. Linux 6.6 or newer is needed"
        raise OSError(error.errno, reason) from error

    for index, descriptor in enumerate(descriptors):
        os.mkdir(f"{BASE}/{index}")
        mount(f"/proc/self/fd/{descriptor}", f"{BASE}/{index}", None, MS_BIND)
        os.close(descriptor)
    os.chdir(BASE)
    lower = ":".join(str(index) for index in range(len(descriptors)))
    options = f"lowerdir={lower},upperdir=upper,workdir=work,userxattr,xino=off,index=off,volatile"
    mount("overlay", "root", "overlay", MS_NOSUID | MS_NODEV, options)
    for name in ("proc", "dev", "tmp", "run", "root"):
        os.makedirs(f"root/{name}", exist_ok=True)
    return f"{BASE}/root"


def _mount_proc(root: str) -> None:
    """Mount /proc read-only, so that programs cannot lower their oom_score_adj."""
    mount(f"{BASE}/proc", f"{root}/proc", None, MS_BIND)
    flags = MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC
    mount("none", f"{root}/proc", None, flags)
    for name in COVERED_FILES:
        if os.path.exists(f"{root}/proc/{name}"):
            mount("/dev/null", f"{root}/proc/{name}", None, MS_BIND)


def _mount_devices(root: str) -> None:
    dev = f"{root}/dev"
    mount("tmpfs", dev, "tmpfs", MS_NOSUID, "size=64k,nr_inodes=64,mode=755")
    for name, device in DEVICES.items():
        write_file(f"{dev}/{name}", "")
        mount(f"/dev/{device}", f"{dev}/{name}", None, MS_BIND)
    for name, target in DEVICE_LINKS.items():
        os.symlink(target, f"{dev}/{name}")
    os.mkdir(f"{dev}/pts")
    options = "newinstance,ptmxmode=0666,mode=0620,max=64"
    mount("devpts", f"{dev}/pts", "devpts", MS_NOSUID | MS_NOEXEC, options)
    # A part of the tmpfs of the changed files, which is limited as a whole.
    os.mkdir(f"{dev}/shm")
    mount(f"{BASE}/shm", f"{dev}/shm", None, MS_BIND)


def _set_limits(spec: SandboxSpec) -> None:
    limits = {
        **FIXED_LIMITS,
        resource.RLIMIT_SIGPENDING: 4096,
        resource.RLIMIT_AS: spec.address_space_bytes,
        # Programs should see a full disk before they reach this limit, which bounds sparse files.
        resource.RLIMIT_FSIZE: spec.disk_bytes + (1 << 20),
        resource.RLIMIT_NPROC: spec.processes + SPARE_PROCESSES,
        # MAX_DESCRIPTORS of ``commands``.
        resource.RLIMIT_NOFILE: 1024,
    }
    for limit, value in limits.items():
        # The machine's limit may be lower and cannot be raised.
        _, most = resource.getrlimit(limit)
        value = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(limit, (value, value))


def _drop_privileges(seccomp: bytes) -> None:
    """Keep two capabilities in this process, and let commands have none.

    The two let this process read files and memory maps of commands. Because commands have no
    capability, they cannot trace this process. As it is not dumpable, they cannot list its
    descriptors either.
    """
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    for capability in range(LAST_CAPABILITY + 1):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    kept = 1 << CAP_DAC_OVERRIDE | 1 << CAP_SYS_PTRACE
    header = struct.pack("Ii", CAPABILITY_VERSION_3, 0)
    check(libc.capset(header, struct.pack("6I", kept, kept, 0, 0, 0, 0)), "capset")
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(PR_SET_NO_NEW_PRIVS)")
    SeccompProgram(seccomp).install()


def hide_command_line() -> None:
    """Overwrite the arguments of this process, because programs can read /proc/1/cmdline."""
    with open("/proc/self/stat") as stat:
        fields = stat.read().rpartition(")")[2].split()
    # Fields 48 and 49 of proc(5), arg_start and arg_end. They are 0 for other users.
    start, end = int(fields[45]), int(fields[46])
    if start and end > start:
        ctypes.memset(start, 0, end - start)
