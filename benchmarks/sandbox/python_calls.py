"""Throughput and latency of the warm sandbox.

``python -m benchmarks.sandbox`` needs no GPU. It prints executions per second and latencies (p50,
p99) as JSON.
"""

from __future__ import annotations

import asyncio
import json
import time
from argparse import ArgumentParser

from rl_loop.sandbox import PythonSandbox, SandboxConfig


async def measure(servers: int, calls: int, code: str) -> dict[str, object]:
    """Run ``calls`` copies of ``code``, two per server at a time, and time each call.

    Args:
        servers: number of sandbox servers, as in sandbox.servers.
        calls: number of timed calls.
        code: Python program. It must exit with code 0.

    Returns:
        The arguments with the measured throughput and latencies.
    """
    slots = asyncio.Semaphore(2 * servers)
    async with PythonSandbox(SandboxConfig(servers=servers)) as sandbox:

        async def latency() -> float:
            async with slots:
                started = time.perf_counter()
                result = await sandbox.run(code)
                if result.exit_code != 0:
                    raise SystemExit(f"the program failed: {result.output}")
                return 1e3 * (time.perf_counter() - started)

        # Start and warm up every server before the measurement.
        await asyncio.gather(*(latency() for _ in range(10 * servers)))

        started = time.perf_counter()
        latencies = sorted(await asyncio.gather(*(latency() for _ in range(calls))))
        seconds = time.perf_counter() - started
    return {
        "code": code,
        "servers": servers,
        "calls": calls,
        "executions_per_second": round(calls / seconds, 1),
        "latency_p50_ms": round(latencies[calls // 2], 2),
        "latency_p99_ms": round(latencies[int(0.99 * calls)], 2),
    }


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--servers", type=int, default=2, help="programs that run at the same time")
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--code", default="print(sum(range(1000)))")
    options = parser.parse_args()
    print(json.dumps(asyncio.run(measure(**vars(options)))))


if __name__ == "__main__":
    main()
