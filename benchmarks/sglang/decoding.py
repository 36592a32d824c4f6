"""Decoding and prefill speed of servers with different settings, and a memory bound.

    python -m benchmarks.sglang --layers 24 decode
    python -m benchmarks.sglang --layers 12 decode --quantization mxfp4 --profile

Needs one GPU. Two servers with the same random weights share it, and rounds alternate between them,
so that changes of the GPU's clocks affect both. ``unmodified`` lacks this project's settings of
SGLang's mixture-of-experts kernel and the patches ``fused_sampling`` and
``fused_window_attention``.
``tuned`` has them. A round has three calls with the same prompts through the rollouts' client:

1. one new token each (prefill),
2. the same again from the prefix cache (overhead of a call),
3. ``--tokens`` more tokens (decoding).

The time of a decoding step comes from the server's log, which has a line per 40 steps. The table
has the median of all rounds. The client's time is printed, too: the third call minus the median of
all second calls, divided by the tokens. It includes the client's work, which varies by milliseconds
per step with 256 requests. It is used if a server does not log steps.

With ``--quantization mxfp4`` the servers are ``bf16`` (with this project's settings) and ``mxfp4``.
``--variants`` selects others:

* ``mxfp4_slow_routing`` routes and sums with the kernels of triton_kernels.
* ``mxfp4_slow_gemms`` uses the tile shapes of triton_kernels for large-batch expert GEMMs.
* ``mxfp4_slow_small_batch`` uses the kernel of triton_kernels for small batches, too.
* ``bf16_slow_sampling`` and ``mxfp4_slow_sampling`` sample like SGLang, not in one pass over the
  logits (without the patch ``fused_sampling``).
* ``bf16_slow_window`` and ``mxfp4_slow_window`` use FlashAttention for windows instead of the
  plugin's kernel (without the patch ``fused_window_attention``).
* ``bf16_slow`` and ``mxfp4_slow`` do both.
* ``bf16_rounded_logits`` and ``mxfp4_rounded_logits`` round logits to bf16 (without
  ``rollout.engine.fp32_logits``).
* ``mxfp4_sglang_fp32_logits`` computes logits with SGLang's ``--enable-fp32-lm-head``.
* ``mxfp4_adapters`` adds unmerged adapters of rank 8 in the expert GEMMs.

All servers get the same weights with MXFP4 values. Servers with adapters also get random adapters. They are compared
first: log-probs of one text,
and the experts of its tokens. With ``--separate-gpus``, each server has its own GPU, for models of which
one GPU cannot hold two.

The limit is the time to read the bytes of a decoding step once, at the bandwidth of reading 4 GB on
this GPU. The bytes are those of attention, router, experts, head, and the keys and values in the
attention windows. The experts of the running requests are counted from the routes that the server
returns.

``--profile`` takes a trace of some decoding steps of both servers for every number of requests. It
runs after all rounds, because a profiled process may stay slower. ``decoding_profile.py`` then
shows the GPU time by group of kernels.
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
from benchmarks.sglang.alternating_servers import (
    Variant,
    chosen_variants,
    emit,
    generate,
    prepare,
    random_prompts,
    send_random_weights,
    servers_until_the_end,
)
from benchmarks.sglang.decoding_profile import StepProfile, profile_steps, profile_table, read_trace
from benchmarks.sglang.server_log import step_seconds
from benchmarks.sglang.servers import Variation, model_config, wait_until_healthy
from megatron_gptoss.families.gpt_oss.config import GptOssModelConfig
from rl_loop.engines.protocol import GenerateRequest, SamplingParams
from rl_loop.engines.sglang.client import SglangClient

BF16_BYTES = 2
MXFP4_BYTES = 17 / 32
"""Bytes of an MXFP4 weight."""
ROUTED_TOKENS = 16
"""Number of decoding steps in which the experts are counted."""
MOE_VARIABLE = "SGLANG_MOE_CONFIG_DIR"
SLOW_SAMPLING = Variation(without_patches=("fused_sampling",))
SLOW_WINDOW = Variation(without_patches=("fused_window_attention",))
BF16_LOGITS = Variation(without_patches=("fp32_logits",))
SGLANG_FP32_LOGITS = Variation(
    without_patches=("fp32_logits",), arguments=("--enable-fp32-lm-head",)
)
SLOW = Variation(without_patches=("fused_sampling", "fused_window_attention"))
UNMODIFIED = Variation(without_variables=(MOE_VARIABLE,), without_patches=SLOW.without_patches)
VARIANTS = {"unmodified": UNMODIFIED, "tuned": Variation()}
"""Servers by name, as differences from the default server."""
BF16_VARIANTS = (
    "bf16",
    "bf16_slow_sampling",
    "bf16_slow_window",
    "bf16_slow",
    "bf16_rounded_logits",
)
"""Servers with MXFP4 values in bf16. All others of ``QUANTIZED_VARIANTS`` have MXFP4 experts."""
QUANTIZED_VARIANTS = {
    "bf16": Variation(),
    "mxfp4": Variation(),
    "mxfp4_slow_routing": Variation(without_patches=("fused_routing",)),
    "mxfp4_slow_gemms": Variation(without_patches=("moe_occupancy",)),
    "mxfp4_slow_small_batch": Variation(without_patches=("small_batch_moe",)),
    "bf16_slow_sampling": SLOW_SAMPLING,
    "mxfp4_slow_sampling": SLOW_SAMPLING,
    "bf16_slow_window": SLOW_WINDOW,
    "mxfp4_slow_window": SLOW_WINDOW,
    "bf16_slow": SLOW,
    "mxfp4_slow": SLOW,
    "bf16_rounded_logits": BF16_LOGITS,
    "mxfp4_rounded_logits": BF16_LOGITS,
    "mxfp4_sglang_fp32_logits": SGLANG_FP32_LOGITS,
    "mxfp4_adapters": Variation(expert_adapter_rank=8),
}
"""Servers with ``--quantization mxfp4``: differences from the default server."""
COMPARED_TOKENS = 512
"""Number of tokens of the text on which quantized servers are compared."""
PROFILED_STEPS = 20
"""Approximate number of decoding steps of a trace."""
PROFILED_TOKENS = 10 * PROFILED_STEPS
"""Tokens sampled by profiled requests. All requests must run until the trace ends."""


@dataclass
class Times:
    """Seconds of every round of one server with one number of requests."""

    prefill: list[float] = field(default_factory=list)
    """Seconds of the prefill of all prompts."""
    one_token: list[float] = field(default_factory=list)
    """Seconds of a call for one token, with the prompts from the prefix cache."""
    all_tokens: list[float] = field(default_factory=list)
    """Seconds of a call for one token and the counted ones, with cached prompts."""
    cached: list[float] = field(default_factory=list)
    """Fraction of the prompts that came from the prefix cache."""

    def steps(self, tokens: int) -> list[float]:
        """Return the seconds of a decoding step for every round of ``tokens`` steps."""
        besides = median(self.one_token)
        return [(seconds - besides) / tokens for seconds in self.all_tokens]


def select_variants(options: argparse.Namespace) -> dict[str, Variation]:
    """Return the servers to compare with their names."""
    return chosen_variants(
        QUANTIZED_VARIANTS if options.quantization else VARIANTS, options.variants
    )


async def measure_decoding(options: argparse.Namespace, scratch: Path) -> None:
    """Start the servers, measure, print the table, and stop the servers."""
    config = model_config(options)
    bandwidth = 0.0
    if options.device != "cpu":
        bandwidth = read_bandwidth()
        torch.cuda.empty_cache()
        emit("bandwidth", terabytes_per_second=bandwidth / 1e12)

    async with servers_until_the_end() as variants:
        # In sequence, because a server takes a fraction of the memory that is free at its start.
        for name, variation in select_variants(options).items():
            gpu = len(variants) if options.separate_gpus else options.server_gpu
            mxfp4_experts = options.quantization is not None and name not in BF16_VARIANTS
            variants.append(
                prepare(name, variation, gpu, options, config, scratch, mxfp4_experts=mxfp4_experts)
            )
            emit("start", variant=name, seconds=await wait_until_healthy(variants[-1].server))
        emit("weights", seconds=await send_random_weights(variants, options, config, scratch))
        if options.quantization:
            await compare_variants(variants, options, config)

        rows = []
        for running in options.running:
            rows.append(await measure_row(variants, running, options, config, bandwidth))
            print(table(rows, options, config), flush=True)

        profiles = ""
        if options.profile:
            directory = (options.traces or scratch / "traces").absolute()
            for row in rows:
                profiles += await profile_row(variants, row, options, config, directory)

    if options.out:
        options.out.write_text(table(rows, options, config) + profiles)


async def compare_variants(
    variants: list[Variant], options: argparse.Namespace, config: GptOssModelConfig
) -> None:
    """Print differences of log-probs and routed experts from the first server, on one text."""
    (text,) = random_prompts(random.Random(0), 1, COMPARED_TOKENS, config)
    scores = []
    routes = []
    for variant in variants:
        scores.append(await variant.engine.score(text))
        if options.device != "cpu":  # servers on CPUs return no routes
            (result,) = await generate(variant, "compared", [text], 1, with_routes=True)
            assert result.routed_experts is not None
            routes.append(np.sort(result.routed_experts[: len(text)], axis=-1))

    for number, variant in enumerate(variants[1:], start=1):
        gaps = np.abs(np.subtract(scores[0], scores[number]))
        figures: dict[str, Any] = {"gap_mean": float(gaps.mean()), "gap_max": float(gaps.max())}
        if routes:
            agreeing = (routes[0] == routes[number]).all(axis=-1).mean(axis=0)  # by layer
            figures["routes_agreeing_first_layer"] = float(agreeing[0])
            figures["routes_agreeing"] = float(agreeing.mean())
        emit("compared", variants=[variants[0].name, variant.name], **figures)


# -- times ----------------------------------------------------------------------------------------


async def measure_row(
    variants: list[Variant],
    running: int,
    options: argparse.Namespace,
    config: GptOssModelConfig,
    bandwidth: float,
) -> dict[str, Any]:
    """Measure one number of running requests on all servers and return the row's values.

    Args:
        variants: servers.
        running: number of running requests.
        options: command line.
        config: configuration of the model.
        bandwidth: read bandwidth of the GPU in bytes per second; 0 for no limit.
    """
    generator = random.Random(running)
    times = {variant.name: Times() for variant in variants}

    # The first round is a warm-up of kernels and of the allocator.
    written = {variant.name: 0 for variant in variants}
    for number in range(options.rounds + 1):
        if number == 1:
            written = {variant.name: len(variant.log.read_bytes()) for variant in variants}
        prompts = random_prompts(generator, running, options.prompt, config)
        in_turn = variants if number % 2 else variants[::-1]
        for variant in in_turn:
            measured = Times() if number == 0 else times[variant.name]
            await time_round(variant, f"{running}/{number}", prompts, options.tokens, measured)

    logs = {
        variant.name: variant.log.read_bytes()[written[variant.name] :].decode(errors="replace")
        for variant in variants
    }
    experts = await count_experts(variants[-1], running, generator, options, config)
    context = options.prompt + options.tokens // 2
    expert_bytes = MXFP4_BYTES if options.quantization else BF16_BYTES
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
    variant: Variant, name: str, prompts: list[list[int]], tokens: int, times: Times
) -> None:
    """Run a round's three calls and add their seconds to ``times``."""
    began = time.perf_counter()
    await generate(variant, f"{name}/prefill", prompts, 1)
    prefilled = time.perf_counter()
    cached = await generate(variant, f"{name}/cached", prompts, 1)
    found = time.perf_counter()
    await generate(variant, f"{name}/decode", prompts, 1 + tokens)
    ended = time.perf_counter()

    times.prefill.append(prefilled - began)
    times.one_token.append(found - prefilled)
    times.all_tokens.append(ended - found)
    cached_tokens = sum(result.cached_tokens for result in cached)
    times.cached.append(cached_tokens / sum(map(len, prompts)))


