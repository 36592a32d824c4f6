"""One running server, seen from the host: start it, hand it a program, end it."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import socket
import struct
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from rl_loop.sandbox import server as server_module
from rl_loop.sandbox.config import SandboxConfig
from rl_loop.sandbox.isolation import SandboxUnavailable, bubblewrap_command
from rl_loop.sandbox.seccomp import seccomp_filter

START_SECONDS = 60.0
# how much later than its own limit a server may answer before it counts as hung: a loaded machine is slow, not broken
GRACE_SECONDS = 20.0
_LARGEST_HEADER = 1 << 16


@dataclass(frozen=True)
class ExecutionResult:
    """What one program did. ``error`` is None when it ended by itself, whatever its exit code."""

    output: str
    """Standard output and standard error in the order written, undecodable bytes replaced."""
    exit_code: int
    """0 to 255; 1 after an exception; minus the signal's number if it was killed."""
    timed_out: bool
    """It ran into the wall-clock limit and was killed."""
    truncated: bool
    """It printed more than the limit; the output then ends in a line that says so."""
    seconds: float
    """Wall-clock time of the program, without its set-up."""
    error: str | None = None
    """Why it was killed, or what failed in the sandbox."""


class ServerLost(Exception):
    """The server died, hung or could not set the call up. ``started``: the program had begun and may be the cause."""

    def __init__(self, reason: str, started: bool) -> None:
        super().__init__(reason)
        self.started = started


class ServerProcess:
    """A warm fork-server in bubblewrap. One call at a time.

    It dies with the *thread* that made it (bubblewrap's --die-with-parent), so make it in one that lives as long.
    """

    def __init__(self, config: SandboxConfig) -> None:
        """Start and wait until it is ready. Raises SandboxUnavailable with what bubblewrap or the server said."""
        self._config = config
        self.calls = 0
        self._last_words: str | None = None
        self._socket, theirs = socket.socketpair()
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the server)
        info_read, info_write = os.pipe()
        source = os.memfd_create("sandbox-server")
        try:
            os.write(source, Path(server_module.__file__).read_bytes())
            os.lseek(source, 0, os.SEEK_SET)
            self._process = subprocess.Popen(
                bubblewrap_command(config, source, info_write),
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=self._stderr,
                pass_fds=(source, info_write),
                cwd="/",
                start_new_session=True,  # Ctrl-C in the owner's terminal is for the owner, who closes the sandbox
            )
        except BaseException:
            os.close(info_read)
            self._socket.close()
            self._stderr.close()
            raise
        finally:
            os.close(source)
            os.close(info_write)
            theirs.close()
        with os.fdopen(info_read) as info:
            text = info.read()
        self._init_process: int | None = json.loads(text)["child-pid"] if text else None
        try:
            self._send_configuration()
            kind, _ = self._receive_frame(time.monotonic() + START_SECONDS)
            if kind != b"Y":
                raise OSError(f"unexpected answer {kind!r}")
        except (OSError, EOFError) as error:
            self.close()
            raise SandboxUnavailable(f"the sandbox's server did not start: {self.last_words() or error}") from error

    def last_words(self) -> str:
        """What bubblewrap and the server wrote to standard error, the last 500 characters."""
        if self._last_words is not None:
            return self._last_words
        self._stderr.seek(0)
        return self._stderr.read().decode("utf-8", "replace").strip()[-500:]

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def execute(self, code: str) -> ExecutionResult:
        """Run one program. Raises ServerLost; the server is then of no further use."""
        self.calls += 1
        payload = code.encode("utf-8", "replace")
        if len(payload) > self._config.code_bytes:
            reason = f"the program has {len(payload)} bytes, more than the limit of {self._config.code_bytes}"
            return ExecutionResult("", 1, False, False, 0.0, reason)
        started = False
        deadline = time.monotonic() + self._config.timeout_seconds + GRACE_SECONDS
        try:
            self._send(b"C" + struct.pack("!I", len(payload)) + payload, deadline)
            kind, answer = self._receive_frame(deadline)
            if kind == b"S":
                started = True
                kind, answer = self._receive_frame(deadline)
            if kind == b"F":
                raise ServerLost(f"a call could not be isolated: {answer.decode('utf-8', 'replace')}", started)
            if kind != b"R" or not started:
                raise ServerLost(f"the server sent {kind!r} out of turn", started)
            return self._result(answer)
        except TimeoutError:
            raise ServerLost(
                f"the server did not answer within {GRACE_SECONDS:.0f} s of the time limit", started
            ) from None
        except (OSError, EOFError, ValueError, KeyError) as error:
            raise ServerLost(f"the sandbox's server died: {self.last_words() or error}", started) from error

    def kill(self) -> None:
        """Kill the server and all that runs in it; from any thread."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                # process 1 of the sandbox: when it dies the kernel kills the rest, and bubblewrap ends after it
                os.kill(self._init_process or self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill the server, wait until it and its processes are gone, free the descriptors. Safe to repeat."""
        self.kill()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._socket.close()
        if self._last_words is None:
            self._last_words = self.last_words()
            self._stderr.close()

    def _send_configuration(self) -> None:
        limits = (
            "timeout_seconds",
            "cpu_seconds",
            "memory_bytes",
            "total_memory_bytes",
            "processes",
            "open_files",
            "file_bytes",
            "tmp_bytes",
            "tmp_files",
            "output_bytes",
        )
        settings = {
            "limits": {name: getattr(self._config, name) for name in limits},
            "preload_modules": self._config.preload_modules,
            "seccomp": seccomp_filter(platform.machine()).hex(),
        }
        payload = json.dumps(settings).encode()
        self._send(struct.pack("!I", len(payload)) + payload, time.monotonic() + START_SECONDS)

    def _send(self, data: bytes, deadline: float) -> None:
        self._socket.settimeout(max(0.001, deadline - time.monotonic()))
        self._socket.sendall(data)

    def _receive(self, size: int, deadline: float) -> bytes:
        parts = []
        while size:
            self._socket.settimeout(max(0.001, deadline - time.monotonic()))
            part = self._socket.recv(size)
            if not part:
                raise EOFError("it closed its socket")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def _receive_frame(self, deadline: float) -> tuple[bytes, bytes]:
        header = self._receive(5, deadline)
        (size,) = struct.unpack("!I", header[1:])
        if size > self._config.output_bytes + _LARGEST_HEADER:
            raise ValueError(f"a frame of {size} bytes")
        return header[:1], self._receive(size, deadline)

    def _result(self, answer: bytes) -> ExecutionResult:
        line, _, output = answer.partition(b"\n")
        header = json.loads(line)
        exit_code, killed_for = int(header["exit_code"]), header["killed_for"]
        text = output.decode("utf-8", "replace")
        if header["truncated"]:
            text += f"\n[output truncated at {self._config.output_bytes} bytes]"
        error = None
        if killed_for == "time":
            error = f"killed: it ran longer than {self._config.timeout_seconds:g} s"
        elif killed_for == "memory":
            error = f"killed: its processes used more than {self._config.total_memory_bytes} bytes of memory"
        elif killed_for == "output":
            error = f"killed: it printed more than {self._config.output_bytes} bytes"
        elif exit_code < 0:
            error = f"killed by signal {-exit_code} ({signal.Signals(-exit_code).name})"
        return ExecutionResult(
            text, exit_code, killed_for == "time", bool(header["truncated"]), float(header["seconds"]), error
        )
