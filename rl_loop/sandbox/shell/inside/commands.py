"""Commands of a sandbox: single ones, and those of a persistent bash."""

import contextlib
import fcntl
import os
import resource
import select
import signal
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from rl_loop.sandbox.inside.confinement import PR_SET_DUMPABLE, drop_capabilities, libc
from rl_loop.sandbox.shell.inside.messages import SandboxSpec
from rl_loop.sandbox.shell.inside.mounts import SandboxRoot
from rl_loop.sandbox.shell.inside.outcomes import CommandOutcome, OutputBuffer

BASH = "/bin/bash"
DEFAULT_ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
    "PAGER": "cat",
    "GIT_PAGER": "cat",
    "USER": "root",
}
SHELL_LOOP = (
    "while IFS= read -r -d '' -u 8 __command; do "
    'eval "$__command" </dev/null 8<&- 9>&-; __status=$?; '
    'printf \'%s\\0%s\\0\' "$__status" "$PWD" >&9; done'
)
"""Program of the persistent bash. It reads commands from descriptor 8, and writes the exit status
and the working directory of each to descriptor 9."""

CHECK_SECONDS = 0.1
WRITE_SECONDS = 10.0
"""Time for writing a command to the persistent bash, in addition to the time of the command."""
IDLE_CHECK_SECONDS = 2.0
"""Time between two checks if no process but the persistent bash exists."""
END_SECONDS = 20.0
"""Time until all killed processes must have ended."""
DRAIN_BYTES = 1 << 20
"""Output that is read after the end of a command. Its background processes may go on printing."""
FIRST_FREE_DESCRIPTOR, MAX_DESCRIPTORS = 300, 1024
SIGKILL_EXIT = -int(signal.SIGKILL)


class SandboxFailureError(Exception):
    """Failure of the sandbox that commands did not cause."""


@dataclass
class _PersistentShell:
    pid: int
    commands: int
    """Write end of its commands."""
    status: int
    """Read end of its answers."""
    output: int


