"""The fork-server: runs inside bubblewrap, as one file, on the standard library alone.

Three kinds of process:

- the *server* imports modules once, then forks a supervisor per call. It reads no program and no output, so nothing of
  one call is left in the memory that the next call is forked from;
- the *supervisor* of a call reads the program, enters new user, process, mount and IPC namespaces, forks the program
  and watches time, memory and output. The program can not see it: it is outside the program's process namespace;
- the *program* is process 1 of its namespace. When it ends, or is killed, the kernel kills all that it started.

Messages on descriptor 0 (a Unix stream socket) are those of ``multiprocessing.connection``. The host sends the
configuration as JSON, then a program per call. The first byte of an answer says what it is: ``Y`` ready, ``S`` the
program starts, ``R`` its result (a JSON line, then the raw output), ``F`` the call could not be set up (the reason)."""

import ast
import builtins
import contextlib
import ctypes
import gc
import importlib
import json
import linecache
import os
import resource
import select
import signal
import struct
import sys
import threading
import time
import traceback
import types
from typing import Any, NoReturn

Limits = dict[str, Any]  # the configuration, as JSON
CONTROL = 0
NOBODY = 65534
PROGRAM_NAME = "<sandbox>"
MEMORY_CHECK_SECONDS = 0.1
TRACEBACK_FRAMES = 8
LINE_CHARACTERS = 400

CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID = 0x00020000, 0x08000000, 0x10000000, 0x20000000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND = 2, 4, 8, 4096
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
SECCOMP_MODE_FILTER = 2
CAPABILITY_VERSION_3 = 0x20080522
RESOURCE_LIMITS = {
    "memory_bytes": resource.RLIMIT_AS, "cpu_seconds": resource.RLIMIT_CPU, "processes": resource.RLIMIT_NPROC,
    "file_bytes": resource.RLIMIT_FSIZE, "open_files": resource.RLIMIT_NOFILE,
}  # fmt: skip

libc = ctypes.CDLL(None, use_errno=True)


def receive() -> bytes:
    """The host's next message. Reads ahead: the host must not send another one before it has an answer."""
    with open(CONTROL, "rb", closefd=False) as stream:
        (size,) = struct.unpack("!i", stream.read(4))
        return stream.read(size)


def send(message: bytes) -> None:
    with open(CONTROL, "wb", closefd=False) as stream:
        stream.write(struct.pack("!i", len(message)) + message)


def check(result: int, what: str) -> None:
    """Turn the C library's -1 into an OSError that names the step."""
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    encoded = [text.encode() if text is not None else None for text in (source, target, kind, options)]
    check(libc.mount(*encoded[:3], ctypes.c_ulong(flags), encoded[3]), f"mount {target}")


def write_file(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


class SeccompProgram:
    """A ``struct sock_fprog`` that stays alive for the forked children."""

    def __init__(self, instructions: bytes) -> None:
        self._instructions = ctypes.create_string_buffer(instructions, len(instructions))
        packed = struct.pack("@HP", len(instructions) // 8, ctypes.addressof(self._instructions))
        self._program = ctypes.create_string_buffer(packed, len(packed))

    def install(self) -> None:
        address = ctypes.c_void_p(ctypes.addressof(self._program))
        check(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, address, 0, 0), "seccomp filter")


def drop_root() -> None:
    """Become nobody. Only needed when bubblewrap was started by root, without a user namespace of its own."""
    if os.getuid() == 0:
        # as root, bubblewrap covers parts of its /proc, and the kernel then refuses the calls' namespaces a fresh one
        mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        # changing the user made /proc/self/uid_map belong to root; the supervisors must write it
        check(libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0), "prctl(PR_SET_DUMPABLE)")
    if os.getresuid() != (NOBODY,) * 3 or os.getresgid() != (NOBODY,) * 3:
        raise PermissionError(f"the sandbox server runs as {os.getresuid()}/{os.getresgid()}, not as nobody")


def enter_namespaces() -> None:
    """New user, process, mount and IPC namespaces; the process namespace holds for the next fork."""
    check(libc.unshare(CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWIPC), "unshare")
    write_file("/proc/self/setgroups", "deny")
    write_file("/proc/self/uid_map", f"{NOBODY} {NOBODY} 1")
    write_file("/proc/self/gid_map", f"{NOBODY} {NOBODY} 1")


def resident_bytes() -> int:
    """Anonymous and shared memory of all processes of the call; /proc is the call's own here."""
    kibibytes = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/status", "rb") as file:
                    for line in file:
                        if line.startswith((b"RssAnon:", b"RssShmem:")):
                            kibibytes += int(line.split()[1])
            except OSError:
                continue  # it ended meanwhile
    return kibibytes * 1024


def supervise(limits: Limits, seccomp: SeccompProgram) -> None:
    """Run one program and send its result."""
    code = receive()
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    output_read, output_write = os.pipe()
    setup_read, setup_write = os.pipe()
    try:
        enter_namespaces()
    except OSError as error:
        send(b"F" + str(error).encode())
        return
    if (program := os.fork()) == 0:
        run_program(code, limits, seccomp, output_write, setup_write)
    os.close(output_write)
    os.close(setup_write)
    setup = b"".join(iter(lambda: os.read(setup_read, 4096), b""))
    if setup != b"ok":
        os.waitpid(program, 0)
        send(b"F" + (setup or b"the program's process ended before it was set up"))
        return
    send(b"S")
    started = time.monotonic()
    output, reason = watch(program, output_read, started, limits)
    os.kill(program, signal.SIGKILL)  # harmless if it ended: it is not yet waited for
    _, status = os.waitpid(program, 0)
    header: dict[str, Any] = {"exit_code": os.waitstatus_to_exitcode(status), "killed_for": reason}
    header |= {"truncated": len(output) > limits["output_bytes"], "seconds": time.monotonic() - started}
    send(b"R" + json.dumps(header).encode() + b"\n" + output[: limits["output_bytes"]])


