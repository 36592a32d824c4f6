"""System-call filters of sandboxed programs, as classic BPF, for x86_64 and aarch64.

A filter is a deny-list (``SyscallPolicy``). PYTHON_POLICY rejects, with EPERM, calls that an
unprivileged numeric program does not need and calls with a history of kernel escapes. Python then
raises an ordinary exception. The policy also rejects

- calls that use kernel memory which neither a limit of the process nor ``process_watch`` counts;
- calls that leave a mark on a file, because all sandboxes share the inodes of ``/usr``. These are
  ``flock``, open file description locks, leases, inotify, dnotify, write hints and extended
  attributes. ``fcntl(F_SETLK)`` is allowed, because SQLite needs it. Another sandbox cannot see its
  locks: ``F_GETLK`` is rejected, ``/proc/locks`` is covered, and a read-only file cannot have a
  lock that blocks another process;
- ``setsid``: the kernel's autogroups share processors among sessions, so a call must stay in one
  session.

Some calls return ENOSYS, because libraries then use a substitute: clone3, epoll, and all calls that
are newer than this list.

SHELL_POLICY allows more, because every file of a shell sandbox is private to it, and because git,
servers and debuggers need sessions, locks, epoll, sockets and ptrace.

The numbers are from Linux ``asm/unistd.h``.
"""

import errno
import struct
from collections.abc import Mapping
from dataclasses import dataclass

from rl_loop.sandbox.config import SandboxUnavailableError

# name: (number on x86_64, number on aarch64); None if the architecture does not have the call
DENIED_SYSCALLS: dict[str, tuple[int | None, int | None]] = {
    # other processes' memory and descriptors
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "process_madvise": (440, 440), "kcmp": (312, 272), "pidfd_getfd": (438, 438),
    # file systems and namespaces
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "open_tree": (428, 428),
    "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432),
    "fspick": (433, 433), "mount_setattr": (442, 442), "unshare": (272, 97), "setns": (308, 268),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "quotactl": (179, 60), "quotactl_fd": (443, 443),
    "fanotify_init": (300, 262), "statmount": (457, 457), "listmount": (458, 458), "open_tree_attr": (467, 467),
    # the kernel itself
    "reboot": (169, 142), "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105),
    "finit_module": (313, 273), "delete_module": (176, 106), "swapon": (167, 224), "swapoff": (168, 225),
    "acct": (163, 89), "syslog": (103, 116), "settimeofday": (164, 170), "clock_settime": (227, 112),
    "clock_adjtime": (305, 266), "adjtimex": (159, 171), "sethostname": (170, 161), "setdomainname": (171, 162),
    "vhangup": (153, 58), "personality": (135, 92), "modify_ldt": (154, None), "ioperm": (173, None),
    "iopl": (172, None),
    # large attack surface
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "add_key": (248, 217), "request_key": (249, 218),
    "keyctl": (250, 219), "vmsplice": (278, 75), "mbind": (237, 235), "set_mempolicy": (238, 237),
    "migrate_pages": (256, 238), "move_pages": (279, 239), "set_mempolicy_home_node": (450, 450),
    # memory that no limit of the process counts
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "shmat": (30, 196),
    "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180),
    "io_setup": (206, 0), "seccomp": (317, 277), "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7),
    "setxattrat": (463, 463), "landlock_create_ruleset": (444, 444), "landlock_add_rule": (445, 445),
    "landlock_restrict_self": (446, 446),
    # marks on files that other sandboxes share, and calls that reveal them
    "flock": (73, 32), "inotify_init": (253, None), "inotify_init1": (294, 26), "inotify_add_watch": (254, 27),
    "cachestat": (451, 451),
    # reserved for the processor share of a call
    "setsid": (112, 157),
}  # fmt: skip

