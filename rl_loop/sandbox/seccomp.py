"""The system-call filter of a sandboxed program, as classic BPF, for x86_64 and aarch64.

A deny-list: what an unprivileged numeric program has no use for, or what has a history of kernel escapes, is refused
with EPERM, so that Python raises an ordinary exception. Numbers are those of Linux ``asm/unistd.h``."""

import errno
import struct

from rl_loop.sandbox.config import SandboxUnavailable

# name: (number on x86_64, number on aarch64); None where the architecture does not have the call
DENIED_SYSCALLS: dict[str, tuple[int | None, int | None]] = {
    # other processes' memory and descriptors
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "process_madvise": (440, 440), "kcmp": (312, 272), "pidfd_getfd": (438, 438),
    # file systems and namespaces
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "open_tree": (428, 428),
    "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432),
    "fspick": (433, 433), "mount_setattr": (442, 442), "unshare": (272, 97), "setns": (308, 268),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "quotactl": (179, 60), "quotactl_fd": (443, 443),
    "fanotify_init": (300, 262),
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
    "migrate_pages": (256, 238), "move_pages": (279, 239),
    # memory that no limit of the process counts
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "shmat": (30, 196),
    "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180),
}  # fmt: skip

# architecture: (AUDIT_ARCH_* constant, column above, clone, clone3, socket, socketpair)
_ARCHITECTURES = {"x86_64": (0xC000003E, 0, 56, 435, 41, 53), "aarch64": (0xC00000B7, 1, 220, 435, 198, 199)}

_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL_PROCESS, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER_OFFSET, _ARCHITECTURE_OFFSET, _FIRST_ARGUMENT_OFFSET = 0, 4, 16
_CLONE_NEW_NAMESPACES = 0x7E020000
_AF_UNIX = 1
_X32_SYSCALL_BIT = 0x40000000


def seccomp_filter(machine: str) -> bytes:
    """The filter as an array of ``struct sock_filter`` (8 bytes each), for SECCOMP_MODE_FILTER.

    machine: as ``platform.machine()`` names it. Raises SandboxUnavailable for others than x86_64 and aarch64.
    Beyond the list: namespaces through clone are refused, clone3 is ENOSYS (its flags lie in memory that a filter can
    not see; the C library falls back to clone), and sockets other than AF_UNIX are refused, among them AF_VSOCK, which
    no network namespace confines."""
    if machine not in _ARCHITECTURES:
        known = " and ".join(sorted(_ARCHITECTURES))
        raise SandboxUnavailable(f"the sandbox's system-call filter knows {known}, not {machine!r}")
    architecture, column, clone, clone3, socket, socketpair = _ARCHITECTURES[machine]
    program = [(_LOAD, 0, 0, _ARCHITECTURE_OFFSET), (_JUMP_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _KILL_PROCESS)]
    program.append((_LOAD, 0, 0, _NUMBER_OFFSET))
    if machine == "x86_64":
        program += [(_JUMP_AT_LEAST, 0, 1, _X32_SYSCALL_BIT), (_RETURN, 0, 0, _KILL_PROCESS)]
    for numbers in DENIED_SYSCALLS.values():
        if (number := numbers[column]) is not None:
            program += [(_JUMP_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERRNO | errno.EPERM)]
    program += [(_JUMP_EQUAL, 0, 1, clone3), (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)]
    # these by their first argument: how it is tested, and whether the test refuses or allows
    unix_only = (_JUMP_EQUAL, 1, 0, _AF_UNIX), errno.EACCES
    no_namespaces = (_JUMP_ANY_BIT, 0, 1, _CLONE_NEW_NAMESPACES), errno.EPERM
    for number, (test, error) in ((clone, no_namespaces), (socket, unix_only), (socketpair, unix_only)):
        program += [(_JUMP_EQUAL, 0, 4, number), (_LOAD, 0, 0, _FIRST_ARGUMENT_OFFSET), test]
        program += [(_RETURN, 0, 0, _ERRNO | error), (_RETURN, 0, 0, _ALLOW)]
    program.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
