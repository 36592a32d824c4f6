"""One SGLang server: its process, its health and its weights.

``fleet`` creates Ray actors of ``SglangServer``.

    DEAD -> STARTING -> UNSYNCED -> SYNCED
      ^________|__________|________|    the process ended, was silent or did not finish a sync

Only a SYNCED server serves. Every process is a new *incarnation*: facts about the previous one,
such as its weights, do not hold for it.
"""

import asyncio
import logging
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from rl_loop.cluster.placement import exit_with_parent, free_address
from rl_loop.cluster.ray_session import local_directory
from rl_loop.engines.backend import EngineUnavailableError
from rl_loop.engines.sglang.client import SglangClient
from rl_loop.engines.sglang.python_environment import inherited_environment
from rl_loop.engines.sglang.server_command import Command

logger = logging.getLogger(__name__)

MAX_FAILURES = 5
"""Number of failed starts in sequence after which a server is given up."""
FIRST_BACK_OFF = 1.0
"""Seconds before the restart after the first failure. Each further failure doubles them."""
MAX_BACK_OFF = 60.0
"""Longest delay of a restart, in seconds."""
STOP_SECONDS = 10.0
"""Seconds within which the kernel must end a killed process."""
HEALTH_SECONDS = 60.0
"""Seconds between two health checks of a running server, and time limit of one check.

The limit is long because a busy machine responds slowly. The end of a process is noticed at once.
"""
LOG_BYTES = 2000
LOG_LINES = 3
"""Number of lines at the end of a server's log that an error quotes, within ``LOG_BYTES``."""


class ServerState(StrEnum):
    DEAD = "dead"  # no process, or a process that is being killed
    STARTING = "starting"  # not healthy yet
    UNSYNCED = "unsynced"  # healthy, without weights of the policy
    SYNCED = "synced"  # healthy, holds policy weights ``version``


@dataclass(frozen=True)
class ServerStatus:
    """State of a server at one moment."""

    url: str
    state: ServerState
    incarnation: int = 0
    """Number that is unique per process."""
    version: int | None = None
    """Version of the weights if SYNCED, else None."""
    fault: str = ""
    """Reason why the last process ended, if one ended."""
    given_up: bool = False
    """True if the server is not restarted: it failed too often, or a restart would fail, too."""

    @property
    def healthy(self) -> bool:
        return self.state in (ServerState.UNSYNCED, ServerState.SYNCED)


@dataclass(frozen=True)
class ServerFailure:
    """Reason why a process ended."""

    message: str
    is_permanent: bool = False
    """True if a restart would end in the same way. The message then gives a remedy."""