class Commands:
    """Starts, watches and ends the processes of a sandbox. Process 1 makes one."""

    def __init__(self, spec: SandboxSpec, root: SandboxRoot, control: socket.socket) -> None:
        self._spec, self._root, self._control = spec, root, control
        self._shell: _PersistentShell | None = None
        self._shell_is_alive = False
        self._directory = spec.working_directory
        self._ended_before: str | None = None

        self._null = os.open("/dev/null", os.O_RDONLY)

        # Every end of a child wakes ``poll``.
        self._wake, write_end = os.pipe()
        for descriptor in (self._wake, write_end):
            os.set_blocking(descriptor, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)

    # ---- between commands

    def wait_for_request(self) -> None:
        """Return when the host has sent something. Reap and watch background processes until then."""
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        next_check = time.monotonic() + CHECK_SECONDS
        while True:
            count = self.count()
            idle = 1 if self._shell_is_alive else 0
            pause = None if count == 0 else CHECK_SECONDS if count > idle else IDLE_CHECK_SECONDS
            events = dict(poll.poll(None if pause is None else 1000 * pause))
            if self._wake in events:
                self._drain_wake()
            self._reap(-1)
            if self._control.fileno() in events:
                return
            # Every end of a process wakes this loop, and checks are expensive.
            if count == 0 or time.monotonic() < next_check:
                continue
            next_check = time.monotonic() + CHECK_SECONDS
            reason = self._root.watch.check()
            if reason is not None:
                self.end_all()
                self._ended_before = reason

    # ---- commands

    def run(self, request: Mapping[str, Any]) -> tuple[CommandOutcome, bytes]:
        """Run one command until it ends or reaches a limit.

        Raises:
            SandboxFailureError: if the machine fails.
        """
        self._root.watch.begin_call()
        if not self._shell_is_alive:
            self._drop_shell()
        try:
            if request["persistent"]:
                outcome, output = self._run_persistent(request)
            else:
                outcome, output = self._run_alone(request)
        except BlockingIOError as error:  # EAGAIN of fork
            raise SandboxFailureError(f"the machine has no process left: {error}") from error
        was_killed = outcome.exit_code == SIGKILL_EXIT and outcome.killed_for is None
        if was_killed and self._root.watch.killed_by_machine():
            raise SandboxFailureError("machine out of memory")
        self._ended_before = None
        return outcome, output

    def _run_alone(self, request: Mapping[str, Any]) -> tuple[CommandOutcome, bytes]:
        output, output_write = os.pipe()
        try:
            environment = self._environment(request["environment"])
            argv = [BASH, "-c", request["command"].replace("\0", "")]
            folder = request["working_directory"] or self._spec.working_directory
            descriptors = {0: self._null, 1: output_write, 2: output_write}
            pid = self._spawn(argv, folder, environment, descriptors)
        except BaseException:
            os.close(output)
            raise
        finally:
            os.close(output_write)
        try:
            return _Wait(self, request, pid, output, None, new_shell=False).run()
        finally:
            os.close(output)

    def _run_persistent(self, request: Mapping[str, Any]) -> tuple[CommandOutcome, bytes]:
        new_shell = self._shell is None
        shell = self._shell or self._start_shell(request)
        command = request["command"].replace("\0", "").encode("utf-8", "replace")
        self._write_command(shell.commands, command + b"\0", float(request["seconds"]))
        return _Wait(self, request, shell.pid, shell.output, shell.status, new_shell).run()

    def _write_command(self, pipe: int, data: bytes, seconds: float) -> None:
        """Write a command until bash has read it. Bash may have ended, or read no more."""
        began, seconds = time.monotonic(), min(seconds, WRITE_SECONDS)
        poll = select.poll()
        poll.register(pipe, select.POLLOUT)
        with contextlib.suppress(BrokenPipeError):
            while data:
                if poll.poll(1000 * CHECK_SECONDS):
                    data = data[os.write(pipe, data) :]
                elif self.limit_reached(began, seconds, 0, check=True) is not None:
                    return  # the wait for the command ends it

    def _start_shell(self, request: Mapping[str, Any]) -> _PersistentShell:
        (commands_read, commands), (status, status_write), (output, output_write) = (
            os.pipe(), os.pipe(), os.pipe()
        )  # fmt: skip
        argv = [BASH, "--norc", "--noprofile", "-c", SHELL_LOOP]
        descriptors = {
            0: self._null, 1: output_write, 2: output_write, 8: commands_read, 9: status_write
        }  # fmt: skip
        environment = self._environment(request["environment"])
        try:
            pid = self._spawn(argv, self._directory, environment, descriptors)
        except BaseException:
            for descriptor in (commands, status, output):
                os.close(descriptor)
            raise
        finally:
            for descriptor in (commands_read, status_write, output_write):
                os.close(descriptor)
        os.set_blocking(commands, False)
        self._shell_is_alive = True
        self._shell = _PersistentShell(pid, commands, status, output)
        return self._shell

    def _drop_shell(self) -> None:
        if self._shell is not None:
            for descriptor in (self._shell.commands, self._shell.status, self._shell.output):
                os.close(descriptor)
            self._shell = None

    def _environment(self, further: Mapping[str, str]) -> dict[str, str]:
        return {**DEFAULT_ENVIRONMENT, **self._spec.environment, **further}

    def _spawn(
        self,
        argv: list[str],
        folder: str,
        environment: Mapping[str, str],
        descriptors: Mapping[int, int],
    ) -> int:
        """Start a program in a new session. ``descriptors`` are {number there: descriptor here}."""
        pid = os.fork()
        if pid:
            return pid
        try:
            os.setsid()
            # The files of this process in /proc belong to root otherwise. It still has capabilities,
            # so commands cannot trace it.
            libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
            self._kill_first_when_memory_runs_out()
            moved = {
                number: fcntl.fcntl(descriptor, fcntl.F_DUPFD, FIRST_FREE_DESCRIPTOR)
                for number, descriptor in descriptors.items()
            }
            for number, descriptor in moved.items():
                os.dup2(descriptor, number)
            # All others, also between these: commands must not get the control socket.
            for before, number in pairwise([-1, *sorted(descriptors), MAX_DESCRIPTORS]):
                if before + 1 < number:  # an empty range would close everything
                    os.closerange(before + 1, number)
            for name in (signal.SIGPIPE, signal.SIGCHLD, signal.SIGINT, signal.SIGXFSZ):
                signal.signal(name, signal.SIG_DFL)
            limit = self._spec.processes
            resource.setrlimit(resource.RLIMIT_NPROC, (limit, limit))
            drop_capabilities()
            try:
                os.chdir(folder)
            except OSError:
                os.chdir("/")
            os.execve(argv[0], argv, environment)
        except BaseException as error:
            os.write(2, f"sandbox: {argv[0]}: {error}\n".encode())
        finally:
            os._exit(127)

    def _kill_first_when_memory_runs_out(self) -> None:
        score = os.open("self/oom_score_adj", os.O_WRONLY, dir_fd=self._root.proc)
        os.write(score, b"1000")
        os.close(score)

    # ---- waiting

    def limit_reached(self, began: float, seconds: float, printed: int, check: bool) -> str | None:
        """Return the limit that the running command exceeds."""
        if time.monotonic() - began >= seconds:
            return "time"
        if printed > self._spec.printed_bytes:
            return "output"
        return self._root.watch.check() if check else None

    def _reap(self, wanted: int) -> int | None:
        """Reap all ended children. Return the exit code of ``wanted`` if it is one of them."""
        found = None
        while True:
            try:
                pid, state = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return found
            if pid == 0:
                return found
            if pid == wanted:
                found = os.waitstatus_to_exitcode(state)
            if self._shell is not None and pid == self._shell.pid:
                self._shell_is_alive = False

    def _drain_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake, 4096)

    def stop_all(self) -> None:
        """Stop all processes, so that files do not change. ``continue_all`` continues them."""
        deadline = time.monotonic() + END_SECONDS
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGSTOP)
            while not self._all_stopped():
                if time.monotonic() > deadline:
                    raise SandboxFailureError("processes could not be stopped")
                os.kill(-1, signal.SIGSTOP)
                time.sleep(0.001)

    def continue_all(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGCONT)

    def _all_stopped(self) -> bool:
        for name in self._process_names():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    state = file.read().rpartition(b")")[2].split()[0]
            except (OSError, IndexError):
                continue
            if state not in b"TtZX":
                return False
        return True

    def end_all(self) -> None:
        """Kill all processes, and wait until they have ended.

        Raises:
            SandboxFailureError: if they do not end.
        """
        deadline = time.monotonic() + END_SECONDS
        while True:
            try:
                os.kill(-1, signal.SIGKILL)
            except ProcessLookupError:
                break
            self._reap(-1)
            if self.count() == 0:
                break
            if time.monotonic() > deadline:
                raise SandboxFailureError("killed processes did not end")
            time.sleep(0.001)
        self._reap(-1)
        self._root.watch.begin_call()

    def count(self) -> int:
        """Return the number of processes, without process 1."""
        return len(self._process_names())

    def _process_names(self) -> list[str]:
        return [name for name in os.listdir("/proc") if name.isdigit() and name != "1"]


