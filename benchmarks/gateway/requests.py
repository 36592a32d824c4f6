"""Time that the gateway adds to a request.

    python -m benchmarks.gateway requests              # 64 sessions, 500 ms per turn in the engine
    python -m benchmarks.gateway requests --dialect responses --stream

Needs no GPU. The engine is a mock: it returns the same tokens after a fixed time. The remaining
time belongs to the gateway: HTTP, JSON, matching of the conversation, rendering of new messages,
parsing of the answer, checks and capture.

The clients run in another process and send plain HTTP. Their first requests are spread over the
time of one turn. Each client holds conversations of ``--turns`` turns with the vocabulary and the
prompts of the released models. The first conversation of each session is not counted. Prints one
JSON object:

    added_ms_mean, _p50, _p99   latency seen by a client, without the engine's time
    processor_ms                processor time of the gateway's process per request
    prompt_tokens_mean          tokens of a prompt
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import statistics
import sys
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import aiohttp
import torch

from rl_loop.config.episode import EpisodeLimits
from rl_loop.data.trajectory import FinishReason, WeightVersionSpan
from rl_loop.engines.protocol import GenerateRequest, GenerateResult, ModelShape, SamplingParams
from rl_loop.gateway.server import Gateway, GatewaySettings
from rl_loop.gateway.session import ConversationSession, SessionSettings
from rl_loop.harmony.codec import Harmony, ParsedMessage, PromptConfig
from rl_loop.harmony.vocabulary import GptOssVocabulary

Dialect = Literal["chat", "responses"]
QUESTION = "Explain how the third step follows from the second one, and what would break it. "
"""Text of a user message. A message contains it QUESTION_REPEATS times."""
QUESTION_REPEATS = 10
ANSWER_REPEATS = 5


@dataclass(frozen=True)
class Load:
    """Requests that the clients send."""

    base_url: str
    api_keys: list[str]
    dialect: Dialect
    stream: bool
    turns: int
    conversations: int
    """Conversations per session. The first one is a warm-up and is not counted."""
    spread_seconds: float
    """Seconds over which the sessions start, so that they do not all send requests at once."""


class ClockEngine:
    """Mock engine that returns the same tokens after a fixed time."""

    def __init__(self, answer: list[int], seconds: float) -> None:
        self._answer = answer
        self._seconds = seconds

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        if request.on_begin is not None:
            request.on_begin()
        await asyncio.sleep(self._seconds)
        tokens = len(self._answer)
        return GenerateResult(
            output_ids=list(self._answer),
            output_log_probs=[-0.5] * tokens,
            finish_reason=FinishReason.STOP,
            weight_versions=[WeightVersionSpan(0, tokens, 0)],
        )

    async def score(self, input_ids: list[int], temperature: float = 1.0) -> list[float]:
        return [0.0] * (len(input_ids) - 1)

    async def abort(self, request_id: str | None = None) -> None: ...

    async def sync_weights(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int
    ) -> None: ...

    async def close(self) -> None: ...


# ---- clients


def run_clients(load: Load, results: Any) -> None:
    """Hold all conversations and put the seconds of every counted request into ``results``."""
    results.put(asyncio.run(_converse_all(load, results)))


async def _converse_all(load: Load, results: Any) -> list[float]:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as http:
        seconds: list[float] = []
        for number in range(load.conversations):
            conversations = [
                _converse(http, load, key, number, load.spread_seconds * i / len(load.api_keys))
                for i, key in enumerate(load.api_keys)
            ]
            latencies = await asyncio.gather(*conversations)
            if number == 0:
                results.put("warm")
            else:
                seconds += [latency for of_session in latencies for latency in of_session]
    return seconds


async def _converse(
    http: aiohttp.ClientSession,
    load: Load,
    api_key: str,
    conversation: int,
    delay_seconds: float,
) -> list[float]:
    """Hold one conversation after a delay and return the seconds of each request."""
    await asyncio.sleep(delay_seconds)
    path = "chat/completions" if load.dialect == "chat" else "responses"
    items = "messages" if load.dialect == "chat" else "input"
    headers = {"Authorization": f"Bearer {api_key}"}
    messages: list[dict[str, Any]] = []
    latencies = []

    for turn in range(load.turns):
        question = f"{conversation}.{turn}: " + QUESTION * QUESTION_REPEATS
        messages.append({"role": "user", "content": question})
        body = {"model": "any", items: messages, "stream": load.stream}

        started = time.perf_counter()
        async with http.post(f"{load.base_url}/{path}", json=body, headers=headers) as answer:
            text = await answer.text()
        latencies.append(time.perf_counter() - started)
        if answer.status != 200:
            raise SystemExit(f"HTTP {answer.status}: {text[:500]}")
        messages.append({"role": "assistant", "content": ANSWER_TEXT})
    return latencies


ANSWER_TEXT = "It follows because the sum telescopes, and nothing else is needed. " * ANSWER_REPEATS


# ---- the gateway


async def measure(
    sessions: int,
    turns: int,
    conversations: int,
    engine_ms: float,
    dialect: Dialect,
    stream: bool,
) -> dict[str, object]:
    """Serve clients in another process and measure both sides.

    Args:
        sessions: number of concurrent sessions.
        turns: turns per conversation.
        conversations: conversations per session. The first one is not counted.
        engine_ms: time of a turn in the engine, in milliseconds.
        dialect: API of the requests.
        stream: whether to use server-sent events.
    """
    harmony = Harmony(GptOssVocabulary(), PromptConfig())
    thought = ParsedMessage("analysis", None, None, "The user asks for the reason. " * 5)
    said = ParsedMessage("final", None, None, ANSWER_TEXT)
    answer = harmony.render_assistant([thought, said], "<|return|>")

    limits = EpisodeLimits(
        max_turns=10**9, max_episode_tokens=131_072, max_episode_seconds=float("inf")
    )
    settings = SessionSettings(limits, SamplingParams(max_new_tokens=4096))
    engine = ClockEngine(answer, engine_ms / 1e3)
    shape = ModelShape(harmony.vocabulary.size)
    gateway = Gateway(engine, harmony, shape, GatewaySettings(settings))
    await gateway.start()
    opened = [gateway.open_session(f"session-{i}") for i in range(sessions)]

    keys = [session.api_key for session in opened]
    load = Load(gateway.base_url, keys, dialect, stream, turns, conversations, engine_ms / 1e3)
    spawn = multiprocessing.get_context("spawn")
    results = spawn.Queue()
    clients = spawn.Process(target=run_clients, args=(load, results))
    clients.start()
    try:
        await asyncio.to_thread(results.get)
        processor_before = time.process_time()
        seconds = await asyncio.to_thread(results.get)
        processor = time.process_time() - processor_before
        await asyncio.to_thread(clients.join)
    finally:
        clients.kill()
        await gateway.close()

    added = sorted(1e3 * latency - engine_ms for latency in seconds)
    return {
        "sessions": sessions,
        "requests": len(added),
        "engine_ms": engine_ms,
        "dialect": dialect,
        "stream": stream,
        "processors": os.cpu_count(),
        "prompt_tokens_mean": round(statistics.mean(prompt_lengths(opened)), 1),
        "added_ms_mean": round(statistics.mean(added), 2),
        "added_ms_p50": round(added[len(added) // 2], 2),
        "added_ms_p99": round(added[int(0.99 * len(added))], 2),
        "processor_ms": round(1e3 * processor / len(added), 2),
    }


def prompt_lengths(sessions: list[ConversationSession]) -> list[int]:
    """Return the prompt tokens of every request, and check that conversations were matched."""
    lengths = []
    for session in sessions:
        for node in session.forest.nodes:
            lengths.append(len(node.token_ids()) - len(node.sampled.output_ids))
        trees = sum(node.parent is None for node in session.forest.nodes)
        leaves = sum(node.is_leaf for node in session.forest.nodes)
        if trees != leaves:
            sys.exit("a conversation was not found again: it began another tree")
    return lengths


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    option = parser.add_argument
    option("--sessions", type=int, default=64, help="sessions that converse at the same time")
    option("--turns", type=int, default=8, help="turns of a conversation")
    option("--conversations", type=int, default=3, help="of each session; the first is not counted")
    option("--engine-ms", type=float, default=500.0, help="time of a turn in the engine")
    option("--dialect", choices=("chat", "responses"), default="chat")
    option("--stream", action="store_true", help="server-sent events")
    options = parser.parse_args()
    if options.conversations < 2:
        parser.error("--conversations: at least 2, because the first is not counted")
    print(json.dumps(asyncio.run(measure(**vars(options)))))
