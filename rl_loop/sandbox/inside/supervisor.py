"""Supervisor of one call: forks the program into new namespaces, watches it and reports its result.

The program cannot see its supervisor, which is outside the program's process namespace.
"""

import contextlib
import os
import resource
import select
import signal
import time
from dataclasses import dataclass

from rl_loop.sandbox.inside.confinement import SeccompProgram, enter_namespaces, exit_with_parent
from rl_loop.sandbox.inside.messages import (
    FAILED,
    STARTED,
    CallResult,
    ProgramCall,
    SandboxServerSettings,
    receive,
    send,
)
from rl_loop.sandbox.inside.process_watch import CHECK_SECONDS, ProcessWatch
from rl_loop.sandbox.inside.program import SET_UP, run_program
from rl_loop.sandbox.inside.progress import ProgramDeadline, SharedProgress

READ_BYTES = 1 << 16


class CallFailedError(Exception):
    """Call that failed for a reason other than the program."""


def supervise(settings: SandboxServerSettings, seccomp: SeccompProgram) -> None:
    """Receive one call, run it and send its result.

    Processes of a killed call may still be exiting afterwards.
    """
    call = ProgramCall.from_json(receive())
    exit_with_parent()
    try:
        result, output = run_call(call, settings, seccomp)
    except CallFailedError as failure:
        send(FAILED + str(failure).encode())
        return
    send(result.to_message(output))


def run_call(
    call: ProgramCall, settings: SandboxServerSettings, seccomp: SeccompProgram
) -> tuple[CallResult, bytes]:
    """Run the programs of a call.

    Args:
        call: programs to run.
        settings: limits.
        seccomp: system-call filter.

    Returns:
        The result of the last program, and its output.

    Raises:
        CallFailedError: if the call failed for a reason other than the program.
    """
    progress = SharedProgress()
    try:
        # Create it before the namespaces, because it opens the server's /proc.
        process_watch = ProcessWatch(
            memory_bytes=settings.max_memory_bytes,
            socket_buffer_bytes=settings.socket_buffer_bytes,
            memory_events=settings.memory_events,
            has_cpu_weight=settings.has_cpu_weight,
        )
        enter_namespaces()
    except OSError as error:
        raise CallFailedError(str(error)) from error

    program, output_read = start_program(call, settings, seccomp, progress)
    process_watch.watch_tmp()
    send(STARTED)

    deadline = ProgramDeadline(call, progress, settings.timeout_seconds)
    output, killed_for = watch(
        program, output_read, deadline, process_watch, settings.max_output_bytes
    )
    if killed_for is not None:
        # Report without waiting for the end. A busy machine needs long to end many processes,
        # and the server would seem to hang.
        os.kill(program, signal.SIGKILL)
        ending = ProcessEnd(-signal.SIGKILL, used_its_cpu_time=False, ended_at=time.monotonic())
    else:
        ending = collect_ended(program)
        killed_for = process_watch.killed_by_own_limit()
    if killed_for is None:
        check_machine(ending, process_watch)

    deadline.refresh()
    if killed_for is None and deadline.program < call.program_count:
        killed_for = "history"
    result = CallResult(
        exit_code=ending.exit_code,
        killed_for=killed_for,
        interpreter_ended=killed_for is not None
        or ending.exit_code < 0
        or not progress.read().reached_end,
        truncated=len(output) > settings.max_output_bytes,
        seconds=max(0.0, ending.ended_at - deadline.started_at),
    )
    return result, bytes(output[: settings.max_output_bytes])


def start_program(
    call: ProgramCall,
    settings: SandboxServerSettings,
    seccomp: SeccompProgram,
    progress: SharedProgress,
) -> tuple[int, int]:
    """Fork the program and wait until it is set up.

    Args:
        call: programs to run.
        settings: limits.
        seccomp: system-call filter.
        progress: page shared with the program.

    Returns:
        The process id, and the read end of the output pipe.

    Raises:
        CallFailedError: if the set-up fails.
    """
    output_read, output_write = os.pipe()
    setup_read, setup_write = os.pipe()
    program = os.fork()
    if program == 0:
        run_program(call, settings, seccomp, progress, output_write, setup_write)
    # With copies here, both pipes would stay open after the program.
    os.close(output_write)
    os.close(setup_write)

    # The program closes its end after the set-up, or after writing an error.
    setup = b"".join(iter(lambda: os.read(setup_read, 4096), b""))
    if setup != SET_UP:
        os.waitpid(program, 0)
        reason = (
            setup.decode("utf-8", "replace")
            or "the child process exited before it could start the program"
        )
        raise CallFailedError(reason)
    return program, output_read


