"""Decoding and prefill with and without our settings of SGLang's mixture-of-experts kernel, and
against what the GPU's memory allows: ``python -m benchmarks.sglang decode``.

Two servers with the same random weights share one GPU, and rounds go to them in turn, so that a
change of the clocks meets both: ``as_it_comes`` does not find our settings, ``tuned`` does. A round
is three calls with the same prompts: one new token each (prefill), the same again, now from the
prefix cache (what a call costs besides), and ``--tokens`` more (decoding). Requests go through the
rollouts' own client.

A decoding step is what the server says in its log, once for 40 steps: the median of all rounds. What the
client sees is told beside it: what the third call takes longer than the median of all rounds' second
calls, over the tokens. That has the client's own work in it, which with 256 requests scatters by
milliseconds a step, and stands in for servers that write no such lines.

With ``--quantization mxfp4`` the servers are ``bf16``, with our settings, and ``mxfp4``. ``--ways`` adds

* ``mxfp4_slow_routing``, which routes and sums with triton_kernels' own kernels, ``mxfp4_slow_products``,
  whose expert products of many tokens run in triton_kernels' own shapes, and ``mxfp4_slow_few_tokens``,
  which multiplies few tokens in triton_kernels' kernel, too;
* ``bf16_slow_sampling`` and ``mxfp4_slow_sampling``, which sample as SGLang does, not in one reading of
  the logits (patch ``quick_sampling``), ``bf16_slow_window`` and ``mxfp4_slow_window``, which
  attend to windows with FlashAttention, not in the plugin's own kernel (patch ``quick_window``),
  and ``bf16_slow`` and ``mxfp4_slow``, which do both;
* ``bf16_rounded_logits`` and ``mxfp4_rounded_logits``, whose logits are rounded to bf16
  (``rollout.engine.fp32_logits``), and ``mxfp4_sglang_fp32_logits``, which computes them with SGLang's
  ``--enable-fp32-lm-head``.

All get the same weights, the values of MXFP4, and are compared first: the log-probs of one text, and the
experts that each chose for its tokens. With ``--apart`` each server has a GPU of its own, for models of
which one GPU does not hold two.

The limit is the bytes that a decoding step has to read, once, over the bandwidth that reading 4 GB
reaches on this GPU: attention, router, the experts that the running requests are routed to
(counted from the routes that the server returns), the head, and the keys and values in sight.

With ``--profile`` a trace of some decoding steps is taken of both servers, for every number of
requests, when all rounds have been timed (a process that was profiled may stay slower), and
``decoding_profile.py`` tells where the GPU's time goes.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.harness import read_bandwidth
from benchmarks.sglang.decoding_profile import StepProfile, profile_steps, profile_table, read_trace
from benchmarks.sglang.server_log import step_seconds
from benchmarks.sglang.servers import Variation, model_config, wait_until_healthy
from benchmarks.sglang.servers_in_turn import (
    Way,
    chosen_ways,
    emit,
    generate,
    prepare,
    random_prompts,
    send_random_weights,
    servers_until_the_end,
)
from megatron_gptoss.families.gpt_oss.config import GptOssModelConfig
from rl_loop.engines.protocol import GenerateRequest, SamplingParams
from rl_loop.engines.sglang.client import SglangClient

BF16_BYTES = 2
PACKED_BYTES = 17 / 32
"""Of a weight in MXFP4."""
ROUTED_TOKENS = 16
"""Decoding steps in which the experts are counted."""
MOE_VARIABLE = "SGLANG_MOE_CONFIG_DIR"
SLOW_SAMPLING = Variation(without_mends=("quick_sampling",))
SLOW_WINDOW = Variation(without_mends=("quick_window",))
BF16_LOGITS = Variation(without_mends=("fp32_logits",))
SGLANG_FP32_LOGITS = Variation(without_mends=("fp32_logits",), arguments=("--enable-fp32-lm-head",))
SLOW = Variation(without_mends=("quick_sampling", "quick_window"))
AS_IT_COMES = Variation(without_variables=(MOE_VARIABLE,), without_mends=SLOW.without_mends)
WAYS = {"as_it_comes": AS_IT_COMES, "tuned": Variation()}
"""By name: how a server differs from ours."""
BF16_WAYS = (
    "bf16",
    "bf16_slow_sampling",
    "bf16_slow_window",
    "bf16_slow",
    "bf16_rounded_logits",
)
"""The ways that keep the values of MXFP4 in bf16; all others of ``QUANTIZED_WAYS`` pack them."""
QUANTIZED_WAYS = {
    "bf16": Variation(),
    "mxfp4": Variation(),
    "mxfp4_slow_routing": Variation(without_mends=("quick_routing",)),
    "mxfp4_slow_products": Variation(without_mends=("quick_products",)),
    "mxfp4_slow_few_tokens": Variation(without_mends=("quick_few_tokens",)),
    "bf16_slow_sampling": SLOW_SAMPLING,
    "mxfp4_slow_sampling": SLOW_SAMPLING,
    "bf16_slow_window": SLOW_WINDOW,
    "mxfp4_slow_window": SLOW_WINDOW,
    "bf16_slow": SLOW,
    "mxfp4_slow": SLOW,
    "bf16_rounded_logits": BF16_LOGITS,
    "mxfp4_rounded_logits": BF16_LOGITS,
    "mxfp4_sglang_fp32_logits": SGLANG_FP32_LOGITS,
}
"""The same with ``--quantization mxfp4``."""
COMPARED_TOKENS = 512
"""Of the text on which quantized servers are compared."""
PROFILED_STEPS = 20
"""Decoding steps of a trace, about."""
PROFILED_TOKENS = 10 * PROFILED_STEPS
"""That the requests sample which are profiled: all have to run until the trace ends."""


@dataclass
class Times:
    """Seconds of every round of one server with one number of requests."""

    prefill: list[float] = field(default_factory=list)
    """Of all prompts."""
    one_token: list[float] = field(default_factory=list)
    """Of a call for one token, with the prompts from the prefix cache."""
    all_tokens: list[float] = field(default_factory=list)
    """Of such a call for one token and those that are counted."""
    cached: list[float] = field(default_factory=list)
    """Not seconds, but the share of the prompts that came from the prefix cache."""

    def steps(self, tokens: int) -> list[float]:
        """Return the seconds of a decoding step in every round of ``tokens`` steps."""
        besides = median(self.one_token)
        return [(seconds - besides) / tokens for seconds in self.all_tokens]


def ways_of(options: argparse.Namespace) -> dict[str, Variation]:
    """Return the servers to compare, by name."""
    return chosen_ways(QUANTIZED_WAYS if options.quantization else WAYS, options.ways)


async def measure_decoding(options: argparse.Namespace, scratch: Path) -> None:
    """Start both servers, measure, and print the table; ends both whatever happens."""
    config = model_config(options)
    bandwidth = 0.0
    if options.device != "cpu":
        bandwidth = read_bandwidth()
        torch.cuda.empty_cache()
        emit("bandwidth", terabytes_per_second=bandwidth / 1e12)

    async with servers_until_the_end() as ways:
        # One after the other: a server takes its share of what is free when it starts.
        for name, variation in ways_of(options).items():
            gpu = len(ways) if options.apart else options.server_gpu
            packed = options.quantization is not None and name not in BF16_WAYS
            ways.append(prepare(name, variation, gpu, options, config, scratch, packed=packed))
            emit("start", way=name, seconds=await wait_until_healthy(ways[-1].server))
        emit("weights", seconds=await send_random_weights(ways, options, config, scratch))
        if options.quantization:
            await compare_ways(ways, options, config)

        rows = []
        for running in options.running:
            rows.append(await measure_row(ways, running, options, config, bandwidth))
            print(table(rows, options, config), flush=True)

        profiles = ""
        if options.profile:
            directory = (options.traces or scratch / "traces").absolute()
            for row in rows:
                profiles += await profile_row(ways, row, options, config, directory)

    if options.out:
        options.out.write_text(table(rows, options, config) + profiles)


async def compare_ways(
    ways: list[Way], options: argparse.Namespace, config: GptOssModelConfig
) -> None:
    """Tell how far log-probs and chosen experts of servers are apart from the first one's, on one
    text."""
    (text,) = random_prompts(random.Random(0), 1, COMPARED_TOKENS, config)
    scores = []
    routes = []
    for way in ways:
        scores.append(await way.engine.score(text))
        if options.device != "cpu":  # servers on CPUs return no routes
            (result,) = await generate(way, "compared", [text], 1, with_routes=True)
            assert result.routed_experts is not None
            routes.append(np.sort(result.routed_experts[: len(text)], axis=-1))

    for number, way in enumerate(ways[1:], start=1):
        gaps = np.abs(np.subtract(scores[0], scores[number]))
        figures: dict[str, Any] = {"gap_mean": float(gaps.mean()), "gap_max": float(gaps.max())}
        if routes:
            agreeing = (routes[0] == routes[number]).all(axis=-1).mean(axis=0)  # by layer
            figures["routes_agreeing_first_layer"] = float(agreeing[0])
            figures["routes_agreeing"] = float(agreeing.mean())
        emit("compared", ways=[ways[0].name, way.name], **figures)


# -- times ----------------------------------------------------------------------------------------


async def measure_row(
    ways: list[Way],
    running: int,
    options: argparse.Namespace,
    config: GptOssModelConfig,
    bandwidth: float,
) -> dict[str, Any]:
    """Measure one number of running requests on all servers; return the row's figures."""
    generator = random.Random(running)
    times = {way.name: Times() for way in ways}

    # The first round warms up: kernels are compiled, and the allocator learns what is needed.
    written = {way.name: 0 for way in ways}
    for number in range(options.rounds + 1):
        if number == 1:
            written = {way.name: len(way.log.read_bytes()) for way in ways}
        prompts = random_prompts(generator, running, options.prompt, config)
        in_turn = ways if number % 2 else ways[::-1]
        for way in in_turn:
            measured = Times() if number == 0 else times[way.name]
            await time_round(way, f"{running}/{number}", prompts, options.tokens, measured)

    logs = {
        way.name: way.log.read_bytes()[written[way.name] :].decode(errors="replace") for way in ways
    }
    experts = await count_experts(ways[-1], running, generator, options, config)
    context = options.prompt + options.tokens // 2
    expert_bytes = PACKED_BYTES if options.quantization else BF16_BYTES
    read = bytes_of_step(config, running, context, experts, expert_bytes)
    row: dict[str, Any] = {
        "running": running,
        "experts_used": experts,
        "gigabytes_read": read / 1e9,
    }
    if bandwidth:
        row["limit_ms"] = read / bandwidth * 1e3
    for name, measured in times.items():
        row[f"{name}_prefill_tokens_per_second"] = (
            running * options.prompt / median(measured.prefill)
        )
        client_steps = measured.steps(options.tokens)
        server_steps = step_seconds(logs[name], running)
        steps = server_steps or client_steps
        row[f"{name}_steps_by"] = "server" if server_steps else "client"
        row[f"{name}_ms"] = median(steps) * 1e3
        row[f"{name}_from_to_ms"] = [round(step(steps) * 1e3, 3) for step in (min, max)]
        row[f"{name}_client_all_ms"] = [round(step * 1e3, 3) for step in client_steps]
        row[f"{name}_cached_share"] = min(measured.cached)
    emit("decode", layers=config.num_layers, **row)
    return row


