"""Waiting for conditions in tests, independent of the machine's speed.

A time limit only ends a test that hangs. It may be long, because it costs no time if the test
passes. Speed is measured in benchmarks/.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

PATIENCE_SECONDS = 300.0
"""Time limit in seconds. It is long enough for a machine that is busy with other work."""


def wait_until(
    condition: Callable[[], object],
    explain: Callable[[], object] = lambda: "it never came to that",
    *,
    seconds: float = PATIENCE_SECONDS,
    pause: float = 0.05,
) -> None:
    """Wait until ``condition`` is true. Fail with the text of ``explain`` after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, explain()
        time.sleep(pause)


async def wait_until_async(
    condition: Callable[[], object], *, seconds: float = PATIENCE_SECONDS
) -> None:
    """Wait like ``wait_until``, with a running event loop. Raises TimeoutError."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.001)
