"""One running server, seen from the host: start it, hand it a program, end it."""

import contextlib
import json
import os
import platform
import signal
import socket
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from rl_loop.sandbox.cgroup import ServerCgroup, find_base
from rl_loop.sandbox.config import SandboxConfig, SandboxLimits, SandboxUnavailable
from rl_loop.sandbox.inside.messages import (
    FAILED,
    READY,
    RESULT,
    STARTED,
    Call,
    CallResult,
    ServerSettings,
)
from rl_loop.sandbox.isolation import SERVER_FILES, SERVER_FOLDER, bubblewrap_command, hints
from rl_loop.sandbox.seccomp import seccomp_filter

START_SECONDS = 60

GRACE_SECONDS = 20.0
"""How much later than its own limit a server may answer before it counts as hung: a loaded machine
is slow, not broken."""

LARGEST_HEADER = 1 << 16
"""Bytes of a message beside the program's output."""

SOCKET_BUFFER_FILE = Path("/proc/sys/net/core/wmem_default")


@dataclass(frozen=True)
class ExecutionResult:
    """What one program did."""

    output: str
    """Standard output and standard error in the order written, undecodable bytes replaced."""

    exit_code: int
    """0 to 255; 1 after an exception; minus the signal's number if it was killed."""

    error: str | None = None
    """Why it was killed, or what failed in the sandbox; None when it ended by itself, whatever its
    exit code."""

    timed_out: bool = False
    """It ran into the wall-clock limit and was killed."""

    truncated: bool = False
    """It printed more than the limit; the output then ends in a line that says so."""

    seconds: float = 0.0
    """Wall-clock time of the program, without its set-up and without its session's history."""

    ended: bool = False
    """It ended its interpreter, by exit() or because it was killed: no session goes on from here.
    An exception does not end it."""


class ServerLost(Exception):
    """The server died, hung or could not set the call up."""

    def __init__(self, reason: str, culprit: str, started: bool) -> None:
        """``culprit``: the kind of failure. ``started``: the program had begun and may be the cause."""
        super().__init__(reason)
        self.culprit = culprit
        self.started = started