class _Wait:
    """Waits for one command."""

    def __init__(
        self,
        commands: Commands,
        request: Mapping[str, Any],
        pid: int,
        output: int,
        status: int | None,
        new_shell: bool,
    ) -> None:
        self._commands, self._pid, self._output, self._status = commands, pid, output, status
        self._seconds, self._new_shell = float(request["seconds"]), new_shell
        self._buffer = OutputBuffer(commands._spec.output_bytes)
        self._answer = b""
        self._exit_code: int | None = None
        self._shell_ended = False
        os.set_blocking(output, False)

        self._poll = select.poll()
        self._poll.register(output, select.POLLIN)
        self._poll.register(commands._wake, select.POLLIN)
        self._poll.register(commands._control, select.POLLRDHUP)
        if status is not None:
            self._poll.register(status, select.POLLIN)

    def run(self) -> tuple[CommandOutcome, bytes]:
        commands, began = self._commands, time.monotonic()
        next_check, reason = began + CHECK_SECONDS, None
        while self._exit_code is None:
            now = time.monotonic()
            check = now >= next_check
            reason = commands.limit_reached(began, self._seconds, self._buffer.total, check)
            if reason is not None:
                commands.end_all()
                self._exit_code, self._shell_ended = SIGKILL_EXIT, self._status is not None
                break
            if check:
                next_check = now + CHECK_SECONDS
            pause = max(0.0, min(next_check, began + self._seconds) - now)
            self._handle(self._poll.poll(1000 * pause))
        self._read_rest()
        outcome = CommandOutcome(
            exit_code=self._exit_code,
            killed_for=reason,
            seconds=time.monotonic() - began,
            cut_bytes=self._buffer.cut_bytes,
            shell_ended=self._shell_ended,
            new_shell=self._new_shell,
            working_directory=commands._directory,
            processes=commands.count(),
            ended_before=commands._ended_before,
        )
        return outcome, self._buffer.contents()

    def _handle(self, events: list[tuple[int, int]]) -> None:
        commands = self._commands
        for descriptor, event in events:
            if descriptor == self._output:
                self._read_output()
            elif descriptor == self._status:
                self._read_status()
            elif descriptor == commands._wake:
                commands._drain_wake()
                self._look_for_end()
            elif event & (select.POLLRDHUP | select.POLLHUP):
                os._exit(0)

    def _read_output(self) -> None:
        try:
            data = os.read(self._output, 1 << 16)
        except BlockingIOError:
            return
        self._buffer.add(data)
        if not data:  # every process has closed it
            self._poll.unregister(self._output)

    def _read_status(self) -> None:
        assert self._status is not None
        data = os.read(self._status, 1 << 16)
        if not data:
            self._poll.unregister(self._status)
            return
        self._answer += data
        if self._answer.count(b"\0") >= 2:
            code, folder, *_ = self._answer.split(b"\0")
            # Commands can write to this pipe, too.
            self._exit_code = int(code) & 255 if code.isdigit() and len(code) < 6 else 1
            self._commands._directory = folder[:4096].decode("utf-8", "replace") or "/"
        elif len(self._answer) > 1 << 16:
            self._exit_code = 1

    def _look_for_end(self) -> None:
        code = self._commands._reap(self._pid)
        if code is not None and self._exit_code is None:
            self._exit_code, self._shell_ended = code, self._status is not None

    def _read_rest(self) -> None:
        """Read the output that the ended command left in the pipe."""
        for _ in range(DRAIN_BYTES >> 16):
            try:
                data = os.read(self._output, 1 << 16)
            except OSError:
                return
            if not data:
                return
            self._buffer.add(data)
