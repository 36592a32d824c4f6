"""Host side of one server: starts it, sends it programs, and stops it."""

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
from rl_loop.sandbox.config import SandboxConfig, SandboxLimits, SandboxUnavailableError
from rl_loop.sandbox.inside.messages import (
    FAILED,
    READY,
    RESULT,
    STARTED,
    CallResult,
    ProgramCall,
    SandboxServerSettings,
)
from rl_loop.sandbox.isolation import SERVER_FILES, SERVER_FOLDER, bubblewrap_command, hints
from rl_loop.sandbox.seccomp import seccomp_filter

START_SECONDS = 60

GRACE_SECONDS = 20.0
"""Additional time, in seconds, before a server counts as hung. A busy machine may be slow."""

MAX_HEADER_BYTES = 1 << 16
"""Maximum size of a message without the program's output, in bytes."""

SOCKET_BUFFER_FILE = Path("/proc/sys/net/core/wmem_default")


@dataclass(frozen=True)
class ExecutionResult:
    """Result of one program."""

    output: str
    """Standard output and error in the order of writing. Undecodable bytes are replaced."""

    exit_code: int
    """0 to 255; 1 after an exception; minus the signal's number if it was killed."""

    error: str | None = None
    """Reason why it was killed, or failure of the sandbox. None if it ended normally, with any exit
    code."""

    timed_out: bool = False
    """True if it was killed at the wall-clock limit."""

    truncated: bool = False
    """True if it printed more than the limit. The output then ends with a line about it."""

    seconds: float = 0.0
    """Wall-clock time of the program, without set-up and without the session's history."""

    interpreter_ended: bool = False
    """True if the interpreter ended, by exit() or because it was killed. The session cannot
    continue. An exception does not end the interpreter."""


class SandboxServerLostError(Exception):
    """Server that died, hung or could not set up a call."""

    def __init__(self, reason: str, failure_source: str, started: bool) -> None:
        """Create the error.

        Args:
            reason: message for users.
            failure_source: kind of failure.
            started: True if the program had started and may be the cause.
        """
        super().__init__(reason)
        self.failure_source = failure_source
        self.started = started


