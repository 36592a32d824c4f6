"""Programs that hide memory from a simple monitor, or that affect other sandboxes.

Each is bounded: without the sandbox, none takes more than 1 GB or lasts longer than its call.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass

COLUMN = 0 if platform.machine() == "x86_64" else 1


@dataclass(frozen=True)
class Attack:
    """A program and its expected result. By default it ends with exit code 0."""

    code: str  # may be indented
    output: str = ""  # a regular expression for the whole output
    exit_code: int = 0
    timed_out: bool = False
    truncated: bool = False
    error: str | None = None  # a part of the error


def killed_for(error: str, code: str) -> Attack:
    return Attack(code, output="(?s).*", exit_code=-9, error=error)


LIBC = "import ctypes, errno, os\nlibc = ctypes.CDLL(None, use_errno=True)\nlibc.mmap.restype = ctypes.c_void_p\n"


def raw_call(numbers: tuple[int, int], *arguments: int) -> str:
    """Return a program that makes one system call and prints its result and errno."""
    words = ", ".join(f"ctypes.c_long({argument})" for argument in (numbers[COLUMN], *arguments))
    return f"{LIBC}print(libc.syscall({words}), errno.errorcode.get(ctypes.get_errno()))"


def file_control(command: int, path: str = "/usr/bin/env", argument: str = "0") -> Attack:
    """Return a program that applies an ``fcntl`` to a file that all sandboxes share."""
    return Attack(
        f"import fcntl, struct\nfile = open({path!r}, 'rb') if {path!r} != 'pipe' else None\n"
        "import os\ndescriptor = os.pipe()[1] if file is None else file.fileno()\n"
        f"try:\n    fcntl.fcntl(descriptor, {command}, {argument})\n    print('DONE')\n"
        "except PermissionError:\n    print('REFUSED')\n",
        "REFUSED\n",
    )


READ_LOCK = "struct.pack('hhqqi4x', fcntl.F_RDLCK, 0, 77, 1, 0)"
WRITE_LOCK = "struct.pack('hhqqi4x', fcntl.F_WRLCK, 0, 77, 1, 0)"
PRCTL = (157, 167)

MEMORY = {
    "memory of processes whose first thread has ended": killed_for(
        "memory",
        LIBC
        + f"""
import threading, time
def hold():
    time.sleep(0.2)
    block = bytearray(b'x') * (80 << 20)
    time.sleep(60)
for _ in range(8):
    if os.fork() == 0:
        threading.Thread(target=hold).start()
        libc.syscall({(60, 93)[COLUMN]}, 0)  # exit of this thread alone
time.sleep(60)
""",
    ),
    "buffers of sockets": killed_for(
        "memory",
        """
import os, socket, time
for _ in range(40):
    if os.fork() == 0:
        pairs = []
        try:
            while True:
                pair = socket.socketpair()
                pairs.append(pair)
                for end in pair:
                    end.setblocking(False)
                    try:
                        while True:
                            end.send(bytes(32768))
                    except BlockingIOError:
                        pass
        except OSError:
            time.sleep(60)
time.sleep(60)
""",
    ),
    "buffers of sockets whose senders are closed": killed_for(
        "memory",
        """
import os, socket, time
for _ in range(50):
    if os.fork() == 0:
        receivers = []
        try:
            while True:
                sender, receiver = socket.socketpair()
                sender.setblocking(False)
                try:
                    while True:
                        sender.send(bytes(32768))
                except BlockingIOError:
                    pass
                sender.close()
                receivers.append(receiver)
        except OSError:
            time.sleep(60)
time.sleep(60)
""",
    ),
    "sparse mappings that cost page tables": killed_for(
        "memory",
        LIBC
        + """
import time
for _ in range(4):
    if os.fork() == 0:
        base = 0x200000000000
        for n in range(50000):
            address = libc.mmap(ctypes.c_void_p(base + (n << 21)), ctypes.c_size_t(4096), 1, 0x100022, -1, 0)
            ctypes.string_at(address, 1)
        time.sleep(60)
time.sleep(60)
""",
    ),
    "mappings that cost the kernel more than their pages": killed_for(
        "memory",
        LIBC
        + """
import time
size = 60000 * 4096
address = libc.mmap(None, ctypes.c_size_t(size), 1, 0x22, -1, 0)
for n in range(0, 60000, 2):
    libc.mprotect(ctypes.c_void_p(address + 4096 * n), ctypes.c_size_t(4096), 0)