# return ENOSYS, so that callers use something else
MISSING_SYSCALLS: dict[str, tuple[int | None, int | None]] = {
    # A filter cannot see the flags, which are in memory. The C library falls back to clone.
    "clone3": (435, 435),
    # Watches of epoll are kernel memory, limited only by a number that all processes of the user
    # share. Each pair of an open file and a descriptor number is a watch, in every instance, and
    # other processes can keep the files open. Python's ``selectors`` fall back to poll.
    "epoll_create": (213, None), "epoll_create1": (291, 20),
}  # fmt: skip

NEWEST_SYSCALL = 467
"""Largest number in these lists. Larger numbers belong to newer kernels and are unknown."""

# return success without effect: advice about shared files, and flushes of disks that have no data
# of a sandbox
IGNORED_SYSCALLS: dict[str, tuple[int, int]] = {
    "fadvise64": (221, 223),
    "sync": (162, 81),
    "syncfs": (306, 267),
}


@dataclass(frozen=True)
class ArgumentRule:
    """Rejects or allows a call by the value of one argument.

    Only the lower half of the argument is compared. Each of these arguments is an int, or has no
    meaning above bit 31.
    """

    numbers: tuple[int, int]
    """Number of the call on x86_64 and on aarch64."""
    argument: int
    """Index of the argument, from 0."""
    values: tuple[int, ...]
    """Values of the argument to reject."""
    error: int
    """errno of a rejected call. 0 for a success that does nothing."""
    bits: bool = False
    """True to reject arguments that have every bit of one of the values."""
    others: bool = False
    """True to reject all other values instead."""


AF_UNIX, AF_INET, AF_INET6, AF_NETLINK = 1, 2, 10, 16
CLONE_NEW_NAMESPACES = (
    0x20000,
    0x2000000,
    0x4000000,
    0x8000000,
    0x10000000,
    0x20000000,
    0x40000000,
)
MAP_SHARED_ANONYMOUS, MAP_HUGETLB = 0x21, 0x40000
F_GETLK, F_OFD_GETLK, F_OFD_SETLK, F_OFD_SETLKW = 5, 36, 37, 38
F_SETLEASE, F_GETLEASE, F_NOTIFY, F_SETPIPE_SZ = 1024, 1025, 1026, 1031
F_GET_RW_HINT, F_SET_RW_HINT, F_GET_FILE_RW_HINT, F_SET_FILE_RW_HINT = 1035, 1036, 1037, 1038
PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SCHED_CORE, PR_SET_MEMORY_MERGE = 4, 22, 62, 67
PR_FUTEX_HASH = 78
MADV_MERGEABLE = 12
SO_SNDBUF, SO_RCVBUF, SO_SNDBUFFORCE, SO_RCVBUFFORCE = 7, 8, 32, 33
TIOCSTI, TIOCLINUX = 0x5412, 0x541C

ARGUMENT_RULES: dict[str, ArgumentRule] = {
    "clone into a namespace": ArgumentRule((56, 220), 0, CLONE_NEW_NAMESPACES, errno.EPERM, bits=True),
    # for example, network namespaces do not confine AF_VSOCK
    "socket": ArgumentRule((41, 198), 0, (AF_UNIX,), errno.EACCES, others=True),
    "socketpair": ArgumentRule((53, 199), 0, (AF_UNIX,), errno.EACCES, others=True),
    # The watcher charges each socket for the default buffer size. Report success, because the
    # kernel also cuts a larger size silently.
    "larger socket buffers": ArgumentRule((54, 208), 2, (SO_SNDBUF, SO_SNDBUFFORCE), 0),
    # All pages of a shared anonymous mapping stay while one of them is mapped, and no counter shows
    # them.
    "shared anonymous memory": ArgumentRule(
        (9, 222), 3, (MAP_SHARED_ANONYMOUS, MAP_HUGETLB), errno.EPERM, bits=True
    ),
    "locks and leases seen by others": ArgumentRule(
        (72, 25),
        1,
        (F_GETLK, F_OFD_GETLK, F_OFD_SETLK, F_OFD_SETLKW, F_SETLEASE, F_GETLEASE, F_NOTIFY, F_SETPIPE_SZ,
         F_GET_RW_HINT, F_SET_RW_HINT, F_GET_FILE_RW_HINT, F_SET_FILE_RW_HINT),
        errno.EPERM,
    ),
    # If a process is not dumpable, the watcher cannot distinguish shared pages from others. Filters
    # and futex tables, which may have a gigabyte, are kernel memory. A core-scheduling cookie idles
    # the host's other hyper-threads. Merged pages reveal memory contents of other processes.
    "process attributes": ArgumentRule(
        (157, 167), 0, (PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SCHED_CORE, PR_SET_MEMORY_MERGE, PR_FUTEX_HASH),
        errno.EPERM,
    ),
    "merged pages": ArgumentRule((28, 233), 2, (MADV_MERGEABLE,), errno.EPERM),
}  # fmt: skip

