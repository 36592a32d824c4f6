"""User code that hangs occupies its own thread, and no other work waits for it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from rl_loop import threads
from rl_loop.environments import arithmetic
from rl_loop.environments.base import RewardConfig
from rl_loop.environments.mcp_tools import McpEnvironment, McpOptions
from rl_loop.environments.tool_servers.config import ToolServerConfig
from rl_loop.threads import MAX_HUNG_CALLS, TooManyHungCallsError, call_user_code

released = threading.Event()


@pytest.fixture(autouse=True)
def release() -> Iterator[None]:
    """Let the functions that hang in a test return after it."""
    released.clear()
    yield
    released.set()


def judge(row: dict[str, Any], answer: str, tools: Any) -> float:
    if answer == "hang":
        released.wait(60)
    return 1.0


async def cancelled_calls(count: int, name: str) -> None:
    """Start calls of a function that hangs, and cancel them."""
    calls = [
        asyncio.create_task(call_user_code(partial(released.wait, 60), name)) for _ in range(count)
    ]
    await asyncio.sleep(0.1)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)


def test_users_code_returns_values_and_raises_its_exceptions() -> None:
    def fail() -> None:
        raise KeyError("a")

    async def run() -> None:
        assert await call_user_code(lambda: threading.current_thread().name, "f") == "f"
        with pytest.raises(KeyError):
            await call_user_code(fail, "f")

    asyncio.run(run())


def test_judge_is_called_while_other_judges_hang() -> None:
    """More calls hang than asyncio has default threads."""
    server = ToolServerConfig(url="http://127.0.0.1:1/mcp")
    options = McpOptions(servers={"s": server}, judge=f"{__name__}:judge")
    task = McpEnvironment.from_record({"prompt": "p", "answer": "a"}, "t", options)
    environment = McpEnvironment(replace(task), arithmetic.interpret, RewardConfig())

    async def run() -> None:
        tools: Any = None
        hanging = [asyncio.create_task(environment.judge("hang", tools)) for _ in range(40)]
        await asyncio.sleep(0.2)
        async with asyncio.timeout(30):
            assert await environment.judge("a", tools) == 1.0
        for call in hanging:
            call.cancel()
        await asyncio.gather(*hanging, return_exceptions=True)
        async with asyncio.timeout(30):
            assert await environment.judge("a", tools) == 1.0
            assert await asyncio.to_thread(lambda: 2) == 2

    asyncio.run(run())


def test_too_many_hanging_calls_name_the_function() -> None:
    async def run() -> None:
        await cancelled_calls(MAX_HUNG_CALLS, "judges:slow")
        with pytest.raises(TooManyHungCallsError, match="judges:slow: 64 calls have not returned"):
            await call_user_code(lambda: 1, "judges:slow")
        # The limit applies per function, and ends when the calls have returned.
        assert await call_user_code(lambda: 2, "judges:other") == 2
        released.set()
        async with asyncio.timeout(30):
            while threads._hanging["judges:slow"]:
                await asyncio.sleep(0.01)
        assert await call_user_code(lambda: 3, "judges:slow") == 3

    asyncio.run(run())


def test_process_ends_while_users_code_hangs() -> None:
    code = (
        "import asyncio, threading\n"
        "from rl_loop.threads import call_user_code\n"
        "async def run():\n"
        "    try:\n"
        "        await asyncio.wait_for(call_user_code(threading.Event().wait, 'f'), 0.1)\n"
        "    except TimeoutError:\n"
        "        print('late')\n"
        "asyncio.run(run())\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stdout == "late\n"
