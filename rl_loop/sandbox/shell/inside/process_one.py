"""Process 1 of a sandbox: answers the host's requests."""

import os
import signal
import socket
from typing import Any

from rl_loop.sandbox.inside.confinement import libc
from rl_loop.sandbox.shell.inside.commands import Commands, SandboxFailureError
from rl_loop.sandbox.shell.inside.files import ArchiveWriter, FilesError, write_archive
from rl_loop.sandbox.shell.inside.messages import Connection, PartWriter, SandboxSpec
from rl_loop.sandbox.shell.inside.mounts import SandboxRoot, build, hide_command_line

PR_SET_NAME = 15


class ProcessOne:
    """Builds the sandbox around the calling process, and serves it until the host disconnects."""

    def __init__(self, control: socket.socket) -> None:
        self._connection = Connection(control)
        # Signals without a handler do not reach process 1 of a namespace.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)

        fields, _ = self._connection.receive()
        self._spec = SandboxSpec(**fields)
        hide_command_line()
        libc.prctl(PR_SET_NAME, b"sandbox", 0, 0, 0)
        self._root: SandboxRoot = build(self._spec)
        self._commands = Commands(self._spec, self._root, control)

    def serve(self) -> None:
        """Answer requests. Raises EOFError when the host disconnects."""
        self._connection.send({"ready": True})
        while True:
            self._commands.wait_for_request()
            request, payload = self._connection.receive()
            try:
                result, output = self._answer(request, payload)
            except FilesError as error:
                result, output = {"refused": str(error)}, b""
            except SandboxFailureError as error:
                result, output = {"failed": str(error)}, b""
            except EOFError:
                raise
            except Exception as error:
                result, output = {"failed": f"{type(error).__name__}: {error}"}, b""
            self._connection.send(result, output)

    def _answer(self, request: dict[str, Any], payload: bytes) -> tuple[dict[str, Any], bytes]:
        action = request["action"]
        if action == "run":
            outcome, output = self._commands.run(request)
            return outcome.to_fields(), output
        if action == "usage":
            return self._usage(), b""
        if action == "end":
            self._commands.end_all()
            return {}, b""

        # Files do not change while they are written or read.
        self._commands.stop_all()
        try:
            if action == "put":
                write_archive(payload)
                return {}, b""
            return self._read_files(request), b""
        finally:
            self._commands.continue_all()

    def _read_files(self, request: dict[str, Any]) -> dict[str, Any]:
        send = PartWriter(self._connection).write
        limits = (request["max_bytes"], request["max_files"])
        writer = ArchiveWriter(self._root.upper, send, *limits)
        if request["action"] == "take":
            writer.add_regular_files(request["paths"])
        else:
            writer.add_layer()
        writer.close()
        return {"skipped": writer.skipped}

    def _usage(self) -> dict[str, Any]:
        disk = os.fstatvfs(self._root.upper)
        return {
            "processes": self._commands.count(),
            "memory_bytes": self._root.watch.memory_bytes(),
            "disk_bytes": (disk.f_blocks - disk.f_bfree) * disk.f_frsize,
            "disk_files": disk.f_files - disk.f_ffree,
        }


def main(control: socket.socket) -> None:
    """Run process 1. It never returns: when it exits, the kernel ends the whole sandbox."""
    try:
        try:
            process = ProcessOne(control)
        except EOFError:
            os._exit(0)
        except BaseException as error:
            Connection(control).send({"failed": f"{type(error).__name__}: {error}"})
            os._exit(1)
        process.serve()
    finally:
        os._exit(0)
