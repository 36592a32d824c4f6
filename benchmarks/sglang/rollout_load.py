"""Sampled tokens per second under a load similar to a rollout.

    python -m benchmarks.sglang --layers 24 rollouts --running 64 --rounds 3
    python -m benchmarks.sglang --layers 24 rollouts --quantization mxfp4 --running 64 256 \\
        --variants one_by_one gathered --tool-tokens 200 600

Needs one GPU. ``--running`` episodes run concurrently. A turn samples ``--tokens`` tokens on
average (geometric distribution). A tool takes some time (exponential distribution) and answers with
``--tool-tokens`` tokens. After 8 turns, a new episode with a new prompt starts. Therefore, turns end
one by one. Every continuation is a prefill, which interrupts the decoding of all others.

``--variants`` selects variants of servers. Colocated servers of a run are ``gathered``:

- ``one_by_one``: prefills use CUDA graphs, and begin without delay.
- ``gathered``: the server also gathers continuations, for at most 15 decoding steps.
- ``gathered_N``: it gathers for at most N - 1 decoding steps.
- ``gathered_2048``: CUDA graphs of up to 2,048 tokens instead of 512.
- ``few_requests``: as ``one_by_one``, but graphs hold 16 requests, SGLang's default, and begin at 8
  tokens.
- ``tuned``: as ``one_by_one`` without CUDA graphs of prefills, which then take longer than a
  decoding step.
- ``broken_graphs``: the graphs are split at each attention, as in SGLang's servers that keep their
  memory.

SGLang's ``--enable-mixed-chunk`` is not among them, because it does not apply to requests for
log-probs.

Servers with the same random weights share one GPU, and rounds alternate between them. The rate of a
round counts the turns that ended in ``--seconds``, after a warm-up that fills the server. Prints a
table, with these columns from the servers' logs:

- ``prefills a second``, and in brackets those without a CUDA graph.
- ``tokens of a prefill``: new tokens, without those in the prefix cache.
- ``time in prefills`` and ``in stalls``: shares of the rounds in which decoding stopped
  (``benchmarks.loop.rollout_split``).

At last it scores some episodes of every server on the same server. The difference to the log-probs
of sampling does not depend on the variant, unless a variant computes prefills incorrectly.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, mean, median
from typing import Any

from benchmarks.loop.rollout_split import mean_split
from benchmarks.sglang.alternating_servers import (
    Variant,
    chosen_variants,
    emit,
    prepare,
    random_prompts,
    send_random_weights,
    servers_until_the_end,
)
from benchmarks.sglang.server_log import ServerRollout, read_rollout
from benchmarks.sglang.servers import Variation, model_config, wait_until_healthy
from megatron_gptoss.families.gpt_oss.config import GptOssModelConfig
from rl_loop.engines.protocol import GenerateRequest, SamplingParams
from rl_loop.engines.sglang.prefills import (
    GATHER_PASSES,
    GATHER_PASSES_OPTION,
    PREFILL_GRAPH_TOKENS,
    prefill_graph_options,
)


def gathered(passes: int = GATHER_PASSES, graph_tokens: int = PREFILL_GRAPH_TOKENS) -> Variation:
    """Return a server that waits up to ``passes`` - 1 decoding steps for more continuations."""
    options = prefill_graph_options(graph_tokens)
    return Variation(arguments=(*options, GATHER_PASSES_OPTION, str(passes)))


AT_ONCE = (GATHER_PASSES_OPTION, "1")
"""Arguments of a server whose prefills begin without delay."""
FEW_REQUESTS = (
    *("--cuda-graph-backend-prefill", "full"),
    *("--cuda-graph-bs-prefill", "8", "16", "32", "64", "128", "256", "512"),
)
BROKEN_GRAPHS = (
    *("--cuda-graph-backend-prefill", "breakable"),
    *("--cuda-graph-max-bs-prefill", str(PREFILL_GRAPH_TOKENS)),
)
VARIANTS = {
    "one_by_one": gathered(1),
    "gathered": gathered(),
    "gathered_8": gathered(8),
    "gathered_32": gathered(32),
    "gathered_2048": gathered(graph_tokens=2048),
    "few_requests": Variation(arguments=(*FEW_REQUESTS, *AT_ONCE)),
    "tuned": Variation(arguments=(*prefill_graph_options(0), *AT_ONCE)),
    "broken_graphs": Variation(arguments=(*BROKEN_GRAPHS, *AT_ONCE)),
}
"""Servers by name, as differences from the default server."""
TURNS = 8
"""Number of turns of an episode."""
TOOL_SECONDS = 0.05
"""Mean time of a tool call in seconds."""
MAX_TURN_FACTOR = 4
"""Maximum length of a turn, as a multiple of the mean length."""
STEPS_PER_LINE = 10
"""Decoding steps between two lines of the servers' logs. SGLang's default of 40 is too rare for rounds
of a few seconds.
"""
SCORED_EPISODES = 16
"""Episodes of a server whose log-probs are compared."""


@dataclass
class Round:
    """Measurements of one round."""

    seconds: float
    tokens_per_second: float
    turn_seconds: float
    """Mean seconds of a turn, without its tool."""
    server: ServerRollout
    """Decoding and prefills according to the server's log."""