@dataclass(frozen=True)
class ProcessEnd:
    """End of the program's process."""

    exit_code: int
    """Exit code, or minus the number of the signal that killed it."""
    used_its_cpu_time: bool
    """True if it reached the limit on its processor time, which it may have lowered itself."""
    ended_at: float
    """Time of the end on the monotonic clock, in seconds."""


def collect_ended(program: int) -> ProcessEnd:
    """Return the end of the program's process, which has exited."""
    # Its limits can be read only before it is waited for.
    cpu_limit = 0
    with contextlib.suppress(OSError):
        _, cpu_limit = resource.prlimit(program, resource.RLIMIT_CPU)

    _, status, usage = os.wait4(program, 0)
    return ProcessEnd(
        exit_code=os.waitstatus_to_exitcode(status),
        # The kernel checks the limit at its ticks, and counts in other units.
        used_its_cpu_time=usage.ru_utime + usage.ru_stime > cpu_limit - 1,
        ended_at=time.monotonic(),
    )


def check_machine(ending: ProcessEnd, process_watch: ProcessWatch) -> None:
    """Raise CallFailedError if the kernel killed the program because the machine is out of memory.

    A program can get a SIGKILL in several ways: by a lower limit of its processor time, or by a
    signal that seems to come from the kernel. Blame the machine only with evidence.
    """
    is_unexplained = ending.exit_code == -signal.SIGKILL and not ending.used_its_cpu_time
    if is_unexplained and process_watch.killed_by_machine():
        raise CallFailedError(
            "the kernel killed the program, because the machine or its container is out of memory"
        )


def watch(
    program: int,
    output_read: int,
    deadline: ProgramDeadline,
    process_watch: ProcessWatch,
    output_bytes: int,
) -> tuple[bytearray, str | None]:
    """Read the program's output until it ends or must be killed.

    Args:
        program: process id.
        output_read: read end of the output pipe.
        deadline: time limit.
        process_watch: watcher of memory and processors.
        output_bytes: maximum size of the output.

    Returns:
        The output, at most one byte over ``output_bytes``, and the reason for killing the program:
        "time", "memory", "locks", "output", or None if it ended normally.
    """
    process = os.pidfd_open(program)
    os.set_blocking(output_read, False)
    next_check = deadline.started_at + CHECK_SECONDS
    room = output_bytes + 1
    output = bytearray()
    watched = [output_read, process]
    while True:
        now = time.monotonic()
        if now >= deadline.refresh():
            return output, "time"
        if now >= next_check:
            reason = process_watch.check()
            if reason is not None:
                return output, reason
            # Checking many large processes takes long. Limit it to a third of one processor.
            next_check = time.monotonic() + max(CHECK_SECONDS, 2 * (time.monotonic() - now))

        wait = max(0.0, min(deadline.refresh(), next_check) - time.monotonic())
        ready, _, _ = select.select(watched, [], [], wait)
        if process in ready:
            # Process 1 has exited, so all of its namespace has. The pipe has the rest of the
            # output. Do not wait for its end-of-file: the program may have sent its descriptor over
            # a socket that no process can read.
            while part := read_some(output_read, room - len(output)):
                output += part
            return output, None

        if output_read in ready:
            part = read_some(output_read, room - len(output))
            if part == b"":
                watched.remove(output_read)
            output += part or b""
            if len(output) == room:
                return output, "output"


def read_some(pipe: int, most: int) -> bytes | None:
    """Read up to ``most`` bytes. Returns b"" at the end of the file, None if there is no data."""
    try:
        return os.read(pipe, min(most, READ_BYTES))
    except BlockingIOError:
        return None
