"""The fork-server: runs inside bubblewrap, with ``process_watch`` beside it, on the standard library alone.

Three kinds of process:

- the *server* imports modules once, then forks a supervisor per call. It reads no program and no output, so nothing of
  one call is left in the memory that the next call is forked from;
- the *supervisor* of a call reads the program, enters new user, process, mount and IPC namespaces, forks the program
  and watches time, memory and output. The program can not see it: it is outside the program's process namespace;
- the *program* is process 1 of its namespace. When it ends, or is killed, the kernel kills all that it started.

A call of a session brings its history: programs that run again, in the same interpreter, before the new one, with
their output thrown away and limits of their own.

Messages on descriptor 0 (a Unix stream socket) are those of ``multiprocessing.connection``. The host sends the
configuration as JSON, then a call as JSON ("code", "history"). The first byte of an answer says what it is: ``Y``
ready, ``S`` the program starts, ``R`` its result (a JSON line, then the raw output), ``F`` the call failed for a reason
that is not the program's (the reason)."""

import ast
import builtins
import contextlib
import ctypes
import gc
import importlib
import json
import linecache
import math
import mmap
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
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from rl_loop.sandbox.process_watch import LOOK_SECONDS, ProcessWatch

Limits = dict[str, Any]  # the configuration, as JSON
CONTROL = 0
NOBODY = 65534
PROGRAM_NAME = "<sandbox>"
TRACEBACK_FRAMES = 8
LINE_CHARACTERS = 400

CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID = 0x00020000, 0x08000000, 0x10000000, 0x20000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND = 1, 2, 4, 8, 4096
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
SECCOMP_MODE_FILTER = 2
CAPABILITY_VERSION_3 = 0x20080522
RESOURCE_LIMITS = {
    "memory_bytes": resource.RLIMIT_AS, "cpu_seconds": resource.RLIMIT_CPU, "processes": resource.RLIMIT_NPROC,
    "file_bytes": resource.RLIMIT_FSIZE, "open_files": resource.RLIMIT_NOFILE,
}  # fmt: skip

