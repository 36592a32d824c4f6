"""Host side of one shell sandbox."""

import asyncio
import contextlib
import io
import json
import os
import signal
import socket
import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO, Any

from rl_loop.sandbox.cgroup import SandboxCgroup
from rl_loop.sandbox.config import SandboxError
from rl_loop.sandbox.connection import ExecutionResult
from rl_loop.sandbox.shell.config import ShellLimits
from rl_loop.sandbox.shell.inside.messages import HEADER, SandboxSpec, encode

START_SECONDS = 60.0
GRACE_SECONDS = 40.0
"""Additional time, in seconds, before a sandbox counts as hung."""
FILES_SECONDS = 300.0
MAX_READ_BYTES = 16 << 20
MAX_READ_FILES = 10_000
MAX_ANSWER_BYTES = 1 << 28


@dataclass(frozen=True)
class CommandResult(ExecutionResult):
    """Result of one command. ``interpreter_ended`` means that the persistent shell ended."""

    killed_for: str | None = None
    """Limit that ended all processes of the sandbox: "time", "memory", "locks" or "output"."""
    working_directory: str = "/"
    """Working directory of the persistent shell."""
    new_shell: bool = False
    """True if a new persistent shell ran the command: the first one, or after an end."""
    processes: int = 0
    """Background processes that still run."""


@dataclass(frozen=True)
class SandboxUsage:
    """Resources that a sandbox uses."""

    processes: int
    memory_bytes: int
    """Memory of all processes except process 1, including kernel memory."""
    disk_bytes: int
    """Changed files."""
    disk_files: int


@dataclass(frozen=True)
class SandboxFile:
    """Contents of a file and its mode."""

    contents: bytes
    mode: int = 0o644


@dataclass(frozen=True)
class ChangedFiles:
    """Changed regular files of a sandbox."""

    files: dict[str, SandboxFile]
    """File by absolute path."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Reason why a file was left out, by path."""


class SandboxFilesError(Exception):
    """Files that could not be written or read because of what commands did in the sandbox."""