def watch(program: int, output_read: int, started: float, limits: Limits) -> tuple[bytearray, str | None]:
    """The output (at most one byte over the limit) and why the program must be killed, None if it ended by itself."""
    process = os.pidfd_open(program)
    deadline = started + limits["timeout_seconds"]
    next_memory_check = started + MEMORY_CHECK_SECONDS
    room = limits["output_bytes"] + 1
    output = bytearray()
    watched = [output_read, process]
    ended = False
    while True:
        now = time.monotonic()
        if not ended and now >= deadline:
            return output, "time"
        if not ended and now >= next_memory_check:
            if resident_bytes() > limits["total_memory_bytes"]:
                return output, "memory"
            next_memory_check = time.monotonic() + MEMORY_CHECK_SECONDS
        ready, _, _ = select.select(watched, [], [], max(0.0, min(deadline, next_memory_check) - time.monotonic()))
        if process in ready:
            # process 1 is gone, so all of its namespace is: what is in the pipe is all there will be
            ended = True
            watched.remove(process)
        if output_read in ready:
            part = os.read(output_read, min(room - len(output), 1 << 16))
            output += part
            if len(output) == room:
                return output, None if ended else "output"
            if not part:
                watched.remove(output_read)
        if ended and output_read not in watched:
            return output, None


def run_program(code: bytes, limits: Limits, seccomp: SeccompProgram, output_write: int, setup_write: int) -> NoReturn:
    """In process 1 of the call: build its world, give up every privilege, execute the program, end."""
    try:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        os.setsid()  # else kill(0, ...) would reach the server's process group, namespaces or not
        os.dup2(output_write, 1)
        os.dup2(output_write, 2)
        os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
        setup_write = os.dup2(setup_write, 3)
        os.closerange(4, 4096)
        write_file("/proc/self/oom_score_adj", "1000")
        tmp_options = f"size={limits['tmp_bytes']},nr_inodes={limits['tmp_files']},mode=1777"
        mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, tmp_options)
        mount("/tmp", "/dev/shm", None, MS_BIND)
        mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
        os.chdir("/tmp")
        for name, limit in RESOURCE_LIMITS.items():
            resource.setrlimit(limit, (limits[name], limits[name]))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        drop_capabilities()
        seccomp.install()
        os.write(setup_write, b"ok")
        os.close(setup_write)
    except BaseException as error:
        os.write(setup_write, str(error).encode())
        os._exit(1)
    os._exit(execute(code))


def drop_capabilities() -> None:
    """A new user namespace gave all capabilities over itself: keep none."""
    header = struct.pack("Ii", CAPABILITY_VERSION_3, 0)
    check(libc.capset(header, bytes(24)), "capset")
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(PR_SET_NO_NEW_PRIVS)")


def execute(code: bytes) -> int:
    """Run the program as ``__main__`` and return its exit code; print a last expression's repr unless it is None."""
    source = code.decode("utf-8", "replace")
    linecache.cache[PROGRAM_NAME] = (len(source), None, source.splitlines(keepends=True), PROGRAM_NAME)
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    sys.argv = [PROGRAM_NAME]
    sys.path[0] = "/tmp"
    try:
        tree = ast.parse(source, PROGRAM_NAME)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, PROGRAM_NAME, "exec"), main.__dict__)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), PROGRAM_NAME, "eval"), main.__dict__)
            if value is not None:
                print(repr(value))
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        exit_code = 0
    except SystemExit as error:
        exit_code = exit_code_of(error)
    except BaseException as error:
        exit_code = 1
        print_traceback(error)
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        exit_code = exit_code or 1
    return exit_code


def exit_code_of(error: SystemExit) -> int:
    if error.code is None or isinstance(error.code, int):
        return (error.code or 0) & 255
    with contextlib.suppress(BaseException):
        print(error.code, file=sys.stderr)
    return 1


def print_traceback(error: BaseException) -> None:
    """The traceback with the program's own frames only, the last TRACEBACK_FRAMES of them, lines cut."""
    try:
        sys.stdout.flush()
        summary = traceback.TracebackException.from_exception(error)
        shown: traceback.TracebackException | None = summary
        while shown is not None:
            frames = [frame for frame in shown.stack if frame.filename == PROGRAM_NAME]
            shown.stack = traceback.StackSummary.from_list(frames[-TRACEBACK_FRAMES:])
            shown = shown.__cause__ or shown.__context__
        # cut, because the error in a line of a megabyte would be quoted whole
        text = "".join(f"{line[:LINE_CHARACTERS]}\n" for part in summary.format() for line in part.splitlines())
    except BaseException:  # a hostile __str__, or no memory left
        text = f"{type(error).__name__}\n"
    with contextlib.suppress(BaseException):
        print(text, end="", file=sys.stderr)


def main() -> None:
    settings = json.loads(receive())
    drop_root()
    for name in settings["preload_modules"]:
        importlib.import_module(name)
    seccomp = SeccompProgram(bytes.fromhex(settings["seccomp"]))
    # line buffering, so that a program killed in the middle has shown what it printed
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, encoding="utf-8", errors="backslashreplace")  # type: ignore[union-attr]
    gc.collect()
    gc.freeze()
    send(b"Y")
    while select.select([CONTROL], [], []):
        if (supervisor := os.fork()) == 0:
            try:
                supervise(settings, seccomp)
                os._exit(0)
            finally:
                os._exit(1)
        _, status = os.waitpid(supervisor, 0)
        if status != 0:
            sys.exit(f"the supervisor of a call ended with status {status}")


if __name__ == "__main__":
    main()
