"""Alternating measurements of several servers with the same random weights."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from benchmarks.sglang.servers import (
    Variation,
    free_gpu_memory,
    make_engine,
    make_server,
    server_settings,
    total_gpu_memory,
    unmerged_adapter,
)
from converters.expert_adapters import expert_adapter_shapes
from converters.mxfp4_tensors import quantize_experts, rounded_to_mxfp4
from converters.names import hf_shapes
from megatron_gptoss.families.gpt_oss.config import GptOssModelConfig
from rl_loop.engines.protocol import GenerateRequest, GenerateResult, SamplingParams
from rl_loop.engines.sglang.engine import SglangEngine
from rl_loop.engines.sglang.gpu_memory import ServerNeeds
from rl_loop.engines.sglang.server import SglangServer
from rl_loop.engines.sglang.weight_endpoints import send_weights
from rl_loop.weight_sync.servers import SyncPlan


@dataclass(frozen=True)
class Variant:
    """One of the servers."""

    name: str
    server: SglangServer
    engine: SglangEngine
    mxfp4_experts: bool
    """True if the server's experts are MXFP4."""
    gpu: int
    """Index of the GPU among the visible ones."""
    log: Path
    """Log file of the server."""
    expert_adapter_rank: int | None = None
    """Rank of unmerged expert adapters; None for a server without them."""


@asynccontextmanager
async def servers_until_the_end() -> AsyncIterator[list[Variant]]:
    """Yield a list for the servers of the block, and stop all of them at the end."""
    variants: list[Variant] = []
    try:
        yield variants
    finally:
        for way in variants:
            await way.engine.close()
            await way.server.stop()


def chosen_variants(known: dict[str, Variation], names: list[str] | None) -> dict[str, Variation]:
    """Return the servers with these names, or the first two.

    Args:
        known: all servers with their names.
        names: names of ``--variants``; None for the default.

    Raises:
        SystemExit: if a name is unknown.
    """
    names = names or list(known)[:2]
    for name in names:
        if name not in known:
            raise SystemExit(f"--variants {name}: there are {', '.join(known)}")
    return {name: known[name] for name in names}


def prepare(
    name: str,
    variation: Variation,
    gpu: int,
    options: argparse.Namespace,
    config: GptOssModelConfig,
    scratch: Path,
    *,
    mxfp4_experts: bool,
    together: bool = False,
) -> Variant:
    """Prepare one of the servers. It starts when its status is requested.

    Args:
        name: name of the server.
        variation: differences from the default server.
        gpu: index of its GPU among the visible ones.
        options: command line.
        config: configuration of the model.
        scratch: directory for its files.
        mxfp4_experts: whether its experts are MXFP4.
        together: whether other servers start on the same GPU at the same time.
    """
    # Each server has its own GPU and fraction of memory.
    options = argparse.Namespace(**vars(options))
    options.server_gpu = gpu

    arguments = list(variation.arguments)
    if options.device != "cpu":
        graphs = [str(count) for count in sorted(options.running)]
        arguments += ["--cuda-graph-bs", *graphs]
        rank = variation.expert_adapter_rank
        adapter = None if rank is None else unmerged_adapter(rank)
        needs = ServerNeeds.of(config, "bf16", 1, mxfp4_experts=mxfp4_experts, adapter=adapter)
        if together:
            # The free memory changes while others start, so it cannot define the cache.
            cached_tokens = int(options.cache_gb * 1e9 / needs.token_bytes)
            arguments += ["--mem-fraction-static", "0.9", "--max-total-tokens", str(cached_tokens)]
        else:
            wanted_bytes = needs.weights + options.cache_gb * 1e9
            fraction = wanted_bytes / free_gpu_memory(options)
            arguments += ["--mem-fraction-static", f"{fraction:.3f}"]

        # The memory that is checked before the start. nvidia-smi reports slightly more memory than
        # a process can use, so add 1%.
        needed = 100 * needs.all / total_gpu_memory(options)
        options.memory_fraction = (math.ceil(needed) + 1) / 100

    attention = options.attention[0]
    log = scratch / f"{name}.log"
    if options.log:
        log = options.log.with_name(f"{name}_{options.log.name}")
    directory = scratch / name
    directory.mkdir()
    quantization = options.quantization if mxfp4_experts else None
    settings = server_settings(options, attention, arguments, quantization)
    server = make_server(options, settings, config, directory, log, variation)
    engine = make_engine(server, config)
    return Variant(name, server, engine, mxfp4_experts, gpu, log, variation.expert_adapter_rank)


# -- weights --------------------------------------------------------------------------------------


