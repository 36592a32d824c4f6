"""The process that an agent's episodes run in; ``main`` reads MODULE:FUNCTION BYTES THREADS.

It reads a line of JSON for every episode from its standard input, runs many at a time, and writes a
line for each end. It imports nothing but the standard library and the agent's own module, so that any
interpreter can run it, and ends when its input does: with the rollout worker, however that ended.

    {"call": 7, "task": {...}, "base_url": "...", "api_key": "..."}   begin an episode
    {"cancel": 7}                                                     end it now
    {"call": 7, "given": 0.5}                                         what the agent returned
    {"call": 7, "component": "environment", "reason": "..."}          what it raised
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

from rl_loop.heap import exempt_from_collection
from rl_loop.infrastructure import InfrastructureFailure, describe
from rl_loop.registry import Registry

READY = {"ready": True}
"""The first line, once the agent's module is imported."""


class Host:
    """Runs the episodes of one function."""

    def __init__(self, run: Callable[..., Any], answers: TextIO, threads: int) -> None:
        """``threads``: episodes of a plain function that run at the same time."""
        self._run = run
        self._is_async = inspect.iscoroutinefunction(run)
        self._answers = answers
        self._threads = ThreadPoolExecutor(threads, "episode")
        self._running: dict[int, asyncio.Task[None]] = {}

    def answer(self, line: dict[str, Any]) -> None:
        """Write one line. From the event loop's thread only."""
        self._answers.write(json.dumps(line) + "\n")
        self._answers.flush()

    def obey(self, line: dict[str, Any]) -> None:
        """Begin or cancel an episode."""
        if "cancel" in line:
            task = self._running.get(line["cancel"])
            # The thread of a plain function would go on unseen: that it does not end is what the
            # rollout worker has to know.
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
                given = await self._run(*arguments)
            else:
                loop = asyncio.get_running_loop()
                given = await loop.run_in_executor(self._threads, partial(self._run, *arguments))
            if isinstance(given, InfrastructureFailure):
                raise given
            self.answer({"call": number, "given": given})
        except asyncio.CancelledError:
            self.answer({"call": number, "component": "environment", "reason": "cancelled"})
        except InfrastructureFailure as failure:
            self.answer({"call": number, "component": failure.component, "reason": failure.reason})
        except BaseException as error:
            # What an agent returns may be no JSON, and it may call sys.exit().
            self.answer({"call": number, "component": "environment", "reason": describe(error)})
        finally:
            del self._running[number]


async def serve(host: Host, commands: TextIO) -> None:
    """Obey until the process is ended."""
    loop = asyncio.get_running_loop()

    def read() -> None:
        for text in commands:
            loop.call_soon_threadsafe(host.obey, json.loads(text))
        # The rollout worker is gone, and nobody wants what still runs here. A thread of a plain
        # function cannot be ended, so neither can this process in any milder way.
        os._exit(0)

    threading.Thread(target=read, name="commands", daemon=True).start()
    host.answer(READY)
    await asyncio.Event().wait()


def main() -> None:
    path, memory_bytes, threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])

    # What an agent prints belongs to the log: standard output is for answers alone.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    commands = os.fdopen(os.dup(0), encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)

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
    asyncio.run(serve(Host(run, answers, threads), commands))


if __name__ == "__main__":
    main()
