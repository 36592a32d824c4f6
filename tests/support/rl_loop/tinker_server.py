"""A server of the Tinker API in this process, on the shipped tiny configuration."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rl_loop.config.load import load_config
from rl_loop.config.tinker import TinkerConfig
from rl_loop.tinker.owners import Owners
from rl_loop.tinker.serve import open_policy, served_model
from rl_loop.tinker.server import TinkerServer
from rl_loop.tinker.state import TinkerState

KEY = "tml-test"
OTHER_KEY = "tml-other"
SMALLER = [
    "model.num_layers=1",
    "model.hidden_size=64",
    "model.intermediate_size=64",
    "model.num_attention_heads=4",
    "adapter.targets=[q,o,experts,head]",
]
"""Overrides for short tests."""


@dataclass(frozen=True)
class RunningServer:
    url: str
    state: TinkerState
    """Read it only between requests: it belongs to the server's event loop."""
    loop: asyncio.AbstractEventLoop


@contextmanager
def running_server(directory: Path, overrides: Sequence[str] = SMALLER) -> Iterator[RunningServer]:
    """Serve the tiny model from threads of this process, with checkpoints in ``directory``."""
    config = load_config(Path("tiny"), TinkerConfig, list(overrides))
    loop = asyncio.new_event_loop()
    loop_thread = threading.Thread(target=loop.run_forever, daemon=True)
    loop_thread.start()
    with ThreadPoolExecutor(1) as thread:
        context = open_policy(config)
        policy = thread.submit(context.__enter__).result()

        async def start() -> tuple[TinkerServer, TinkerState, str]:
            state = TinkerState(policy, thread, directory, served_model(config), config.tinker)
            server = TinkerServer(state, Owners([KEY, OTHER_KEY]), "a notice")
            return server, state, await server.start("127.0.0.1", 0)

        server, state, url = asyncio.run_coroutine_threadsafe(start(), loop).result()
        try:
            yield RunningServer(url, state, loop)
        finally:
            asyncio.run_coroutine_threadsafe(server.close(), loop).result()
            loop.call_soon_threadsafe(loop.stop)
            loop_thread.join()
            thread.submit(context.__exit__, None, None, None).result()
