"""``PythonSandbox``: a pool of isolated Python interpreters for programs that a model wrote."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from concurrent.futures import Future
from types import TracebackType
from typing import Self

from rl_loop.sandbox.config import SandboxConfig
from rl_loop.sandbox.connection import ExecutionResult, ServerLost, ServerProcess
from rl_loop.sandbox.isolation import SandboxUnavailable, missing_requirements, restrictions

logger = logging.getLogger(__name__)


def check_isolation(config: SandboxConfig | None = None) -> list[str]:
    """The reasons why programs can not be isolated on this machine, each with what to do; empty if they can.

    It starts one server and runs one program in it, because only that proves it (about 0.2 s).
    """
    config = config or SandboxConfig()
    reasons = missing_requirements(config)
    if reasons:
        return reasons
    try:
        server = ServerProcess(config)
    except SandboxUnavailable as error:
        return [str(error), *restrictions()]
    try:
        result = server.execute("import os; print(os.getuid(), os.getgid(), os.getpid(), sorted(os.listdir('/tmp')))")
    except ServerLost as error:
        return [str(error), *restrictions()]
    finally:
        server.close()
    expected = "65534 65534 1 []\n"
    if result.output != expected:
        return [f"a program in the sandbox should see {expected!r} as its ids and /tmp, but saw {result.output!r}"]
    return []


class PythonSandbox:
    """Runs untrusted Python, ``config.workers`` programs at a time, each in a fresh isolated process.

    As in a notebook, and as GPT-OSS's python tool has it, the repr of a last expression is printed: ``1 + 1`` prints 2.
    No state lasts from one call to the next. Use it as ``async with PythonSandbox(config) as sandbox``. ``run`` may be
    awaited from any event loop and thread.
    """

    def __init__(self, config: SandboxConfig | None = None) -> None:
        self.config = config or SandboxConfig()
        self._jobs: queue.SimpleQueue[tuple[str, Future[ExecutionResult]] | None] = queue.SimpleQueue()
        self._workers: list[_Worker] = []

    async def start(self) -> None:
        """Start the servers. Raises SandboxUnavailable, naming every reason, where isolation is not possible."""
        if self._workers:
            return
        reasons = await asyncio.to_thread(check_isolation, self.config)
        if reasons:
            raise SandboxUnavailable("untrusted code can not be isolated here: " + "; ".join(reasons))
        self._jobs = queue.SimpleQueue()
        self._workers = [_Worker(self.config, self._jobs, index) for index in range(self.config.workers)]
        for worker in self._workers:
            worker.start()
        try:
            await asyncio.gather(*(asyncio.wrap_future(worker.ready) for worker in self._workers))
        except BaseException:
            await self.close()
            raise

    async def run(self, code: str) -> ExecutionResult:
        """Run one program and return what it did; it never raises because of the program.

        A call that a server failed before the program began is tried once more, on a new server.
        Raises RuntimeError when the sandbox is not started or is closed.
        """
        if not self._workers:
            raise RuntimeError("the sandbox is not running: call start(), or use it as an async context manager")
        future: Future[ExecutionResult] = Future()
        self._jobs.put((code, future))
        return await asyncio.wrap_future(future)

    async def close(self) -> None:
        """Kill what runs and end the servers. Calls still waiting get an error result. Safe to repeat."""
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.stop()
        for _ in workers:
            self._jobs.put(None)
        for worker in workers:
            await asyncio.to_thread(worker.join)
        while workers and not self._jobs.empty():  # calls from another thread that came after the workers' last
            job = self._jobs.get()
            if job is not None and job[1].set_running_or_notify_cancel():
                job[1].set_result(_failure(_CLOSED))

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


_CLOSED = "the sandbox was closed"


def _failure(reason: str) -> ExecutionResult:
    return ExecutionResult("", -1, False, False, 0.0, reason)


class _Worker(threading.Thread):
    """Owns one server at a time. A thread of its own, because a server dies with the thread that started it."""

    def __init__(
        self,
        config: SandboxConfig,
        jobs: queue.SimpleQueue[tuple[str, Future[ExecutionResult]] | None],
        index: int,
    ) -> None:
        super().__init__(name=f"python-sandbox-{index}", daemon=True)
        self.ready: Future[None] = Future()
        self._config = config
        self._jobs = jobs
        self._server: ServerProcess | None = None
        self._stopping = threading.Event()

    def stop(self) -> None:
        """Let no further program start and kill the one that runs."""
        self._stopping.set()
        server = self._server
        if server is not None:
            server.kill()

    def run(self) -> None:
        try:
            self._server = ServerProcess(self._config)
        except Exception as error:
            self.ready.set_exception(error)
            return
        self.ready.set_result(None)
        while (job := self._jobs.get()) is not None:
            code, future = job
            if future.set_running_or_notify_cancel():
                result = self._execute(code)
                future.set_result(result)
                self._replace_server_if_needed(result)
        self._discard_server()

    def _execute(self, code: str) -> ExecutionResult:
        reason = ""
        for _ in range(2):
            if self._stopping.is_set():
                return _failure(_CLOSED)
            try:
                if self._server is None or not self._server.is_alive():
                    self._discard_server()
                    self._server = ServerProcess(self._config)
                return self._server.execute(code)
            except SandboxUnavailable as error:
                reason = str(error)
            except ServerLost as error:
                reason = str(error)
                self._discard_server()
                if self._stopping.is_set():
                    return _failure(_CLOSED)
                logger.warning("a sandbox server was lost and is replaced: %s", reason)
                if error.started:
                    break
        return _failure(reason)

    def _replace_server_if_needed(self, result: ExecutionResult) -> None:
        """After any call that was killed, and after calls_per_server calls. Done here, so that no call waits for it."""
        if self._stopping.is_set():
            return
        worn_out = self._server is not None and self._server.calls >= self._config.calls_per_server
        if worn_out or result.error is not None:
            self._discard_server()
            try:
                self._server = ServerProcess(self._config)
            except SandboxUnavailable:
                self._server = None  # the next call tries again and reports why

    def _discard_server(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.close()