SHELL_CALLS = frozenset({
    # debuggers, which reach only processes of the same sandbox
    "ptrace", "process_vm_readv", "process_vm_writev", "process_madvise", "kcmp", "name_to_handle_at",
    # files are private to the sandbox
    "flock", "inotify_init", "inotify_init1", "inotify_add_watch",
    "setxattr", "lsetxattr", "fsetxattr", "setxattrat",
    # daemons
    "setsid",
})  # fmt: skip
"""Names in DENIED_SYSCALLS that shells may use."""

SHELL_ARGUMENT_RULES: dict[str, ArgumentRule] = {
    **{
        name: ARGUMENT_RULES[name]
        for name in ("clone into a namespace", "socketpair", "shared anonymous memory", "merged pages")
    },
    # Network namespaces do not confine other families, such as AF_VSOCK and AF_ALG.
    "socket": ArgumentRule(
        (41, 198), 0, (AF_UNIX, AF_INET, AF_INET6, AF_NETLINK), errno.EACCES, others=True
    ),
    "larger socket buffers": ArgumentRule(
        (54, 208), 2, (SO_SNDBUF, SO_RCVBUF, SO_SNDBUFFORCE, SO_RCVBUFFORCE), 0
    ),
    "leases and larger pipes": ArgumentRule(
        (72, 25), 1, (F_SETLEASE, F_NOTIFY, F_SETPIPE_SZ), errno.EPERM
    ),
    "process attributes": ArgumentRule(
        (157, 167), 0, (PR_SET_SECCOMP, PR_SCHED_CORE, PR_SET_MEMORY_MERGE, PR_FUTEX_HASH), errno.EPERM
    ),
    "terminal input": ArgumentRule((16, 29), 1, (TIOCSTI, TIOCLINUX), errno.EPERM),
}  # fmt: skip


@dataclass(frozen=True)
class SyscallPolicy:
    """Calls that a filter rejects. The number of a call is for x86_64 and for aarch64."""

    denied: Mapping[str, tuple[int | None, int | None]]
    """Calls that return EPERM."""
    missing: Mapping[str, tuple[int | None, int | None]]
    """Calls that return ENOSYS, so that callers use something else."""
    ignored: Mapping[str, tuple[int, int]]
    """Calls that return success without effect."""
    rules: Mapping[str, ArgumentRule]
    """Calls that are judged by an argument."""


PYTHON_POLICY = SyscallPolicy(DENIED_SYSCALLS, MISSING_SYSCALLS, IGNORED_SYSCALLS, ARGUMENT_RULES)

SHELL_POLICY = SyscallPolicy(
    {name: numbers for name, numbers in DENIED_SYSCALLS.items() if name not in SHELL_CALLS},
    {"clone3": MISSING_SYSCALLS["clone3"]},
    # The sandbox sets the processors, and programs keep them.
    {**IGNORED_SYSCALLS, "sched_setaffinity": (203, 122)},
    SHELL_ARGUMENT_RULES,
)

# architecture: (AUDIT_ARCH_* constant, column above)
_ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}

