"""Pool of isolated Python interpreters for programs written by a model."""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

from rl_loop.sandbox.config import (
    SandboxConfig,
    SandboxError,
    SandboxLimits,
    SandboxUnavailableError,
)
from rl_loop.sandbox.connection import ExecutionResult, SandboxServerLostError, ServerProcess
from rl_loop.sandbox.isolation import hints

_CLOSED = "the sandbox was closed"

logger = logging.getLogger(__name__)


def check_isolation(
    config: SandboxConfig | None = None, limits: SandboxLimits | None = None
) -> None:
    """Check that this machine can isolate programs.

    It starts one server and runs one program in it (about 0.2 s), because only that is proof.

    Raises:
        SandboxUnavailableError: if isolation fails, with the reason and a remedy.
    """
    server = ServerProcess(config or SandboxConfig(), limits or SandboxLimits())
    try:
        result = server.execute(
            "import os; print(os.getuid(), os.getgid(), os.getpid(), sorted(os.listdir('/tmp')))"
        )
    except SandboxServerLostError as error:
        raise SandboxUnavailableError("; ".join([str(error), *hints()])) from error
    finally:
        server.close()
    expected = "65534 65534 1 []\n"
    if result.output != expected:
        saw = f"should see {expected!r} as its ids and /tmp, but saw {result.output!r}"
        raise SandboxUnavailableError(f"a program in the sandbox {saw}")


class PythonSandbox:
    """Runs untrusted Python, up to ``config.servers`` programs at a time, in fresh isolated
    processes.

    The repr of a last expression is printed, as in a notebook and in GPT-OSS's python tool: ``1 +
    1`` prints 2. Calls share no state, except the state that ``history`` creates again. Use it as
    ``async with PythonSandbox(config) as sandbox``. ``run`` may be awaited from any event loop and
    thread.
    """

    def __init__(
        self, config: SandboxConfig | None = None, limits: SandboxLimits | None = None
    ) -> None:
        self.config = config or SandboxConfig()
        self.limits = limits or SandboxLimits()
        self._threads: ThreadPoolExecutor | None = None
        # By the thread that started the server, because a server dies with its thread.
        self._servers: dict[int, ServerProcess] = {}
        self._closing = False

    async def start(self) -> None:
        """Start the servers. Raises SandboxUnavailableError, with the reason, if isolation fails."""
        if self._threads is not None:
            return
        await asyncio.to_thread(check_isolation, self.config, self.limits)
        self._closing = False
        self._threads = ThreadPoolExecutor(self.config.servers, "python-sandbox")
        # One thread could otherwise take two of these tasks, and another would start without a
        # server.
        every_thread = threading.Barrier(self.config.servers)

        def first_server() -> None:
            every_thread.wait()
            self._replace_server()

        try:
            starts = [self._threads.submit(first_server) for _ in range(self.config.servers)]
            await asyncio.gather(*map(asyncio.wrap_future, starts))
        except BaseException:
            await self.close()
            raise

    async def run(
        self, code: str, history: Sequence[str] = (), on_begin: Callable[[], None] | None = None
    ) -> ExecutionResult:
        """Run one program. A failing program does not raise an exception.

        If a server fails before the program starts, the call is repeated once on a new server.

        Args:
            code: source of the program.
            history: earlier programs of the session, oldest first. They run again in the same
                interpreter, with separate time limits, and their output is discarded.
            on_begin: function to call on the event loop when the program leaves the queue.

        Returns:
            The result of the program.

        Raises:
            SandboxError: if the call fails for a reason other than the program.
            RuntimeError: if the sandbox is not started.
        """
        if self._threads is None:
            raise RuntimeError(
                "the sandbox is not running. Call start(), or use it as an async context manager"
            )
        future: Future[ExecutionResult] = Future()
        loop = asyncio.get_running_loop()

        def begin() -> None:
            if on_begin is not None:
                # The loop may be closed, and then no caller waits.
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(on_begin)

        self._threads.submit(self._answer, code, history, future, begin)
        return await asyncio.wrap_future(future)

    async def close(self) -> None:
        """Kill running programs and stop the servers. May be called again.

        Waiting calls raise SandboxError.
        """
        threads, self._threads = self._threads, None
        if threads is None:
            return
        self._closing = True
        for server in list(self._servers.values()):
            server.kill()
        await asyncio.to_thread(threads.shutdown)
        for server in self._servers.values():
            server.close()
        self._servers.clear()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    # ---- worker threads, each with one server

    def _answer(
        self,
        code: str,
        history: Sequence[str],
        future: Future[ExecutionResult],
        begin: Callable[[], None],
    ) -> None:
        if not future.set_running_or_notify_cancel():
            return
        begin()
        try:
            result = self._execute(code, history)
        except Exception as error:
            future.set_exception(error)
            return
        future.set_result(result)

        # Replace the server before the next call needs it: after every killed call, and after
        # calls_per_server calls.
        server = self._servers.get(threading.get_ident())
        if result.error is not None or (
            server is not None and server.calls >= self.limits.calls_per_server
        ):
            # The next call tries again and reports the error.
            with contextlib.suppress(SandboxUnavailableError, OSError):
                self._replace_server()

    def _execute(self, code: str, history: Sequence[str]) -> ExecutionResult:
        """Run a program on this thread's server. Raises SandboxError."""
        failure = SandboxError(_CLOSED, "closed")
        for _ in range(2):
            try:
                server = self._servers.get(threading.get_ident())
                if server is None or not server.is_alive():
                    server = self._replace_server()
                return server.execute(code, history)
            except (SandboxUnavailableError, OSError) as error:
                # OSError: this process has no descriptor, process or memory left to start a server.
                failure = SandboxError(str(error))
            except SandboxServerLostError as error:
                failure = SandboxError(str(error), error.failure_source)
                self._discard_server()
                if not self._closing:
                    logger.warning("a sandbox server was lost; replacing it: %s", error)
                if error.started:
                    break
        raise SandboxError(_CLOSED, "closed") if self._closing else failure

    def _replace_server(self) -> ServerProcess:
        """Start a new server for this thread.

        Raises:
            SandboxUnavailableError: if it does not start, or if the sandbox is being closed.
        """
        self._discard_server()
        if not self._closing:
            server = self._servers[threading.get_ident()] = ServerProcess(self.config, self.limits)
            # While the sandbox closes, ``close`` may have missed the new server.
            if not self._closing:
                return server
        raise SandboxUnavailableError(_CLOSED)

    def _discard_server(self) -> None:
        server = self._servers.pop(threading.get_ident(), None)
        if server is not None:
            server.close()
