"""Run of benchmarks.sglang interruptions: every mode interrupts sampling and loses no token."""

from __future__ import annotations

import asyncio
import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from aiohttp import web

from rl_loop.engines.sglang.client import SglangClient
from rl_loop.engines.sglang.engine import SglangEngine
from rl_loop.engines.sglang.server import ServerState, ServerStatus
from tests.support.rl_loop.sglang_protocol import (
    SERVED_MODEL,
    VOCAB,
    LocalServer,
)

ROOT = Path(__file__).parents[2]
REQUESTS = 4
TOKENS = 40


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return importlib.import_module("benchmarks.sglang.interruptions")


class WatchedServer(LocalServer):
    """Server that records its pause modes, its requests at that time, and their token limits."""

    def __init__(self) -> None:
        super().__init__(token_seconds=0.01)
        self.version = "1"
        self.pauses: list[tuple[str, int]] = []
        self.limits: list[int] = []

    async def pause_generation(self, request: web.Request) -> web.Response:
        self.pauses.append(((await request.json())["mode"], len(self.running)))
        return await super().pause_generation(request)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        self.limits.append((await request.json())["sampling_params"]["max_new_tokens"])
        return await super().generate(request)


def measure(benchmark: ModuleType, server: LocalServer) -> dict[str, dict[str, float]]:
    """Measure the four modes on ``server`` in one round."""

    async def run() -> Any:
        url = await server.start()
        client = SglangClient(url)

        async def statuses() -> list[ServerStatus]:
            return [ServerStatus(url, ServerState.SYNCED, 1, 1)]

        engine = SglangEngine(statuses, SERVED_MODEL)
        try:
            load = benchmark.Load(REQUESTS, prompt=20, tokens=TOKENS, vocab_size=VOCAB)
            return await benchmark.measure_interruptions(engine, client, load, rounds=1)
        finally:
            await engine.close()
            await client.close()
            await server.stop()

    return asyncio.run(run())


def test_each_mode_interrupts_all_requests_during_sampling(benchmark: ModuleType) -> None:
    server = WatchedServer()
    modes = measure(benchmark, server)
    assert list(modes) == list(benchmark.PAUSE_MODES)
    assert server.pauses == [(mode, REQUESTS) for mode in ("abort", "retract", "in_place")]
    assert server.calls.count("/continue_generation") == 3
    assert server.calls.count("/flush_cache") == 1

    # Only an abort sends requests again, for their missing tokens.
    again = [limit for limit in server.limits if limit < TOKENS]
    assert len(again) == REQUESTS
    assert modes["abort"]["tokens_before"] == REQUESTS * TOKENS - sum(again)
    assert modes["retract"]["tokens_before"] == modes["in_place"]["tokens_before"] == 0
    assert modes["none"]["extra"] == modes["none"]["pause"] == 0.0
    for mode in ("abort", "retract", "in_place"):
        assert modes[mode]["extra"] == modes[mode]["total"] - modes["none"]["total"]


def test_unfinished_request_is_an_error(benchmark: ModuleType) -> None:
    class Aborting(WatchedServer):
        async def generate(self, request: web.Request) -> web.StreamResponse:
            if self.pauses:
                asyncio.get_running_loop().call_later(0.05, self.abort_all)
            return await super().generate(request)

        def abort_all(self) -> None:
            for event in self.running.values():
                event.set()

    with pytest.raises(RuntimeError, match="was aborted twice"):
        measure(benchmark, Aborting())