class ShellSandbox:
    """A running sandbox. ``ShellSandboxPool.open`` makes one. One call runs at a time.

    Every method raises SandboxError if the sandbox fails for a reason other than its commands.
    """

    def __init__(
        self, control: socket.socket, limits: ShellLimits, on_close: Callable[[], None]
    ) -> None:
        self.limits = limits
        self._control = control
        self._on_close = on_close
        self._process = -1
        self._cgroup: SandboxCgroup | None = None
        self._closed = False
        self._lock = asyncio.Lock()

    async def start(self, spec: SandboxSpec, cgroup_base: Path | None) -> None:
        """Build the sandbox. ``ShellSandboxPool.open`` calls it."""
        try:
            async with asyncio.timeout(START_SECONDS):
                self._process = await self._receive_process()
                if cgroup_base is not None:
                    self._join_cgroup(cgroup_base)
                await self._send(encode(spec.to_fields()))
                fields, _ = await self._receive()
        except TimeoutError:
            raise SandboxError("a shell sandbox did not start in time", "no sandbox") from None
        if "failed" in fields:
            raise SandboxError(f"a shell sandbox did not start: {fields['failed']}", "no sandbox")

    # ---- commands

    async def run(
        self,
        command: str,
        *,
        seconds: float | None = None,
        persistent: bool = False,
        working_directory: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> CommandResult:
        """Run one command with bash. A failing command does not raise an exception.

        At a limit of time, memory or output, all processes of the sandbox are killed, including
        background processes of earlier commands.

        Args:
            command: text for bash.
            seconds: maximum wall-clock time. Default: ``limits.command_seconds``.
            persistent: run it in the sandbox's persistent bash, which keeps variables, functions and
                the working directory. Otherwise in a new bash.
            working_directory: directory of a new bash. Default: that of the image.
            environment: further variables of a new bash.

        Returns:
            The result of the command.
        """
        seconds = self.limits.command_seconds if seconds is None else seconds
        fields, output = await self._call(
            seconds + GRACE_SECONDS,
            {
                "action": "run",
                # A lone surrogate cannot be encoded as UTF-8.
                "command": command.encode("utf-8", "replace").decode(),
                "seconds": seconds,
                "persistent": persistent,
                "working_directory": working_directory,
                "environment": dict(environment or {}),
            },
        )
        killed_for = fields["killed_for"]
        if killed_for is None and self._cgroup is not None and self._cgroup.killed_by_limit():
            killed_for = "memory"
        return CommandResult(
            output=output.decode("utf-8", "replace"),
            exit_code=int(fields["exit_code"]),
            error=self._reason(killed_for, seconds, fields),
            timed_out=killed_for == "time",
            truncated=fields["cut_bytes"] > 0,
            seconds=float(fields["seconds"]),
            interpreter_ended=bool(fields["shell_ended"]),
            killed_for=killed_for,
            working_directory=fields["working_directory"],
            new_shell=bool(fields["new_shell"]),
            processes=int(fields["processes"]),
        )

    def _reason(self, killed_for: str | None, seconds: float, fields: Any) -> str | None:
        limits = self.limits
        reasons = {
            "time": f"killed: it ran longer than {seconds:g} s",
            "memory": f"killed: more than {limits.memory_bytes / 1e9:g} GB of memory",
            "locks": "killed: too many locks of files",
            "output": f"killed: it printed more than {limits.printed_bytes} bytes",
        }
        if killed_for is not None:
            return reasons[killed_for]
        if fields["ended_before"] is not None:
            return f"background processes were {reasons[fields['ended_before']]}"
        if fields["exit_code"] < 0:
            return f"killed by signal {-fields['exit_code']}"
        return None

    async def end_processes(self) -> None:
        """Kill all processes, including the persistent shell."""
        await self._call(GRACE_SECONDS, {"action": "end"})

    async def usage(self) -> SandboxUsage:
        """Return the resources in use."""
        fields, _ = await self._call(GRACE_SECONDS, {"action": "usage"})
        return SandboxUsage(**fields)

    # ---- files

    async def write_files(self, files: Mapping[str, SandboxFile | bytes]) -> None:
        """Write files by absolute path. Existing files are replaced.

        Raises:
            SandboxFilesError: if a file cannot be written, for example because the disk is full.
        """
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
            for path, file in files.items():
                content = file if isinstance(file, SandboxFile) else SandboxFile(file)
                member = tarfile.TarInfo(str(PurePosixPath("/", path)).lstrip("/"))
                member.size, member.mode = len(content.contents), content.mode
                archive.addfile(member, io.BytesIO(content.contents))
        await self._call(FILES_SECONDS, {"action": "put"}, buffer.getvalue())

    async def read_changed_files(
        self, paths: Sequence[str], max_bytes: int = MAX_READ_BYTES, max_files: int = MAX_READ_FILES
    ) -> ChangedFiles:
        """Return the changed regular files at and below some paths.

        Links, pipes and devices are left out, and so are files behind a link. ``skipped`` names
        files above the limits. A grader must check it.

        Args:
            paths: absolute paths.
            max_bytes: maximum size of all files.
            max_files: maximum number of files.
        """
        buffer = io.BytesIO()
        request = {
            "action": "take", "paths": list(paths), "max_bytes": max_bytes, "max_files": max_files
        }  # fmt: skip
        fields, _ = await self._call(FILES_SECONDS, request, parts=buffer)
        buffer.seek(0)
        files: dict[str, SandboxFile] = {}
        with tarfile.open(fileobj=buffer, mode="r:") as archive:
            for member in archive:
                content = archive.extractfile(member)
                if content is not None:
                    files[f"/{member.name}"] = SandboxFile(content.read(), member.mode)
        return ChangedFiles(files, fields["skipped"])

    async def write_layer(self, target: IO[bytes]) -> None:
        """Write all changed files as a layer of an OCI image. ``ShellSandboxPool.snapshot`` uses it.

        Processes are stopped meanwhile. /dev/shm and processes are not a part of the layer.

        Raises:
            SandboxFilesError: if the files exceed a limit.
        """
        limits = {"max_bytes": self.limits.disk_bytes, "max_files": self.limits.disk_files}
        await self._call(FILES_SECONDS, {"action": "snapshot", **limits}, parts=target)

    # ---- end

    async def close(self) -> None:
        """End the sandbox and all its processes. May be called again."""
        if self._closed:
            return
        self._closed = True
        try:
            # A call of another task ends with an error.
            with contextlib.suppress(OSError):
                self._control.shutdown(socket.SHUT_RDWR)
            if self._process >= 0:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._process, signal.SIGKILL)
                with contextlib.suppress(TimeoutError):
                    await _wait_readable(self._process, GRACE_SECONDS)
        finally:
            self._control.close()
            if self._process >= 0:
                os.close(self._process)
            if self._cgroup is not None:
                self._cgroup.remove()
            self._on_close()

    async def __aenter__(self) -> "ShellSandbox":
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    # ---- messages

    async def _call(
        self,
        seconds: float,
        request: dict[str, Any],
        payload: bytes = b"",
        parts: IO[bytes] | None = None,
    ) -> tuple[dict[str, Any], bytes]:
        """Send a request and return the result. Raises SandboxError or SandboxFilesError."""
        async with self._lock:
            if self._closed:
                raise SandboxError("the shell sandbox was closed", "closed")
            try:
                async with asyncio.timeout(seconds):
                    await self._send(encode(request, payload))
                    while True:
                        fields, output = await self._receive()
                        if "part" not in fields:
                            break
                        if parts is not None:
                            parts.write(output)
            except TimeoutError:
                await self.close()
                raise SandboxError(
                    f"the shell sandbox did not answer within {seconds:g} s", "server hung"
                ) from None
            except BaseException:
                # The answer of an interrupted call would be read as that of the next one.
                await self.close()
                raise
        if "refused" in fields:
            raise SandboxFilesError(fields["refused"])
        if "failed" in fields:
            await self.close()
            raise SandboxError(f"the shell sandbox failed: {fields['failed']}", "set-up of a call")
        return fields, output

    async def _send(self, message: bytes) -> None:
        try:
            await asyncio.get_running_loop().sock_sendall(self._control, message)
        except OSError as error:
            raise SandboxError(f"the shell sandbox exited: {error}", "server died") from error

    async def _receive(self) -> tuple[dict[str, Any], bytes]:
        size, payload_size = HEADER.unpack(await self._read(HEADER.size))
        if size + payload_size > MAX_ANSWER_BYTES:
            raise SandboxError("the shell sandbox sent a message that is too long", "server died")
        return json.loads(await self._read(size)), bytes(await self._read(payload_size))

    async def _read(self, size: int) -> bytearray:
        loop, data = asyncio.get_running_loop(), bytearray()
        while len(data) < size:
            try:
                part = await loop.sock_recv(self._control, min(size - len(data), 1 << 20))
            except OSError as error:
                raise SandboxError(f"the shell sandbox exited: {error}", "server died") from error
            if not part:
                raise SandboxError("process 1 of the shell sandbox exited", "server died")
            data += part
        return data

    async def _receive_process(self) -> int:
        """Return the process descriptor of process 1, which the fork server sends."""
        await _wait_readable(self._control.fileno(), START_SECONDS)
        first, descriptors, _, _ = socket.recv_fds(self._control, 1, 1)
        if descriptors:
            return descriptors[0]
        if not first:
            raise SandboxError("the fork server of shell sandboxes exited", "no sandbox")
        # An error in place of the process.
        rest = await self._read(HEADER.size - 1)
        size, _ = HEADER.unpack(bytes(first) + rest)
        reason = json.loads(await self._read(size))["failed"]
        raise SandboxError(f"a shell sandbox did not start: {reason}", "no sandbox")

    def _join_cgroup(self, base: Path) -> None:
        with open(f"/proc/self/fdinfo/{self._process}") as file:
            lines = dict(line.split(":", 1) for line in file.read().splitlines())
        try:
            self._cgroup = SandboxCgroup(base)
            memory = self.limits.memory_bytes + self.limits.disk_bytes
            self._cgroup.admit(int(lines["Pid"]), memory, self.limits.processes)
        except OSError as error:
            raise SandboxError(f"cgroup of a shell sandbox: {error}", "no sandbox") from error


async def _wait_readable(descriptor: int, seconds: float) -> None:
    """Wait until a descriptor is readable. A process descriptor is when its process has ended."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def set_ready() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(descriptor, set_ready)
    try:
        async with asyncio.timeout(seconds):
            await ready
    finally:
        loop.remove_reader(descriptor)