# -- profiles -------------------------------------------------------------------------------------


async def profile_row(
    variants: list[Variant],
    row: dict[str, Any],
    options: argparse.Namespace,
    config: GptOssModelConfig,
    directory: Path,
) -> str:
    """Profile all servers with the row's number of requests. Print and return the tables.

    A trace without whole steps is reported and left out.

    Args:
        variants: servers.
        row: values of ``measure_row``.
        options: command line.
        config: configuration of the model.
        directory: directory for the traces.
    """
    running = row["running"]
    generator = random.Random(f"profile/{running}")
    profiles: dict[str, StepProfile] = {}
    for variant in variants:
        prompts = random_prompts(generator, running, options.prompt, config)
        step_seconds = row[f"{variant.name}_ms"] / 1e3
        trace = await take_trace(variant, prompts, step_seconds, directory)
        try:
            profiles[variant.name] = profile_steps(read_trace(trace))
        except ValueError as error:
            emit("profile", variant=variant.name, running=running, error=str(error))

    if not profiles:
        return ""
    title = f"{running} requests, {config.num_layers} layers, GPU microseconds per decoding step"
    timed_ms = {name: row[f"{name}_ms"] for name in profiles}
    tables = "\n" + profile_table(title, profiles, timed_ms)
    print(tables, flush=True)
    return tables


