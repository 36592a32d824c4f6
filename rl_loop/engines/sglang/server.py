"""One SGLang server: its process, its health and whether it holds the policy.

``fleet`` makes Ray actors of ``SglangServer``.

    DEAD -> STARTING -> STALE -> SYNCED
      ^________|__________|________|    the process ended, was silent or did not finish a sync

Only a SYNCED server serves. A process that is started again is another *incarnation*: what was
known about the one before, such as its weights, does not hold for it.
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

from rl_loop.cluster.placement import end_with_parent, free_address
from rl_loop.cluster.ray_session import local_directory
from rl_loop.engines.backend import EngineUnavailable
from rl_loop.engines.sglang.client import SglangClient
from rl_loop.engines.sglang.config import Command, inherited_environment

logger = logging.getLogger(__name__)

MAX_FAILURES = 5
"""Starts that failed one after the other, after which a server is given up."""
MAX_BACK_OFF = 60.0
"""Longest pause in seconds before another start; the pause doubles with each failure."""
STOP_SECONDS = 10.0
"""How long the kernel may take to end a killed process."""
HEALTH_SECONDS = 60.0
"""Time between two health checks of a running server, and time limit of one. A busy machine is slow
to answer; a process that ends is noticed at once."""
LOG_BYTES = 2000
LOG_LINES = 3
"""How much of the end of a server's log an error quotes."""


class ServerState(StrEnum):
    DEAD = "dead"  # no process, or one that is being killed
    STARTING = "starting"  # not healthy yet
    STALE = "stale"  # healthy, but its weights are not the policy
    SYNCED = "synced"  # healthy and holds policy weights ``version``


@dataclass(frozen=True)
class ServerStatus:
    """What is known of a server at one moment."""

    url: str
    state: ServerState
    incarnation: int = 0
    """Another one for every process."""
    version: int | None = None
    """Of the weights, if SYNCED."""
    fault: str = ""
    """How the last process ended, if one did."""
    given_up: bool = False
    """Whether it is not started again: it failed too often, or another start would fail too."""

    @property
    def healthy(self) -> bool:
        return self.state in (ServerState.STALE, ServerState.SYNCED)


@dataclass(frozen=True)
class Fault:
    """How a process ended."""

    message: str
    is_lasting: bool = False
    """Whether another start would end the same way; the message then says what to change."""


