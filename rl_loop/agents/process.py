"""An agent's process, as a rollout worker sees it."""

import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import rl_loop
from rl_loop.agents.host import READY
from rl_loop.environments.base import ExternalAgent
from rl_loop.gateway.session import ConversationSession
from rl_loop.infrastructure import InfrastructureError
from rl_loop.rollout.episode_clock import OutOfTimeError

START_SECONDS = 300.0
"""Importing an agent's libraries takes a while on a busy machine."""
CANCEL_SECONDS = 5.0
"""Time for an episode to end after its time limit. After that its process gets no new episodes."""
MAX_LINE_BYTES = 256 << 20
"""Largest number of bytes that an agent may return."""

HOST = (
    "import os, sys; sys.path.append(os.environ['GPTOSS_HOST_PATH']);"
    " from rl_loop.agents.host import main; main()"
)
"""Code that the interpreter runs. Packages of the agent come before this project's path."""

logger = logging.getLogger(__name__)


class ProcessEndedError(InfrastructureError):
    """The process ended while the episode ran in it."""


def build_environment_variables(agent: ExternalAgent) -> dict[str, str]:
    """Return the environment variables that set the import path of an agent's process."""
    variables = {"GPTOSS_HOST_PATH": str(Path(rl_loop.__file__).parents[1])}
    if agent.python is None:
        # The import path of this process, including additions since its start.
        variables["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    return variables


class AgentProcess:
    """One process in which episodes of one function run, many at a time."""

    def __init__(self, agent: ExternalAgent) -> None:
        self.function = agent.function
        self._agent = agent
        self.is_usable = True
        """True if it may get further episodes."""
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._calls: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._numbers = count()
        self._started = asyncio.Event()
        self._failure: str | None = None
        """Why it never became ready, or how it ended."""

    @property
    def has_ended(self) -> bool:
        """True if the process was started and has ended."""
        return self._reader is not None and self._reader.done()

    async def start(self) -> None:
        """Start it and wait until the function is imported. Raises InfrastructureError."""
        agent = self._agent
        try:
            self._process = await asyncio.create_subprocess_exec(
                agent.python or sys.executable,
                "-c",
                HOST,
                agent.function,
                str(agent.memory_bytes),
                str(agent.max_concurrent_episodes),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                # asyncio's default limit of a line is 64 KiB. Longer ones raise a ValueError.
                limit=MAX_LINE_BYTES,
                # Ctrl-C in the user's terminal is for the run, which ends its agents.
                start_new_session=True,
                env=os.environ | build_environment_variables(agent),
            )
        except OSError as error:
            raise self._error(f"its process did not start: {error}") from error

        self._reader = asyncio.create_task(self._read())
        try:
            await asyncio.wait_for(self._started.wait(), START_SECONDS)
        except TimeoutError:
            self.kill()
            raise self._error(f"its process did not import it within {START_SECONDS:g} s") from None
        if self._failure is not None:
            raise self._error(self._failure)

    async def run(
        self, agent: ExternalAgent, base_url: str, session: ConversationSession
    ) -> object:
        """Run one episode and return the function's return value.

        Raises:
            InfrastructureError: the function raised an error.
            OutOfTimeError: the time of the session is over and the function does not return.
        """
        number = next(self._numbers)
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._calls[number] = answer

        try:
            self._send(
                {
                    "call": number,
                    "task": agent.task,
                    "base_url": base_url,
                    "api_key": session.api_key,
                }
            )
            await self._wait(answer, session)
            if not answer.done():
                await self._cancel(number, answer, session)
        finally:
            del self._calls[number]
            if answer.done() and not answer.cancelled():
                # asyncio warns of exceptions that no code has read.
                answer.exception()
            else:
                # The episode was cancelled, so no caller waits for its result.
                with suppress(InfrastructureError):
                    self._send({"cancel": number})

            # A process that is given up ends with its last episode.
            if not self.is_usable and not self._calls:
                self.kill()

        line = answer.result()
        if "given" in line:
            return line["given"]
        reason = f"{self.function}: {line['reason']}"
        raise InfrastructureError(line["component"], reason, self.function)

    async def _wait(self, answer: "asyncio.Future[Any]", session: ConversationSession) -> None:
        """Wait for the end of an episode, or of its time."""
        # The session's clock is stopped while it waits for the engine, so check it repeatedly.
        clock = session.episode.clock
        while not answer.done() and not clock.is_over:
            await asyncio.wait({answer}, timeout=max(0.01, clock.left))

    async def _cancel(
        self, number: int, answer: "asyncio.Future[Any]", session: ConversationSession
    ) -> None:
        """End an episode after its time limit. Raises OutOfTimeError if the function does not return."""
        # Further requests to the policy are rejected, and most agents end because of that.
        await session.close()
        self._send({"cancel": number})
        # The cancelled function may return its result in this time.
        await asyncio.wait({answer}, timeout=CANCEL_SECONDS)
        if not answer.done():
            # A plain function cannot be stopped from outside. Its process ends with its last
            # episode.
            logger.warning(
                "agent %s did not stop after its time limit; replacing its process", self.function
            )
            self.is_usable = False
            raise OutOfTimeError

    def _send(self, line: dict[str, Any]) -> None:
        """Write a line. Raises InfrastructureError if the process has ended."""
        if self._failure is not None:
            raise self._error(self._failure)
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(json.dumps(line).encode() + b"\n")

    async def _read(self) -> None:
        """Deliver results until the process ends."""
        assert self._process is not None and self._process.stdout is not None
        try:
            while text := await self._process.stdout.readline():
                self._note(json.loads(text))
        except ValueError as error:
            # The line is too long or malformed, so the lines after it cannot be read.
            self._failure = f"its process wrote a malformed result: {error}"
            self.kill()
        status = await self._process.wait()

        self.is_usable = False
        self._failure = self._failure or _describe_exit(status)
        # `start` waits for this event, even if the process has ended before its start is complete.
        self._started.set()
        for answer in self._calls.values():
            if not answer.done():
                reason = f"{self.function}: {self._failure}"
                answer.set_exception(ProcessEndedError("environment", reason, self.function))

    def _note(self, line: dict[str, Any]) -> None:
        if line == READY:
            self._started.set()
        elif "failed" in line:
            self._failure = line["failed"]
        # An abandoned episode may still report a result.
        elif (answer := self._calls.get(line["call"])) is not None and not answer.done():
            answer.set_result(line)

    def kill(self) -> None:
        """Kill the process."""
        self.is_usable = False
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.kill()

    async def close(self) -> None:
        """End the process, and wait until it is gone."""
        self.kill()
        if self._reader is not None:
            await self._reader

    def _error(self, reason: str) -> InfrastructureError:
        return InfrastructureError("environment", f"{self.function}: {reason}", self.function)


ProcessKey = tuple[str, str | None, int, int]
"""Key of a process. Programs with equal keys run their episodes in one process."""


def _process_key(agent: ExternalAgent) -> ProcessKey:
    # Task and history are settings of one episode, which need no separate process.
    return (agent.function, agent.python, agent.max_concurrent_episodes, agent.memory_bytes)


class AgentProcesses:
    """One rollout worker's agent processes: one per agent, replaced when it ends."""

    def __init__(self) -> None:
        self._current: dict[ProcessKey, AgentProcess] = {}
        self._all: list[AgentProcess] = []
        self._starting: dict[ProcessKey, asyncio.Lock] = {}
        self._slots: dict[ProcessKey, asyncio.Semaphore] = {}
        self._is_closed = False

    def slot(self, agent: ExternalAgent) -> asyncio.Semaphore:
        """Return the semaphore that limits the concurrent episodes of an agent."""
        key = _process_key(agent)
        return self._slots.setdefault(key, asyncio.Semaphore(agent.max_concurrent_episodes))

    async def process(self, agent: ExternalAgent) -> AgentProcess:
        """Return a process that may be given an episode. Raises InfrastructureError."""
        key = _process_key(agent)
        # Episodes that begin at the same time must wait for one process, not start one each.
        async with self._starting.setdefault(key, asyncio.Lock()):
            current = self._current.get(key)
            if current is not None and current.is_usable:
                return current
            if self._is_closed:
                raise InfrastructureError("environment", f"{agent.function}: the run is ending")

            current = AgentProcess(agent)
            self._all = [process for process in self._all if not process.has_ended]
            self._all.append(current)
            await current.start()
            self._current[key] = current
            return current

    @asynccontextmanager
    async def separate_process(self, agent: ExternalAgent) -> AsyncIterator[AgentProcess]:
        """Start a process for one episode, and end it afterwards. Raises InfrastructureError."""
        process = AgentProcess(agent)
        self._all.append(process)
        try:
            await process.start()
            yield process
        finally:
            await process.close()

    async def close(self) -> None:
        """End all processes. No further process can start."""
        self._is_closed = True
        await asyncio.gather(*(process.close() for process in self._all))


def _describe_exit(status: int) -> str:
    """Describe the exit status of a process."""
    if status < 0:
        name = signal.Signals(-status).name
        return f"its process was killed by {name}"
    return f"its process exited with status {status}"