async def time_round(
    way: Way, name: str, prompts: list[list[int]], tokens: int, times: Times
) -> None:
    """Add the seconds of a round's three calls to ``times``."""
    began = time.perf_counter()
    await generate(way, f"{name}/prefill", prompts, 1)
    prefilled = time.perf_counter()
    cached = await generate(way, f"{name}/cached", prompts, 1)
    found = time.perf_counter()
    await generate(way, f"{name}/decode", prompts, 1 + tokens)
    ended = time.perf_counter()

    times.prefill.append(prefilled - began)
    times.one_token.append(found - prefilled)
    times.all_tokens.append(ended - found)
    cached_tokens = sum(result.cached_tokens for result in cached)
    times.cached.append(cached_tokens / sum(map(len, prompts)))


# -- profiles -------------------------------------------------------------------------------------


async def profile_row(
    ways: list[Way],
    row: dict[str, Any],
    options: argparse.Namespace,
    config: GptOssModelConfig,
    directory: Path,
) -> str:
    """Profile all servers with the row's number of requests; print and return the tables.

    The traces go into ``directory``. One without whole steps is reported and left out.
    """
    running = row["running"]
    generator = random.Random(f"profile/{running}")
    profiles: dict[str, StepProfile] = {}
    for way in ways:
        prompts = random_prompts(generator, running, options.prompt, config)
        step_seconds = row[f"{way.name}_ms"] / 1e3
        trace = await take_trace(way, prompts, step_seconds, directory)
        try:
            profiles[way.name] = profile_steps(read_trace(trace))
        except ValueError as error:
            emit("profile", way=way.name, running=running, error=str(error))

    if not profiles:
        return ""
    title = f"{running} requests, {config.num_layers} layers, GPU microseconds per decoding step"
    timed_ms = {name: row[f"{name}_ms"] for name in profiles}
    tables = "\n" + profile_table(title, profiles, timed_ms)
    print(tables, flush=True)
    return tables


