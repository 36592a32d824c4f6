"""SGLang as the rollout engine on GPUs, measured against the trainer. Cases run one after the other on one server.

    python benchmarks/sglang.py --layers 4 gap turns deterministic --attention fa3 triton      (one GPU: both share it)
    python benchmarks/sglang.py --layers 24 sync --trainer-gpu 0 --server-gpu 1 --transport nccl
    python benchmarks/sglang.py --layers 8 sync --transport cuda_ipc

The model has GPT-OSS-20B's widths and random weights (normal with std 0.02, small enough that routing margins decide).
SGLang runs in its own environment: ``--python`` and ``--pythonpath``. No Ray. Prints one JSON object per case.
``--device cpu --tiny`` is for an SGLang that serves on CPUs.
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
from pathlib import Path
from typing import Any

import numpy as np
import torch

from converters.live import export_hf_weights
from megatron_gptoss import distributed
from megatron_gptoss.config import ModelConfig, ParallelConfig
from megatron_gptoss.model import build_model
from megatron_gptoss.packing import Sample, pack, unpack
from megatron_gptoss.routing_replay import RoutingReplay
from megatron_gptoss.scorer import Scorer, alignment
from rl_loop.cluster.placement import free_port
from rl_loop.engines.protocol import GenerateRequest, GenerateResult, SamplingParams
from rl_loop.engines.sglang.client import SglangClient
from rl_loop.engines.sglang.config import SglangConfig
from rl_loop.engines.sglang.engine import SglangEngine, score_on
from rl_loop.engines.sglang.server import ServerState, SglangServer
from rl_loop.engines.sglang.weight_sender import SyncPlan, send_weights


class Bench:
    """One trainer in this process, one server in another."""

    def __init__(self, arguments: argparse.Namespace, attention: str, scratch: Path) -> None:
        self.arguments, self.attention, self.scratch = arguments, attention, scratch
        shape: dict[str, Any] = {"num_layers": arguments.layers, "num_experts": 32, "max_length": 32_768}
        if arguments.tiny:
            shape |= {"num_experts": 4, "experts_per_token": 2, "hidden_size": 64, "intermediate_size": 96}
            shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_size": 32, "vocab_size": 1024}
        self.model_config = ModelConfig(**shape)
        self.random = random.Random(0)
        self.version = 0
        model = build_model(self.model_config, ParallelConfig(), torch.bfloat16)
        torch.manual_seed(0)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    parameter.fill_(1)
                else:
                    parameter.normal_(0, 1 if "softmax_offset" in name else 0.02)
        self.model, self.scorer = model, Scorer(model)

    def settings(self) -> SglangConfig:
        a = self.arguments
        extra = (
            ["--device", "cpu", "--max-total-tokens", "8192"]
            if a.device == "cpu"
            else ["--disable-piecewise-cuda-graph"]
        )
        return SglangConfig(
            python=a.python, attention_backend=self.attention, memory_fraction=a.memory_fraction,
            weight_sync=a.transport,
            arguments=extra + a.server_arguments.split(), deterministic="deterministic" in a.cases,
            env={"PYTHONPATH": a.pythonpath} | dict(setting.split("=", 1) for setting in a.server_env),
        )  # fmt: skip

    async def run(self) -> None:
        a = self.arguments
        (self.scratch / "config.json").write_text(json.dumps(self.model_config.to_hf_config(dtype="bfloat16")))
        environment = {"OMP_NUM_THREADS": "4", "CUDA_VISIBLE_DEVICES": self.server_gpu()}
        if a.device == "cpu":
            environment["SGLANG_USE_CPU_ENGINE"] = "1"
        settings = self.settings()
        whole = settings.command(0, self.scratch, "bfloat16", routed_experts=a.device != "cpu", seed=0)
        environment |= settings.environment

        def command(host: str, port: int) -> list[str]:
            return [word for word in whole(host, port) if word.removeprefix("--") not in a.without]

        server = SglangServer(command, environment, a.log or self.scratch / "server.log", health_seconds=60)
        began = time.monotonic()
        try:
            while (status := await server.status()).state is not ServerState.STALE:
                if status.fault:
                    raise SystemExit(status.fault)
                await asyncio.sleep(0.5)
            self.emit("start", seconds=time.monotonic() - began)

            async def servers() -> list[Any]:
                return [await server.status()]

            c = self.model_config
            engine = SglangEngine(
                servers,
                num_layers=c.num_layers,
                top_k=c.experts_per_token,
                num_experts=c.num_experts,
                vocab_size=c.vocab_size,
            )
            await self.sync(server, "first")
            for case in a.cases:
                await getattr(self, case)(server, engine)
            await engine.close()
        finally:
            await server.stop()

    def emit(self, case: str, **figures: Any) -> None:
        rounded = {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in figures.items()}
        print(
            json.dumps({"case": case, "attention": self.attention, "layers": self.model_config.num_layers, **rounded}),
            flush=True,
        )

    # cases

    async def sync_once(self, server: SglangServer, mebibytes: int, compare: bool = True) -> float:
        status = await server.status()
        self.version += 1
        await server.begin_sync(status.incarnation)
        plan = SyncPlan(
            (status.url,), self.version, self.arguments.transport, bucket_bytes=mebibytes << 20,
            directory=self.scratch / "weights", compare=compare,
        )  # fmt: skip
        began = time.perf_counter()
        await send_weights(self.named(), self.model_config, plan)
        seconds = time.perf_counter() - began
        await server.end_sync(status.incarnation, self.version)
        return seconds

    def named(self) -> Iterator[tuple[str, torch.Tensor]]:
        exported = export_hf_weights(self.model, self.model_config, transposed=self.arguments.transport == "cuda_ipc")
        return ((name, tensor.to(torch.bfloat16)) for name, tensor in exported)

    async def sync(self, server: SglangServer, engine: Any) -> None:
        """Seconds of whole syncs and of the export alone, and the memory that each side needs besides its model."""
        for mebibytes in self.arguments.bucket_mib if engine != "first" else self.arguments.bucket_mib[:1]:
            await self.sync_in_buckets(server, mebibytes, 1 if engine == "first" else 5)

    async def sync_in_buckets(self, server: SglangServer, mebibytes: int, rounds: int) -> None:
        on_gpu = self.arguments.device != "cpu"
        used = peak = self.server_memory()
        before = torch.cuda.memory_allocated() if on_gpu else 0
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        watched = asyncio.ensure_future(self.sync_once(server, mebibytes))  # not timed: looking at memory takes time
        while not watched.done():
            await asyncio.wait({watched}, timeout=0.02)
            peak = max(peak, await asyncio.to_thread(self.server_memory))
        await watched
        sender_extra = (torch.cuda.max_memory_allocated() - before) / 1e9 if on_gpu else 0.0
        compared = [await self.sync_once(server, mebibytes) for _ in range(rounds)]
        seconds, sent = [await self.sync_once(server, mebibytes, compare=False) for _ in range(rounds)], 0
        began = time.perf_counter()
        for _, tensor in self.named():
            sent += tensor.nbytes
        if on_gpu:
            torch.cuda.synchronize()
        self.emit(
            "sync", transport=self.arguments.transport, bucket_mib=mebibytes, gigabytes=sent / 1e9,
            seconds_all=seconds, seconds_median=float(np.median(seconds)),
            with_checksums_median=float(np.median(compared)), export_alone=time.perf_counter() - began,
            server_gpu_extra_gb=(peak - used) / 1e9, sender_extra_gb=sender_extra, link_gbps=self.link(),
        )  # fmt: skip

    def server_gpu(self) -> str:
        """As the whole machine numbers it."""
        return os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7").split(",")[self.arguments.server_gpu]

    def server_memory(self) -> int:
        """Bytes in use on the server's GPU, the trainer's too if they share it."""
        if self.arguments.device == "cpu":
            return 0
        command = [
            "nvidia-smi",
            f"--id={self.server_gpu()}",
            "--query-gpu=memory.used",
            "--format=csv,noheader,nounits",
        ]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout) << 20

    def link(self) -> float:
        """GB/s of a copy between the two GPUs (or within the one): what no transport can beat."""
        a = self.arguments
        if a.device == "cpu":
            return 0.0
        peer = a.server_gpu if a.server_gpu < torch.cuda.device_count() else 0
        source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda:0")
        target = torch.empty_like(source, device=f"cuda:{peer}")
        target.copy_(source)
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(5):
            target.copy_(source)
        torch.cuda.synchronize()
        return 5 * (1 << 30) / (time.perf_counter() - began) / 1e9

    def prompt(self, length: int) -> list[int]:
        return [self.random.randrange(10, self.model_config.vocab_size - 100) for _ in range(length)]

    async def gap(self, server: SglangServer, engine: SglangEngine) -> None:
        """|d log p| of sampled tokens, the trainer routing freely and as the engine did."""
        a, routes = self.arguments, self.arguments.device != "cpu"
        requests = [
            GenerateRequest(f"gap/{i}/0/0", self.prompt(200 + 40 * i), SamplingParams(a.tokens), routes)
            for i in range(a.episodes)
        ]
        results = await asyncio.gather(*map(engine.generate, requests))
        samples = [
            Sample(
                q.input_ids + r.output_ids,
                [0] * len(q.input_ids) + [1] * len(r.output_ids),
                rollout_log_probs=[0.0] * len(q.input_ids) + r.output_log_probs,
                routed_experts=r.routed_experts,
            )
            for q, r in zip(requests, results, strict=True)
        ]
        for replayed in [False, True] if routes else [False]:
            self.scorer.replay = RoutingReplay(self.model) if replayed else None
            gaps = self.gaps(samples)
            figures = {f"p{q}": float(np.quantile(gaps, q / 100)) for q in (50, 95, 99)}
            if self.scorer.replay is not None:
                counts = self.scorer.replay.agreement()
                figures["routes_the_trainer_would_choose_too"] = counts["routes_agreeing"] / counts["routes_compared"]
            self.emit(
                "gap", replayed=replayed, tokens=len(gaps), mean=float(gaps.mean()), max=float(gaps.max()), **figures
            )
        self.scorer.replay = None

    def gaps(self, samples: list[Sample]) -> np.ndarray:
        batches = pack(samples, 16_384, 1, alignment())[0]
        rows: dict[int, list[float]] = {}
        for values, batch in zip(self.scorer.score(batches), batches, strict=True):
            rows |= unpack(values, batch)
        gaps = [
            abs(rows[i][j] - (sample.rollout_log_probs or ())[j])
            for i, sample in enumerate(samples)
            for j, mask in enumerate(sample.loss_mask)
            if mask
        ]
        return np.array(gaps)

    async def turns(self, server: SglangServer, engine: SglangEngine) -> None:
        """Episodes of several turns, each with tool output of 100 tokens: cache hits and tokens per second."""
        a = self.arguments
        hit, reusable, sampled = 0, 0, 0

        async def episode(number: int) -> None:
            nonlocal hit, reusable, sampled
            tokens = self.prompt(300)
            for turn in range(6):
                request = GenerateRequest(f"turns/{number}/{turn}/0", tokens, SamplingParams(a.tokens))
                result = await engine.generate(request)
                sampled += len(result.output_ids)
                if turn:
                    hit += result.cached_tokens
                    reusable += len(tokens) - 100
                tokens = tokens + result.output_ids + self.prompt(100)

        began = time.perf_counter()
        await asyncio.gather(*map(episode, range(a.episodes)))
        seconds = time.perf_counter() - began
        self.emit(
            "turns", episodes=a.episodes, cache_hit=hit / reusable, tokens_per_second=sampled / seconds, seconds=seconds
        )

    async def deterministic(self, server: SglangServer, engine: SglangEngine) -> None:
        """The same seed and the same text alone and among others: tokens, and log-probs to the last bit.

        If the tokens differ, the lines after the first two say where to look: ``prefill`` is without decoding, cache
        and sampling (``to_100``: at most 128 tokens when alone), ``decode_against_prefill`` without other requests."""
        a, client = self.arguments, SglangClient((await server.status()).url)
        prompts = [self.prompt(100 + 17 * i) for i in range(a.episodes)]
        few = range(min(8, a.episodes))

        def sample(run: str, i: int) -> Coroutine[Any, Any, GenerateResult]:
            return engine.generate(
                GenerateRequest(f"{run}/{i}/0/0", prompts[i], SamplingParams(a.tokens, seed=i), a.device != "cpu")
            )

        await client.call("/flush_cache?timeout=30", {})
        together = await asyncio.gather(*(sample("many", i) for i in range(a.episodes)))
        alone = {"cached": [await sample("cached", i) for i in few], "cold": []}
        for i in few:
            await client.call("/flush_cache?timeout=30", {})
            alone["cold"].append(await sample("cold", i))
        for prefix, results in alone.items():
            pairs = list(zip(results, together, strict=False))
            self.emit(
                "deterministic", prefix=prefix, cached_tokens=[x.cached_tokens for x in results], of=len(pairs),
                same=sum(x.output_ids == y.output_ids for x, y in pairs),
                tokens_until_they_differ=[first_difference(x.output_ids, y.output_ids)[0] for x, y in pairs],
                log_probs_until_they_differ_and_by=[
                    first_difference(x.output_log_probs, y.output_log_probs) for x, y in pairs
                ],
            )  # fmt: skip
        texts = [q + r.output_ids for q, r in zip(prompts, together, strict=True)]
        for name, scored in {"whole": texts, "to_100": [text[:100] for text in texts]}.items():
            many = await asyncio.gather(*(score_on(client, text) for text in scored))
            one = [await score_on(client, scored[i]) for i in few]
            gap = max(abs(x - y) for i in few for x, y in zip(one[i], many[i], strict=True))
            self.emit("prefill", text=name, same=sum(one[i] == many[i] for i in few), of=len(few), max=gap)
        positions: list[int] = []
        gaps: list[float] = []
        for prompt, result in zip(prompts, alone["cold"], strict=False):
            scores = (await score_on(client, prompt + result.output_ids))[len(prompt) - 1 :]
            gaps += [abs(x - y) for x, y in zip(scores, result.output_log_probs, strict=True)]
            positions += range(len(prompt) - 1, len(prompt) - 1 + len(scores))
        for name, within in {"to_127": np.array(positions) < 128, "from_128": np.array(positions) >= 128}.items():
            some = np.array(gaps)[within]  # from position 128 on a window of 128 keys leaves keys out
            if len(some):
                figures = {"equal": (some == 0).mean(), "mean": some.mean(), "max": some.max()}
                self.emit("decode_against_prefill", positions=name, **{k: float(v) for k, v in figures.items()})
        await client.close()


def first_difference(x: Sequence[float], y: Sequence[float]) -> tuple[int, float]:
    """Where two sequences first differ and by how much; their length and 0 if nowhere."""
    return next(((i, abs(s - t)) for i, (s, t) in enumerate(zip(x, y, strict=True)) if s != t), (len(x), 0.0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", choices=["gap", "turns", "deterministic", "sync"])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--attention", nargs="+", default=["fa3"])
    parser.add_argument(
        "--transport", default="cuda_ipc", choices=["nccl", "cuda_ipc", "gloo", "shared_memory", "disk"]
    )
    parser.add_argument("--bucket-mib", type=int, nargs="+", default=[1024])
    parser.add_argument("--server-arguments", default="", help="further ones of sglang.launch_server")
    parser.add_argument(
        "--without", nargs="*", default=[], help="flags that the server is not given: disable-radix-cache"
    )
    parser.add_argument("--server-env", nargs="*", default=[], metavar="NAME=VALUE", help="the server's variables")
    parser.add_argument("--episodes", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=256, help="sampled per turn")
    parser.add_argument("--server-gpu", type=int, default=0, help="of the visible ones; the trainer has the first")
    parser.add_argument("--memory-fraction", type=float, default=0.4)
    parser.add_argument("--python", default=sys.executable, help="interpreter that has SGLang")
    parser.add_argument("--pythonpath", default="", help="of the server")
    parser.add_argument("--log", type=Path, help="file for what the server prints")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    distributed.initialize(ParallelConfig(), port=free_port())
    for attention in arguments.attention:
        with tempfile.TemporaryDirectory() as scratch:
            asyncio.run(Bench(arguments, attention, Path(scratch)).run())
    os._exit(0)  # shared-memory helpers of torch would keep a pipe of this process open


if __name__ == "__main__":
    main()
