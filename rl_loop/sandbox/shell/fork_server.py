"""Host side of the fork server, which starts the sandboxes."""

import contextlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

from rl_loop.sandbox.config import SandboxUnavailableError
from rl_loop.sandbox.isolation import hints

SANDBOX_FOLDER = Path(__file__).parents[1]
START_SECONDS = 60.0

# The server imports only modules of the standard library and of the two packages "inside". Other
# packages of the same name would import pydantic, and their memory would be a part of every sandbox.
BOOTSTRAP = """
import sys, types
for name, folder in {packages!r}.items():
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__ = [folder]
from rl_loop.sandbox.shell.inside.server import main
main()
"""


class ForkServer:
    """Process that starts sandboxes. All of them end when it ends."""

    def __init__(self, store: Path) -> None:
        """Start the process.

        Args:
            store: folder of the image store.

        Raises:
            SandboxUnavailableError: if it does not start.
        """
        self._channel, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.settimeout(START_SECONDS)
        packages = {
            "rl_loop": str(SANDBOX_FOLDER.parent),
            "rl_loop.sandbox": str(SANDBOX_FOLDER),
            "rl_loop.sandbox.shell": str(SANDBOX_FOLDER / "shell"),
        }
        owner, folder = os.pidfd_open(os.getpid()), os.open(store, os.O_PATH | os.O_DIRECTORY)
        inherited = (there.fileno(), owner, folder)
        try:
            self.process = subprocess.Popen(
                [
                    _interpreter(),
                    *("-I", "-S", "-c", BOOTSTRAP.format(packages=packages)),
                    *map(str, inherited),
                ],
                cwd="/",
                env={},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=inherited,
                # Ctrl-C in the terminal is for the owner, who closes the sandboxes.
                start_new_session=True,
            )
        finally:
            there.close()
            os.close(owner)
            os.close(folder)
        try:
            user = json.loads(self._channel.recv(256) or b"null")
            self.uid, self.gid = int(user["uid"]), int(user["gid"])
        except (OSError, TypeError, ValueError) as error:
            reason = f"the fork server of shell sandboxes did not start: {self.close() or error}"
            raise SandboxUnavailableError("; ".join([reason, *hints()])) from error

    def is_alive(self) -> bool:
        return self.process.poll() is None

    def start(self, control: socket.socket) -> None:
        """Start process 1 of a sandbox, with this end of its control socket.

        Raises:
            OSError: if the server has ended or does not read.
        """
        socket.send_fds(self._channel, [b"start"], [control.fileno()])

    def close(self) -> str:
        """Kill the server, and so all sandboxes. May be called again.

        Returns:
            The end of its standard error.
        """
        self._channel.close()
        self.process.kill()
        self.process.wait()
        assert self.process.stderr is not None
        if self.process.stderr.closed:
            return ""
        with self.process.stderr as errors, contextlib.suppress(OSError):
            return errors.read().decode("utf-8", "replace").strip()[-500:]
        return ""


def _interpreter() -> str:
    """Return the base installation of the running Python, which needs no other packages."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    path = Path(sys.base_prefix, "bin", version)
    return str(path if path.exists() else Path(sys.executable).resolve())