async def take_trace(
    way: Way, prompts: list[list[int]], step_seconds: float, directory: Path
) -> Path:
    """Let a server trace some decoding steps while all prompts are continued.

    Returns the trace's path. Raises RuntimeError if a request ended before the trace did.
    """
    running = len(prompts)
    begun: set[int] = set()
    tasks = []
    for number, prompt in enumerate(prompts):
        request = GenerateRequest(
            request_id=f"{running}/profile/{number}/0/0",
            input_ids=prompt,
            sampling=SamplingParams(PROFILED_TOKENS),
            on_begin=partial(begun.add, number),
        )
        tasks.append(asyncio.create_task(way.engine.generate(request)))

    # With its first token a request has left prefill behind.
    while len(begun) < running and not any(task.done() for task in tasks):
        await asyncio.sleep(0.005)

    name = f"{way.name}_{running}"
    client = SglangClient((await way.server.status()).url)
    try:
        # Without the processor's side, which would slow the server down.
        request_body = {
            "output_dir": str(directory),
            "profile_id": name,
            "activities": ["GPU"],
            "with_stack": False,
            "record_shapes": False,
        }
        await client.call("/start_profile", request_body)
        await asyncio.sleep(PROFILED_STEPS * step_seconds)
        # The answer comes when the trace is written; until then the server does nothing else.
        await client.call("/stop_profile", {})
        ended = sum(task.done() for task in tasks)
    finally:
        await client.close()
        await asyncio.gather(*tasks)

    if ended:
        raise RuntimeError(f"{ended} of {running} requests ended before the trace of {name} did")
    return directory / f"{name}-TP-0.trace.json.gz"


