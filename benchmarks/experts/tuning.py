"""Finds the fastest settings of SGLang's Triton mixture-of-experts kernel for GPT-OSS.

    python -m benchmarks.experts tune --shapes 32x2880 128x720 \\
        --out rl_loop/engines/sglang/moe_configs

Needs the GPU for which the settings are tuned. Run it in SGLang's Python environment, from the root
of a checkout. It imports no package of this project.

A shape is EXPERTSxSIZE. SIZE is the intermediate size of the experts (2,880) divided by the
server's tensor-parallel size. GPT-OSS-20B has 32 experts and 120B has 128. For each shape, two
files are written to OUT/configs/triton_VERSION, for the gate-up GEMM and for the down GEMM
(``_down``). Each file has settings by number of tokens in a batch. Servers find the files with
SGLANG_MOE_CONFIG_DIR=OUT.

Both GEMMs of a layer use the same sorting of tokens into blocks, so they share BLOCK_SIZE_M.
Settings are timed in a CUDA graph over several random routings, as in a server. They are compared
with an fp32 GEMM before they are written.

Prints a line of JSON per shape and number of tokens. It has the microseconds of both GEMMs with
SGLang's default and with tuned settings. ``weights_read_us`` is the time to read the experts'
weights once at the measured bandwidth.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from triton.errors import TritonError

from benchmarks.harness import read_bandwidth, time_call

HIDDEN_SIZE = 2880
TOP_K = 4
TOKENS = (64, 256, 8, 1, 4096, 16, 128, 1024, 32, 8192, 48, 2048, 96, 512, 4, 192, 24, 2)
"""Numbers of tokens, the most important first, because the time may be limited.

A server uses the settings of the nearest number.
"""
BLOCK_SIZES_M = (16, 32, 64, 128)
"""Sizes of a block of tokens, in rows."""
SHARED_MEMORY = 227 * 1024
"""Shared memory of a thread block on Hopper, in bytes."""
ROUTINGS = 6
"""Number of alternating random routings, so that the L2 cache does not hold a batch's experts."""


@dataclass(frozen=True)
class Shape:
    """Experts of one layer on one tensor-parallel rank."""

    experts: int
    intermediate_size: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        experts, intermediate_size = text.split("x")
        return cls(int(experts), int(intermediate_size))


@dataclass(frozen=True)
class Settings:
    """Settings of the kernel, with the names in SGLang's files."""

    BLOCK_SIZE_M: int
    BLOCK_SIZE_N: int
    BLOCK_SIZE_K: int
    GROUP_SIZE_M: int
    num_warps: int
    num_stages: int


def candidates(block_m: int) -> list[Settings]:
    """Return the settings to try for blocks of ``block_m`` rows.

    They fit into shared memory and keep the tensor cores busy. Blocks with few rows wait for
    weights, so all prefetch depths are tried. Blocks with many rows are compute-bound, so only wide
    tiles are tried.
    """
    sizes = (32, 64, 128, 256)
    few_rows = block_m <= 32
    group_sizes = (1,) if few_rows else (1, 16)
    worth_trying = []
    for block_n, block_k, warps, stages in itertools.product(sizes, sizes, (4, 8), (2, 3, 4, 5)):
        is_wide_tile = block_n >= 64 and block_k <= 128 and stages in (3, 4)
        if not few_rows and not is_wide_tile:
            continue

        staged_bytes = stages * (block_m + block_n) * block_k * 2
        if staged_bytes > SHARED_MEMORY:
            continue

        # With fewer bytes in flight, loads of weights do not hide the memory's latency.
        if staged_bytes < 24 * 1024:
            continue

        # Limits of the accumulators: at most 128 fp32 registers of each thread, and at least one
        # 16 x 16 tile per warp.
        accumulators = block_m * block_n / (32 * warps)
        if accumulators > 128 or block_m * block_n < 256 * warps:
            continue

        for group in group_sizes:
            worth_trying.append(
                Settings(
                    BLOCK_SIZE_M=block_m,
                    BLOCK_SIZE_N=block_n,
                    BLOCK_SIZE_K=block_k,
                    GROUP_SIZE_M=group,
                    num_warps=warps,
                    num_stages=stages,
                )
            )
    return worth_trying


def block_sizes(tokens: int, experts: int) -> list[int]:
    """Return rows per block that suit the mean number of rows of an expert."""
    rows = tokens * TOP_K / experts
    smallest = min(128, rows / 4)
    largest = max(16, 4 * rows)
    return [block for block in BLOCK_SIZES_M if smallest <= block <= largest]


