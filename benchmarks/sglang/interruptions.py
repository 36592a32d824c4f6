"""What an interruption of running requests costs, by each of SGLang's three ways to pause.

    python -m benchmarks.sglang --layers 24 interruptions --running 64 256 --tokens 512

Requests with prompts of ``--prompt`` tokens sample ``--tokens`` each. Halfway the server is paused and
goes on at once, so that nothing but the interruption is timed:

- ``none``: no pause; what the others are compared with,
- ``abort``: as a weight sync does it: the requests end, the prefix cache is dropped, and every
  request is sent again with the tokens that it has,
- ``retract``: the server keeps the requests, frees their keys and computes them again,
- ``in_place``: the server keeps requests and keys.

``retract`` and ``in_place`` are measured to know what ``abort`` gives away; a weight sync does not
use them (docs/sglang.md says why). The ways take turns within a round, each with prompts of its own.
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field
from statistics import median

from rl_loop.engines.protocol import FinishReason, GenerateRequest, GenerateResult, SamplingParams
from rl_loop.engines.sglang.client import SglangClient
from rl_loop.engines.sglang.engine import SglangEngine

WAYS = ("none", "abort", "retract", "in_place")


@dataclass(frozen=True)
class Load:
    """The requests of one measurement."""

    requests: int
    prompt: int
    """Tokens of each prompt."""
    tokens: int
    """That each request samples."""
    vocab_size: int


@dataclass
class Interrupted:
    """What one way came to in every round."""

    total: list[float] = field(default_factory=list)
    """Seconds from the first request to the last answer."""
    pause: list[float] = field(default_factory=list)
    """Seconds until the server said that it is paused (and, for ``abort``, has no cache)."""
    tokens_before: list[int] = field(default_factory=list)
    """That had come back when an abort ended the requests; 0 for the others."""


async def measure_interruptions(
    engine: SglangEngine, client: SglangClient, load: Load, rounds: int
) -> dict[str, dict[str, float]]:
    """Interrupt ``load`` in every way, ``rounds`` times.

    Returns, by way, the medians of ``total``, ``pause`` and ``tokens_before``, and ``extra``: the
    seconds that the total is longer than without a pause, by the median of the rounds' differences.

    Raises RuntimeError if a request did not get all its tokens.
    """
    # Kernels are compiled and graphs are met before anything is timed.
    await _run(engine, client, load, "none", halfway=0.0, seed=-1)
    seconds = (await _run(engine, client, load, "none", halfway=0.0, seed=-2)).total[0]

    measured = {way: Interrupted() for way in WAYS}
    for number in range(rounds):
        for position, way in enumerate(WAYS):
            seed = number * len(WAYS) + position
            one = await _run(engine, client, load, way, halfway=seconds / 2, seed=seed)
            measured[way].total += one.total
            measured[way].pause += one.pause
            measured[way].tokens_before += one.tokens_before

    return {way: _summary(measured[way], measured["none"]) for way in WAYS}


def _summary(way: Interrupted, undisturbed: Interrupted) -> dict[str, float]:
    differences = [x - y for x, y in zip(way.total, undisturbed.total, strict=True)]
    return {
        "total": median(way.total),
        "extra": median(differences),
        "pause": median(way.pause),
        "tokens_before": median(way.tokens_before),
    }


async def _run(
    engine: SglangEngine,
    client: SglangClient,
    load: Load,
    way: str,
    halfway: float,
    seed: int,
) -> Interrupted:
    """Let all requests run once, interrupted after ``halfway`` seconds.

    ``seed`` makes the prompts, so that no run finds those of another in the cache.
    """
    generator = random.Random(seed)
    going_on = asyncio.Event()
    tasks = []
    began = time.perf_counter()
    for number in range(load.requests):
        prompt = [generator.randrange(10, load.vocab_size - 100) for _ in range(load.prompt)]
        name = f"interruptions-{seed}-{number}"
        tasks.append(asyncio.create_task(_sample(engine, name, prompt, load.tokens, going_on)))

    pause = 0.0
    if way != "none":
        await asyncio.sleep(halfway)
        pause = await _pause(client, way)
        await client.call("/continue_generation", {})
    going_on.set()

    before_abort = sum(await asyncio.gather(*tasks))
    return Interrupted([time.perf_counter() - began], [pause], [before_abort])


async def _pause(client: SglangClient, way: str) -> float:
    """Pause the server and return how many seconds it took."""
    began = time.perf_counter()
    await client.call("/pause_generation", {"mode": way})
    if way == "abort":
        await client.call("/flush_cache", {})
    return time.perf_counter() - began


async def _sample(
    engine: SglangEngine,
    name: str,
    prompt: list[int],
    tokens: int,
    going_on: asyncio.Event,
) -> int:
    """Sample ``tokens`` tokens, in a second request if the first is aborted.

    Returns how many there were when it was aborted, 0 if it was not.
    """
    first = await engine.generate(_request(name, prompt, [], tokens))
    if first.finish_reason is not FinishReason.ABORT:
        _check_complete(name, first, tokens)
        return 0

    await going_on.wait()
    remaining = tokens - len(first.output_ids)
    second = await engine.generate(_request(name, prompt, first.output_ids, remaining))
    _check_complete(name, second, remaining)
    return len(first.output_ids)


def _request(name: str, prompt: list[int], so_far: list[int], tokens: int) -> GenerateRequest:
    return GenerateRequest(f"{name}/0/{len(so_far)}", prompt + so_far, SamplingParams(tokens))


def _check_complete(name: str, result: GenerateResult, tokens: int) -> None:
    """Raise RuntimeError if fewer than ``tokens`` tokens came back, unless the text ended."""
    if result.finish_reason is FinishReason.LENGTH and len(result.output_ids) < tokens:
        raise RuntimeError(f"{name} got {len(result.output_ids)} of {tokens} tokens")
    if result.finish_reason is FinishReason.ABORT:
        raise RuntimeError(f"{name} was aborted twice")