for _ in range(11):
    if os.fork() == 0:
        time.sleep(60)
time.sleep(60)
""",
    ),
    "watches of epoll": Attack(
        """
import ctypes, errno, os, select, selectors
libc = ctypes.CDLL(None, use_errno=True)
print(libc.epoll_create1(0), errno.errorcode[ctypes.get_errno()])
print(libc.epoll_create(1), errno.errorcode[ctypes.get_errno()])
print(hasattr(select, 'epoll'), selectors.DefaultSelector.__name__)
""",
        "-1 ENOSYS\n-1 ENOSYS\nFalse PollSelector\n",
    ),
    "tables of futexes": Attack(raw_call(PRCTL, 78, 1, 1 << 20, 0, 0), "-1 EPERM\n"),
    "calls of kernels to come": Attack(
        raw_call((468, 468), 0) + f"\n{raw_call((600, 600), 0)}", "-1 ENOSYS\n-1 ENOSYS\n"
    ),
    "locks of files": killed_for(
        "locks",
        """
import fcntl, time
with open('/tmp/locked', 'wb') as file:
    for start in range(200000, 0, -2):
        fcntl.lockf(file, fcntl.LOCK_EX, 1, start)
    time.sleep(60)
""",
    ),
    "shared anonymous memory behind an unmapped page": Attack(
        LIBC
        + """
size = 32 << 20
held = 0
for _ in range(8):
    address = libc.mmap(None, ctypes.c_size_t(size), 3, 0x21, -1, 0)
    if address == ctypes.c_void_p(-1).value:
        break
    ctypes.memset(ctypes.c_void_p(address), 1, size)
    libc.munmap(ctypes.c_void_p(address + 4096), ctypes.c_size_t(size - 4096))
    held += size
print(held, errno.errorcode.get(ctypes.get_errno()))
""",
        "0 EPERM\n",
    ),
    "shared memory of /dev/zero": Attack(
        """
import mmap
with open('/dev/zero', 'r+b', buffering=0) as file:
    print(file.read(3))
    try:
        mmap.mmap(file.fileno(), 1 << 20)
        print('DONE')
    except OSError as error:
        print('REFUSED')
""",
        r"b'\\x00\\x00\\x00'\nREFUSED\n",
    ),
    "reserved huge pages": Attack(
        LIBC
        + "print(libc.mmap(None, ctypes.c_size_t(2 << 20), 3, 0x40022, -1, 0) == ctypes.c_void_p(-1).value,"
        " errno.errorcode[ctypes.get_errno()])",
        "True EPERM\n",
    ),
    "larger socket buffers": Attack(
        """
import socket
one, _ = socket.socketpair()
before = one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)
print(one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == before)
""",
        "True\n",
    ),
    "larger pipes": file_control(1031, "pipe", "1 << 20"),
    "locked memory": Attack(
        LIBC + "block = ctypes.create_string_buffer(1 << 20)\n"
        "print(libc.mlock(block, ctypes.c_size_t(1 << 20)), errno.errorcode[ctypes.get_errno()])",
        "-1 (EPERM|ENOMEM)\n",
    ),
    "timers": Attack(
        LIBC
        + f"""
made = 0
identifier = ctypes.c_int()
while made < 5000 and libc.syscall({(222, 107)[COLUMN]}, 1, None, ctypes.byref(identifier)) == 0:
    made += 1
print(made < 300)
""",
        "True\n",
    ),
    "queued signals": Attack(
        LIBC
        + """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, {40})
queued = 0
while queued < 5000 and libc.sigqueue(os.getpid(), 40, ctypes.c_void_p(0)) == 0:
    queued += 1
print(queued < 300)
""",
        "True\n",
    ),
    "access lists of files": Attack(
        """
import os, struct
entry = struct.pack('HHI', 1, 7, 0xffffffff), struct.pack('HHI', 4, 7, 0xffffffff)
last = struct.pack('HHI', 16, 7, 0xffffffff) + struct.pack('HHI', 32, 7, 0xffffffff)
many = struct.pack('HHI', 2, 7, 65534) * 8000
open('/tmp/file', 'w').close()
try:
    os.setxattr('/tmp/file', 'system.posix_acl_access', struct.pack('I', 2) + entry[0] + many + entry[1] + last)
    print('DONE')
except PermissionError:
    print('REFUSED')