def padded_entries(tokens: int, experts: int, block_m: int) -> int:
    """Return the number of entries after each expert's entries are padded to whole blocks.

    SGLang 0.5.17 computes the same number in ``moe_align_block_size``.
    """
    entries = tokens * TOP_K
    # SGLang adds one expert for the entries of other ranks.
    if entries <= experts:
        return entries * block_m
    return entries + (experts + 1) * (block_m - 1)


class Layer:
    """Weights of one layer's experts, its inputs, and the two GEMMs of SGLang's kernel."""

    def __init__(self, shape: Shape, tokens: int, weights: dict[str, torch.Tensor]) -> None:
        self.shape = shape
        self.tokens = tokens
        self.weights = weights

        generator = torch.Generator("cuda").manual_seed(tokens)
        scores = torch.rand(ROUTINGS, tokens, shape.experts, device="cuda", generator=generator)
        self.ids = scores.topk(TOP_K, dim=-1).indices.to(torch.int32)
        self.router_weights = torch.full((tokens, TOP_K), 1 / TOP_K, device="cuda")

        rows = tokens * TOP_K
        options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
        self.inputs = {
            "up": torch.randn(tokens, HIDDEN_SIZE, generator=generator, **options),
            "down": torch.randn(rows, shape.intermediate_size, generator=generator, **options),
        }
        self.outputs = {
            "up": torch.empty(rows, 2 * shape.intermediate_size, **options),
            "down": torch.empty(tokens, TOP_K, HIDDEN_SIZE, **options),
        }
        self._sorted: dict[int, list[Any]] = {}

    def run(self, gemm: str, settings: dict[str, Any], routing: int) -> None:
        """Launch SGLang's kernel for one GEMM.

        Args:
            gemm: "up" or "down".
            settings: settings of the kernel.
            routing: index of the routing.
        """
        import triton.language as tl
        from sglang.kernels.ops.moe.fused_moe_triton_kernels import invoke_fused_moe_kernel

        is_up = gemm == "up"
        invoke_fused_moe_kernel(
            self.inputs[gemm],
            self.weights[gemm],
            self.weights[f"{gemm}_bias"],
            self.outputs[gemm],
            None,
            None,
            None,
            self.router_weights,
            self.ids[routing],
            *self.sorted(settings["BLOCK_SIZE_M"])[routing],
            not is_up,  # only the down GEMM multiplies by the router's weights
            TOP_K if is_up else 1,
            settings,
            compute_type=tl.bfloat16,
            use_fp8_w8a8=False,
            use_int8_w8a8=False,
            use_int8_w8a16=False,
            use_int4_w4a16=False,
            per_channel_quant=False,
            filter_expert=False,
        )

    def sorted(self, block_m: int) -> list[Any]:
        """Sort each routing's tokens by expert and pad them to whole blocks, as SGLang does."""
        from sglang.srt.layers.moe.moe_runner.triton_utils.moe_align_block_size import (
            moe_align_block_size,
        )

        if block_m not in self._sorted:
            experts = self.shape.experts
            self._sorted[block_m] = [
                moe_align_block_size(ids, block_m, experts) for ids in self.ids
            ]
        return self._sorted[block_m]

    def microseconds(self, gemm: str, settings: dict[str, Any], rounds: int) -> float:
        """Return the median microseconds of a launch, in a CUDA graph with one launch per routing.

        Args:
            gemm: "up" or "down".
            settings: settings of the kernel.
            rounds: number of replays.
        """
        # Compile and sort before the capture, which allows neither.
        self.sorted(settings["BLOCK_SIZE_M"])
        self.run(gemm, settings, 0)
        torch.cuda.synchronize()

        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for routing in range(ROUTINGS):
                self.run(gemm, settings, routing)

        graph.replay()
        times = [time_call(graph.replay) for _ in range(rounds)]
        return median(times) * 1000 / ROUTINGS

    def relative_error(self, gemm: str, settings: dict[str, Any]) -> float:
        """Return the relative error for the first 32 tokens against a GEMM in fp32."""
        # NaN reveals rows that the kernel does not write.
        self.outputs[gemm].fill_(torch.nan)
        self.run(gemm, settings, 0)
        count = min(self.tokens, 32)
        computed = self.outputs[gemm].view(self.tokens, TOP_K, -1)[:count].float()

        expected = torch.empty_like(computed)
        for token, choice in itertools.product(range(count), range(TOP_K)):
            expert = int(self.ids[0, token, choice])
            weight = self.weights[gemm][expert].float()
            bias = self.weights[f"{gemm}_bias"][expert].float()
            if gemm == "up":
                row = self.inputs["up"][token].float()
                expected[token, choice] = weight @ row + bias
            else:
                row = self.inputs["down"][token * TOP_K + choice].float()
                expected[token, choice] = (weight @ row + bias) / TOP_K
        return float((computed - expected).norm() / expected.norm())