class ServerProcess:
    """A warm fork-server in bubblewrap. One call at a time.

    It dies with the *thread* that made it (bubblewrap's --die-with-parent), so make it in one that
    lives as long."""

    def __init__(self, config: SandboxConfig, limits: SandboxLimits) -> None:
        """Start and wait until it is ready. Raises SandboxUnavailable with what bubblewrap or the
        server said."""
        self._config = config
        self._limits = limits
        self.calls = 0
        self._cgroup: ServerCgroup | None = None

        host_end, server_end = socket.socketpair()
        # a server that hangs takes no large program
        send_timeout = struct.pack("@ll", START_SECONDS, 0)
        host_end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, send_timeout)
        self._connection = Connection(host_end.detach())
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the server)
        with server_end:
            self._init_process = self._start_bubblewrap(server_end)

        try:
            self._connection.send_bytes(self._settings().to_json())
            kind, _ = self._receive(START_SECONDS)
            if kind != READY:
                raise OSError(f"unexpected answer {kind!r}")
            if self._cgroup is not None:
                self._cgroup.limit_calls(config.total_memory_bytes)
        except (OSError, EOFError) as error:
            reason = f"the sandbox's server did not start: {self.close() or error}"
            raise SandboxUnavailable("; ".join([reason, *hints()])) from error
        except BaseException:
            # Of a machine whose system calls are not known, for one.
            self.close()
            raise

    def _start_bubblewrap(self, control: socket.socket) -> int | None:
        """Start the process and return the id that process 1 of the sandbox has on the host, None
        if there is none."""
        with contextlib.ExitStack() as stack:
            sources = {
                name: stack.enter_context((SERVER_FOLDER / name).open("rb")).fileno()
                for name in SERVER_FILES
            }
            info_read, info_write = os.pipe()
            info = stack.enter_context(open(info_read))
            inherited = [*sources.values(), info_write]
            try:
                command = bubblewrap_command(self._config, sources, info_descriptor=info_write)
                base = find_base() if self._limits.use_cgroup else None
                if base is not None:
                    self._cgroup = ServerCgroup(base)
                    command = self._cgroup.joining(command)
                    inherited.append(self._cgroup.memory_events)

                self._process = subprocess.Popen(
                    command,
                    cwd="/",
                    stdin=control.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=self._stderr,
                    # Ctrl-C in the owner's terminal is for the owner, who closes the sandbox
                    start_new_session=True,
                    pass_fds=inherited,
                )
            except BaseException:
                if self._cgroup is not None:
                    self._cgroup.remove()
                raise
            finally:
                os.close(info_write)

            # nothing, if bubblewrap has failed before it forked
            text = info.read()
        return json.loads(text)["child-pid"] if text else None

    def _settings(self) -> ServerSettings:
        """Collect the configuration and what else a server must be told."""
        config, limits = self._config, self._limits
        return ServerSettings(
            preload_modules=list(config.preload_modules),
            timeout_seconds=config.timeout_seconds,
            cpu_seconds=limits.cpu_seconds_of(config),
            memory_bytes=config.memory_bytes,
            total_memory_bytes=config.total_memory_bytes,
            processes=limits.processes,
            open_files=limits.open_files,
            file_bytes=limits.file_bytes,
            tmp_bytes=limits.tmp_bytes,
            tmp_files=limits.tmp_files,
            output_bytes=limits.output_bytes,
            seccomp=seccomp_filter(platform.machine()).hex(),
            socket_buffer_bytes=int(SOCKET_BUFFER_FILE.read_text()),
            memory_events=None if self._cgroup is None else self._cgroup.memory_events,
            has_cpu_weight=self._cgroup is not None and self._cgroup.has_cpu_weight,
        )

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def execute(self, code: str, history: Sequence[str] = ()) -> ExecutionResult:
        """Run one program, after those of ``history``. Raises ServerLost; the server is then of no
        further use."""
        self.calls += 1
        # a lone surrogate is no UTF-8
        programs = [program.encode("utf-8", "replace").decode() for program in (*history, code)]
        call = Call(code=programs[-1], history=programs[:-1])

        size = len(call.code.encode())
        if size > self._limits.code_bytes:
            reason = (
                f"the program has {size} bytes, more than the limit of {self._limits.code_bytes}"
            )
            return ExecutionResult(output="", exit_code=1, error=reason)

        # Of a server that is lost the caller must know whether the program may be the cause.
        started = False
        seconds = self._config.timeout_seconds * call.programs + GRACE_SECONDS
        try:
            self._connection.send_bytes(call.to_json())
            kind, payload = self._receive(seconds)
            if kind == STARTED:
                started = True
                kind, payload = self._receive(seconds)

            if kind == FAILED:
                reason = payload.decode("utf-8", "replace")
                # Once a program has begun, a server reports only this (``run_call``).
                culprit = "machine out of memory" if started else "set-up of a call"
                raise ServerLost(f"a call failed in the sandbox: {reason}", culprit, started)
            if kind != RESULT or not started:
                raise ServerLost(f"the server sent {kind!r} out of turn", "server died", started)
            return self._result(payload)
        except TimeoutError as error:
            raise ServerLost(str(error), "server hung", started) from None
        except (OSError, EOFError, ValueError, KeyError) as error:
            reason = f"the sandbox's server died: {self.close() or error}"
            raise ServerLost(reason, "server died", started) from error

    def kill(self) -> None:
        """Kill the server and all that runs in it; from any thread."""
        if self.is_alive():
            with contextlib.suppress(ProcessLookupError):
                # process 1 of the sandbox: when it dies the kernel kills the rest, and bubblewrap
                # ends after it
                os.kill(self._init_process or self._process.pid, signal.SIGKILL)

    def close(self) -> str:
        """Kill the server, wait until it and its processes are gone, free the descriptors. Safe to
        repeat.

        Returns what bubblewrap and the server wrote to standard error, the last 500 characters."""
        self.kill()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._connection.close()
        if self._cgroup is not None:
            self._cgroup.remove()
            self._cgroup = None
        if self._stderr.closed:
            return ""
        with self._stderr:
            self._stderr.seek(0)
            return self._stderr.read().decode("utf-8", "replace").strip()[-500:]

    def _receive(self, seconds: float) -> tuple[bytes, bytes]:
        """Kind and payload of the server's next message."""
        if not self._connection.poll(seconds):
            raise TimeoutError(f"the server did not answer within {seconds:g} s")
        message = self._connection.recv_bytes(self._limits.output_bytes + LARGEST_HEADER)
        return message[:1], message[1:]

    def _result(self, payload: bytes) -> ExecutionResult:
        """Put what the server says of a program into words. Raises ValueError or KeyError if it
        says nothing."""
        call, output = CallResult.from_payload(payload)
        text = output.decode("utf-8", "replace")
        if call.truncated:
            text += f"\n[output truncated at {self._limits.output_bytes} bytes]"

        error = self._reason(call.killed_for)
        if error is None and call.exit_code < 0:
            error = f"killed by signal {-call.exit_code} ({_signal_name(-call.exit_code)})"
        return ExecutionResult(
            output=text,
            exit_code=call.exit_code,
            error=error,
            timed_out=call.killed_for == "time",
            truncated=call.truncated,
            seconds=call.seconds,
            ended=call.ended,
        )

    def _reason(self, killed_for: str | None) -> str | None:
        """Say to people, and to the model, why a program was killed."""
        reasons = {
            "time": f"killed: it ran longer than {self._config.timeout_seconds:g} s",
            "memory": f"killed: its processes used more than {self._config.total_memory_bytes} bytes of memory",
            "locks": "killed: its processes held too many locks of files",
            "output": f"killed: it printed more than {self._limits.output_bytes} bytes",
            "history": "the earlier programs of its session ended the interpreter when they ran again",
        }
        return None if killed_for is None else reasons.get(killed_for)


def _signal_name(number: int) -> str:
    """Return the name of a signal, or its description: most real-time signals have no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return signal.strsignal(number) or "unknown"
