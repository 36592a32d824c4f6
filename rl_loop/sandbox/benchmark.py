"""Executions per second of the warm sandbox: ``python -m rl_loop.sandbox.benchmark``. Prints one line of JSON."""

from __future__ import annotations

import argparse
import asyncio
import json
import time

from rl_loop.sandbox import PythonSandbox, SandboxConfig


async def measure(workers: int, calls: int, code: str) -> dict[str, object]:
    """Run ``calls`` copies of ``code``, always two per worker under way. Times are milliseconds seen by the caller."""
    async with PythonSandbox(SandboxConfig(workers=workers)) as sandbox:
        expected = await sandbox.run(code)
        await asyncio.gather(*(sandbox.run(code) for _ in range(10 * workers)))
        latencies: list[float] = []
        wrong = 0

        async def client(share: int) -> None:
            nonlocal wrong
            for _ in range(share):
                begun = time.perf_counter()
                result = await sandbox.run(code)
                latencies.append(1e3 * (time.perf_counter() - begun))
                wrong += result.output != expected.output or result.exit_code != 0

        begun = time.perf_counter()
        clients = 2 * workers
        await asyncio.gather(*(client(calls // clients) for _ in range(clients)))
        seconds = time.perf_counter() - begun
    latencies.sort()
    return {
        "benchmark": "sandbox",
        "code": code,
        "workers": workers,
        "calls": len(latencies),
        "wrong": wrong,
        "executions_per_second": round(len(latencies) / seconds, 1),
        "latency_p50_ms": round(latencies[len(latencies) // 2], 2),
        "latency_p99_ms": round(latencies[int(0.99 * len(latencies))], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2, help="servers, that is programs that run at the same time")
    parser.add_argument("--calls", type=int, default=2000, help="programs to run")
    parser.add_argument("--code", default="print(sum(range(1000)))", help="the program")
    arguments = parser.parse_args()
    print(json.dumps(asyncio.run(measure(arguments.workers, arguments.calls, arguments.code))))


if __name__ == "__main__":
    main()
