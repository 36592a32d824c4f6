"""Ctrl-C ends a coroutine that waits."""

from __future__ import annotations

import asyncio
import signal
import threading
import time

import pytest

from rl_loop.lifecycle.interrupt import run_until_interrupted

WAIT_SECONDS = 60.0
"""The coroutine waits so long without a signal."""


def signal_this_thread(waits: threading.Event) -> None:
    """Send SIGINT to this thread instead of the main thread, which waits for events."""
    waits.wait()
    time.sleep(0.2)
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)


@pytest.mark.parametrize("closes_slowly", [False, True])
def test_ctrl_c_wakes_a_waiting_event_loop(closes_slowly: bool) -> None:
    waits = threading.Event()
    closed = []

    async def wait() -> None:
        waits.set()
        try:
            await asyncio.sleep(WAIT_SECONDS)
        finally:
            if closes_slowly:
                await asyncio.sleep(0.1)
            closed.append(True)

    thread = threading.Thread(target=signal_this_thread, args=(waits,))
    thread.start()
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_until_interrupted(wait())
    assert time.monotonic() - begin < WAIT_SECONDS / 2
    assert closed == [True]
    thread.join()


def test_result_and_other_cancellations_pass_through() -> None:
    async def cancelled() -> None:
        raise asyncio.CancelledError

    async def result() -> int:
        return 3

    def handler(number: int, frame: object) -> None: ...

    before = signal.signal(signal.SIGINT, handler)
    assert run_until_interrupted(result()) == 3
    with pytest.raises(asyncio.CancelledError):
        run_until_interrupted(cancelled())
    assert signal.signal(signal.SIGINT, before) is handler