FIXED_LIMITS = {
    # 0 would still hand the dump to a program of the host where core_pattern names one; 1 does not (core(5))
    resource.RLIMIT_CORE: 1,
    # queued signals and timers; pages kept from being reclaimed; message queues: memory of the kernel
    resource.RLIMIT_SIGPENDING: 256, resource.RLIMIT_MEMLOCK: 0, resource.RLIMIT_MSGQUEUE: 0,
    resource.RLIMIT_NICE: 0, resource.RLIMIT_RTPRIO: 0,
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


@dataclass(frozen=True)
class Call:
    """What the host asks for."""

    code: str
    history: list[str]  # programs of the session that ran before, oldest first

    @property
    def programs(self) -> int:
        return len(self.history) + 1


class Progress:
    """How far the programs of a call have come: a page that the program's process shares with the supervisor.

    The program may write what it likes into it. That can end its own session or change the time that is reported, and
    give it no more than ``timeout_seconds`` for each program of the call."""

    _FORMAT = "=IId"  # programs begun, whether the last one came to its end, when it began (monotonic seconds)

    def __init__(self) -> None:
        self._page = mmap.mmap(-1, mmap.PAGESIZE)

    def begin(self, program: int) -> None:
        """Program number ``program``, from 1, begins now."""
        struct.pack_into(self._FORMAT, self._page, 0, program, 0, time.monotonic())

    def reach_end(self) -> None:
        """The program has come to its end, or to an exception: it did not end the interpreter."""
        struct.pack_into("=I", self._page, 4, 1)

    def read(self) -> tuple[int, bool, float]:
        begun, reached_end, begun_at = struct.unpack_from(self._FORMAT, self._page)
        return begun, reached_end == 1, begun_at


class Deadline:
    """When the running program of a call must have ended: each has ``timeout_seconds`` of its own."""

    def __init__(self, call: Call, progress: Progress, timeout_seconds: float) -> None:
        self._programs = call.programs
        self._progress = progress
        self._timeout = timeout_seconds
        self.begun_at = time.monotonic()
        self.program = 0

    def at(self) -> float:
        """The deadline on the monotonic clock. It moves on when another program of the call begins."""
        begun, _, begun_at = self._progress.read()
        if self.program < begun <= self._programs:
            # no earlier than what is known, no later than now: the page is the program's
            self.begun_at = max(self.begun_at, min(begun_at, time.monotonic()))
            self.program = begun
        return self.begun_at + self._timeout


def supervise(limits: Limits, seccomp: SeccompProgram) -> None:
    """Run one call and send its result."""
    call = Call(**json.loads(receive()))
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    progress = Progress()
    output_read, output_write = os.pipe()
    setup_read, setup_write = os.pipe()
    try:
        process_watch = ProcessWatch(
            memory_bytes=limits["total_memory_bytes"],
            socket_buffer_bytes=limits["socket_buffer_bytes"],
            memory_events=limits["memory_events"],
            cpu_weight=limits["cpu_weight"],
        )
        enter_namespaces()
    except OSError as error:
        send(b"F" + str(error).encode())
        return

    if (program := os.fork()) == 0:
        run_program(call, limits, seccomp, progress, output_write, setup_write)
    os.close(output_write)
    os.close(setup_write)
    setup = b"".join(iter(lambda: os.read(setup_read, 4096), b""))
    if setup != b"ok":
        os.waitpid(program, 0)
        send(b"F" + (setup or b"the program's process ended before it was set up"))
        return

    process_watch.watch_tmp()
    send(b"S")
    deadline = Deadline(call, progress, limits["timeout_seconds"])
    output, reason = watch(program, output_read, deadline, process_watch, limits)
    os.kill(program, signal.SIGKILL)  # harmless if it ended: it is not yet waited for
    _, status, usage = os.wait4(program, 0)
    ended_at = time.monotonic()

    exit_code = os.waitstatus_to_exitcode(status)
    reason = reason or process_watch.killed_by_cgroup()
    # no signal from inside its namespace kills a process 1: SIGKILL is the limit on its processor time, or the host
    within_cpu_limit = usage.ru_utime + usage.ru_stime < limits["cpu_seconds"] - 1
    if exit_code == -signal.SIGKILL and reason is None and within_cpu_limit:
        send(b"Fthe program was killed from outside its sandbox, as Linux does when the machine is out of memory")
        return

    deadline.at()
    if reason is None and deadline.program < call.programs:
        reason = "history"
    _, reached_end, _ = progress.read()
    header: dict[str, Any] = {
        "exit_code": exit_code,
        "killed_for": reason,
        "ended": reason is not None or exit_code < 0 or not reached_end,
        "truncated": len(output) > limits["output_bytes"],
        "seconds": max(0.0, ended_at - deadline.begun_at),
    }
    send(b"R" + json.dumps(header).encode() + b"\n" + output[: limits["output_bytes"]])


def watch(
    program: int, output_read: int, deadline: Deadline, process_watch: ProcessWatch, limits: Limits
) -> tuple[bytearray, str | None]:
    """The output (at most one byte over the limit) and why the program must be killed, None if it ended by itself."""
    process = os.pidfd_open(program)
    next_look = deadline.begun_at + LOOK_SECONDS
    room = limits["output_bytes"] + 1
    output = bytearray()
    watched = [output_read, process]
    ended = False
    while True:
        now = time.monotonic()
        if not ended and now >= deadline.at():
            return output, "time"
        if not ended and now >= next_look:
            reason = process_watch.look()
            if reason is not None:
                return output, reason
            # a look at many large processes takes long: it has no more than a third of one processor
            next_look = time.monotonic() + max(LOOK_SECONDS, 2 * (time.monotonic() - now))

        wait = max(0.0, min(deadline.at(), next_look) - time.monotonic())
        ready, _, _ = select.select(watched, [], [], wait)
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


def run_program(
    call: Call, limits: Limits, seccomp: SeccompProgram, progress: Progress, output_write: int, setup_write: int
) -> NoReturn:
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
        # read-only, so that nothing set here (oom_score_adj, autogroup) can be set back
        mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC | MS_RDONLY)
        # it lists locks of files by all processes of the machine
        mount("/dev/null", "/proc/locks", None, MS_BIND)
        os.chdir("/tmp")
        set_resource_limits(limits, call.programs)
        drop_capabilities()
        seccomp.install()
        os.write(setup_write, b"ok")
        os.close(setup_write)
    except BaseException as error:
        os.write(setup_write, str(error).encode())
        os._exit(1)
    os._exit(execute(call, limits, progress))


