"""Start, memory, commands and forks of shell sandboxes.

``python -m benchmarks.sandbox shell`` needs no GPU. It prints medians as JSON. The image consists of
programs of this machine.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Awaitable
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from rl_loop.sandbox.shell import HOST_IMAGE, Image, ShellSandboxConfig, ShellSandboxPool

COMMANDS_OF_AN_EPISODE = 30
PREPARED = "mkdir /w; cd /w; seq 4000 | xargs touch; head -c 100000000 /dev/zero > big"


async def timed(awaitable: Awaitable[Any]) -> tuple[float, Any]:
    """Return the milliseconds until a result, and the result."""
    began = time.perf_counter()
    result = await awaitable
    return 1e3 * (time.perf_counter() - began), result


def own_sandboxes() -> list[psutil.Process]:
    """Return process 1 of every open sandbox."""
    children = psutil.Process(os.getpid()).children(recursive=True)
    return [process for process in children if process.name() == "sandbox"]


def processor_ms(process: psutil.Process) -> float:
    """Return the processor time of a process. It does not depend on other programs."""
    nanoseconds, _, _ = Path(f"/proc/{process.pid}/schedstat").read_text().split()
    return int(nanoseconds) / 1e6


async def measure_one(pool: ShellSandboxPool, image: Image, rounds: int) -> dict[str, float]:
    """Return the median milliseconds of each step in the life of a sandbox."""
    times: dict[str, list[float]] = {}

    async def add(name: str, awaitable: Awaitable[Any]) -> Any:
        milliseconds, result = await timed(awaitable)
        times.setdefault(name, []).append(milliseconds)
        return result

    for _ in range(rounds):
        sandbox = await add("start_ms", pool.open(image))
        times.setdefault("start_processor_ms", []).append(processor_ms(own_sandboxes()[0]))
        await add("first_command_ms", sandbox.run("true"))
        await add("command_ms", sandbox.run("true"))
        await sandbox.run("true", persistent=True)
        await add("persistent_command_ms", sandbox.run("true", persistent=True))
        await add("close_ms", sandbox.close())

    async def episode() -> None:
        async with await pool.open(image) as sandbox:
            for _ in range(COMMANDS_OF_AN_EPISODE):
                await sandbox.run("true")

    for _ in range(max(1, rounds // 10)):
        await add("episode_of_30_commands_ms", episode())
    return {name: round(median(values), 2) for name, values in times.items()}


async def measure_fork(pool: ShellSandboxPool, image: Image, rounds: int) -> dict[str, float]:
    """Return the median milliseconds to start a sandbox from a snapshot of 4,000 files, 100 MB."""
    async with await pool.open(image) as sandbox:
        await sandbox.run(PREPARED)
        snapshot_ms, layer = await timed(pool.snapshot(sandbox))
    starts = []
    for _ in range(rounds):
        milliseconds, fork = await timed(pool.open(image.with_layer(layer)))
        starts.append(milliseconds)
        await fork.close()
    pool.store.delete_snapshot(layer)
    return {"snapshot_ms": round(snapshot_ms, 1), "fork_ms": round(median(starts), 2)}


async def measure_many(pool: ShellSandboxPool, image: Image, number: int) -> dict[str, float]:
    """Return times and memory of many idle sandboxes, each with a persistent bash."""
    before = psutil.virtual_memory().available
    start_ms, sandboxes = await timed(asyncio.gather(*(pool.open(image) for _ in range(number))))
    idle = (before - psutil.virtual_memory().available) / number
    own = [process.memory_full_info().uss for process in own_sandboxes()]
    await asyncio.gather(*(sandbox.run("true", persistent=True) for sandbox in sandboxes))
    with_bash = (before - psutil.virtual_memory().available) / number
    close_ms, _ = await timed(asyncio.gather(*(sandbox.close() for sandbox in sandboxes)))
    return {
        "sandboxes": number,
        "start_all_s": round(start_ms / 1e3, 2),
        "close_all_s": round(close_ms / 1e3, 2),
        "machine_mb_each": round(idle / 1e6, 2),
        "machine_mb_each_with_bash": round(with_bash / 1e6, 2),
        "process_1_mb": round(median(own) / 1e6, 2),
    }


async def measure(rounds: int, numbers: list[int]) -> list[dict[str, float]]:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        config = ShellSandboxConfig(store=Path(folder), max_sandboxes=max(numbers))
        async with ShellSandboxPool(config) as pool:
            image = await pool.load(HOST_IMAGE)
            results = [await measure_one(pool, image, rounds)]
            results.append(await measure_fork(pool, image, max(1, rounds // 5)))
            results += [await measure_many(pool, image, number) for number in numbers]
        return results


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100, help="sandboxes that are timed")
    parser.add_argument(
        "--numbers", type=int, nargs="+", default=[200, 500], help="sandboxes at the same time"
    )
    options = parser.parse_args()
    for result in asyncio.run(measure(options.rounds, options.numbers)):
        print(json.dumps(result))


if __name__ == "__main__":
    main()
