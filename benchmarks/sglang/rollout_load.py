"""Sampled tokens per second under a load like a rollout's: ``python -m benchmarks.sglang rollouts``.

    python -m benchmarks.sglang --layers 24 rollouts --running 64 --rounds 3
    python -m benchmarks.sglang --layers 24 rollouts --quantization mxfp4 --ways tuned prefill_graphs gathered_8

``--running`` episodes go on at a time. A turn samples ``--tokens`` tokens on average (geometric), a
tool takes a while (exponential) and answers with a few, and after eight turns a new episode with a new
prompt takes its place. So turns end one by one, and every continuation is a prefill of a few tokens,
for which a server interrupts the decoding of all others.

``tuned`` is what colocated servers have by themselves: a prefill is no CUDA graph, and takes longer than a
decoding step. In ``prefill_graphs`` small ones are (``rollout.engine.prefill_graph_tokens``), in
``broken_graphs`` the graphs are broken off at each attention, as SGLang has them where servers keep their
memory. SGLang can also wait until several continuations have come. ``gathered_N`` waits for N decoding steps
at most, and no longer than until a quarter as many requests wait as run; ``mixed`` decodes in the same pass
that prefills, without a CUDA graph.

Servers with the same random weights share one GPU, and rounds go to them in turn. A round's rate is of
the turns that ended in ``--seconds``, behind some that only fill the server.
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

from benchmarks.sglang.servers import Variation, model_config, wait_until_healthy
from benchmarks.sglang.servers_in_turn import (
    Way,
    chosen_ways,
    emit,
    prepare,
    random_prompts,
    send_random_weights,
    servers_until_the_end,
)
from megatron_gptoss.families.gpt_oss.config import GptOssModelConfig
from rl_loop.engines.protocol import GenerateRequest, SamplingParams
from rl_loop.engines.sglang.config import prefill_graph_options


def gathered(passes: int) -> Variation:
    """Return a server that waits up to ``passes`` decoding steps for further continuations."""
    return Variation(
        arguments=(
            "--enable-prefill-delayer",
            *("--prefill-delayer-queue-min-ratio", "0.25"),
            *("--prefill-delayer-max-delay-passes", str(passes)),
        )
    )


GRAPH_TOKENS = 512
"""Prefills of up to so many tokens are CUDA graphs in the ways that have them."""
PREFILL_GRAPHS = Variation(arguments=tuple(prefill_graph_options(GRAPH_TOKENS)))
BROKEN_GRAPHS = Variation(
    arguments=(
        *("--cuda-graph-backend-prefill", "breakable"),
        *("--cuda-graph-max-bs-prefill", str(GRAPH_TOKENS)),
    )
)
WAYS = {
    "tuned": Variation(),
    "prefill_graphs": PREFILL_GRAPHS,
    "broken_graphs": BROKEN_GRAPHS,
    "gathered_8": gathered(8),
    "gathered_16": gathered(16),
    "mixed": Variation(arguments=("--enable-mixed-chunk",)),
}
"""By name: how a server differs from ours."""
TURNS = 8
"""Of an episode."""
TOOL_TOKENS = 13
"""Of a tool's answer, with what Harmony puts around it."""
TOOL_SECONDS = 0.05
"""That a tool takes on average."""
LONGEST = 4
"""Of a turn, in mean lengths."""
PREFILL_LINE = re.compile(r"Prefill batch, #new-seq: (\d+)")


@dataclass
class Round:
    """What one round came to."""

    tokens_per_second: float
    turn_seconds: float
    """Of a turn, on average, without its tool."""
    sequences: float | None
    """Of a prefill, on average; None if the server does not tell."""