async def take_trace(
    variant: Variant, prompts: list[list[int]], step_seconds: float, directory: Path
) -> Path:
    """Let a server trace some decoding steps while all prompts are continued.

    Args:
        variant: server.
        prompts: token ids.
        step_seconds: duration of a decoding step.
        directory: directory for the trace.

    Returns:
        Path of the trace.

    Raises:
        RuntimeError: if a request ended before the trace.
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
        tasks.append(asyncio.create_task(variant.engine.generate(request)))

    # A request that has its first token has finished its prefill.
    while len(begun) < running and not any(task.done() for task in tasks):
        await asyncio.sleep(0.005)

    name = f"{variant.name}_{running}"
    client = SglangClient((await variant.server.status()).url)
    try:
        # Without CPU activities, because tracing them would slow the server down.
        request_body = {
            "output_dir": str(directory),
            "profile_id": name,
            "activities": ["GPU"],
            "with_stack": False,
            "record_shapes": False,
        }
        await client.call("/start_profile", request_body)
        await asyncio.sleep(PROFILED_STEPS * step_seconds)
        # The server answers after it has written the trace. It is blocked until then.
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
    variant: Variant,
    running: int,
    generator: random.Random,
    options: argparse.Namespace,
    config: GptOssModelConfig,
) -> float:
    """Return the number of experts per layer in a decoding step, averaged over steps and layers."""
    if options.device == "cpu":  # servers on CPUs return no routes
        return expected_experts(config, running)
    prompts = random_prompts(generator, running, options.prompt, config)
    name = f"{running}/routes"
    results = await generate(variant, name, prompts, ROUTED_TOKENS, with_routes=True)

    # Use only the sampled tokens that were read again. Skip requests that ended early.
    routes = []
    for result in results:
        assert result.routed_experts is not None
        if len(result.output_ids) == ROUTED_TOKENS:
            routes.append(result.routed_experts[options.prompt :])
    return mean_experts_used(np.stack(routes))


def mean_experts_used(routes: np.ndarray) -> float:
    """Return the mean number of different experts per step and layer.

    Args:
        routes: experts, [requests, steps, layers, top_k].
    """
    counts = []
    for step in range(routes.shape[1]):
        for layer in range(routes.shape[2]):
            counts.append(len(np.unique(routes[:, step, layer])))
    return float(np.mean(counts))


def expected_experts(config: GptOssModelConfig, running: int) -> float:
    """Return the expected number of used experts per layer if all are equally likely."""
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
        config: configuration of the model. Weights except experts are bf16.
        running: number of running requests.
        context: tokens before the new one in every request.
        experts: number of experts per layer to which the requests are routed.
        expert_bytes: bytes of an expert's weight.
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
    """Return Markdown tables that compare the first server with each of the others."""
    first, *others = select_variants(options)
    parts = [
        f"{config.num_layers} layers, {options.attention[0]}, prompts of {options.prompt} tokens, "
        f"{options.tokens} decoded, medians of {options.rounds} rounds\n"
    ]
    parts += [table_of_two(rows, first, second) for second in others]
    return "\n".join(parts)


def table_of_two(rows: list[dict[str, Any]], first: str, second: str) -> str:
    """Return the Markdown table of two servers.

    Args:
        rows: values of ``measure_row``.
        first: name of the first server.
        second: name of the second server.
    """
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
