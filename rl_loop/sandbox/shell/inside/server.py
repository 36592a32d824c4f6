"""Fork server of shell sandboxes. It is single-threaded, and an ordinary user.

The host sends one message per sandbox on a socket of whole messages, with the sandbox's control
socket as descriptor. The server answers on the control socket, with a process descriptor.
"""

import ctypes
import gc
import json
import os
import platform
import select
import signal
import socket
import sys

from rl_loop.sandbox.inside.confinement import (
    CLONE_NEWIPC,
    CLONE_NEWNS,
    CLONE_NEWPID,
    CLONE_NEWUSER,
    NOBODY,
    PR_SET_DUMPABLE,
    check,
    exit_with_parent,
    libc,
)
from rl_loop.sandbox.shell.inside import files, process_one
from rl_loop.sandbox.shell.inside.messages import encode

CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWNET = 0x02000000, 0x04000000, 0x40000000
NAMESPACES = (
    CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS
    | CLONE_NEWCGROUP
)  # fmt: skip
CLONE = {"x86_64": 56, "aarch64": 220}


def become_ordinary_user() -> None:
    """Become ``nobody`` if root started the server."""
    if os.getuid() != 0:
        return
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    # After the change of user /proc/self/uid_map belongs to root, but sandboxes must write it.
    check(libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0), "prctl(PR_SET_DUMPABLE)")


def start_sandbox(channel: socket.socket, owner: int, control: socket.socket, clone: int) -> None:
    """Start process 1 of a sandbox, and send its process descriptor to the host."""
    pid = libc.syscall(clone, NAMESPACES | signal.SIGCHLD, 0, 0, 0, 0)
    if pid == 0:
        exit_with_parent()
        channel.close()
        os.close(owner)
        process_one.main(control)
    if pid < 0:
        number = ctypes.get_errno()
        reason = f"creating namespaces: {os.strerror(number)}"
        control.sendall(encode({"failed": reason}))
        return
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return  # the host reads the reason
    socket.send_fds(control, [b"p"], [descriptor])
    os.close(descriptor)


def main() -> None:
    """Serve until the host closes the channel or exits."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    owner = int(sys.argv[2])
    # The image store: layers have paths relative to it.
    os.fchdir(int(sys.argv[3]))
    os.close(int(sys.argv[3]))

    files.warm_up()
    become_ordinary_user()
    os.umask(0o022)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The kernel reaps ended sandboxes.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    # Collections would write to every object, and so copy all pages in every sandbox.
    gc.collect()
    gc.freeze()
    gc.disable()

    clone = CLONE[platform.machine()]
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    # A copy of the channel in another process would keep it open.
    poll.register(owner, select.POLLIN)
    channel.send(json.dumps({"uid": os.getuid(), "gid": os.getgid()}).encode())
    while True:
        events = dict(poll.poll())
        if owner in events:
            return
        message, descriptors, _, _ = socket.recv_fds(channel, 16, 1)
        if not message or not descriptors:
            return
        os.set_inheritable(descriptors[0], False)
        with socket.socket(fileno=descriptors[0]) as control:
            start_sandbox(channel, owner, control, clone)
