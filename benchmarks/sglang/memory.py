"""GPU memory of an SGLang server that shares its GPU, running and paused.

    python -m benchmarks.sglang memory --memory-fraction 0.5 --max-running-requests 256 128
    python -m benchmarks.sglang memory --memory-fraction 0.5 --unmodified

Needs one GPU. For every value of ``--max-running-requests``, starts one server of GPT-OSS-20B's
size and sends it random weights by CUDA IPC, like a trainer rank on the same GPU. Uses neither Ray
nor Megatron. ``--python`` and ``--pythonpath`` select SGLang's environment.

Prints one JSON object per server:

- GB (1e9 bytes) on the GPU after the start, under load, paused and resumed
- seconds to pause, to resume and to sync
- equality of log-probs and of a greedy continuation after pauses
- GB left by a server that is killed during a sync
- lines of SGLang's log about memory

``--unmodified`` disables the settings that let paused servers keep less memory.
``--device cpu --tiny`` is a test of the command, with an SGLang that runs on CPUs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.sglang.servers import model_config
from converters.names import hf_shapes
from rl_loop.engines.protocol import GenerateRequest, SamplingParams
from rl_loop.engines.sglang.client import SglangClient
from rl_loop.engines.sglang.config import SglangConfig
from rl_loop.engines.sglang.engine import SglangEngine, score_on
from rl_loop.engines.sglang.gpu_memory import memory_fault, settled_gpus, visible_gpus
from rl_loop.engines.sglang.server import ServerState, ServerStatus, SglangServer
from rl_loop.engines.sglang.server_command import server_command
from rl_loop.engines.sglang.weight_endpoints import send_weights
from rl_loop.weight_sync.servers import SyncPlan
from rl_loop.weight_sync.source import SyncError

ROUNDS = 3
"""Number of pauses of each server."""
LOGGED = re.compile(
    r"(Init torch distributed ends|Load weight (?:begin|end)|Memory pool end|KV Cache is allocated|"
    r"SWAKVPool|Capture .* end|max_total_num_tokens|Using default MoE kernel config).*"
)
"""Lines of SGLang's log about memory and about the settings of kernels."""