def random_weights(config: GptOssModelConfig, device: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield bf16 weights by Hugging Face name: normal with std 0.02, sinks with std 1, norms 1.

    With these values, tokens differ enough to be routed to all experts.
    """
    generator = torch.Generator(device).manual_seed(0)
    for name, shape in hf_shapes(config).items():
        tensor = torch.empty(shape, dtype=torch.bfloat16, device=device)
        if "norm" in name:
            tensor.fill_(1)
        elif name.endswith("sinks"):
            tensor.normal_(0, 1, generator=generator)
        else:
            tensor.normal_(0, 0.02, generator=generator)
        yield name, tensor


async def send_random_weights(
    variants: list[Variant], options: argparse.Namespace, config: GptOssModelConfig, scratch: Path
) -> float:
    """Send the same weights to all servers and return the seconds.

    Args:
        variants: servers.
        options: command line.
        config: configuration of the model.
        scratch: directory for weights on disk.
    """
    began = time.perf_counter()
    for way in variants:
        # On the server's GPU, because CUDA IPC passes pointers to its memory.
        device = "cpu" if options.device == "cpu" else f"cuda:{way.gpu}"
        status = await way.server.status()
        await way.server.begin_sync(status.incarnation)
        rank = way.expert_adapter_rank
        plan = SyncPlan(
            urls=(status.url,),
            version=1,
            transport=options.transport,
            bucket_bytes=options.bucket_mib[0] << 20,
            directory=scratch / "weights",
            compare=way.mxfp4_experts,
            mxfp4_experts=way.mxfp4_experts,
            adapter=None if rank is None else unmerged_adapter(rank),
        )
        weights = random_weights(config, device)
        if options.quantization:
            weights = quantized_weights(weights, mxfp4_experts=way.mxfp4_experts)
        if rank is not None:
            weights = chain(weights, random_adapters(config, rank, device))
        await send_weights(weights, config, plan)
        await way.server.end_sync(status.incarnation, 1)

    if options.device != "cpu":
        torch.cuda.empty_cache()
    return time.perf_counter() - began


def random_adapters(
    config: GptOssModelConfig, rank: int, device: str
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield bf16 factors of expert adapters: A as PEFT initializes it, B as after 100 steps of 1e-5.

    Args:
        config: configuration of the model.
        rank: rank of the adapters.
        device: device of the tensors.
    """
    generator = torch.Generator(device).manual_seed(1)
    for name, shape in expert_adapter_shapes(config, rank).items():
        tensor = torch.empty(shape, dtype=torch.bfloat16, device=device)
        if name.endswith("lora_A"):
            limit = shape[-1] ** -0.5
            tensor.uniform_(-limit, limit, generator=generator)
        else:
            tensor.normal_(0, 1e-3, generator=generator)
        yield name, tensor


def quantized_weights(
    named_tensors: Iterator[tuple[str, torch.Tensor]], *, mxfp4_experts: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """Round the experts' matrices to MXFP4.

    Args:
        named_tensors: names and weights.
        mxfp4_experts: whether to return blocks and scales instead of values in bf16.
    """
    for name, tensor in named_tensors:
        if mxfp4_experts:
            yield from quantize_experts({name: tensor}).items()
        else:
            yield name, rounded_to_mxfp4(name, tensor)


async def generate(
    way: Variant, name: str, prompts: list[list[int]], tokens: int, with_routes: bool = False
) -> list[GenerateResult]:
    """Continue all prompts concurrently.

    Args:
        way: server.
        name: prefix of the names of the requests.
        prompts: token ids.
        tokens: number of tokens to sample.
        with_routes: whether to return the routed experts.
    """
    requests = [
        GenerateRequest(f"{name}/{i}/0/0", prompt, SamplingParams(tokens), with_routes)
        for i, prompt in enumerate(prompts)
    ]
    return list(await asyncio.gather(*map(way.engine.generate, requests)))


def random_prompts(
    generator: random.Random, count: int, length: int, config: GptOssModelConfig
) -> list[list[int]]:
    """Return prompts of uniform tokens without special tokens."""
    limit = config.vocab_size - 1100
    if limit < 1000:
        limit = config.vocab_size - 100
    return [[generator.randrange(10, limit) for _ in range(length)] for _ in range(count)]


def emit(case: str, **figures: Any) -> None:
    """Print one JSON object. Floats have 4 significant digits."""
    line: dict[str, Any] = {"case": case}
    for name, value in figures.items():
        if isinstance(value, float):
            value = float(f"{value:.4g}")
        line[name] = value
    print(json.dumps(line), file=sys.stdout, flush=True)