def set_resource_limits(limits: Limits, programs: int) -> None:
    """Set the limits of process 1; what it starts inherits them. Processor time is that of all the call's programs."""
    for name, limit in RESOURCE_LIMITS.items():
        value = limits[name] * programs if limit == resource.RLIMIT_CPU else limits[name]
        resource.setrlimit(limit, (value, value))
    for limit, value in FIXED_LIMITS.items():
        _, most = resource.getrlimit(limit)
        if most != resource.RLIM_INFINITY:
            value = min(value, most)
        resource.setrlimit(limit, (value, value))


def drop_capabilities() -> None:
    """A new user namespace gave all capabilities over itself: keep none."""
    header = struct.pack("Ii", CAPABILITY_VERSION_3, 0)
    check(libc.capset(header, bytes(24)), "capset")
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(PR_SET_NO_NEW_PRIVS)")


def execute(call: Call, limits: Limits, progress: Progress) -> int:
    """Run the session's programs as one ``__main__`` and return the exit code of the last, the only one to be heard."""
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    sys.argv = [PROGRAM_NAME]
    sys.path[0] = "/tmp"
    for name in [name for name in sys.modules if name.partition(".")[0] == "rl_loop"]:
        del sys.modules[name]

    if call.history:
        with muted():
            for number, code in enumerate(call.history, start=1):
                progress.begin(number)
                run_code(code, main)
        # less than what was set for all programs together, and no process can raise it again
        used = resource.getrusage(resource.RUSAGE_SELF)
        seconds = min(
            math.ceil(used.ru_utime + used.ru_stime) + limits["cpu_seconds"], limits["cpu_seconds"] * call.programs
        )
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))

    progress.begin(call.programs)
    try:
        exit_code = run_code(call.code, main)
        progress.reach_end()
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
    except SystemExit as error:
        exit_code = exit_code_of(error)
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        exit_code = exit_code or 1
    return exit_code


def run_code(source: str, main: types.ModuleType) -> int:
    """Run one program in ``main``; print a last expression's repr unless it is None, or the traceback of an exception.

    Returns 0, or 1 after an exception. SystemExit goes through: it ends the interpreter."""
    linecache.cache[PROGRAM_NAME] = (len(source), None, source.splitlines(keepends=True), PROGRAM_NAME)
    try:
        tree = ast.parse(source, PROGRAM_NAME)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, PROGRAM_NAME, "exec"), main.__dict__)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), PROGRAM_NAME, "eval"), main.__dict__)
            if value is not None:
                print(repr(value))
    except SystemExit:
        raise
    except BaseException as error:
        print_traceback(error)
        return 1
    return 0


@contextlib.contextmanager
def muted() -> Iterator[None]:
    """Throw away what is printed, by whatever route, meanwhile."""
    null = os.open("/dev/null", os.O_WRONLY)
    outputs = {descriptor: os.dup(descriptor) for descriptor in (1, 2)}
    for descriptor in outputs:
        os.dup2(null, descriptor)
    os.close(null)
    yield
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    for descriptor, copy in outputs.items():
        os.dup2(copy, descriptor)
        os.close(copy)


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
