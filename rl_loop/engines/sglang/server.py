"""One SGLang server: its process, its health and whether it holds the policy. ``sglang_fleet`` makes Ray actors of it.

    DEAD -> STARTING -> STALE -> SYNCED
      ^________|__________|________|      the process ended, was silent or did not finish taking weights

Only a SYNCED server serves. A process that is started again is another *incarnation*: what was known about the one
before, such as its weights, does not hold for it."""

import asyncio
import logging
import os
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from rl_loop.cluster.placement import end_with_parent, free_address
from rl_loop.engines.sglang.client import SglangClient
from rl_loop.engines.sglang.config import Command

logger = logging.getLogger(__name__)

# starts that failed one after the other, after which a server is given up
MAX_FAILURES = 5
MAX_BACK_OFF = 60.0  # seconds


class ServerState(StrEnum):
    DEAD = "dead"  # no process, or one that is being killed
    STARTING = "starting"  # not healthy yet
    STALE = "stale"  # healthy, but its weights are not the policy
    SYNCED = "synced"  # healthy and holds policy weights ``version``


@dataclass(frozen=True)
class ServerStatus:
    """``incarnation`` is another for every process; ``version``: of the weights if SYNCED; ``fault``: how it ended."""

    url: str
    state: ServerState
    incarnation: int = 0
    version: int | None = None
    fault: str = ""
    given_up: bool = False

    @property
    def healthy(self) -> bool:
        return self.state in (ServerState.STALE, ServerState.SYNCED)


class SglangServer:
    """Keeps one server process alive. All methods run on one event loop and return at once, except ``stop``.

    ``env`` is added to this process's own; what the server prints goes to ``log``. ``start_seconds``: until
    then it must be healthy. ``health_seconds``: between two checks, and the time for one."""

    def __init__(
        self, command: Command, env: dict[str, str], log: Path, start_seconds: float = 1200, health_seconds: float = 30
    ) -> None:
        self._command, self._log = command, log
        own = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        self._environment = own | env
        self._start_seconds, self._health_seconds = start_seconds, health_seconds
        self._status = ServerStatus("", ServerState.DEAD)
        self._syncing = False
        self._process: subprocess.Popen[bytes] | None = None
        self._supervisor: asyncio.Task[None] | None = None

    async def status(self) -> ServerStatus:
        """The first call starts the server."""
        if self._supervisor is None:
            self._supervisor = asyncio.create_task(self._supervise())
        if self._supervisor.done() and not self._supervisor.cancelled():
            # It ends by itself only after giving the server up; an exception is a fault of ours, and nobody awaits it.
            self._supervisor.result()
        if self._status.healthy and not self._running():
            return replace(self._status, state=ServerState.DEAD, version=None)  # before the supervisor has noticed
        return self._status

    async def begin_sync(self, incarnation: int) -> bool:
        """From now on its weights are in doubt. False if it is no longer that incarnation."""
        if not self._is_alive(incarnation):
            return False
        self._syncing = True  # a paused server answers no health check
        self._change(state=ServerState.STALE, version=None)
        return True

    async def end_sync(self, incarnation: int, version: int | None) -> None:
        """It holds weights ``version``; None: nobody knows what it holds, and it is started anew."""
        if not self._is_alive(incarnation):
            return
        self._syncing = False
        if version is None:
            self._change(fault="a weight sync failed half-way")
            self._kill()
        else:
            self._change(state=ServerState.SYNCED, version=version)

    async def stop(self) -> None:
        if self._supervisor is not None:
            self._supervisor.cancel()
            with suppress(asyncio.CancelledError):
                await self._supervisor
        self._kill()

    def _is_alive(self, incarnation: int) -> bool:
        return self._status.healthy and self._status.incarnation == incarnation and self._running()

    def _running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _change(self, **fields: Any) -> None:
        self._status = replace(self._status, **fields)

    async def _supervise(self) -> None:
        failures = 0
        while True:
            fault = await self._one_incarnation()
            failures = 1 if self._status.healthy else failures + 1
            self._kill()
            fault = self._status.fault or fault
            given_up = failures >= MAX_FAILURES
            self._change(state=ServerState.DEAD, version=None, fault=f"{fault}{self._tail()}", given_up=given_up)
            if given_up:
                logger.error("SGLang server %s is given up: %s", self._status.url, self._status.fault)
                return

            back_off = min(MAX_BACK_OFF, 2.0 ** (failures - 1))
            logger.warning(
                "SGLang server %s failed and starts again in %.0f s: %s", self._status.url, back_off, self._status.fault
            )
            await asyncio.sleep(back_off)

    async def _one_incarnation(self) -> str:
        """Run a process until it fails; returns how it did."""
        host, port = free_address()
        url = f"http://{host}:{port}"
        client, command = SglangClient(url), self._command(host, port)
        self._syncing = False
        self._status = ServerStatus(url, ServerState.STARTING, time.time_ns())
        try:
            self._log.parent.mkdir(parents=True, exist_ok=True)
            with self._log.open("ab") as log:
                options: dict[str, Any] = {"stdout": log, "stderr": subprocess.STDOUT, "start_new_session": True}
                options |= {"env": self._environment, "preexec_fn": end_with_parent}
                self._process = subprocess.Popen(command, **options)
            deadline = asyncio.get_running_loop().time() + self._start_seconds
            while not await client.healthy(self._health_seconds):
                if not self._running():
                    return f"the process ended with status {self._process.returncode} while it started"
                if asyncio.get_running_loop().time() > deadline:
                    return f"not healthy within {self._start_seconds:.0f} seconds"
                await asyncio.sleep(min(1.0, self._health_seconds / 4))
            self._change(state=ServerState.STALE)
            return await self._until_failure(client)
        except OSError as error:
            return f"{command[0]}: {error}"
        finally:
            await client.close()

    async def _until_failure(self, client: SglangClient) -> str:
        loop = asyncio.get_running_loop()
        checked = loop.time()
        while self._running():
            await asyncio.sleep(min(0.2, self._health_seconds))
            if self._syncing or loop.time() < checked + self._health_seconds:
                continue
            if not await client.healthy(self._health_seconds) and not self._syncing:
                return f"no answer to a health check within {self._health_seconds:.0f} seconds"
            checked = loop.time()
        return f"the process ended with status {self._process.returncode if self._process else None}"

    def _kill(self) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _tail(self) -> str:
        """The end of the log, for people."""
        try:
            with self._log.open("rb") as log:
                log.seek(max(0, self._log.stat().st_size - 2000))
                lines = log.read().decode(errors="replace").strip().splitlines()[-3:]
        except OSError:
            return ""
        return f"; {self._log} ends with: {' | '.join(lines)}"