_LOAD, _AND, _JUMP, _JUMP_EQUAL, _JUMP_AT_LEAST, _RETURN = 0x20, 0x54, 0x05, 0x15, 0x35, 0x06
_ALLOW, _KILL_PROCESS, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER_OFFSET, _ARCHITECTURE_OFFSET, _ARGUMENTS_OFFSET = 0, 4, 16
_X32_SYSCALL_BIT = 0x40000000

GROUP_SIZE = 8
"""Number of system calls that are compared, or skipped, together."""

Instruction = tuple[int, int, int, int]  # operation, jump if true, jump if false, constant


def seccomp_filter(machine: str, policy: SyscallPolicy = PYTHON_POLICY) -> bytes:
    """Return a filter as an array of ``struct sock_filter`` (8 bytes each), for
    SECCOMP_MODE_FILTER.

    A call with another architecture's convention kills the process.

    Args:
        machine: name as in ``platform.machine()``.
        policy: calls to reject.

    Raises:
        SandboxUnavailableError: if the machine is neither x86_64 nor aarch64.
    """
    if machine not in _ARCHITECTURES:
        known = " and ".join(sorted(_ARCHITECTURES))
        raise SandboxUnavailableError(f"the sandbox supports {known}, not {machine!r}")
    architecture, column = _ARCHITECTURES[machine]

    program: list[Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE_OFFSET),
        (_JUMP_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL_PROCESS),
        (_LOAD, 0, 0, _NUMBER_OFFSET),
    ]
    if machine == "x86_64":
        program += [(_JUMP_AT_LEAST, 0, 1, _X32_SYSCALL_BIT), (_RETURN, 0, 0, _KILL_PROCESS)]

    program += [(_JUMP_AT_LEAST, 0, 1, NEWEST_SYSCALL + 1), (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)]

    verdicts: dict[int, int] = {}
    for syscalls, error in ((policy.denied, errno.EPERM), (policy.missing, errno.ENOSYS)):
        for numbers in syscalls.values():
            number = numbers[column]
            if number is not None:
                verdicts[number] = _ERRNO | error
    for ignored in policy.ignored.values():
        verdicts[ignored[column]] = _ERRNO
    program += _verdicts_by_number(verdicts)

    for rule in policy.rules.values():
        body = _argument_rule(rule)
        program += [(_JUMP_EQUAL, 0, len(body), rule.numbers[column]), *body]

    program.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def _verdicts_by_number(verdicts: dict[int, int]) -> list[Instruction]:
    """Return instructions that decide by a call's number, or fall through if it is not listed."""
    numbers = sorted(verdicts)
    # Grouped, so that a group can be skipped as a whole. When a filter is installed, the kernel
    # evaluates it for every system call, and each sandbox call installs it. A single long list made
    # sandbox calls 4% slower.
    groups = [numbers[first : first + GROUP_SIZE] for first in range(0, len(numbers), GROUP_SIZE)]

    program: list[Instruction] = []
    for group in reversed(groups):
        body: list[Instruction] = []
        for number in group:
            body += [(_JUMP_EQUAL, 0, 1, number), (_RETURN, 0, 0, verdicts[number])]
        # Larger numbers are in later groups. Other numbers are not listed, so skip these groups.
        body.append((_JUMP, 0, 0, len(program)))
        program = [(_JUMP_AT_LEAST, len(body), 0, group[-1] + 1), *body, *program]
    return program


def _argument_rule(rule: ArgumentRule) -> list[Instruction]:
    """Return instructions that decide about one call by its argument, for all values."""
    offset = _ARGUMENTS_OFFSET + 8 * rule.argument
    listed, unlisted = _ERRNO | rule.error, _ALLOW
    if rule.others:
        listed, unlisted = unlisted, listed

    program: list[Instruction] = [(_LOAD, 0, 0, offset)]
    for value in rule.values:
        if rule.bits:
            program += [(_LOAD, 0, 0, offset), (_AND, 0, 0, value)]
        program += [(_JUMP_EQUAL, 0, 1, value), (_RETURN, 0, 0, listed)]
    program.append((_RETURN, 0, 0, unlisted))
    return program