def make_weights(shape: Shape) -> dict[str, torch.Tensor]:
    """Return one layer's experts in SGLang's layout: [experts, outputs, inputs] bf16 and biases."""
    sizes = {
        "up": (2 * shape.intermediate_size, HIDDEN_SIZE),
        "down": (HIDDEN_SIZE, shape.intermediate_size),
    }
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    weights = {}
    for gemm, (outputs, inputs) in sizes.items():
        weight = torch.empty(shape.experts, outputs, inputs, **options)
        weights[gemm] = weight.normal_(0, 0.02)
        weights[f"{gemm}_bias"] = torch.randn(shape.experts, outputs, **options)
    return weights


def compile_share(shape: Shape, share: list[tuple[int, Settings]]) -> None:
    """Launch each setting once in a separate process, to fill Triton's cache on disk."""
    weights = make_weights(shape)
    layers = {tokens: Layer(shape, tokens, weights) for tokens in {count for count, _ in share}}
    for (tokens, settings), gemm in itertools.product(share, ("up", "down")):
        try:
            layers[tokens].run(gemm, asdict(settings), 0)
            torch.cuda.synchronize()
        except TritonError as error:
            print(f"{settings} does not compile: {type(error).__name__}", flush=True)


def compiled_batches(tokens: Iterable[int], experts: int, block_m: int) -> list[int]:
    """Return one batch size of each kind for which Triton compiles a separate kernel.

    Triton specializes on whether an integer argument is divisible by 16.

    Args:
        tokens: all batch sizes.
        experts: number of experts.
        block_m: rows of a block. Batch sizes that do not use it are left out.
    """
    batches: dict[tuple[bool, bool], int] = {}
    for count in sorted(tokens):
        if block_m in block_sizes(count, experts):
            padded = padded_entries(count, experts, block_m)
            batches.setdefault((count * TOP_K % 16 == 0, padded % 16 == 0), count)
    return list(batches.values())


def compile_all(shape: Shape, tokens: list[int], jobs: int) -> None:
    """Compile all candidates in parallel, and print the number of failed processes.

    The timing compiles the remaining candidates in sequence.

    Args:
        shape: shape of the experts.
        tokens: batch sizes.
        jobs: number of processes.
    """
    work = [
        (count, settings)
        for block_m in BLOCK_SIZES_M
        for settings in candidates(block_m)
        for count in compiled_batches(tokens, shape.experts, block_m)
    ]
    context = multiprocessing.get_context("spawn")
    processes = []
    for job in range(jobs):
        process = context.Process(target=compile_share, args=(shape, work[job::jobs]))
        process.start()
        processes.append(process)
    for process in processes:
        process.join()

    failures = [process.exitcode for process in processes if process.exitcode != 0]
    if failures:
        codes = ", ".join(str(code) for code in sorted(set(failures)))
        print(
            f"{shape}: {len(failures)} of {jobs} compiling processes failed (exit codes {codes}); "
            "what they left is compiled one by one while it is timed",
            flush=True,
        )


def default_settings(tokens: int, experts: int) -> dict[str, Any]:
    """Return the settings that SGLang 0.5.17 uses without a file (``get_default_config``)."""
    if tokens <= experts:
        return {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 32, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1}
    return {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 32, "GROUP_SIZE_M": 8}


@dataclass
class Choice:
    """Best settings of both GEMMs for one number of tokens.

    The times are in microseconds per launch.
    """

    up: Settings
    down: Settings
    up_time: float
    down_time: float


def tune(layer: Layer) -> Choice:
    """Return the fastest settings of both GEMMs over all numbers of rows in a block."""
    best: Choice | None = None
    for block_m in block_sizes(layer.tokens, layer.shape.experts):
        up_time, up = fastest(layer, "up", block_m)
        down_time, down = fastest(layer, "down", block_m)
        if best is None or up_time + down_time < best.up_time + best.down_time:
            best = Choice(up=up, down=down, up_time=up_time, down_time=down_time)
    assert best is not None
    return best