class SglangServer:
    """Supervisor of one server process, which it restarts.

    All methods run on one event loop. All of them except ``stop`` return at once.
    """

    def __init__(
        self,
        command: Command,
        env: dict[str, str],
        log: Path,
        start_seconds: float = 1200,
        health_seconds: float = HEALTH_SECONDS,
        memory_fault: Callable[[str], str | None] = lambda log: None,
        api_key: str | None = None,
    ) -> None:
        """Prepare a server. The first call of ``status`` starts it.

        Args:
            command: (host, port) -> argument vector of the process.
            env: environment variables in addition to those of this process.
            log: file for the output of the server.
            start_seconds: time limit for the process to become healthy.
            health_seconds: time between two health checks, and time limit of one.
            memory_fault: (output of a process) -> remedy if it ended because it had no GPU memory,
                else None.
            api_key: key that the server requires of its clients. None: no key.
        """
        self._command = command
        self._api_key = api_key
        self._memory_fault = memory_fault
        self._log = log
        self._start_seconds = start_seconds
        self._health_seconds = health_seconds

        self._directory = local_directory()
        self._environment = (
            inherited_environment() | {"GPTOSS_STORE_DIR": str(self._directory)} | env
        )
        self._store: Path | None = None
        """File for the rendezvous of the server's processes."""

        self._status = ServerStatus("", ServerState.DEAD)
        self._syncing = False
        self._may_start = asyncio.Event()
        self._may_start.set()
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0  # offset of the last process's output in the log
        self._supervisor: asyncio.Task[None] | None = None

    async def status(self) -> ServerStatus:
        """Return the state of the server. The first call starts it."""
        if self._supervisor is None:
            self._supervisor = asyncio.create_task(self._supervise())

        # The supervisor returns only after giving the server up. An exception in it is a bug of
        # this project. It is raised here, because no caller awaits the task.
        if self._supervisor.done() and not self._supervisor.cancelled():
            self._supervisor.result()

        # The process may have ended before the supervisor notices it.
        if self._status.healthy and not self._is_running():
            return replace(self._status, state=ServerState.DEAD, version=None)
        return self._status

    async def begin_sync(self, incarnation: int) -> bool:
        """Take the server out of service, because a sync changes its weights.

        Returns:
            False if ``incarnation`` is no longer running.
        """
        if not self._is_alive(incarnation):
            return False
        self._syncing = True  # a paused server does not pass health checks
        self._change(state=ServerState.UNSYNCED, version=None)
        return True

    async def end_sync(self, incarnation: int, version: int | None) -> None:
        """Return the server to service with weights ``version``.

        None means that its weights are unknown. Its process is then killed and restarted.
        """
        # A process that was started during the sync did not take part in it.
        if not self._is_alive(incarnation):
            return
        self._syncing = False
        if version is None:
            self._change(fault="a weight sync failed before its end")
            self._kill()
        else:
            self._change(state=ServerState.SYNCED, version=version)

    async def block_starts(self) -> None:
        """Start no process until ``allow_starts``, and kill one that is starting.

        The trainer needs its memory.
        """
        self._may_start.clear()
        if self._status.state is ServerState.STARTING:
            self._kill()

    async def allow_starts(self) -> None:
        """Allow starts again. A missing process starts at once."""
        self._may_start.set()

    async def stop(self) -> None:
        """End the process permanently."""
        if self._supervisor is not None:
            self._supervisor.cancel()
            with suppress(asyncio.CancelledError):
                await self._supervisor
        self._kill()

    def _is_alive(self, incarnation: int) -> bool:
        is_same = self._status.incarnation == incarnation
        return is_same and self._status.healthy and self._is_running()

    def _is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _change(self, **fields: Any) -> None:
        self._status = replace(self._status, **fields)

    async def _supervise(self) -> None:
        """Run processes in sequence, with growing delays, until the server is given up."""
        failures = 0
        was_healthy = False
        while True:
            await self._may_start.wait()
            fault = await self._run_once()
            self._kill()
            if not self._may_start.is_set() and not self._status.healthy:
                # block_starts ended it, or it ended during the hold. This is not a failed start.
                self._change(state=ServerState.DEAD, version=None, fault=fault.message)
                continue

            # A process that became healthy ends the series of failed starts.
            if self._status.healthy:
                failures = 0
                was_healthy = True
            failures += 1
            # A server that has started once may have failed for a passing reason, such as memory
            # that was not free yet.
            is_hopeless = fault.is_permanent and not was_healthy
            given_up = is_hopeless or failures >= MAX_FAILURES

            message = fault.message
            if not fault.is_permanent:
                # A reason that end_sync has set is more precise.
                message = f"{self._status.fault or message}{self._log_tail()}"
            self._change(state=ServerState.DEAD, version=None, fault=message, given_up=given_up)
            if given_up:
                logger.error(
                    "SGLang server %s failed and is not restarted: %s", self._status.url, message
                )
                return

            back_off = min(MAX_BACK_OFF, FIRST_BACK_OFF * 2.0 ** (failures - 1))
            logger.warning(
                "SGLang server %s failed and restarts in %.0f s: %s",
                self._status.url,
                back_off,
                message,
            )
            await asyncio.sleep(back_off)

    async def _run_once(self) -> ServerFailure:
        """Run a process until it fails. Return the reason."""
        # A new address for every process, because the previous process may still occupy its port.
        # Callers that identify servers by URL also see that this is another process.
        host, port = free_address()
        url = f"http://{host}:{port}"
        client = SglangClient(url, api_key=self._api_key)
        self._syncing = False
        self._process = None
        # The time is unique even if Ray restarts this actor, which would reset a counter.
        self._status = ServerStatus(url, ServerState.STARTING, incarnation=time.time_ns())

        try:
            # In a thread, because it waits until the GPU's free memory has settled.
            command = await asyncio.to_thread(self._command, host, port)
            if not self._may_start.is_set():
                return ServerFailure("paused while it started")
            with self._key_options() as options:
                self._process = self._start_process([*command, *options])
                fault = await self._wait_until_healthy(client, self._process)
            if fault is not None:
                return self._explain(fault)
            self._change(state=ServerState.UNSYNCED)
            return self._explain(await self._watch_health(client, self._process))
        except EngineUnavailableError as error:
            return ServerFailure(str(error), is_permanent=True)
        except OSError as error:
            return ServerFailure(str(error))
        finally:
            await client.close()

    @contextmanager
    def _key_options(self) -> Iterator[list[str]]:
        """Yield the options that give a server its key, while a file holds the key."""
        if self._api_key is None:
            yield []
            return
        # A command line is visible to every user of the machine, so it must not contain the key.
        # Only this user can read the file. A server reads it once, when it starts.
        with NamedTemporaryFile("w", prefix="gptoss-", suffix=".yaml") as file:
            # YAML would read some unquoted keys as numbers.
            file.write(f'api-key: "{self._api_key}"\n')
            file.flush()
            yield ["--config", file.name]

    def _explain(self, fault: str) -> ServerFailure:
        """Return the fault, with a remedy if the process ended because it had no GPU memory."""
        advice = self._memory_fault(self._read_output())
        if advice is None:
            return ServerFailure(fault)
        return ServerFailure(f"{advice} (log: {self._log})", is_permanent=True)

    def _start_process(self, command: list[str]) -> subprocess.Popen[bytes]:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        # The processes of a server are on one node. Other users could join a store on a port.
        self._store = self._directory / f"server-{uuid.uuid4().hex}"
        meeting = {"SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": f"file://{self._store}"}
        with open(self._log, "ab", opener=_open_private) as log:
            self._log_start = log.tell()
            return subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=meeting | self._environment,
                # In a separate process group, which _kill ends with all processes of SGLang.
                start_new_session=True,
                preexec_fn=_prepare_process,
            )

    async def _wait_until_healthy(
        self,
        client: SglangClient,
        process: subprocess.Popen[bytes],
    ) -> str | None:
        """Return None when the server is healthy, else the reason why it cannot become healthy."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._start_seconds
        while not await client.healthy(self._health_seconds):
            if process.poll() is not None:
                return f"the process exited with status {process.returncode} during its start"
            if loop.time() > deadline:
                return f"the server was not healthy within {self._start_seconds:.0f} seconds"
            await asyncio.sleep(min(1.0, self._health_seconds / 4))
        return None

    async def _watch_health(
        self,
        client: SglangClient,
        process: subprocess.Popen[bytes],
    ) -> str:
        """Check the server's health until it fails. Return the reason."""
        loop = asyncio.get_running_loop()
        checked_at = loop.time()
        # Polled often, because requests to a server that has ended fail at once.
        while process.poll() is None:
            await asyncio.sleep(min(0.2, self._health_seconds))
            if self._syncing or loop.time() < checked_at + self._health_seconds:
                continue

            # A sync may have begun, and paused the server, during the check.
            healthy = await client.healthy(self._health_seconds)
            if not healthy and not self._syncing:
                return f"no answer to a health check within {self._health_seconds:.0f} seconds"
            checked_at = loop.time()
        return f"the process exited with status {process.returncode}"

    def _kill(self) -> None:
        """Kill the process and all processes that it started."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            # A process within a call of the GPU's driver ends when the call returns.
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_SECONDS)
        if self._store is not None:
            self._store.unlink(missing_ok=True)

    def _log_tail(self) -> str:
        """Return the end of the log, formatted for an error message."""
        lines = self._read_output()[-LOG_BYTES:].strip().splitlines()[-LOG_LINES:]
        return f"; {self._log} ends with: {' | '.join(lines)}"

    def _read_output(self) -> str:
        """Return the output of the last process."""
        try:
            with self._log.open("rb") as log:
                log.seek(self._log_start)
                return log.read().decode(errors="replace")
        except OSError:
            return ""


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _prepare_process() -> None:
    """Prepare a server's process, between fork and exec."""
    exit_with_parent()
    # SGLang's processes unpickle data from Unix sockets that they create in /tmp.
    os.umask(0o077)
