"""Process that runs an agent's episodes. ``main`` reads MODULE:FUNCTION BYTES THREADS.

It reads a line of JSON for every episode from its standard input, runs many episodes at a time, and
writes a line when an episode ends. It imports only the standard library and the agent's module, so
any interpreter can run it. It exits when its input closes, that is, when the rollout worker ends.

    {"call": 7, "task": {...}, "base_url": "...", "api_key": "..."}   begin an episode
    {"cancel": 7}                                                     cancel it
    {"call": 7, "given": 0.5}                                         return value of the agent
    {"call": 7, "component": "environment", "reason": "..."}          exception of the agent
"""

import asyncio
import inspect
import json
import os
import resource
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TextIO

from rl_loop.infrastructure import InfrastructureError, describe
from rl_loop.process_memory import exempt_from_collection
from rl_loop.registry import Registry

READY = {"ready": True}
"""First line, after the import of the agent's module."""


class AgentHost:
    """Runs the episodes of one function."""

    def __init__(self, run: Callable[..., Any], answers: TextIO, threads: int) -> None:
        """Prepare to run episodes.

        Args:
            run: function of the agent, plain or async.
            answers: stream for the lines that this process writes.
            threads: concurrent episodes of a plain function.
        """
        self._run = run
        self._is_async = inspect.iscoroutinefunction(run)
        self._answers = answers
        self._threads = ThreadPoolExecutor(threads, "episode")
        # Also keeps the tasks alive, because asyncio itself has only weak references to them.
        self._running: dict[int, asyncio.Task[None]] = {}

    def answer(self, line: dict[str, Any]) -> None:
        """Write one line. Only for the event loop's thread."""
        self._answers.write(json.dumps(line) + "\n")
        self._answers.flush()

    def execute(self, line: dict[str, Any]) -> None:
        """Begin or cancel an episode."""
        if "cancel" in line:
            task = self._running.get(line["cancel"])
            # A plain function cannot be cancelled. Without a result line the rollout worker detects
            # that it does not end.
            if task is not None and self._is_async:
                task.cancel()
            return
        number = line["call"]
        task = asyncio.get_running_loop().create_task(self._play(number, line))
        self._running[number] = task

    async def _play(self, number: int, line: dict[str, Any]) -> None:
        arguments = (line["task"], line["base_url"], line["api_key"])
        try:
            if self._is_async:
                result = await self._run(*arguments)
            else:
                loop = asyncio.get_running_loop()
                result = await loop.run_in_executor(self._threads, partial(self._run, *arguments))

            # An agent may return the failure instead of raising it.
            if isinstance(result, InfrastructureError):
                raise result
            self.answer({"call": number, "given": result})
        except asyncio.CancelledError:
            self.answer({"call": number, "component": "environment", "reason": "cancelled"})
        except InfrastructureError as failure:
            self.answer({"call": number, "component": failure.component, "reason": failure.reason})
        except BaseException as error:
            # The return value may not be JSON, and an agent may call sys.exit().
            self.answer({"call": number, "component": "environment", "reason": describe(error)})
        finally:
            del self._running[number]


async def serve(host: AgentHost, commands: TextIO) -> None:
    """Execute commands until the process ends."""
    loop = asyncio.get_running_loop()

    def read() -> None:
        # Reading blocks, so it has a thread. Only the event loop's thread may touch the episodes.
        for text in commands:
            loop.call_soon_threadsafe(host.execute, json.loads(text))
        # The rollout worker is gone, so no result is needed. Threads of plain functions cannot be
        # stopped, so exit without waiting for them.
        os._exit(0)

    threading.Thread(target=read, name="commands", daemon=True).start()
    host.answer(READY)
    await asyncio.Event().wait()


def main() -> None:
    path, memory_bytes, threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])

    # Output of an agent goes to the log, because standard output is only for result lines.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    # An agent that reads its standard input must not take commands away.
    commands = os.fdopen(os.dup(0), encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)

    # RLIMIT_DATA counts the heap and private writable memory (since Linux 4.7). RLIMIT_AS would
    # also count address space that libraries only reserve.
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard != resource.RLIM_INFINITY:
        memory_bytes = min(memory_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, hard))

    functions: Registry[Callable[..., Any]] = Registry("agent", "a function", callable)
    try:
        run = functions.resolve(path)
    except ValueError as error:
        print(json.dumps({"failed": str(error)}), file=answers, flush=True)
        return
    exempt_from_collection()
    asyncio.run(serve(AgentHost(run, answers, threads), commands))


if __name__ == "__main__":
    main()