def fastest(layer: Layer, gemm: str, block_m: int) -> tuple[float, Settings]:
    """Return the microseconds and settings of the fastest candidate.

    Times all candidates briefly and the best five again.
    """
    timed = []
    for settings in candidates(block_m):
        try:
            timed.append((layer.microseconds(gemm, asdict(settings), rounds=1), settings))
        except TritonError as error:
            # Out of registers or shared memory. Other candidates remain.
            print(f"{settings} does not run: {type(error).__name__}", flush=True)
    timed.sort(key=lambda pair: pair[0])

    again = []
    for _, settings in timed[:5]:
        again.append((layer.microseconds(gemm, asdict(settings), rounds=7), settings))
    return min(again, key=lambda pair: pair[0])


def write(directory: Path, shape: Shape, choices: dict[int, Choice]) -> None:
    """Write both files of a shape, with the names that SGLang expects."""
    import triton

    folder = directory / "configs" / f"triton_{triton.__version__.replace('.', '_')}"
    folder.mkdir(parents=True, exist_ok=True)
    device = torch.cuda.get_device_name().replace(" ", "_")
    stem = f"E={shape.experts},N={shape.intermediate_size},device_name={device}"
    for suffix, gemm in (("", "up"), ("_down", "down")):
        content = {str(tokens): asdict(getattr(choice, gemm)) for tokens, choice in choices.items()}
        (folder / f"{stem}{suffix}.json").write_text(json.dumps(content, indent=2) + "\n")


def tune_shape(shape: Shape, tokens: list[int], seconds: float, jobs: int, out: Path) -> None:
    """Tune a shape for each number of tokens, and write the files after each one.

    Args:
        shape: shape of the experts.
        tokens: batch sizes.
        seconds: time after which no further batch size is started.
        jobs: number of processes that compile.
        out: directory of the files.
    """
    began = time.monotonic()
    compile_all(shape, tokens, jobs)
    bandwidth = read_bandwidth()
    name = torch.cuda.get_device_name()
    seconds_to_compile = time.monotonic() - began
    speed = f"compiled in {seconds_to_compile:.0f} s, {bandwidth / 1e12:.2f} TB/s"
    print(f"{name}, {shape}: {speed}", flush=True)

    weights = make_weights(shape)
    choices: dict[int, Choice] = {}
    for count in tokens:
        if time.monotonic() - began > seconds:
            print(f"{shape}: out of time before {count} tokens", flush=True)
            break
        layer = Layer(shape, count, weights)
        choices[count] = tune(layer)
        report(layer, choices[count], bandwidth)
        write(out, shape, dict(sorted(choices.items())))


def report(layer: Layer, choice: Choice, bandwidth: float) -> None:
    """Check settings against fp32 and print the speed-up.

    Raises:
        RuntimeError: if the kernel is wrong with these settings.
    """
    up_error = layer.relative_error("up", asdict(choice.up))
    down_error = layer.relative_error("down", asdict(choice.down))
    errors = [up_error, down_error]
    if not max(errors) < 1e-2:
        what = f"{choice} is wrong, relative errors {errors}"
        raise RuntimeError(f"{layer.shape}, {layer.tokens} tokens: {what}")

    default = default_settings(layer.tokens, layer.shape.experts)
    default_time = layer.microseconds("up", default, rounds=7)
    default_time += layer.microseconds("down", default, rounds=7)
    tuned_time = choice.up_time + choice.down_time

    experts_used = sum(ids.unique().numel() for ids in layer.ids) / ROUTINGS
    weight_bytes = experts_used * 3 * layer.shape.intermediate_size * HIDDEN_SIZE * 2
    line = {
        "experts": layer.shape.experts,
        "size": layer.shape.intermediate_size,
        "tokens": layer.tokens,
        "default_us": round(default_time, 1),
        "tuned_us": round(tuned_time, 1),
        "speedup": round(default_time / tuned_time, 3),
        "weights_read_us": round(weight_bytes / bandwidth * 1e6, 1),
        "errors": [round(error, 5) for error in errors],
    }
    print(json.dumps(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shapes", nargs="+", default=["32x2880"], help="EXPERTSxSIZE")
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes that compile")
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="per shape; what is not reached is left out"
    )
    arguments = parser.parse_args()
    shapes = [Shape.parse(text) for text in arguments.shapes]

    for shape in shapes:
        tune_shape(shape, arguments.tokens, arguments.seconds, arguments.jobs, arguments.out)