# -- the limit ------------------------------------------------------------------------------------


async def count_experts(
    way: Way,
    running: int,
    generator: random.Random,
    options: argparse.Namespace,
    config: GptOssModelConfig,
) -> float:
    """Return how many experts of a layer a decoding step needs, mean over steps and layers."""
    if options.device == "cpu":  # servers on CPUs return no routes
        return expected_experts(config, running)
    prompts = random_prompts(generator, running, options.prompt, config)
    name = f"{running}/routes"
    results = await generate(way, name, prompts, ROUTED_TOKENS, with_routes=True)

    # Of the sampled tokens that were read again; a request that ended early is left out.
    routes = []
    for result in results:
        assert result.routed_experts is not None
        if len(result.output_ids) == ROUTED_TOKENS:
            routes.append(result.routed_experts[options.prompt :])
    return mean_experts_used(np.stack(routes))


def mean_experts_used(routes: np.ndarray) -> float:
    """Count different experts per step and layer: ``routes`` [requests, steps, layers, top_k]."""
    counts = []
    for step in range(routes.shape[1]):
        for layer in range(routes.shape[2]):
            counts.append(len(np.unique(routes[:, step, layer])))
    return float(np.mean(counts))


def expected_experts(config: GptOssModelConfig, running: int) -> float:
    """Return how many experts of a layer are used if all are equally likely."""
    unused = (1 - config.experts_per_token / config.num_experts) ** running
    return config.num_experts * (1 - unused)