@dataclass
class SampledEpisode:
    """Tokens of an episode, and the log-probs of the sampled ones."""

    tokens: list[int] = field(default_factory=list)
    log_probs: dict[int, float] = field(default_factory=dict)
    """Log-prob of every sampled token by its index."""


@dataclass
class Load:
    """Episodes of a round."""

    variant: Variant
    name: str
    options: argparse.Namespace
    config: GptOssModelConfig
    turns: list[tuple[float, int, float]] = field(default_factory=list)
    """End time, number of tokens, and seconds of each turn."""
    kept: list[SampledEpisode] = field(default_factory=list)
    """The first episodes that ended, or were stopped after a turn."""
    stops: bool = False

    async def run(self, running: int) -> None:
        """Keep ``running`` episodes running until ``stops``."""
        await asyncio.gather(*(self._episodes(number) for number in range(running)))

    async def _episodes(self, number: int) -> None:
        generator = random.Random(f"{self.name}/{number}")
        episode = 0
        while not self.stops:
            await self._episode(f"{self.name}/{number}.{episode}", generator)
            episode += 1

    async def _episode(self, name: str, generator: random.Random) -> None:
        episode = SampledEpisode()
        (episode.tokens,) = random_prompts(generator, 1, self.options.prompt, self.config)
        routed = 0
        for turn in range(TURNS):
            if self.stops:
                break
            mean_length = self.options.tokens
            length = 1 + int(generator.expovariate(1 / mean_length))
            sampling = SamplingParams(min(length, MAX_TURN_FACTOR * mean_length))
            began = time.perf_counter()
            # As in a run, a turn returns the experts of tokens that no earlier turn has returned.
            request = GenerateRequest(
                f"{name}/{turn}/0",
                episode.tokens,
                sampling,
                return_routed_experts=self.options.device != "cpu",
                routes_start=routed,
            )
            result = await self.variant.engine.generate(request)
            if self.stops:
                break
            ended = time.perf_counter()
            self.turns.append((ended, len(result.output_ids), ended - began))
            episode.log_probs |= dict(enumerate(result.output_log_probs, len(episode.tokens)))
            sampled = episode.tokens + result.output_ids
            routed = len(sampled) - 1

            await asyncio.sleep(generator.expovariate(1 / TOOL_SECONDS))
            length = generator.randint(*self.options.tool_tokens)
            (answer,) = random_prompts(generator, 1, length, self.config)
            episode.tokens = sampled + answer
        if episode.log_probs and len(self.kept) < SCORED_EPISODES:
            self.kept.append(episode)


async def measure_rollouts(options: argparse.Namespace, scratch: Path) -> None:
    """Start the servers, measure, print a table, and stop the servers."""
    config = model_config(options)
    async with servers_until_the_end() as variants:
        for name, variation in chosen_variants(VARIANTS, options.variants).items():
            mxfp4_experts = options.quantization is not None
            arguments = (*variation.arguments, "--decode-log-interval", str(STEPS_PER_LINE))
            variants.append(
                prepare(
                    name,
                    replace(variation, arguments=arguments),
                    options.server_gpu,
                    options,
                    config,
                    scratch,
                    mxfp4_experts=mxfp4_experts,
                    together=True,
                )
            )
        starts = await asyncio.gather(*(wait_until_healthy(one.server) for one in variants))
        for variant, seconds in zip(variants, starts, strict=True):
            emit("start", variant=variant.name, seconds=seconds)
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
    gaps: dict[str, float] = {}

    # The first round is a warm-up of half the duration: kernels are compiled for all batch sizes.
    for number in range(options.rounds + 1):
        in_turn = variants if number % 2 else variants[::-1]
        for variant in in_turn:
            load = Load(variant, f"{running}/{number}", options, config)
            seconds = options.seconds if number > 0 else options.seconds / 2
            measured = await run_round(load, running, seconds)
            if number > 0:
                rounds[variant.name].append(measured)
            if number == options.rounds:
                gaps[variant.name] = await log_prob_gap(variant, load.kept)

    row: dict[str, Any] = {"running": running}
    for name, measured in rounds.items():
        values = {**summary(measured, running), "log_prob_gap": gaps[name]}
        row |= {f"{name}_{key}": value for key, value in values.items()}
    emit("rollouts", layers=config.num_layers, **row)
    return row