class Bench:
    """A server, and this process in the role of a trainer rank."""

    def __init__(self, options: argparse.Namespace, running: int, scratch: Path) -> None:
        self.options = options
        self.running = running
        self.config = model_config(options, max_length=131_072)  # as GPT-OSS has it
        self.on_gpu = options.device != "cpu"
        self.log = scratch / f"server_{running}.log"
        self.scratch = scratch
        self.settings = self.make_settings()
        self.version = 0
        self.peak = 0
        self.figures: dict[str, Any] = {
            "memory_fraction": options.memory_fraction,
            "max_running_requests": running,
            "unmodified": options.unmodified,
            "layers": self.config.num_layers,
        }

    def make_settings(self) -> SglangConfig:
        options = self.options
        arguments = options.server_arguments.split()
        if not self.on_gpu:
            arguments = ["--device", "cpu", "--max-total-tokens", "8192", *arguments]
        return SglangConfig(
            python=options.python,
            attention_backend=options.attention,
            memory_fraction=options.memory_fraction,
            max_running_requests=self.running,
            weight_sync="cuda_ipc" if self.on_gpu else "shared_memory",
            # On a CPU, a server cannot release memory.
            colocated=self.on_gpu,
            arguments=arguments,
            env={"PYTHONPATH": options.pythonpath},
        )

    def make_server(self) -> SglangServer:
        (self.scratch / "config.json").write_text(
            json.dumps(self.config.to_hf_config(dtype="bfloat16"))
        )
        build = server_command(
            self.settings, 0, self.scratch, "bf16", routed_experts=self.on_gpu, seed=0
        )
        environment = dict(self.settings.environment)
        environment["OMP_NUM_THREADS"] = "4" if self.on_gpu else "1"
        if not self.on_gpu:
            environment["SGLANG_USE_CPU_ENGINE"] = "1"

        def command(host: str, port: int) -> list[str]:
            words = build(host, port)
            where = words.index("--mem-fraction-static")
            self.figures["mem_fraction_static"] = float(words[where + 1])
            if self.options.unmodified:
                words.remove("--disable-prefill-cuda-graph")
            return words

        if self.options.unmodified:
            environment["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] = "0"
            environment["SGLANG_PLUGINS"] = "none"
        return SglangServer(
            command,
            environment,
            self.log,
            memory_fault=partial(memory_fault, fraction=self.settings.memory_fraction),
        )

    async def run(self) -> None:
        """Measure and print. A failure of the server is part of the result."""
        if self.on_gpu:
            # This process's context and tensors represent those of a trainer.
            self.held = torch.zeros(
                int(self.options.hold_gb * 1e9) + 1, dtype=torch.uint8, device="cuda"
            )
            # The previous server may not have released all of its memory yet.
            settled_gpus(os.environ)
        before = self.used()
        server = self.make_server()
        try:
            await self.measure(server, before)
        except Exception as error:
            self.figures["error"] = f"{type(error).__name__}: {error}"[:1000]
        finally:
            await server.stop()
            self.figures["log"] = self.logged()
            print(json.dumps(self.figures), flush=True)

    async def measure(self, server: SglangServer, before: int) -> None:
        began = time.monotonic()
        while (status := await server.status()).state is not ServerState.UNSYNCED:
            if status.fault:
                raise RuntimeError(status.fault)
            await asyncio.sleep(0.5)
        self.note(start_seconds=time.monotonic() - began)
        await server.begin_sync(
            status.incarnation
        )  # stops health checks, because it will be paused
        self.note(total_gb=self.total(), before_gb=before, started_gb=self.used() - before)

        async with self.watching_memory():
            self.note(first_sync_seconds=await self.sync(status.url, compare=True))
        self.note(sync_peak_gb=self.peak - before)
        if self.on_gpu:
            sender = torch.cuda.max_memory_allocated() - self.held.nbytes
            self.note(sender_peak_gb=sender)
        syncs = [await self.sync(status.url) for _ in range(ROUNDS)]
        self.note(sync_seconds=min(syncs))
        self.release()

        engine = self.make_engine(server)
        async with self.watching_memory():
            await self.load(engine, status.url)
        self.note(loaded_peak_gb=self.peak - before, after_load_gb=self.used() - before)
        scores, text = await self.score_and_sample(engine, status.url, "before")

        pauses = [await self.pause_and_resume(status.url, before) for _ in range(ROUNDS)]
        for name in pauses[0]:
            self.figures[name] = [round(pause[name], 3) for pause in pauses]
        scores_after, text_after = await self.score_and_sample(engine, status.url, "after")
        gaps = [abs(x - y) for x, y in zip(scores, scores_after, strict=True)]
        self.note(largest_gap_after_pause=max(gaps))
        self.figures["same_text_after_pause"] = text_after == text
        await engine.close()
        await self.kill_during_sync(server, status.url)

    async def pause_and_resume(self, url: str, before: int) -> dict[str, float]:
        """Pause and resume the server in the same way as the fleet."""
        client = SglangClient(url)
        seconds: dict[str, float] = {}

        async def call(name: str, path: str, body: dict[str, Any]) -> None:
            began = time.perf_counter()
            await client.call(path, body, seconds=120)
            seconds[name] = time.perf_counter() - began

        await call("pause_seconds", "/pause_generation", {"mode": "abort"})
        tags = ["kv_cache", "weights", "cuda_graph"]
        await call("release_seconds", "/release_memory_occupation", {"tags": tags})
        paused = (self.used() - before) / 1e9
        await call("resume_weights_seconds", "/resume_memory_occupation", {"tags": ["weights"]})
        synced = await self.sync(url)
        self.release()
        rest = {"tags": ["kv_cache", "cuda_graph"]}
        await call("resume_rest_seconds", "/resume_memory_occupation", rest)
        await client.close()
        resumed = (self.used() - before) / 1e9
        return seconds | {"paused_gb": paused, "resumed_gb": resumed, "resync_seconds": synced}

    async def kill_during_sync(self, server: SglangServer, url: str) -> None:
        """Kill the server during a sync, and measure the time of the sync and the memory left."""
        held = torch.cuda.memory_reserved() if self.on_gpu else 0
        began = time.perf_counter()
        syncing = asyncio.create_task(self.sync(url))
        await asyncio.sleep(0.15)
        server._kill()
        try:
            await syncing
        except SyncError as failure:
            self.figures["killed_half_way"] = str(failure)[:300]
        self.note(failed_sync_seconds=time.perf_counter() - began)
        self.release()
        if self.on_gpu:
            self.note(left_after_failed_sync_gb=torch.cuda.memory_reserved() - held)

    # ---- weights

    async def sync(self, url: str, compare: bool = False) -> float:
        """Send all weights and return the seconds."""
        self.version += 1
        plan = SyncPlan(
            urls=(url,),
            version=self.version,
            transport=self.settings.weight_sync,
            bucket_bytes=self.options.bucket_mib << 20,
            compare=compare,
        )
        began = time.perf_counter()
        await send_weights(self.weights(), self.config, plan)
        return time.perf_counter() - began

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield random weights, equal in each call. Experts' matrices have Megatron's layout."""
        device = "cuda" if self.on_gpu else "cpu"
        for name, shape in hf_shapes(self.config).items():
            if "norm" in name:
                yield name, torch.ones(shape, dtype=torch.bfloat16, device=device)
                continue

            generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
            is_transposed = name.endswith(("gate_up_proj", "down_proj"))
            made_as = (shape[0], shape[2], shape[1]) if is_transposed else shape
            tensor = torch.empty(made_as, dtype=torch.bfloat16, device=device)
            tensor.normal_(0, 0.02, generator=generator)
            yield name, tensor.mT if is_transposed else tensor
            del tensor  # otherwise it would outlive its bucket

    def release(self) -> None:
        """Release the memory of a sync, as a trainer rank does."""
        if self.on_gpu:
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()

    # ---- load

    def make_engine(self, server: SglangServer) -> SglangEngine:
        async def statuses() -> list[ServerStatus]:
            status = await server.status()
            synced = {"state": ServerState.SYNCED, "version": self.version}
            return [ServerStatus(**(vars(status) | synced))]

        return SglangEngine(statuses, self.config)

    async def load(self, engine: SglangEngine, url: str) -> None:
        """Run the maximum number of concurrent requests, long prefills, and a score."""
        requests = []
        for number in range(self.running):
            sampling = SamplingParams(self.options.tokens, seed=number)
            prompt = self.prompt(number, length=self.options.prompt)
            requests.append(GenerateRequest(f"load/{number}/0/0", prompt, sampling, self.on_gpu))

        began = time.perf_counter()
        results = await asyncio.gather(*map(engine.generate, requests))
        sampled = sum(len(result.output_ids) for result in results)
        self.note(load_tokens_per_second=sampled / (time.perf_counter() - began))

        client = SglangClient(url)
        await score_on(client, self.prompt(1, length=4 * self.options.prompt))
        await client.close()

    async def score_and_sample(
        self, engine: SglangEngine, url: str, when: str
    ) -> tuple[list[float], list[int]]:
        """Return log-probs of a text and a greedy continuation, without the prefix cache."""
        prompt = self.prompt(1_000_000, length=300)
        client = SglangClient(url)
        await client.call("/flush_cache", {})
        scores = await score_on(client, prompt)
        await client.call("/flush_cache", {})
        await client.close()

        sampling = SamplingParams(64, temperature=0)
        request = GenerateRequest(f"{when}/0/0/0", prompt, sampling)
        return scores, (await engine.generate(request)).output_ids

    def prompt(self, seed: int, length: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        limit = self.config.vocab_size - 100
        return torch.randint(10, limit, (length,), generator=generator).tolist()

    # ---- memory

    def used(self) -> int:
        """Return the bytes in use on the GPU, by all processes."""
        if not self.on_gpu:
            return 0
        free, total = torch.cuda.mem_get_info()
        return total - free

    def total(self) -> int:
        """Return the size of the GPU's memory in bytes, to which fractions refer."""
        gpus = visible_gpus(os.environ)
        return gpus[0].total if self.on_gpu else 0

    @asynccontextmanager
    async def watching_memory(self) -> AsyncIterator[None]:
        """Record the peak of used GPU memory, by all processes, in ``peak``."""
        self.peak = self.used()
        watcher = asyncio.create_task(self.watch())
        try:
            yield
        finally:
            watcher.cancel()

    async def watch(self) -> None:
        while True:
            self.peak = max(self.peak, self.used())
            await asyncio.sleep(0.005)

    def logged(self) -> list[str]:
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return [found[0][:300] for found in LOGGED.finditer(text)]

    def note(self, **figures: float) -> None:
        """Record values with 4 significant digits. Values with names in ``_gb`` are in bytes."""
        for name, value in figures.items():
            if name.endswith("_gb"):
                value /= 1e9
            self.figures[name] = float(f"{value:.4g}")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    option = parser.add_argument
    option("--layers", type=int, default=24)
    option("--attention", default="fa3")
    option("--memory-fraction", type=float, default=0.5)
    option("--max-running-requests", type=int, nargs="+", default=[256])
    option("--unmodified", action="store_true")
    option("--hold-gb", type=float, default=0.0, help="of the GPU, as a trainer holds them")
    option("--bucket-mib", type=int, default=1024)
    option("--prompt", type=int, default=1024, help="tokens of a prompt")
    option("--tokens", type=int, default=64, help="sampled for each")

    option("--python", default=sys.executable, help="interpreter that has SGLang")
    option("--pythonpath", default="", help="of the server")
    option("--server-arguments", default="", help="further ones of sglang.launch_server")
    option("--logs", type=Path, help="directory for what the servers print")
    option("--device", default="cuda", choices=["cuda", "cpu"])
    option("--tiny", action="store_true")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    if options.device != "cpu":
        subprocess.run(["nvidia-smi"], check=True, stdout=subprocess.DEVNULL)
    for running in options.max_running_requests:
        with tempfile.TemporaryDirectory() as scratch:
            directory = options.logs or Path(scratch)
            directory.mkdir(parents=True, exist_ok=True)
            asyncio.run(Bench(options, running, directory).run())
    os._exit(0)  # shared-memory helpers of torch would keep a pipe of this process open
