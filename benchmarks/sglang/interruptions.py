"""Cost of interrupting running requests, with each of SGLang's three pause modes.

    python -m benchmarks.sglang --layers 24 interruptions --running 64 256 --tokens 512

Needs one GPU. Requests with prompts of ``--prompt`` tokens sample ``--tokens`` tokens each.
Halfway, the server is paused and continues immediately, so that only the interruption is measured:

- ``none``: no pause (baseline).
- ``abort``: the mode of a weight sync. The requests end, the prefix cache is dropped, and every
  request is sent again with its tokens so far.
- ``retract``: the server keeps the requests, frees their keys and computes them again.
- ``in_place``: the server keeps requests and keys.

``retract`` and ``in_place`` show the cost of ``abort``. A weight sync does not use them
(docs/design/sglang.md has the reason). The modes alternate within a round, each with different
prompts. Prints one JSON object per number of requests and mode.
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

PAUSE_MODES = ("none", "abort", "retract", "in_place")


@dataclass(frozen=True)
class Load:
    """Requests of one measurement."""

    requests: int
    prompt: int
    """Number of tokens of each prompt."""
    tokens: int
    """Number of sampled tokens per request."""
    vocab_size: int


@dataclass
class InterruptionTimes:
    """Measurements of one mode, with one entry per round."""

    total: list[float] = field(default_factory=list)
    """Seconds from the first request to the last answer."""
    pause: list[float] = field(default_factory=list)
    """Seconds until the server is paused (and, for ``abort``, has dropped its cache)."""
    tokens_before: list[int] = field(default_factory=list)
    """Tokens that had been returned when an abort ended the requests; 0 for other modes."""


async def measure_interruptions(
    engine: SglangEngine, client: SglangClient, load: Load, rounds: int
) -> dict[str, dict[str, float]]:
    """Interrupt ``load`` in every mode, ``rounds`` times.

    Args:
        engine: client of the server.
        client: client for the server's control endpoints.
        load: requests of a measurement.
        rounds: number of rounds.

    Returns:
        By mode: the medians of ``total``, ``pause`` and ``tokens_before``, and ``extra``, the
        median over rounds of the additional seconds compared with no pause.

    Raises:
        RuntimeError: if a request did not get all its tokens.
    """
    # The first run is a warm-up, which compiles kernels. The second one measures the duration, of
    # which the pause takes place at 50%.
    await _run(engine, client, load, "none", halfway=0.0, seed=-1)
    seconds = (await _run(engine, client, load, "none", halfway=0.0, seed=-2)).total[0]

    measured = {mode: InterruptionTimes() for mode in PAUSE_MODES}
    for number in range(rounds):
        for position, mode in enumerate(PAUSE_MODES):
            seed = number * len(PAUSE_MODES) + position
            one = await _run(engine, client, load, mode, halfway=seconds / 2, seed=seed)
            measured[mode].total += one.total
            measured[mode].pause += one.pause
            measured[mode].tokens_before += one.tokens_before

    return {mode: _summary(measured[mode], measured["none"]) for mode in PAUSE_MODES}


def _summary(mode: InterruptionTimes, undisturbed: InterruptionTimes) -> dict[str, float]:
    differences = [x - y for x, y in zip(mode.total, undisturbed.total, strict=True)]
    return {
        "total": median(mode.total),
        "extra": median(differences),
        "pause": median(mode.pause),
        "tokens_before": median(mode.tokens_before),
    }


async def _run(
    engine: SglangEngine,
    client: SglangClient,
    load: Load,
    mode: str,
    halfway: float,
    seed: int,
) -> InterruptionTimes:
    """Run all requests once and interrupt them after ``halfway`` seconds.

    Args:
        engine: client of the server.
        client: client for the server's control endpoints.
        load: requests of the measurement.
        mode: pause mode.
        halfway: seconds until the pause.
        seed: seed of the prompts. It differs between runs, so that no prompt is cached.
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
    if mode != "none":
        await asyncio.sleep(halfway)
        pause = await _pause(client, mode)
        await client.call("/continue_generation", {})
    going_on.set()

    before_abort = sum(await asyncio.gather(*tasks))
    return InterruptionTimes([time.perf_counter() - began], [pause], [before_abort])


async def _pause(client: SglangClient, mode: str) -> float:
    """Pause the server and return the seconds until it is paused."""
    began = time.perf_counter()
    await client.call("/pause_generation", {"mode": mode})
    if mode == "abort":
        await client.call("/flush_cache", {})
    return time.perf_counter() - began


async def _sample(
    engine: SglangEngine,
    name: str,
    prompt: list[int],
    tokens: int,
    going_on: asyncio.Event,
) -> int:
    """Sample ``tokens`` tokens, with a second request if the first is aborted.

    Args:
        engine: client of the server.
        name: name of the request.
        prompt: token ids of the prompt.
        tokens: number of tokens to sample.
        going_on: event after which the second request may be sent.

    Returns:
        Number of tokens at the abort; 0 without an abort.
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
    """Raise RuntimeError if fewer than ``tokens`` tokens were returned, unless the text ended."""
    if result.finish_reason is FinishReason.LENGTH and len(result.output_ids) < tokens:
        raise RuntimeError(f"{name} got {len(result.output_ids)} of {tokens} tokens")
    if result.finish_reason is FinishReason.ABORT:
        raise RuntimeError(f"{name} was aborted twice")
