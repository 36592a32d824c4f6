"""Sampled tokens per second under a load similar to a rollout.

    python -m benchmarks.sglang --layers 24 rollouts --running 64 --rounds 3
    python -m benchmarks.sglang --layers 24 rollouts --quantization mxfp4 \\
        --variants tuned prefill_graphs gathered_8

Needs one GPU. ``--running`` episodes run concurrently. A turn samples ``--tokens`` tokens on
average (geometric distribution). A tool takes some time (exponential distribution) and answers with
a few tokens. After 8 turns, a new episode with a new prompt starts. Therefore, turns end one by
one. Every continuation is a prefill of a few tokens, which interrupts the decoding of all others.

``--variants`` selects variants of servers:

- ``tuned``: the default of colocated servers. A prefill does not use a CUDA graph, and takes longer
  than a decoding step.
- ``prefill_graphs``: small prefills use CUDA graphs (``rollout.engine.prefill_graph_tokens``).
- ``broken_graphs``: the graphs are split at each attention, as in SGLang's servers that keep their
  memory.
- ``gathered_N``: the server gathers several continuations. It waits for at most N decoding steps,
  and at most until the waiting requests are 25% of the running ones.
- ``mixed``: one pass decodes and prefills, without a CUDA graph.

Servers with the same random weights share one GPU, and rounds alternate between them. The rate of a
round counts the turns that ended in ``--seconds``, after a warm-up that fills the server. Prints a
table.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.sglang.alternating_servers import (
    Variant,
    chosen_variants,
    emit,
    prepare,
    random_prompts,
    send_random_weights,
    servers_until_the_end,
)
from benchmarks.sglang.servers import Variation, model_config, wait_until_healthy
from megatron_gptoss.families.gpt_oss.config import GptOssModelConfig
from rl_loop.engines.protocol import GenerateRequest, SamplingParams
from rl_loop.engines.sglang.prefills import prefill_graph_options


def gathered(passes: int) -> Variation:
    """Return a server that waits up to ``passes`` decoding steps for more continuations."""
    return Variation(
        arguments=(
            "--enable-prefill-delayer",
            *("--prefill-delayer-queue-min-ratio", "0.25"),
            *("--prefill-delayer-max-delay-passes", str(passes)),
        )
    )


GRAPH_TOKENS = 512
"""Maximum number of tokens of a prefill that uses a CUDA graph, in variants with graphs."""
PREFILL_GRAPHS = Variation(arguments=tuple(prefill_graph_options(GRAPH_TOKENS)))
BROKEN_GRAPHS = Variation(
    arguments=(
        *("--cuda-graph-backend-prefill", "breakable"),
        *("--cuda-graph-max-bs-prefill", str(GRAPH_TOKENS)),
    )
)
VARIANTS = {
    "tuned": Variation(),
    "prefill_graphs": PREFILL_GRAPHS,
    "broken_graphs": BROKEN_GRAPHS,
    "gathered_8": gathered(8),
    "gathered_16": gathered(16),
    "mixed": Variation(arguments=("--enable-mixed-chunk",)),
}
"""Servers by name, as differences from the default server."""
TURNS = 8
"""Number of turns of an episode."""
TOOL_TOKENS = 13
"""Number of tokens of a tool's answer, including Harmony's format."""
TOOL_SECONDS = 0.05
"""Mean time of a tool call in seconds."""
MAX_TURN_FACTOR = 4
"""Maximum length of a turn, as a multiple of the mean length."""
PREFILL_LINE = re.compile(r"Prefill batch, #new-seq: (\d+)")


@dataclass
class Round:
    """Measurements of one round."""

    tokens_per_second: float
    turn_seconds: float
    """Mean seconds of a turn, without its tool."""
    sequences: float | None
    """Mean number of sequences per prefill; None if the server does not log it."""


@dataclass
class Load:
    """Episodes of a round."""

    variant: Variant
    name: str
    options: argparse.Namespace
    config: GptOssModelConfig
    turns: list[tuple[float, int, float]] = field(default_factory=list)
    """End time, number of tokens, and seconds of each turn."""
    stops: bool = False

    async def run(self, running: int) -> None:
        """Keep ``running`` episodes running until ``stops``. Their last turns run to their end."""
        await asyncio.gather(*(self._episodes(number) for number in range(running)))

    async def _episodes(self, number: int) -> None:
        generator = random.Random(f"{self.name}/{number}")
        episode = 0
        while not self.stops:
            await self._episode(f"{self.name}/{number}.{episode}", generator)
            episode += 1

    async def _episode(self, name: str, generator: random.Random) -> None:
        (tokens,) = random_prompts(generator, 1, self.options.prompt, self.config)
        for turn in range(TURNS):
            if self.stops:
                return
            mean_length = self.options.tokens
            length = 1 + int(generator.expovariate(1 / mean_length))
            sampling = SamplingParams(min(length, MAX_TURN_FACTOR * mean_length))
            began = time.perf_counter()
            request = GenerateRequest(f"{name}/{turn}/0", tokens, sampling)
            result = await self.variant.engine.generate(request)
            ended = time.perf_counter()
            self.turns.append((ended, len(result.output_ids), ended - began))

            await asyncio.sleep(generator.expovariate(1 / TOOL_SECONDS))
            (answer,) = random_prompts(generator, 1, TOOL_TOKENS, self.config)
            tokens = tokens + result.output_ids + answer


async def measure_rollouts(options: argparse.Namespace, scratch: Path) -> None:
    """Start the servers, measure, print a table, and stop the servers."""
    config = model_config(options)
    async with servers_until_the_end() as variants:
        # In sequence, because a server takes a fraction of the memory that is free at its start.
        for name, variation in chosen_variants(VARIANTS, options.variants).items():
            packed = options.quantization is not None
            variants.append(
                prepare(
                    name, variation, options.server_gpu, options, config, scratch, packed=packed
                )
            )
            emit("start", variant=name, seconds=await wait_until_healthy(variants[-1].server))
        emit("weights", seconds=await send_random_weights(variants, options, config, scratch))

        rows = []
        for running in options.running:
            rows.append(await measure_row(variants, running, options, config))
            print(table(rows, variants), flush=True)

    if options.out:
        options.out.write_text(table(rows, variants))


async def measure_row(
    variants: list[Variant], running: int, options: argparse.Namespace, config: GptOssModelConfig
) -> dict[str, Any]:
    """Measure one number of running episodes on all servers and return the row's values.

    Args:
        variants: servers.
        running: number of running episodes.
        options: command line.
        config: configuration of the model.
    """
    rounds: dict[str, list[Round]] = {variant.name: [] for variant in variants}

    # The first round is a warm-up: kernels are compiled for all batch sizes.
    for number in range(options.rounds + 1):
        in_turn = variants if number % 2 else variants[::-1]
        for variant in in_turn:
            load = Load(variant, f"{running}/{number}", options, config)
            measured = await run_round(load, running, options.seconds)
            if number > 0:
                rounds[variant.name].append(measured)

    row: dict[str, Any] = {"running": running}
    for name, measured in rounds.items():
        rates = [one.tokens_per_second for one in measured]
        row[f"{name}_tokens_per_second"] = median(rates)
        row[f"{name}_all"] = [round(rate) for rate in rates]
        row[f"{name}_turn_seconds"] = median(one.turn_seconds for one in measured)
        sequences = [one.sequences for one in measured if one.sequences is not None]
        row[f"{name}_sequences"] = mean(sequences) if sequences else None
    emit("rollouts", layers=config.num_layers, **row)
    return row


async def run_round(load: Load, running: int, seconds: float) -> Round:
    """Run episodes and count the turns that end within ``seconds``.

    Counting starts after ``running`` turns have ended, because turns that start together end
    together.

    Args:
        load: episodes of the round.
        running: number of running episodes.
        seconds: duration of the measurement.
    """
    log = load.variant.log
    printed = log.stat().st_size if log.exists() else 0
    task = asyncio.create_task(load.run(running))
    try:
        while len(load.turns) < running and not task.done():
            await asyncio.sleep(0.01)
        began = time.perf_counter()
        # Returns early if an episode failed.
        await asyncio.wait([task], timeout=seconds)
        ended = time.perf_counter()
    finally:
        load.stops = True
        await task

    counted = [turn for turn in load.turns if began < turn[0] <= ended]
    return Round(
        tokens_per_second=sum(tokens for _, tokens, _ in counted) / (ended - began),
        turn_seconds=mean(turn_seconds for _, _, turn_seconds in counted),
        sequences=sequences_of_a_prefill(log, printed),
    )


def sequences_of_a_prefill(log: Path, printed: int) -> float | None:
    """Return the mean number of requests per prefill, from the log after byte ``printed``."""
    if not log.exists():
        return None
    with log.open("rb") as file:
        file.seek(printed)
        text = file.read().decode(errors="replace")
    counts = [int(count) for count in PREFILL_LINE.findall(text)]
    return mean(counts) if counts else None


def table(rows: list[dict[str, Any]], variants: list[Variant]) -> str:
    """Return a Markdown table of all rows, with the speed relative to the first server."""
    lines = [
        "| running | server | sampled tokens/s | times the first | of the rounds | a turn, s | requests of a prefill |",
        "|---" * 7 + "|",
    ]
    for row in rows:
        first = row[f"{variants[0].name}_tokens_per_second"]
        for variant in variants:
            rate = row[f"{variant.name}_tokens_per_second"]
            sequences = row[f"{variant.name}_sequences"]
            cells = [
                f"{row['running']}",
                variant.name.replace("_", " "),
                f"{rate:,.0f}",
                f"**{rate / first:.2f}**",
                f"{min(row[f'{variant.name}_all']):,} to {max(row[f'{variant.name}_all']):,}",
                f"{row[f'{variant.name}_turn_seconds']:.2f}",
                "-" if sequences is None else f"{sequences:.1f}",
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