""",
        "REFUSED\n",
    ),
    "system-call filters": Attack(
        raw_call((317, 277), 1, 0, 0)
        + f"\nctypes.set_errno(0)\nprint(libc.syscall({PRCTL[COLUMN]}, 22, 2, 0, 0, 0),"
        " errno.errorcode[ctypes.get_errno()])",
        "-1 EPERM\n-1 EPERM\n",
    ),
    "rules of landlock": Attack(raw_call((444, 444), 0, 0, 1), "-1 EPERM\n"),
    "asynchronous contexts of the whole machine": Attack(raw_call((206, 0), 1, 0), "-1 EPERM\n"),
    "terminals of the whole machine": Attack(
        "import os\ntry:\n    os.openpty()\n    print('DONE')\nexcept OSError:\n    print('REFUSED')",
        "REFUSED\n",
    ),
    "a process whose memory can not be read": Attack(raw_call(PRCTL, 4, 0), "-1 EPERM\n"),
    "pages merged with those of others": Attack(
        LIBC + "address = libc.mmap(None, ctypes.c_size_t(4096), 3, 0x22, -1, 0)\n"
        "result = libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(4096), 12)\n"
        "print(result, errno.errorcode[ctypes.get_errno()])\n"
        f"print(libc.syscall({PRCTL[COLUMN]}, 67, 1, 0, 0, 0), errno.errorcode[ctypes.get_errno()])",
        "-1 EPERM\n-1 EPERM\n",
    ),
    "core of a crash for the host's handler": Attack(
        "import resource\nprint(resource.getrlimit(resource.RLIMIT_CORE)[0])", "1\n"
    ),
}

CHANNELS = {
    "preference of the kernel's killer set back": Attack(
        """
try:
    open('/proc/self/oom_score_adj', 'w').write('0')
    print('DONE')
except OSError as error:
    print('REFUSED')
print(open('/proc/self/oom_score_adj').read().strip())
""",
        "REFUSED\n1000\n",
    ),
    "share of the processors set": Attack(
        "import os\ntry:\n    open('/proc/self/autogroup', 'w').write('0')\nexcept OSError as error:\n"
        "    print('REFUSED')\ntry:\n    os.setsid()\nexcept PermissionError:\n    print('REFUSED')\n"
        "if os.fork() == 0:\n    try:\n        os.setsid()\n    except PermissionError:\n        print('REFUSED')\n"
        "    os._exit(0)\nos.wait() and None",
        "(REFUSED\n){3}",
    ),
    "hyper-threads of the host idled": Attack(raw_call(PRCTL, 62, 1, 0, 0, 0), "-1 EPERM\n"),
    "flock of a shared file": Attack(
        "import fcntl\ntry:\n    fcntl.flock(open('/usr/bin/env'), fcntl.LOCK_SH)\n    print('DONE')\n"
        "except PermissionError:\n    print('REFUSED')",
        "REFUSED\n",
    ),
    "lock of a file's description": file_control(37, argument=READ_LOCK),
    "question for the locks of others": file_control(5, argument=WRITE_LOCK),
    "question for the description's locks of others": file_control(36, argument=WRITE_LOCK),
    "list of all locks": Attack(
        "import fcntl\nfile = open('/tmp/x', 'w')\nfcntl.lockf(file, fcntl.LOCK_EX)\n"
        "print(len(open('/proc/locks').read()))",
        "0\n",
    ),
    "lease of a shared file": file_control(1024, argument="0"),
    "notice of what others do in a folder": Attack(
        "import fcntl, os\nfolder = os.open('/usr/share', os.O_RDONLY)\n"
        "try:\n    fcntl.fcntl(folder, 1026, 0x80000001)\n    print('DONE')\n"
        "except PermissionError:\n    print('REFUSED')",
        "REFUSED\n",
    ),
    "inotify on a shared folder": Attack(
        raw_call((294, 26), 0),
        "-1 EPERM\n",
    ),
    "hint left on a shared file": file_control(1036, argument="struct.pack('Q', 2)"),
    "pages of shared files in memory": Attack(raw_call((451, 451), 0, 0, 0, 0), "-1 EPERM\n"),
    "mounts of the host by system call": Attack(
        raw_call((457, 457), 0, 0, 0, 0) + f"\n{raw_call((458, 458), 0, 0, 0, 0)}", "-1 EPERM\n-1 EPERM\n"
    ),
}  # fmt: skip
