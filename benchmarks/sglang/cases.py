"""SGLang as the rollout engine, measured against the trainer.

    python -m benchmarks.sglang --layers 4 gap turns deterministic --attention fa3 triton
    python -m benchmarks.sglang --layers 24 sync --server-gpu 1 --transport nccl
    python -m benchmarks.sglang --layers 8 sync --transport cuda_ipc
    python -m benchmarks.sglang --layers 24 decode
    python -m benchmarks.sglang --layers 12 decode --quantization mxfp4 --profile
    python -m benchmarks.sglang --layers 24 layouts sync faults sleep --quantization mxfp4
    python -m benchmarks.sglang --layers 24 sync --server-tensor-parallel 2 --expert-parallel 2
    python -m benchmarks.sglang --layers 24 interruptions --running 64 256 --tokens 512 --rounds 3
    python -m benchmarks.sglang --layers 24 rollouts --running 64 --tokens 190 --rounds 3

Needs one GPU, which trainer and server share. ``--server-gpu``, ``--server-tensor-parallel`` and
``--expert-parallel`` use several. ``--device cpu --tiny`` needs an SGLang that runs on CPUs.

The model has the widths of GPT-OSS-20B and random weights (normal with std 0.02, small enough that
routing margins matter). With ``--quantization mxfp4``, trainer and server have MXFP4 experts.
SGLang runs in its own environment (``--python`` and ``--pythonpath``), without Ray.

Prints one JSON object per measurement. See ``decoding.py`` for ``decode``, ``rollout_load.py`` for
``rollouts``, and ``interruptions.py`` for ``interruptions``. The other cases run in sequence on one
server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.sglang.decoding import measure_decoding
from benchmarks.sglang.interruptions import Load, measure_interruptions
from benchmarks.sglang.rollout_load import measure_rollouts
from benchmarks.sglang.servers import (
    Variation,
    make_engine,
    make_server,
    model_config,
    server_settings,
    used_gpu_memory,
    wait_until_healthy,
)
from benchmarks.sglang.trainer import RandomTrainer
from converters.hf_directory import write_hf_directory
from megatron_gptoss.config import AdapterConfig
from megatron_gptoss.model import list_chunks
from megatron_gptoss.packing import pack
from megatron_gptoss.routing_replay import RoutingReplay
from megatron_gptoss.samples import TrainingSamples
from megatron_gptoss.scorer import LogProbScorer, alignment
from rl_loop.engines.protocol import GenerateRequest, GenerateResult, SamplingParams
from rl_loop.engines.sglang.client import SglangClient
from rl_loop.engines.sglang.config import PLUGIN
from rl_loop.engines.sglang.engine import SglangEngine, score_on
from rl_loop.engines.sglang.python_environment import inherited_environment
from rl_loop.engines.sglang.server import SglangServer
from rl_loop.weight_sync import send
from rl_loop.weight_sync.servers import Bucket, SyncPlan
from rl_loop.weight_sync.source import SyncError, WeightMismatchError
from rl_loop.weight_sync.transports import NamedTensors

CASES = ["gap", "turns", "deterministic", "sync", "decode", "rollouts", "interruptions"]
CASES += ["layouts", "faults", "sleep", "from_disk"]  # of MXFP4 experts
TRANSPORTS = ["nccl", "cuda_ipc", "gloo", "shared_memory", "disk"]


class Bench:
    """One trainer, of which this process is rank 0, and one server."""

    def __init__(
        self,
        arguments: argparse.Namespace,
        trainer: RandomTrainer,
        attention: str,
        scratch: Path,
    ) -> None:
        self.arguments = arguments
        self.trainer = trainer
        self.attention = attention
        self.scratch = scratch
        self.on_gpu = arguments.device != "cpu"
        self.model_config = trainer.config
        self.random = random.Random(0)
        self.version = 0
        self.mxfp4_experts = arguments.quantization is not None
        self.scorer = LogProbScorer(trainer.model)

    async def run(self) -> None:
        settings = server_settings(
            self.arguments, self.attention, quantization=self.arguments.quantization
        )
        log = self.arguments.log or self.scratch / "server.log"
        variation = Variation(expert_adapter_rank=self.arguments.expert_adapter_rank)
        server = make_server(
            self.arguments, settings, self.model_config, self.scratch, log, variation
        )
        try:
            self.emit("start", seconds=await wait_until_healthy(server))

            engine = make_engine(server, self.model_config)
            # The first sync creates the process group, so it is reported separately.
            await self.sync_in_buckets(server, self.arguments.bucket_mib[0], rounds=1)
            await self.compare_all_checksums(server)
            for case in self.arguments.cases:
                await getattr(self, case)(server, engine)
            await engine.close()
        finally:
            await server.stop()

    def emit(self, case: str, **figures: Any) -> None:
        """Print one JSON object. Floats have 4 significant digits."""
        line = {
            "case": case,
            "attention": self.attention,
            "layers": self.model_config.num_layers,
        }
        for name, value in figures.items():
            if isinstance(value, float):
                value = float(f"{value:.4g}")
            line[name] = value
        print(json.dumps(line), flush=True)

    # ---- weight sync

    async def sync(self, server: SglangServer, engine: SglangEngine) -> None:
        """Time whole syncs and the export alone, and measure the memory of each side."""
        for mebibytes in self.arguments.bucket_mib:
            await self.sync_in_buckets(server, mebibytes, rounds=5)

    async def sync_in_buckets(self, server: SglangServer, mebibytes: int, rounds: int) -> None:
        memory = await self.memory_of_sync(server, mebibytes)
        compared = [await self.sync_once(server, mebibytes) for _ in range(rounds)]
        seconds = [await self.sync_once(server, mebibytes, compare=False) for _ in range(rounds)]
        figures: dict[str, Any] = {}
        # With several ranks, those without a server gather all weights each time.
        if self.adapter is not None and self.arguments.expert_parallel == 1:
            some = [await self.sync_adapters(server, mebibytes) for _ in range(rounds)]
            figures["adapters_only_median"] = float(np.median(some))

        began = time.perf_counter()
        sent = 0
        for _, tensor in self.trainer.weights():
            sent += tensor.nbytes
        if self.on_gpu:
            torch.cuda.synchronize()
        export_seconds = time.perf_counter() - began

        self.emit(
            "sync",
            transport=self.arguments.transport,
            server_tensor_parallel=self.arguments.server_tensor_parallel,
            expert_parallel=self.arguments.expert_parallel,
            bucket_mib=mebibytes,
            gigabytes=sent / 1e9,
            seconds_all=seconds,
            seconds_median=float(np.median(seconds)),
            with_checksums_median=float(np.median(compared)),
            export_alone=export_seconds,
            **figures,
            server_gpu_extra_gb=memory.server / 1e9,
            sender_extra_gb=memory.sender / 1e9,
            link_gbps=self.link(),
        )

    async def memory_of_sync(self, server: SglangServer, mebibytes: int) -> SyncMemory:
        """Measure the memory of a sync that is not timed, because sampling memory takes time."""
        server_before = self.server_memory()
        server_peak = server_before
        sender_before = 0
        if self.on_gpu:
            sender_before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()

        syncing = asyncio.ensure_future(self.sync_once(server, mebibytes))
        while not syncing.done():
            await asyncio.wait({syncing}, timeout=0.02)
            server_peak = max(server_peak, await asyncio.to_thread(self.server_memory))
        await syncing

        sender = 0
        if self.on_gpu:
            sender = torch.cuda.max_memory_allocated() - sender_before
        return SyncMemory(server=server_peak - server_before, sender=sender)

    async def sync_adapters(self, server: SglangServer, mebibytes: int) -> float:
        """Send adapters and weights with merged adapters, and return the seconds."""
        return await self.sync_once(server, mebibytes, compare=False, adapters_only=True)

    async def sync_once(
        self,
        server: SglangServer,
        mebibytes: int,
        compare: bool = True,
        adapters_only: bool = False,
    ) -> float:
        """Send the trainer's weights and return the seconds."""
        status = await server.status()
        self.version += 1
        await server.begin_sync(status.incarnation)
        plan = replace(self.plan(status.url, mebibytes, compare), adapters_only=adapters_only)
        began = time.perf_counter()
        await self.trainer.send(plan)
        seconds = time.perf_counter() - began
        await server.end_sync(status.incarnation, self.version)
        return seconds

    def plan(self, url: str, mebibytes: int, compare: bool = True) -> SyncPlan:
        return SyncPlan(
            urls=(url,),
            version=self.version,
            transport=self.arguments.transport,
            tensor_parallel=self.arguments.server_tensor_parallel,
            bucket_bytes=mebibytes << 20,
            directory=self.scratch / "weights",
            compare=compare,
            mxfp4_experts=self.mxfp4_experts,
            adapter=self.adapter,
        )

    @property
    def adapter(self) -> AdapterConfig | None:
        """Settings of the unmerged adapters; None without them."""
        config: AdapterConfig | None = list_chunks(self.trainer.model)[0].config.adapter
        return config

    async def compare_all_checksums(self, server: SglangServer) -> None:
        """Compare the checksums of all parameters with the trainer's."""
        url = (await server.status()).url
        plan = replace(self.plan(url, 1), transport="none")
        began = time.perf_counter()
        await self.trainer.send(plan)
        seconds = time.perf_counter() - began

        client = SglangClient(url)
        answer = await client.call("/weights_checker", {"action": "checksum"})
        info = await client.call("/server_info")
        await client.close()
        states = info.get("internal_states") or [{}]
        self.emit(
            "checksums",
            equal=True,
            parameters=[len(rank["checksums"]) for rank in answer["ranks"]],
            seconds=seconds,
            server_memory=states[0].get("memory_usage"),
        )

    def server_memory(self) -> int:
        """Return the bytes in use on the server's GPUs, including the trainer if it shares them."""
        if not self.on_gpu:
            return 0
        return used_gpu_memory(self.arguments)

    def link(self) -> float:
        """Measure GB/s of a copy from the sender's GPU to the server's last GPU.

        If they share one GPU, the copy is within it. The speed is an upper bound for all
        transports.
        """
        if not self.on_gpu:
            return 0.0

        peer = 0
        last = self.arguments.server_gpu + self.arguments.server_tensor_parallel - 1
        if last < torch.cuda.device_count():
            peer = last
        source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda:0")
        target = torch.empty_like(source, device=f"cuda:{peer}")
        target.copy_(source)
        torch.cuda.synchronize()

        began = time.perf_counter()
        for _ in range(5):
            target.copy_(source)
        torch.cuda.synchronize()
        return 5 * (1 << 30) / (time.perf_counter() - began) / 1e9

    # ---- faults

    async def faults(self, server: SglangServer, engine: SglangEngine) -> None:
        """Lose a bucket in transit, then swap two scales, and print the resulting errors."""
        for fault in (lose_a_bucket, swap_two_scales):
            status = await server.status()
            self.version += 1
            plan = self.plan(status.url, self.arguments.bucket_mib[0])
            message = "none: THE FAULT WAS NOT SEEN"
            with fault(f"model.layers.{self.version % self.model_config.num_layers}."):
                try:
                    await self.trainer.send(plan)
                except (SyncError, WeightMismatchError) as error:
                    message = f"{type(error).__name__}: {error}"
            self.emit("fault", fault=fault.__name__, error=message[:400])

        # The server has invalid weights and is paused, so sync again.
        await self.sync_once(server, self.arguments.bucket_mib[0])
        await self.compare_all_checksums(server)

    # ---- sleep

    async def sleep(self, server: SglangServer, engine: SglangEngine) -> None:
        """Let the server release its memory, resume and sync it, and compare its log-probs."""
        client = SglangClient((await server.status()).url)
        text = self.prompt(300)
        before = await score_on(client, text)
        for _ in range(2):
            tags = {"tags": ["kv_cache", "weights", "cuda_graph"]}
            running = self.server_memory()
            await client.call("/pause_generation", {"mode": "abort"})
            await client.call("/release_memory_occupation", tags)
            paused = self.server_memory()
            await client.call("/resume_memory_occupation", {"tags": ["weights"]})
            seconds = await self.sync_once(server, self.arguments.bucket_mib[0])
            await client.call("/resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]})
            await self.compare_all_checksums(server)
            after = await score_on(client, text)
            self.emit(
                "sleep",
                released_gb=(running - paused) / 1e9,
                sync_seconds=seconds,
                largest_difference=max(abs(x - y) for x, y in zip(before, after, strict=True)),
            )
        await client.close()

    # ---- a server that loads an export

    async def from_disk(self, server: SglangServer, engine: SglangEngine) -> None:
        """Start another server from an export and compare its checksums with the trainer's."""
        directory = self.scratch / "export"
        write_hf_directory(
            directory, self.model_config, self.trainer.weights(), quantized=self.mxfp4_experts
        )
        settings = server_settings(
            self.arguments,
            self.attention,
            ["--load-format", "auto"],
            quantization=self.arguments.quantization,
        )
        log = self.scratch / "from_disk.log"
        if self.arguments.log:
            log = self.arguments.log.with_name(f"from_disk_{self.arguments.log.name}")
        other = make_server(self.arguments, settings, self.model_config, directory, log)
        try:
            self.emit("start_from_disk", seconds=await wait_until_healthy(other))
            await self.compare_all_checksums(other)
        finally:
            await other.stop()

    # ---- the trainer's log-probs

    def prompt(self, length: int) -> list[int]:
        limit = self.model_config.vocab_size - 100
        return [self.random.randrange(10, limit) for _ in range(length)]

    async def gap(self, server: SglangServer, engine: SglangEngine) -> None:
        """Measure |d log p| of sampled tokens, with the trainer's and with the engine's routes."""
        requests = [
            GenerateRequest(
                request_id=f"gap/{i}/0/0",
                input_ids=self.prompt(200 + 40 * i),
                sampling=SamplingParams(self.arguments.tokens),
                return_routed_experts=self.on_gpu,
            )
            for i in range(self.arguments.episodes)
        ]
        results = await asyncio.gather(*map(engine.generate, requests))
        samples = [as_sample(q, r) for q, r in zip(requests, results, strict=True)]

        for replayed in [False, True] if self.on_gpu else [False]:
            self.scorer.replay = RoutingReplay(self.trainer.model) if replayed else None
            gaps = self.gaps(samples)
            figures = {f"p{q}": float(np.quantile(gaps, q / 100)) for q in (50, 95, 99)}
            if self.scorer.replay is not None:
                counts = self.scorer.replay.agreement()
                share = counts["routes_agreeing"] / counts["routes_compared"]
                figures["routes_the_trainer_would_choose_too"] = share
            self.emit(
                "gap",
                replayed=replayed,
                tokens=len(gaps),
                mean=float(gaps.mean()),
                max=float(gaps.max()),
                **figures,
            )
        self.scorer.replay = None

    def gaps(self, samples: list[dict[str, Any]]) -> np.ndarray:
        """Return |trainer's - engine's log-prob| of all sampled tokens."""
        (batches,) = pack(TrainingSamples.join(samples), 16_384, align=alignment())
        gaps = []
        for log_probs, batch in zip(self.scorer.score(batches), batches, strict=True):
            is_sampled = batch.loss_mask
            gaps.append((log_probs.cpu() - batch.rollout_log_probs).abs()[is_sampled])
        return torch.cat(gaps).numpy()

    # ---- turns

    async def turns(self, server: SglangServer, engine: SglangEngine) -> None:
        """Run episodes of 6 turns with 100 tokens of tool output after each turn.

        Measures cache hits and tokens per second.
        """
        hit = 0
        reusable = 0
        sampled = 0

        async def episode(number: int) -> None:
            nonlocal hit, reusable, sampled
            tokens = self.prompt(300)
            for turn in range(6):
                sampling = SamplingParams(self.arguments.tokens)
                request = GenerateRequest(f"turns/{number}/{turn}/0", tokens, sampling)
                result = await engine.generate(request)
                sampled += len(result.output_ids)
                if turn > 0:
                    hit += result.cached_tokens
                    reusable += len(tokens) - 100
                tokens = tokens + result.output_ids + self.prompt(100)

        began = time.perf_counter()
        await asyncio.gather(*map(episode, range(self.arguments.episodes)))
        seconds = time.perf_counter() - began
        self.emit(
            "turns",
            episodes=self.arguments.episodes,
            cache_hit=hit / reusable,
            tokens_per_second=sampled / seconds,
            seconds=seconds,
        )

    # ---- interruptions

    async def interruptions(self, server: SglangServer, engine: SglangEngine) -> None:
        """Measure the cost of a pause for running requests, by pause mode."""
        client = SglangClient((await server.status()).url)
        arguments = self.arguments
        for requests in arguments.running:
            load = Load(requests, arguments.prompt, arguments.tokens, self.model_config.vocab_size)
            modes = await measure_interruptions(engine, client, load, arguments.rounds)
            for mode, seconds in modes.items():
                self.emit("interruptions", requests=requests, mode=mode, **seconds)
        await client.close()

    # ---- determinism

    async def deterministic(self, server: SglangServer, engine: SglangEngine) -> None:
        """Compare tokens and log-probs of the same text and seed, alone and among other requests.

        If the tokens differ, the lines after the first two narrow down the cause. ``prefill``
        excludes decoding, cache and sampling (``to_100``: at most 128 tokens when alone).
        ``decode_against_prefill`` excludes other requests.
        """
        episodes = self.arguments.episodes
        prompts = [self.prompt(100 + 17 * i) for i in range(episodes)]
        few = range(min(8, episodes))
        client = SglangClient((await server.status()).url)

        def sample(run: str, i: int) -> Coroutine[Any, Any, GenerateResult]:
            sampling = SamplingParams(self.arguments.tokens, seed=i)
            request = GenerateRequest(f"{run}/{i}/0/0", prompts[i], sampling, self.on_gpu)
            return engine.generate(request)

        async def flush_cache() -> None:
            await client.call("/flush_cache?timeout=30", {})

        await flush_cache()
        together = await asyncio.gather(*(sample("many", i) for i in range(episodes)))
        cached = [await sample("cached", i) for i in few]
        cold = []
        for i in few:
            await flush_cache()
            cold.append(await sample("cold", i))

        self.emit_differences("cached", cached, together)
        self.emit_differences("cold", cold, together)
        texts = [q + r.output_ids for q, r in zip(prompts, together, strict=True)]
        await self.compare_prefill(client, "whole", texts, few)
        await self.compare_prefill(client, "to_100", [text[:100] for text in texts], few)
        await self.compare_decode_with_prefill(client, prompts, cold)
        await client.close()

    def emit_differences(
        self,
        prefix: str,
        alone: list[GenerateResult],
        together: list[GenerateResult],
    ) -> None:
        pairs = list(zip(alone, together, strict=False))
        tokens = [first_difference(x.output_ids, y.output_ids)[0] for x, y in pairs]
        log_probs = [first_difference(x.output_log_probs, y.output_log_probs) for x, y in pairs]
        self.emit(
            "deterministic",
            prefix=prefix,
            cached_tokens=[result.cached_tokens for result in alone],
            of=len(pairs),
            same=sum(x.output_ids == y.output_ids for x, y in pairs),
            tokens_until_they_differ=tokens,
            log_probs_until_they_differ_and_by=log_probs,
        )

    async def compare_prefill(
        self,
        client: SglangClient,
        name: str,
        texts: list[list[int]],
        few: range,
    ) -> None:
        """Score all texts concurrently, and a few of them in sequence."""
        together = await asyncio.gather(*(score_on(client, text) for text in texts))
        alone = [await score_on(client, texts[i]) for i in few]
        same = 0
        largest = 0.0
        for one, other in zip(alone, together, strict=False):
            same += one == other
            largest = max(largest, *(abs(x - y) for x, y in zip(one, other, strict=True)))
        self.emit("prefill", text=name, same=same, of=len(few), max=largest)

    async def compare_decode_with_prefill(
        self,
        client: SglangClient,
        prompts: list[list[int]],
        results: list[GenerateResult],
    ) -> None:
        """Compare the log-probs of sampled tokens with those of the same text as a prompt."""
        positions: list[int] = []
        gaps: list[float] = []
        for prompt, result in zip(prompts, results, strict=False):
            first = len(prompt) - 1
            scores = (await score_on(client, prompt + result.output_ids))[first:]
            gaps += [abs(x - y) for x, y in zip(scores, result.output_log_probs, strict=True)]
            positions += range(first, first + len(scores))

        # From position 128 on, a window of 128 keys excludes keys.
        leaves_keys_out = np.array(positions) >= 128
        for name, chosen in {"to_127": ~leaves_keys_out, "from_128": leaves_keys_out}.items():
            some = np.array(gaps)[chosen]
            if len(some):
                self.emit(
                    "decode_against_prefill",
                    positions=name,
                    equal=float((some == 0).mean()),
                    mean=float(some.mean()),
                    max=float(some.max()),
                )


@dataclass(frozen=True)
class SyncMemory:
    """Bytes that a sync needs in addition to the model."""

    server: int
    sender: int


@contextmanager
def lose_a_bucket(layer: str) -> Iterator[None]:
    """Drop the first bucket that contains a tensor of ``layer``."""
    original = send.split_into_buckets

    def some(named_tensors: NamedTensors, limit: int) -> Iterator[Bucket]:
        is_lost = False
        for bucket in original(named_tensors, limit):
            if not is_lost and any(name.startswith(layer) for name, _ in bucket):
                is_lost = True
                continue
            yield bucket

    send.split_into_buckets = some
    try:
        yield
    finally:
        send.split_into_buckets = original


@contextmanager
def swap_two_scales(layer: str) -> Iterator[None]:
    """Swap the first scale of an expert with a different one, in transit to the server."""
    original = send.split_into_buckets

    def changed(named_tensors: NamedTensors, limit: int) -> Iterator[Bucket]:
        return original(with_two_scales_swapped(named_tensors, layer), limit)

    send.split_into_buckets = changed
    try:
        yield
    finally:
        send.split_into_buckets = original


def with_two_scales_swapped(
    named_tensors: NamedTensors, layer: str
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in named_tensors:
        if name == f"{layer}mlp.experts.down_proj_scales":
            tensor = tensor.clone()
            flat = tensor.view(-1)
            other = int((flat != flat[0]).nonzero()[0])
            flat[[0, other]] = flat[[other, 0]]
        yield name, tensor
        del tensor


def as_sample(request: GenerateRequest, result: GenerateResult) -> dict[str, Any]:
    """Return the sample columns of a request and its answer."""
    prompt_length = len(request.input_ids)
    return {
        "token_ids": request.input_ids + result.output_ids,
        "loss_mask": [0] * prompt_length + [1] * len(result.output_ids),
        "rollout_log_probs": [0.0] * prompt_length + result.output_log_probs,
        "routed_experts": result.routed_experts,
    }


def first_difference(x: Sequence[float], y: Sequence[float]) -> tuple[int, float]:
    """Return the position and size of the first difference; the length and 0 if there is none."""
    for i, (left, right) in enumerate(zip(x, y, strict=True)):
        if left != right:
            return i, abs(left - right)
    return len(x), 0.0


def compare_layouts(arguments: argparse.Namespace) -> None:
    """Run ``mxfp4_layouts.py`` in the server's environment."""
    program = Path(__file__).parent / "mxfp4_layouts.py"
    path = os.pathsep.join([str(PLUGIN), arguments.pythonpath])
    environment = inherited_environment() | {"PYTHONPATH": path}
    # -P: modules next to the program must not shadow those of the environment.
    command = [arguments.python, "-P", str(program)]
    done = subprocess.run(command, env=environment, check=False)
    if done.returncode:
        raise SystemExit("the layouts of MXFP4 experts are not those of SGLang")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    option = parser.add_argument
    option("cases", nargs="+", choices=CASES)
    option("--quantization", choices=["mxfp4"], help="of the experts, in trainer and server")
    option(
        "--expert-adapter-rank",
        type=int,
        help="gap, turns, sync, sleep: rank of unmerged expert adapters in trainer and server",
    )
    option("--layers", type=int, default=4)
    option("--attention", nargs="+", default=["fa3"])
    option("--transport", default="cuda_ipc", choices=TRANSPORTS)
    option("--bucket-mib", type=int, nargs="+", default=[1024])
    option("--episodes", type=int, default=32)
    option("--tokens", type=int, default=256, help="sampled tokens per turn")
    option(
        "--running",
        type=int,
        nargs="+",
        default=[1, 8, 64, 256],
        help="decode, rollouts, interruptions: requests",
    )
    option(
        "--prompt",
        type=int,
        default=512,
        help="decode, rollouts, interruptions: tokens of every prompt",
    )
    option(
        "--rounds",
        type=int,
        default=5,
        help="decode, rollouts, interruptions: rounds, of which the median is reported",
    )
    option("--seconds", type=float, default=20.0, help="rollouts: duration of a round")
    option(
        "--tool-tokens",
        type=int,
        nargs=2,
        default=[13, 13],
        metavar=("LEAST", "MOST"),
        help="rollouts: tokens of a tool's output, uniformly distributed",
    )
    option(
        "--cache-gb",
        type=float,
        default=16.0,
        help="decode, rollouts: KV cache of each server, in GB",
    )
    option("--out", type=Path, help="decode, rollouts: file for the tables")
    option("--separate-gpus", action="store_true", help="decode: each server on the next GPU")
    option(
        "--variants",
        nargs="+",
        help="decode, rollouts: servers; the first is compared with each other one",
    )
    option(
        "--profile",
        action="store_true",
        help="decode: report the GPU time of each group of kernels",
    )
    option(
        "--traces",
        type=Path,
        help="decode: directory that keeps the traces of --profile; by default they are deleted",
    )

    option("--python", default=sys.executable, help="interpreter that has SGLang")
    option("--pythonpath", default="", help="PYTHONPATH of the server")
    option("--server-arguments", default="", help="additional arguments of sglang.launch_server")
    option("--without", nargs="*", default=[], help="flags to leave out: disable-radix-cache")
    option(
        "--server-env",
        nargs="*",
        default=[],
        metavar="NAME=VALUE",
        help="environment variables of the server",
    )
    option(
        "--server-gpu", type=int, default=0, help="index of the server's GPU; the trainer has GPU 0"
    )
    option(
        "--server-tensor-parallel",
        type=int,
        default=1,
        help="number of consecutive GPUs of the server",
    )
    option(
        "--expert-parallel",
        type=int,
        default=1,
        help="number of trainer ranks, on GPUs from 0 on, over which experts are sharded",
    )
    option("--memory-fraction", type=float, default=0.4)
    option("--log", type=Path, help="log file of the server")
    option("--device", default="cuda", choices=["cuda", "cpu"])
    option("--tiny", action="store_true")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    if arguments.expert_parallel > 1 and "gap" in arguments.cases:
        raise SystemExit("gap is for a trainer of one rank, which scores alone")
    if arguments.server_tensor_parallel > 1 and {"decode", "rollouts"} & set(arguments.cases):
        raise SystemExit("decode and rollouts are for servers of one GPU")

    if arguments.expert_adapter_rank is not None and arguments.quantization is None:
        raise SystemExit("--expert-adapter-rank is for --quantization mxfp4")

    with tempfile.TemporaryDirectory() as scratch:
        if "layouts" in arguments.cases:
            arguments.cases.remove("layouts")
            compare_layouts(arguments)
        if "from_disk" in arguments.cases and arguments.quantization is None:
            raise SystemExit("from_disk is for --quantization mxfp4")
        if "decode" in arguments.cases:
            arguments.cases.remove("decode")
            asyncio.run(measure_decoding(arguments, Path(scratch)))
    if "rollouts" in arguments.cases:
        arguments.cases.remove("rollouts")
        with tempfile.TemporaryDirectory() as scratch:
            asyncio.run(measure_rollouts(arguments, Path(scratch)))

    if arguments.cases:
        trainer = RandomTrainer(arguments, model_config(arguments))
        for attention in arguments.attention:
            with tempfile.TemporaryDirectory() as scratch:
                asyncio.run(Bench(arguments, trainer, attention, Path(scratch)).run())
        trainer.close()
    os._exit(0)  # shared-memory helpers of torch would keep a pipe of this process open