@dataclass
class Load:
    """The episodes of a round."""

    way: Way
    name: str
    options: argparse.Namespace
    config: GptOssModelConfig
    turns: list[tuple[float, int, float]] = field(default_factory=list)
    """When each turn ended, its tokens, and its seconds."""
    stops: bool = False

    async def run(self, running: int) -> None:
        """Keep so many episodes going until ``stops``; their last turns end by themselves."""
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
            sampling = SamplingParams(min(length, LONGEST * mean_length))
            began = time.perf_counter()
            request = GenerateRequest(f"{name}/{turn}/0", tokens, sampling)
            result = await self.way.engine.generate(request)
            ended = time.perf_counter()
            self.turns.append((ended, len(result.output_ids), ended - began))

            await asyncio.sleep(generator.expovariate(1 / TOOL_SECONDS))
            (answer,) = random_prompts(generator, 1, TOOL_TOKENS, self.config)
            tokens = tokens + result.output_ids + answer


async def measure_rollouts(options: argparse.Namespace, scratch: Path) -> None:
    """Start the servers, measure, and print a table; ends all whatever happens."""
    config = model_config(options)
    async with servers_until_the_end() as ways:
        # One after the other: a server takes its share of what is free when it starts.
        for name, variation in chosen_ways(WAYS, options.ways).items():
            packed = options.quantization is not None
            ways.append(
                prepare(
                    name, variation, options.server_gpu, options, config, scratch, packed=packed
                )
            )
            emit("start", way=name, seconds=await wait_until_healthy(ways[-1].server))
        emit("weights", seconds=await send_random_weights(ways, options, config, scratch))

        rows = []
        for running in options.running:
            rows.append(await measure_row(ways, running, options, config))
            print(table(rows, ways), flush=True)

    if options.out:
        options.out.write_text(table(rows, ways))


async def measure_row(
    ways: list[Way], running: int, options: argparse.Namespace, config: GptOssModelConfig
) -> dict[str, Any]:
    """Measure one number of running episodes on all servers; return the row's figures."""
    rounds: dict[str, list[Round]] = {way.name: [] for way in ways}

    # The first round warms up: kernels are compiled for all the sizes of batches.
    for number in range(options.rounds + 1):
        in_turn = ways if number % 2 else ways[::-1]
        for way in in_turn:
            load = Load(way, f"{running}/{number}", options, config)
            measured = await run_round(load, running, options.seconds)
            if number > 0:
                rounds[way.name].append(measured)

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
    """Run episodes, and count the turns that end within ``seconds``.

    Counting begins when as many turns have ended as run: turns that began together end together.
    """
    log = load.way.log
    printed = log.stat().st_size if log.exists() else 0
    task = asyncio.create_task(load.run(running))
    try:
        while len(load.turns) < running and not task.done():
            await asyncio.sleep(0.01)
        began = time.perf_counter()
        # Not a second longer if an episode failed.
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
    """Return how many requests a prefill had on average, by what a server has printed since."""
    if not log.exists():
        return None
    with log.open("rb") as file:
        file.seek(printed)
        text = file.read().decode(errors="replace")
    counts = [int(count) for count in PREFILL_LINE.findall(text)]
    return mean(counts) if counts else None


def table(rows: list[dict[str, Any]], ways: list[Way]) -> str:
    """Return the Markdown table of what was measured, the first server beside the others."""
    lines = [
        "| running | server | sampled tokens/s | times the first | of the rounds | a turn, s | requests of a prefill |",
        "|---" * 7 + "|",
    ]
    for row in rows:
        first = row[f"{ways[0].name}_tokens_per_second"]
        for way in ways:
            rate = row[f"{way.name}_tokens_per_second"]
            sequences = row[f"{way.name}_sequences"]
            cells = [
                f"{row['running']}",
                way.name.replace("_", " "),
                f"{rate:,.0f}",
                f"**{rate / first:.2f}**",
                f"{min(row[f'{way.name}_all']):,} to {max(row[f'{way.name}_all']):,}",
                f"{row[f'{way.name}_turn_seconds']:.2f}",
                "-" if sequences is None else f"{sequences:.1f}",
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