def bytes_of_step(
    config: GptOssModelConfig,
    running: int,
    context: int,
    experts: float,
    expert_bytes: float = BF16_BYTES,
) -> float:
    """Return the bytes that one decoding step must read.

    Args:
        config: of the model, in bf16 but for the experts.
        running: requests.
        context: tokens before the new one, of every request.
        experts: of a layer that the requests are routed to.
        expert_bytes: of one weight of an expert.
    """
    width = config.hidden_size
    attention = width * (config.query_size + 2 * config.key_size) + config.query_size * width
    router = width * config.num_experts
    one_expert = 3 * width * config.intermediate_size
    layer = attention + router + experts * one_expert * expert_bytes / BF16_BYTES
    head = width * config.vocab_size

    keys_and_values = 0
    for layer_type in config.layer_types:
        in_sight = context
        if layer_type == "sliding_attention":
            in_sight = min(context, config.sliding_window)
        keys_and_values += running * in_sight * 2 * config.key_size
    return (config.num_layers * layer + head + keys_and_values) * BF16_BYTES


# -- output ---------------------------------------------------------------------------------------


def table(
    rows: list[dict[str, Any]], options: argparse.Namespace, config: GptOssModelConfig
) -> str:
    """Return Markdown tables of what was measured: the first server beside each of the others."""
    first, *others = ways_of(options)
    parts = [
        f"{config.num_layers} layers, {options.attention[0]}, prompts of {options.prompt} tokens, "
        f"{options.tokens} decoded, medians of {options.rounds} rounds\n"
    ]
    parts += [table_of_two(rows, first, second) for second in others]
    return "\n".join(parts)


def table_of_two(rows: list[dict[str, Any]], first: str, second: str) -> str:
    """Return the Markdown table of two servers, by their names."""
    one, other = first.replace("_", " "), second.replace("_", " ")
    lines = [
        f"| running | prefill tokens/s, {one} | {other} | times | decoding step ms, {one} | {other} "
        f"| times | tokens/s, {one} | {other} | experts used | limit ms | {other} over limit |",
        "|---" * 12 + "|",
    ]
    for row in rows:
        running = row["running"]
        stock = row[f"{first}_ms"]
        tuned = row[f"{second}_ms"]
        stock_prefill = row[f"{first}_prefill_tokens_per_second"]
        tuned_prefill = row[f"{second}_prefill_tokens_per_second"]
        limit = row.get("limit_ms")
        cells = [
            f"{running}",
            f"{stock_prefill:,.0f}",
            f"{tuned_prefill:,.0f}",
            f"{tuned_prefill / stock_prefill:.2f}",
            f"{stock:.2f}",
            f"{tuned:.2f}",
            f"**{stock / tuned:.2f}**",
            f"{running / stock * 1e3:,.0f}",
            f"{running / tuned * 1e3:,.0f}",
            f"{row['experts_used']:.1f}",
            f"{limit:.2f}" if limit else "-",
            f"{tuned / limit:.2f}" if limit else "-",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    told = ", ".join(
        f"{row['running']}: {row[f'{first}_steps_by']}, {row[f'{second}_steps_by']}" for row in rows
    )
    lines += ["", f"Decoding steps as told by: {told}."]
    return "\n".join(lines) + "\n"