class SglangServer:
    """Keeps one server process alive.

    All methods run on one event loop and return at once, except ``stop``.
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
        """Prepare a server; the first call of ``status`` starts it.

        Args:
            command: (host, port) -> the argument vector of the process.
            env: environment variables besides those of this process.
            log: file that gets what the server prints.
            start_seconds: the process must be healthy within this time.
            health_seconds: time between two health checks, and longest that one may take.
            memory_fault: (what a process printed) -> what to change, if it ended for want of GPU
                memory.
            api_key: key that the server asks its clients for; None asks for none.
        """
        self._command = command
        self._api_key = api_key
        self._memory_fault = memory_fault
        self._log = log
        self._start_seconds = start_seconds
        self._health_seconds = health_seconds

        self._directory = local_directory()
        self._environment = inherited_environment() | {"GPTOSS_STORES": str(self._directory)} | env
        self._store: Path | None = None
        """File in which the processes of the server meet."""

        self._status = ServerStatus("", ServerState.DEAD)
        self._syncing = False
        self._may_start = asyncio.Event()
        self._may_start.set()
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0  # where the log of the last process begins
        self._supervisor: asyncio.Task[None] | None = None

    async def status(self) -> ServerStatus:
        """Return the state of the server. The first call starts it."""
        if self._supervisor is None:
            self._supervisor = asyncio.create_task(self._supervise())

        # The supervisor ends by itself only after giving the server up. An exception in it is a
        # fault of ours, and since nobody awaits the task it is raised here.
        if self._supervisor.done() and not self._supervisor.cancelled():
            self._supervisor.result()

        # The process may have ended and the supervisor not have noticed yet.
        if self._status.healthy and not self._is_running():
            return replace(self._status, state=ServerState.DEAD, version=None)
        return self._status

    async def begin_sync(self, incarnation: int) -> bool:
        """Take the server out of service: from now on its weights are in doubt.

        Returns False if it is no longer that incarnation.
        """
        if not self._is_alive(incarnation):
            return False
        self._syncing = True  # a paused server answers no health check
        self._change(state=ServerState.STALE, version=None)
        return True

    async def end_sync(self, incarnation: int, version: int | None) -> None:
        """Put the server back into service with weights ``version``.

        None: nobody knows what it holds, and its process is started anew.
        """
        # A process that was started since then has never taken part in the sync.
        if not self._is_alive(incarnation):
            return
        self._syncing = False
        if version is None:
            self._change(fault="a weight sync failed half-way")
            self._kill()
        else:
            self._change(state=ServerState.SYNCED, version=version)

    async def hold_starts(self) -> None:
        """Start no process until ``allow_starts``, and end one that is starting: its memory is
        the trainer's now."""
        self._may_start.clear()
        if self._status.state is ServerState.STARTING:
            self._kill()

    async def allow_starts(self) -> None:
        """Start processes again, at once where one is missing."""
        self._may_start.set()

    async def stop(self) -> None:
        """End the process for good."""
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
        """Run one process after another, with growing pauses, until the server is given up."""
        failures = 0
        was_healthy = False
        while True:
            await self._may_start.wait()
            fault = await self._run_once()
            self._kill()
            if not self._may_start.is_set() and not self._status.healthy:
                # It was ended by hold_starts, or did not survive it: that says nothing of the next.
                self._change(state=ServerState.DEAD, version=None, fault=fault.message)
                continue

            # A process that became healthy ends the series of failed starts.
            if self._status.healthy:
                failures = 0
                was_healthy = True
            failures += 1
            # What once started may only have met a bad moment, such as memory that was not free yet.
            is_hopeless = fault.is_lasting and not was_healthy
            given_up = is_hopeless or failures >= MAX_FAILURES

            message = fault.message
            if not fault.is_lasting:
                # end_sync knows better why it ended
                message = f"{self._status.fault or message}{self._log_tail()}"
            self._change(state=ServerState.DEAD, version=None, fault=message, given_up=given_up)
            if given_up:
                logger.error("SGLang server %s is given up: %s", self._status.url, message)
                return

            back_off = min(MAX_BACK_OFF, 2.0 ** (failures - 1))
            logger.warning(
                "SGLang server %s failed and starts again in %.0f s: %s",
                self._status.url,
                back_off,
                message,
            )
            await asyncio.sleep(back_off)

    async def _run_once(self) -> Fault:
        """Run a process until it fails; return how it did."""
        # A new address every time: the old port may still be taken by what is being killed, and
        # whoever knows servers by their URL sees that this is another one.
        host, port = free_address()
        url = f"http://{host}:{port}"
        client = SglangClient(url, api_key=self._api_key)
        self._syncing = False
        self._process = None
        self._status = ServerStatus(url, ServerState.STARTING, incarnation=time.time_ns())

        try:
            # In a thread, because it looks at the GPU's memory, perhaps for a while.
            command = await asyncio.to_thread(self._command, host, port)
            if not self._may_start.is_set():
                return Fault("held while it started")
            with self._key_options() as options:
                self._process = self._start_process([*command, *options])
                fault = await self._wait_until_healthy(client, self._process)
            if fault is not None:
                return self._explain(fault)
            self._change(state=ServerState.STALE)
            return self._explain(await self._watch_health(client, self._process))
        except EngineUnavailable as error:
            return Fault(str(error), is_lasting=True)
        except OSError as error:
            return Fault(str(error))
        finally:
            await client.close()

    @contextmanager
    def _key_options(self) -> Iterator[list[str]]:
        """Yield the options that give a server its key, while a file holds the key.

        The command line of a process is visible to every user of the machine."""
        if self._api_key is None:
            yield []
            return
        # Only this user can read it. A server reads it once, when it starts.
        with NamedTemporaryFile("w", prefix="gptoss-", suffix=".yaml") as file:
            # YAML would read some unquoted keys as numbers.
            file.write(f'api-key: "{self._api_key}"\n')
            file.flush()
            yield ["--config", file.name]

    def _explain(self, fault: str) -> Fault:
        """Say of a process that ended for want of memory what to change."""
        advice = self._memory_fault(self._printed())
        if advice is None:
            return Fault(fault)
        return Fault(f"{advice} (its log: {self._log})", is_lasting=True)

    def _start_process(self, command: list[str]) -> subprocess.Popen[bytes]:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        # The processes of a server are on one node. A store on a port would let others join them.
        self._store = self._directory / f"server-{uuid.uuid4().hex}"
        meeting = {"SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": f"file://{self._store}"}
        with open(self._log, "ab", opener=_open_private) as log:
            self._log_start = log.tell()
            return subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=meeting | self._environment,
                # A process group of its own, which _kill ends with all of SGLang's helpers.
                start_new_session=True,
                preexec_fn=_prepare_process,
            )

    async def _wait_until_healthy(
        self,
        client: SglangClient,
        process: subprocess.Popen[bytes],
    ) -> str | None:
        """Return None once the server is healthy, or why it will not be."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._start_seconds
        while not await client.healthy(self._health_seconds):
            if process.poll() is not None:
                return f"the process ended with status {process.returncode} while it started"
            if loop.time() > deadline:
                return f"not healthy within {self._start_seconds:.0f} seconds"
            await asyncio.sleep(min(1.0, self._health_seconds / 4))
        return None

    async def _watch_health(
        self,
        client: SglangClient,
        process: subprocess.Popen[bytes],
    ) -> str:
        """Check the server's health for as long as it lasts; return what ended it."""
        loop = asyncio.get_running_loop()
        checked_at = loop.time()
        while process.poll() is None:
            await asyncio.sleep(min(0.2, self._health_seconds))
            if self._syncing or loop.time() < checked_at + self._health_seconds:
                continue

            # A sync may have begun, and paused the server, while it was asked.
            healthy = await client.healthy(self._health_seconds)
            if not healthy and not self._syncing:
                return f"no answer to a health check within {self._health_seconds:.0f} seconds"
            checked_at = loop.time()
        return f"the process ended with status {process.returncode}"

    def _kill(self) -> None:
        """End the process and all that it started."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            # A process in the middle of a call of the GPU's driver ends when that returns.
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_SECONDS)
        if self._store is not None:
            self._store.unlink(missing_ok=True)

    def _log_tail(self) -> str:
        """Quote the end of the log, for the person who reads the error."""
        lines = self._printed()[-LOG_BYTES:].strip().splitlines()[-LOG_LINES:]
        return f"; {self._log} ends with: {' | '.join(lines)}"

    def _printed(self) -> str:
        """Return what the last process printed."""
        try:
            with self._log.open("rb") as log:
                log.seek(self._log_start)
                return log.read().decode(errors="replace")
        except OSError:
            return ""


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _prepare_process() -> None:
    """Called in a server's process between fork and exec."""
    end_with_parent()
    # SGLang's processes unpickle what comes through the Unix sockets that they make in /tmp.
    os.umask(0o077)
