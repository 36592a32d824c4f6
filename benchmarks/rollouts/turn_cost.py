"""Processor time of a rollout worker per turn, by the length of the episode.

    python -m benchmarks.rollouts turns
    python -m benchmarks.rollouts turns --lengths 1000 32000 --layers 36 --experts 128

Needs no GPU. The engine's client, the checks of its results and the sampler of turns are real. A
server in another process implements SGLang's streaming protocol and answers at once, with scripted
tokens and random expert indices.

Prints the milliseconds per turn for three requests:

    no routes       the server returns no experts
    new tokens      it returns the experts of tokens that no earlier turn has returned, as in rollouts
    whole episode   it returns the experts of all tokens
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import multiprocessing
import time
from multiprocessing.connection import Connection

import numpy as np
from aiohttp import web

from megatron_gptoss.families.gpt_oss.config import GptOssModelConfig
from rl_loop.data.trajectory import FinishReason
from rl_loop.engines.protocol import ModelShape, SamplingParams
from rl_loop.engines.sglang.engine import SglangEngine
from rl_loop.engines.sglang.server import ServerState, ServerStatus
from rl_loop.rollout.episode_clock import EpisodeClock
from rl_loop.rollout.turn_sampler import TurnSampler

TURN_TOKENS = 190
"""Sampled tokens of a turn, as in docs/performance/loop.md."""
CHUNK_TOKENS = 32
ANSWER_TOKENS = 13
"""Tokens of a tool's answer."""
VARIANTS = ("no routes", "new tokens", "whole episode")


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        default=[500, 2000, 8000, 32000],
        help="tokens of an episode before a turn",
    )
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--turns", type=int, default=256, help="turns per figure")
    parser.add_argument("--concurrent", type=int, default=32, help="episodes at a time")
    options = parser.parse_args()

    model = GptOssModelConfig(num_layers=options.layers, num_experts=options.experts)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    rows = max(options.lengths) + TURN_TOKENS
    server = context.Process(target=serve, args=(theirs, model, rows), daemon=True)
    server.start()
    port = ours.recv()

    print(f"{'tokens before':>13}" + "".join(f"{name:>16}" for name in VARIANTS))
    for length in options.lengths:
        times = [
            asyncio.run(measure(port, model, length, variant, options.turns, options.concurrent))
            for variant in VARIANTS
        ]
        print(f"{length:>13}" + "".join(f"{1000 * seconds:>13.2f} ms" for seconds in times))
    server.terminate()


async def measure(
    port: int, model: GptOssModelConfig, length: int, variant: str, turns: int, concurrent: int
) -> float:
    """Return the processor seconds of this process per turn.

    Args:
        port: port of the server.
        model: model whose experts are returned.
        length: tokens of the episode before the turn.
        variant: one of ``VARIANTS``.
        turns: number of measured turns.
        concurrent: turns at a time.
    """
    url = f"http://127.0.0.1:{port}"

    async def statuses() -> list[ServerStatus]:
        return [ServerStatus(url, ServerState.SYNCED, 1, 0)]

    engine = SglangEngine(statuses, model)
    shape = ModelShape(
        model.vocab_size, model.num_layers, model.experts_per_token, model.num_experts
    )
    prefix = list(range(length))
    known = length - ANSWER_TOKENS - 1 if variant == "new tokens" else 0

    async def episode(number: int, turns: int) -> None:
        sampler = TurnSampler(
            engine,
            f"task/{number}",
            SamplingParams(1024),
            EpisodeClock(3600.0),
            shape,
            record_routes=variant != "no routes",
        )
        for turn in range(turns):
            result = await sampler.sample(str(turn), prefix, 1024, routes_start=known)
            assert result.finish_reason is FinishReason.STOP
            assert len(result.output_ids) == TURN_TOKENS

    async def episodes(count: int) -> None:
        await asyncio.gather(*(episode(i, max(1, count // concurrent)) for i in range(concurrent)))

    try:
        # Connections are opened before the measurement.
        await episodes(concurrent)
        begin = time.process_time()
        await episodes(turns)
        return (time.process_time() - begin) / (max(1, turns // concurrent) * concurrent)
    finally:
        await engine.close()


def serve(connection: Connection, model: GptOssModelConfig, rows: int) -> None:
    """Run a server that implements SGLang's /generate with streaming, and send its port.

    Args:
        connection: receives the port.
        model: model whose experts are returned.
        rows: largest number of tokens of an episode.
    """
    random = np.random.default_rng(0).random((rows, model.num_layers, model.num_experts))
    routes = random.argsort(-1)[..., : model.experts_per_token].astype(np.int32)

    async def generate(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        response = web.StreamResponse()
        await response.prepare(request)

        total = 0
        while total < TURN_TOKENS:
            count = min(CHUNK_TOKENS, TURN_TOKENS - total)
            total += count
            meta: dict[str, object] = {
                "id": body["rid"],
                "weight_version": "0",
                "completion_tokens": total,
                "cached_tokens": 0,
                "output_token_logprobs": [[-11.0, 1000 + i, None] for i in range(count)],
                "finish_reason": None,
            }
            if total == TURN_TOKENS:
                meta["finish_reason"] = {"type": "stop"}
                if body["return_routed_experts"]:
                    end = len(body["input_ids"]) + TURN_TOKENS - 1
                    returned = routes[body["routed_experts_start_len"] : end]
                    meta["routed_experts"] = base64.b64encode(returned.tobytes()).decode()
            chunk = {"output_ids": [1000 + i for i in range(count)], "meta_info": meta}
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async def start() -> None:
        application = web.Application(client_max_size=1 << 30)
        application.router.add_post("/generate", generate)
        runner = web.AppRunner(application)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        connection.send(runner.addresses[0][1])
        await asyncio.Event().wait()

    asyncio.run(start())
