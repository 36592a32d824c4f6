"""The supervisor of one call: forks the program into new namespaces, watches it, ends it and
reports what it did.

The program cannot see its supervisor, which is outside the program's process namespace."""

import os
import select
import signal
import time
from dataclasses import dataclass

from rl_loop.sandbox.inside.confinement import SeccompProgram, die_with_parent, enter_namespaces
from rl_loop.sandbox.inside.messages import (
    FAILED,
    STARTED,
    Call,
    CallResult,
    ServerSettings,
    receive,
    send,
)
from rl_loop.sandbox.inside.process_watch import LOOK_SECONDS, ProcessWatch
from rl_loop.sandbox.inside.program import SET_UP, run_program
from rl_loop.sandbox.inside.progress import Deadline, Progress

READ_BYTES = 1 << 16


class CallFailed(Exception):
    """The call failed for a reason that is not the program's."""


def supervise(settings: ServerSettings, seccomp: SeccompProgram) -> None:
    """Receive one call, run it and send its result."""
    call = Call.from_json(receive())
    die_with_parent()
    try:
        result, output = run_call(call, settings, seccomp)
    except CallFailed as failure:
        send(FAILED + str(failure).encode())
        return
    send(result.to_message(output))


def run_call(
    call: Call, settings: ServerSettings, seccomp: SeccompProgram
) -> tuple[CallResult, bytes]:
    """Run the programs of a call. Returns what the last one did, and its output. Raises
    CallFailed."""
    progress = Progress()
    try:
        # before the namespaces: it keeps the server's /proc open
        process_watch = ProcessWatch(
            memory_bytes=settings.total_memory_bytes,
            socket_buffer_bytes=settings.socket_buffer_bytes,
            memory_events=settings.memory_events,
            has_cpu_weight=settings.has_cpu_weight,
        )
        enter_namespaces()
    except OSError as error:
        raise CallFailed(str(error)) from error

    program, output_read = start_program(call, settings, seccomp, progress)
    process_watch.watch_tmp()
    send(STARTED)

    deadline = Deadline(call, progress, settings.timeout_seconds)
    output, killed_for = watch(program, output_read, deadline, process_watch, settings.output_bytes)
    ending = end_program(program)
    killed_for = killed_for or process_watch.killed_by_cgroup()

    # no signal from inside its namespace kills a process 1: SIGKILL is the limit on its processor
    # time, or the host
    within_cpu_limit = ending.cpu_seconds < settings.cpu_seconds - 1
    if ending.exit_code == -signal.SIGKILL and killed_for is None and within_cpu_limit:
        raise CallFailed(
            "the program was killed from outside its sandbox, as Linux does when the machine is out of memory"
        )

    deadline.update()
    if killed_for is None and deadline.program < call.programs:
        killed_for = "history"
    result = CallResult(
        exit_code=ending.exit_code,
        killed_for=killed_for,
        ended=killed_for is not None or ending.exit_code < 0 or not progress.read().reached_end,
        truncated=len(output) > settings.output_bytes,
        seconds=max(0.0, ending.ended_at - deadline.begun_at),
    )
    return result, bytes(output[: settings.output_bytes])


def start_program(
    call: Call, settings: ServerSettings, seccomp: SeccompProgram, progress: Progress
) -> tuple[int, int]:
    """Fork the program and wait until its world is set up.

    Returns its process id and the end of the pipe that its output is read from. Raises
    CallFailed."""
    output_read, output_write = os.pipe()
    setup_read, setup_write = os.pipe()
    program = os.fork()
    if program == 0:
        run_program(call, settings, seccomp, progress, output_write, setup_write)
    os.close(output_write)
    os.close(setup_write)

    # ends when the program closes its end: either it is set up, or it has ended and this is the
    # reason
    setup = b"".join(iter(lambda: os.read(setup_read, 4096), b""))
    if setup != SET_UP:
        os.waitpid(program, 0)
        reason = (
            setup.decode("utf-8", "replace") or "the program's process ended before it was set up"
        )
        raise CallFailed(reason)
    return program, output_read


@dataclass(frozen=True)
class Ending:
    """How the program's process ended."""

    exit_code: int
    """Minus the signal's number if a signal killed it."""
    cpu_seconds: float
    ended_at: float
    """Monotonic clock."""


def end_program(program: int) -> Ending:
    """Kill the program, and with it all that it started, and wait for it."""
    os.kill(program, signal.SIGKILL)  # harmless if it ended: it is not yet waited for
    _, status, usage = os.wait4(program, 0)
    return Ending(
        exit_code=os.waitstatus_to_exitcode(status),
        cpu_seconds=usage.ru_utime + usage.ru_stime,
        ended_at=time.monotonic(),
    )


def watch(
    program: int,
    output_read: int,
    deadline: Deadline,
    process_watch: ProcessWatch,
    output_bytes: int,
) -> tuple[bytearray, str | None]:
    """Read the program's output until it ends or must be killed.

    Returns the output, at most one byte over ``output_bytes``, and why the program must be killed:
    "time", "memory", "locks", "output", or None if it ended by itself."""
    process = os.pidfd_open(program)
    next_look = deadline.begun_at + LOOK_SECONDS
    room = output_bytes + 1
    output = bytearray()
    watched = [output_read, process]
    ended = False
    while True:
        now = time.monotonic()
        if not ended and now >= deadline.update():
            return output, "time"
        if not ended and now >= next_look:
            reason = process_watch.look()
            if reason is not None:
                return output, reason
            # a look at many large processes takes long: it has no more than a third of one
            # processor
            next_look = time.monotonic() + max(LOOK_SECONDS, 2 * (time.monotonic() - now))

        wait = max(0.0, min(deadline.update(), next_look) - time.monotonic())
        ready, _, _ = select.select(watched, [], [], wait)
        if process in ready:
            # process 1 is gone, so all of its namespace is: what is in the pipe is all there will
            # be
            ended = True
            watched.remove(process)

        if output_read in ready:
            part = os.read(output_read, min(room - len(output), READ_BYTES))
            output += part
            if len(output) == room:
                return output, None if ended else "output"
            if not part:
                watched.remove(output_read)
        if ended and output_read not in watched:
            return output, None
