"""Waiting for what a test needs, without a guess at how fast the machine is.

A limit in a test is there to end a test that hangs, so it may be long: it costs nothing where all is well. What must be
fast belongs into benchmarks/."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

PATIENCE_SECONDS = 300.0
"""Until then, whatever a test waits for has happened on a machine that is busy with something else."""


def wait_until(
    condition: Callable[[], object],
    explain: Callable[[], object] = lambda: "it never came to that",
    *,
    seconds: float = PATIENCE_SECONDS,
    pause: float = 0.05,
) -> None:
    """Return as soon as ``condition`` holds; fail with what ``explain`` returns if it does not within ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, explain()
        time.sleep(pause)


async def wait_until_async(
    condition: Callable[[], object], *, seconds: float = PATIENCE_SECONDS
) -> None:
    """``wait_until`` with the event loop running; raises TimeoutError."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.001)
