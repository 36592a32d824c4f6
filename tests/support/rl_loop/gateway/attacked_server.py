"""A gateway in a separate process, for attacks.

    python -m tests.support.rl_loop.gateway.attacked_server

It prints its port. For every line that it reads, it prints its peak memory in bytes, its number of
open files, and the longest blocking of its event loop since the last line, in seconds.
"""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import sys
import time
from pathlib import Path

from rl_loop.data.trajectory import FinishReason, WeightVersionSpan
from rl_loop.engines.protocol import GenerateRequest, GenerateResult, ModelShape
from rl_loop.gateway.serve import ServeOptions, served_settings
from rl_loop.gateway.server import Gateway
from rl_loop.harmony.codec import Harmony, ParsedMessage, PromptConfig
from rl_loop.harmony.vocabulary import GptOssVocabulary

KEYS = ("sk-victim", "sk-attacker")


class InstantPolicy:
    """An engine that immediately returns one turn."""

    def __init__(self, turn: list[int]) -> None:
        self._turn = turn

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        if request.on_begin is not None:
            request.on_begin()
        ids = self._turn[: request.sampling.max_new_tokens]
        spans = [WeightVersionSpan(0, len(ids), 1)]
        reason = FinishReason.STOP if len(ids) == len(self._turn) else FinishReason.LENGTH
        return GenerateResult(ids, [-0.5] * len(ids), reason, spans)

    async def score(self, input_ids: list[int], temperature: float = 1.0) -> list[float]:
        return [-0.5] * (len(input_ids) - 1)

    async def abort(self, request_id: str | None = None) -> None: ...

    async def close(self) -> None: ...


class Heartbeat:
    """Measures how long computation of this process blocks the event loop.

    Waiting for a processor does not count, because other programs of the machine may cause it.
    """

    def __init__(self) -> None:
        self.longest = 0.0

    async def beat(self) -> None:
        while True:
            begun, computed = time.perf_counter(), time.process_time()
            await asyncio.sleep(0.001)
            held = min(time.perf_counter() - begun, time.process_time() - computed)
            self.longest = max(self.longest, held)


async def serve() -> None:
    codec = Harmony(GptOssVocabulary(), PromptConfig(current_date="2026-01-01"))
    engine = InstantPolicy(codec.render_assistant([ParsedMessage("final", None, None, "ok")]))
    settings = served_settings(ServeOptions(port=0), 131_072)
    gateway = Gateway(engine, codec, ModelShape(codec.vocabulary.size), settings)
    await gateway.start()
    for number, key in enumerate(KEYS):
        gateway.open_session(f"session-{number}", key)
    print(gateway.base_url.rpartition(":")[2].removesuffix("/v1"), flush=True)

    # Same as ``gptoss serve``.
    gc.collect()
    gc.freeze()
    heartbeat = Heartbeat()
    beating = asyncio.create_task(heartbeat.beat())
    loop = asyncio.get_running_loop()
    while await loop.run_in_executor(None, sys.stdin.readline):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        files = len(list(Path(f"/proc/{os.getpid()}/fd").iterdir()))
        print(peak, files, heartbeat.longest, flush=True)
        heartbeat.longest = 0.0
    beating.cancel()
    await gateway.close()


if __name__ == "__main__":
    asyncio.run(serve())
