"""Pool of shell sandboxes in one process."""

import asyncio
import logging
import os
import platform
import socket
import tempfile
import time
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Self

from rl_loop.sandbox.cgroup import find_base
from rl_loop.sandbox.config import SandboxError, SandboxUnavailableError
from rl_loop.sandbox.connection import SOCKET_BUFFER_FILE
from rl_loop.sandbox.isolation import hints
from rl_loop.sandbox.seccomp import SHELL_POLICY, seccomp_filter
from rl_loop.sandbox.shell.config import ShellLimits, ShellSandboxConfig
from rl_loop.sandbox.shell.fork_server import ForkServer
from rl_loop.sandbox.shell.images import HOST_IMAGE, Image, ImageStore
from rl_loop.sandbox.shell.inside.messages import SandboxSpec
from rl_loop.sandbox.shell.sandbox import ShellSandbox

logger = logging.getLogger(__name__)


class ShellSandboxPool:
    """Opens shell sandboxes, up to ``config.max_sandboxes`` at a time.

    Use it as ``async with ShellSandboxPool(config) as pool``, on one event loop. Sandboxes end
    with this process, even if it is killed.
    """

    def __init__(self, config: ShellSandboxConfig | None = None) -> None:
        self.config = config or ShellSandboxConfig()
        self._store: ImageStore | None = None
        self._server: ForkServer | None = None
        self._slots = asyncio.Semaphore(self.config.max_sandboxes)
        self._cgroup_base: Path | None = None
        self._filter = ""
        self._images: dict[str, Image] = {}
        self._loading = asyncio.Lock()
        self._next_sandbox = count()
        self._open: set[ShellSandbox] = set()
        self._snapshots: list[str] = []

    @property
    def store(self) -> ImageStore:
        """Store of images. Raises RuntimeError before ``start``."""
        if self._store is None:
            raise RuntimeError("the shell sandboxes are not started. Call start()")
        return self._store

    async def start(self) -> None:
        """Start the fork server.

        Raises:
            SandboxUnavailableError: if it does not start.
            ImageError: if the image store cannot be used.
        """
        if self._store is None:
            self._filter = seccomp_filter(platform.machine(), SHELL_POLICY).hex()
            self._cgroup_base = find_base()
            self._store = ImageStore(self.config.store)
            self._server = await asyncio.to_thread(ForkServer, self._store.folder)

    async def load(self, source: str | Path) -> Image:
        """Return an image. See ``ImageStore.load``. Each source is read once per process."""
        name = str(source)
        async with self._loading:
            if name not in self._images:
                self._images[name] = await asyncio.to_thread(self.store.load, source)
        return self._images[name]

    async def open(
        self,
        image: Image,
        *,
        limits: ShellLimits | None = None,
        environment: Mapping[str, str] | None = None,
        working_directory: str | None = None,
    ) -> ShellSandbox:
        """Start a sandbox. It waits while ``config.max_sandboxes`` sandboxes are open.

        Args:
            image: file system.
            limits: limits of the sandbox, instead of those of the configuration.
            environment: further variables of all commands.
            working_directory: directory of commands. Default: that of the image.

        Raises:
            SandboxError: if it does not start.
        """
        limits = limits or self.config.limits
        await self._slots.acquire()
        here, there = socket.socketpair()
        here.setblocking(False)
        sandbox = ShellSandbox(here, limits, lambda: self._forget(sandbox))
        self._open.add(sandbox)
        try:
            server = await self._live_server()
            try:
                server.start(there)
            except OSError as error:
                reason = f"the fork server of shell sandboxes failed: {error}"
                raise SandboxError(reason, "no sandbox") from error
            finally:
                there.close()
            spec = self._spec(server, image, limits, environment, working_directory)
            await sandbox.start(spec, self._cgroup_base)
        except BaseException:
            there.close()
            await sandbox.close()
            raise
        return sandbox

    async def snapshot(self, sandbox: ShellSandbox) -> str:
        """Store the changed files of a sandbox as a temporary layer, and return its name.

        ``image.with_layer(name)`` opens sandboxes with these files. ``close`` deletes the layer, and
        ``store.delete_snapshot(name)`` deletes it earlier.

        Raises:
            SandboxFilesError: if the changed files exceed a limit of size, number or nesting.
        """
        with self.store.temporary_file() as archive:
            await sandbox.write_layer(archive)
            archive.seek(0)
            layer = await asyncio.to_thread(self.store.add_snapshot, archive)
        self._snapshots.append(layer)
        return layer

    async def close(self) -> None:
        """End all sandboxes and the server. May be called again."""
        await asyncio.gather(*(sandbox.close() for sandbox in list(self._open)))
        if self._server is not None:
            await asyncio.to_thread(self._server.close)
        for layer in self._snapshots:
            await asyncio.to_thread(self.store.delete_snapshot, layer)
        self._snapshots.clear()
        self._server = self._store = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    def _forget(self, sandbox: ShellSandbox) -> None:
        self._open.discard(sandbox)
        self._slots.release()

    async def _live_server(self) -> ForkServer:
        """Return the server. A new one replaces a server that has ended."""
        if self._server is None or self._store is None:
            raise SandboxError("the shell sandboxes were closed", "closed")
        if not self._server.is_alive():
            logger.warning("the fork server of shell sandboxes was lost; replacing it")
            self._server.close()
            try:
                self._server = ForkServer(self._store.folder)
            except (SandboxUnavailableError, OSError) as error:
                raise SandboxError(str(error), "no sandbox") from error
        return self._server

    def _spec(
        self,
        server: ForkServer,
        image: Image,
        limits: ShellLimits,
        environment: Mapping[str, str] | None,
        working_directory: str | None,
    ) -> SandboxSpec:
        return SandboxSpec(
            uid=server.uid,
            gid=server.gid,
            layers=list(image.layers),
            disk_bytes=limits.disk_bytes,
            disk_files=limits.disk_files,
            memory_bytes=limits.memory_bytes,
            address_space_bytes=limits.address_space_bytes,
            processes=limits.processes,
            output_bytes=limits.output_bytes,
            printed_bytes=limits.printed_bytes,
            cpus=self._processors(limits.cpus),
            environment={**image.environment, **(environment or {})},
            working_directory=working_directory or image.working_directory,
            seccomp=self._filter,
            socket_buffer_bytes=int(SOCKET_BUFFER_FILE.read_text()),
        )

    def _processors(self, wanted: int | None) -> list[int] | None:
        """Return processors for the next sandbox, in turn."""
        allowed = sorted(os.sched_getaffinity(0))
        if wanted is None or wanted >= len(allowed):
            return None
        first = next(self._next_sandbox) * wanted
        return [allowed[(first + index) % len(allowed)] for index in range(wanted)]


async def check_shell_sandboxes(config: ShellSandboxConfig | None = None) -> float:
    """Start a sandbox and run a command, to check that this machine supports shell sandboxes.

    Without a configuration, the image is stored in a temporary directory.

    Returns:
        Seconds that the start of the sandbox took.

    Raises:
        SandboxUnavailableError: if it fails, with the reason and a remedy.
        ImageError: if the image store cannot be used.
    """
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        config = config or ShellSandboxConfig(store=Path(folder))
        try:
            async with ShellSandboxPool(config) as pool:
                image = await pool.load(HOST_IMAGE)
                began = time.monotonic()
                async with await pool.open(image) as sandbox:
                    seconds = time.monotonic() - began
                    command = "id -u; ls /proc/1/fd 2>&1 | wc -l; touch /new && ls /new"
                    result = await sandbox.run(command, seconds=20.0)
        except SandboxUnavailableError:
            raise
        except SandboxError as error:
            raise SandboxUnavailableError("; ".join([str(error), *hints()])) from error
    expected = "0\n1\n/new\n"
    if result.output != expected:
        raise SandboxUnavailableError(
            f"a command in a shell sandbox should print {expected!r}, but printed {result.output!r}"
        )
    return seconds