def summary(rounds: list[Round], running: int) -> dict[str, Any]:
    """Return the values of a table's row for one server.

    Args:
        rounds: rounds of the server.
        running: number of running episodes.
    """
    rates = [one.tokens_per_second for one in rounds]
    seconds = sum(one.seconds for one in rounds)
    prefills = [prefill for one in rounds for prefill in one.server.prefills]
    split = mean_split([one.server for one in rounds], running)
    return {
        "tokens_per_second": median(rates),
        "all": [round(rate) for rate in rates],
        "turn_seconds": median(one.turn_seconds for one in rounds),
        "prefills": len(prefills) / seconds,
        "eager": sum(not prefill.has_graph for prefill in prefills) / seconds,
        "requests": mean(prefill.requests for prefill in prefills) if prefills else None,
        "prefill_tokens": mean(prefill.tokens for prefill in prefills) if prefills else None,
        "in_prefills": None if split is None else split.prefill / split.total,
        "in_stalls": None if split is None else split.stalls / split.total,
    }


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
    task = asyncio.create_task(load.run(running))
    try:
        while len(load.turns) < running and not task.done():
            await asyncio.sleep(0.01)
        printed = log.stat().st_size if log.exists() else 0
        began = time.perf_counter()
        # Returns early if an episode failed.
        await asyncio.wait([task], timeout=seconds)
        ended = time.perf_counter()
        server = rollout_after(log, printed)
    finally:
        load.stops = True
        await load.variant.engine.abort()
        await task

    counted = [turn for turn in load.turns if began < turn[0] <= ended]
    return Round(
        seconds=ended - began,
        tokens_per_second=sum(tokens for _, tokens, _ in counted) / (ended - began),
        turn_seconds=mean(turn_seconds for _, _, turn_seconds in counted),
        server=server,
    )


def rollout_after(log: Path, printed: int) -> ServerRollout:
    """Return decoding and prefills of a server, from its log after byte ``printed``."""
    if not log.exists():
        return ServerRollout((), ())
    with log.open("rb") as file:
        file.seek(printed)
        lines = file.read().decode(errors="replace").splitlines()
    return read_rollout(lines, STEPS_PER_LINE)


async def log_prob_gap(variant: Variant, episodes: list[SampledEpisode]) -> float | None:
    """Return the mean difference of log-probs between sampling and scoring, in nats.

    Args:
        variant: server that sampled the episodes.
        episodes: episodes to score. None is returned if there are none.
    """
    gaps = []
    for episode in episodes:
        scored = await variant.engine.score(episode.tokens)
        # The first token has no log-prob.
        gaps += [abs(value - scored[index - 1]) for index, value in episode.log_probs.items()]
    return fmean(gaps) if gaps else None


def table(rows: list[dict[str, Any]], variants: list[Variant]) -> str:
    """Return a Markdown table of all rows, with the speed relative to the first server."""
    lines = [
        "| running | server | sampled tokens/s | times the first | of the rounds | a turn, s "
        "| prefills a second (eager) | requests of a prefill | tokens of a prefill "
        "| time in prefills | in stalls | gap, nats |",
        "|---" * 12 + "|",
    ]
    for row in rows:
        first = row[f"{variants[0].name}_tokens_per_second"]
        for variant in variants:
            name = variant.name
            rate = row[f"{name}_tokens_per_second"]
            cells = [
                f"{row['running']}",
                name.replace("_", " "),
                f"{rate:,.0f}",
                f"**{rate / first:.2f}**",
                f"{min(row[f'{name}_all']):,} to {max(row[f'{name}_all']):,}",
                f"{row[f'{name}_turn_seconds']:.2f}",
                f"{row[f'{name}_prefills']:.1f} ({row[f'{name}_eager']:.1f})",
                _cell(row[f"{name}_requests"], ".1f"),
                _cell(row[f"{name}_prefill_tokens"], ",.0f"),
                _cell(row[f"{name}_in_prefills"], ".0%"),
                _cell(row[f"{name}_in_stalls"], ".0%"),
                _cell(row[f"{name}_log_prob_gap"], ".5f"),
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