class ServerProcess:
    """Fork-server in bubblewrap with preloaded modules. It runs one call at a time.

    It dies with the *thread* that created it (bubblewrap's --die-with-parent), so create it in a
    thread that lives as long.
    """

    def __init__(self, config: SandboxConfig, limits: SandboxLimits) -> None:
        """Start the server and wait until it is ready.

        Raises:
            SandboxUnavailableError: if it does not start. The message has the error of bubblewrap or
                the server.
        """
        self._config = config
        self._limits = limits
        self.calls = 0
        self._cgroup: ServerCgroup | None = None

        host_end, server_end = socket.socketpair()
        # A hung server does not read, so limit the time for sending a large program.
        send_timeout = struct.pack("@ll", START_SECONDS, 0)
        host_end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, send_timeout)
        self._connection = Connection(host_end.detach())
        # A file, because a full pipe would stop the server.
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the server)
        # Without a copy here, the connection ends when the server dies.
        with server_end:
            self._init_process = self._start_bubblewrap(server_end)

        try:
            self._connection.send_bytes(self._settings().to_json())
            kind, _ = self._receive(START_SECONDS)
            if kind != READY:
                raise OSError(f"unexpected message {kind!r}")
            if self._cgroup is not None:
                self._cgroup.limit_calls(config.total_memory_bytes)
        except (OSError, EOFError) as error:
            reason = f"the sandbox server did not start: {self.close() or error}"
            raise SandboxUnavailableError("; ".join([reason, *hints()])) from error
        except BaseException:
            # For example, the system calls of this machine may be unknown.
            self.close()
            raise

    def _start_bubblewrap(self, control: socket.socket) -> int | None:
        """Start the process.

        Returns:
            The host's process id of the sandbox's process 1. None if bubblewrap failed.
        """
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
                    # Ctrl-C in the terminal is for the owner, who closes the sandbox.
                    start_new_session=True,
                    pass_fds=inherited,
                )
            except BaseException:
                if self._cgroup is not None:
                    self._cgroup.remove()
                raise
            finally:
                # With a copy here, the read below would never see the end of the pipe.
                os.close(info_write)

            # Empty if bubblewrap failed before it forked.
            text = info.read()
        return json.loads(text)["child-pid"] if text else None

    def _settings(self) -> SandboxServerSettings:
        """Return the configuration and further data for the server."""
        config, limits = self._config, self._limits
        return SandboxServerSettings(
            preload_modules=list(config.preload_modules),
            timeout_seconds=config.timeout_seconds,
            max_cpu_seconds=limits.effective_cpu_seconds(config),
            max_address_space_bytes=config.address_space_bytes,
            max_memory_bytes=config.total_memory_bytes,
            max_processes=limits.processes,
            max_open_files=limits.open_files,
            max_file_bytes=limits.file_bytes,
            max_tmp_bytes=limits.tmp_bytes,
            max_tmp_files=limits.tmp_files,
            max_output_bytes=limits.output_bytes,
            seccomp=seccomp_filter(platform.machine()).hex(),
            socket_buffer_bytes=int(SOCKET_BUFFER_FILE.read_text()),
            memory_events=None if self._cgroup is None else self._cgroup.memory_events,
            has_cpu_weight=self._cgroup is not None and self._cgroup.has_cpu_weight,
        )

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def execute(self, code: str, history: Sequence[str] = ()) -> ExecutionResult:
        """Run one program after the programs of ``history``.

        Args:
            code: source of the program.
            history: earlier programs of the session, oldest first.

        Raises:
            SandboxServerLostError: if the server failed. Do not use it again.
        """
        self.calls += 1
        # A lone surrogate cannot be encoded as UTF-8.
        programs = [program.encode("utf-8", "replace").decode() for program in (*history, code)]
        call = ProgramCall(code=programs[-1], history=programs[:-1])

        size = len(call.code.encode())
        if size > self._limits.code_bytes:
            reason = (
                f"the program has {size} bytes, more than the limit of {self._limits.code_bytes}"
            )
            return ExecutionResult(output="", exit_code=1, error=reason)

        # If the server is lost, the caller must know whether the program may be the cause.
        started = False
        seconds = self._config.timeout_seconds * call.program_count + GRACE_SECONDS
        try:
            self._connection.send_bytes(call.to_json())
            kind, payload = self._receive(seconds)
            if kind == STARTED:
                started = True
                kind, payload = self._receive(seconds)

            if kind == FAILED:
                reason = payload.decode("utf-8", "replace")
                # After the start of a program a server reports only this failure (``run_call``).
                failure_source = "machine out of memory" if started else "set-up of a call"
                raise SandboxServerLostError(
                    f"a call failed in the sandbox: {reason}", failure_source, started
                )
            if kind != RESULT or not started:
                raise SandboxServerLostError(
                    f"the server sent the unexpected message {kind!r}", "server died", started
                )
            return self._result(payload)
        except TimeoutError as error:
            raise SandboxServerLostError(str(error), "server hung", started) from None
        except (OSError, EOFError, ValueError, KeyError) as error:
            reason = f"the sandbox server exited: {self.close() or error}"
            raise SandboxServerLostError(reason, "server died", started) from error

    def kill(self) -> None:
        """Kill the server and its processes. Can be called from any thread."""
        if self.is_alive():
            with contextlib.suppress(ProcessLookupError):
                # When process 1 of the sandbox dies, the kernel kills the others. Then bubblewrap
                # exits.
                os.kill(self._init_process or self._process.pid, signal.SIGKILL)

    def close(self) -> str:
        """Kill the server, wait for its processes, and close descriptors. May be called again.

        Returns:
            The last 500 characters of the standard error of bubblewrap and the server.
        """
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
        """Return the kind and the payload of the server's next message."""
        if not self._connection.poll(seconds):
            raise TimeoutError(f"the server did not answer within {seconds:g} s")
        message = self._connection.recv_bytes(self._limits.output_bytes + MAX_HEADER_BYTES)
        return message[:1], message[1:]

    def _result(self, payload: bytes) -> ExecutionResult:
        """Return the result in a message. Raises ValueError or KeyError if it is malformed."""
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
            interpreter_ended=call.interpreter_ended,
        )

    def _reason(self, killed_for: str | None) -> str | None:
        """Return the reason for killing a program as text for users and the model."""
        reasons = {
            "time": f"killed: it ran longer than {self._config.timeout_seconds:g} s",
            "memory": f"killed: its processes used more than {self._config.total_memory_gb:g} GB of memory",
            "locks": "killed: its processes held too many locks of files",
            "output": f"killed: it printed more than {self._limits.output_bytes} bytes",
            "history": "the earlier programs of its session ended the interpreter when they ran again",
        }
        return None if killed_for is None else reasons.get(killed_for)


def _signal_name(number: int) -> str:
    """Return a signal's name, or its description: most real-time signals have no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return signal.strsignal(number) or "unknown"
