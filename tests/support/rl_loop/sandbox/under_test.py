"""A running sandbox that is called without await."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import Future
from pathlib import Path

from rl_loop.sandbox import (
    ExecutionResult,
    PythonSandbox,
    SandboxConfig,
    SandboxError,
    SandboxLimits,
)
from tests.support.waiting import PATIENCE_SECONDS

PROCESSES_PER_SERVER = 3  # outer bubblewrap, inner bubblewrap as process 1, server


def descendants(root: int) -> set[int]:
    """Return the process ids of all living descendants of root."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[0] != "Z":
                children.setdefault(int(fields[1]), []).append(int(entry.name))
    found: set[int] = set()
    waiting = [root]
    while waiting:
        for child in children.get(waiting.pop(), []):
            found.add(child)
            waiting.append(child)
    return found


class SandboxUnderTest:
    """A sandbox that is called without await, and that knows its number of processes."""

    def __init__(self, config: SandboxConfig, limits: SandboxLimits) -> None:
        self._runner = asyncio.Runner()
        self.sandbox = PythonSandbox(config, limits)
        self._runner.run(self.sandbox.start())

    def run(self, code: str) -> ExecutionResult:
        return self._runner.run(self.sandbox.run(code))

    def start(self, code: str) -> Future[ExecutionResult]:
        """Start a call in a separate thread."""
        future: Future[ExecutionResult] = Future()
        threading.Thread(target=self._run_alone, args=(code, future), daemon=True).start()
        return future

    def _run_alone(self, code: str, future: Future[ExecutionResult]) -> None:
        try:
            future.set_result(asyncio.run(self.sandbox.run(code)))
        except SandboxError as failure:  # closed during the call
            future.set_exception(failure)

    def run_many(self, codes: list[str]) -> list[ExecutionResult]:
        async def gather() -> list[ExecutionResult]:
            return await asyncio.gather(*(self.sandbox.run(code) for code in codes))

        return self._runner.run(gather())

    def processes(self) -> set[int]:
        """Return the ids of the sandbox's current processes on the host."""
        roots = {server._process.pid for server in self.sandbox._servers.values()}
        return roots.union(*(descendants(root) for root in roots))

    def processes_left(self) -> int:
        """Return the number of processes beyond the servers', after a short wait for endings."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            excess = len(self.processes()) - PROCESSES_PER_SERVER * self.sandbox.config.servers
            if excess == 0 or time.monotonic() > deadline:
                return excess
            time.sleep(0.01)

    def close(self) -> None:
        self._runner.run(self.sandbox.close())
        self._runner.close()
