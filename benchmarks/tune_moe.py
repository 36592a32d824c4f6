"""Finds the fastest settings of SGLang's Triton mixture-of-experts kernel for GPT-OSS.

    python benchmarks/tune_moe.py --shapes 32x2880 32x1440 128x720 --out rl_loop/engines/sglang/moe_configs

Runs in SGLang's Python environment, on the GPU that the settings are for; nothing of this project is imported.

A shape is EXPERTSxSIZE, where SIZE is the experts' intermediate size (2,880) over the server's tensor-parallel size:
32 experts are GPT-OSS-20B, 128 are 120B. For each shape two files appear below OUT/configs/triton_VERSION: the settings
of the gate-up product and (``_down``) of the down product, each a choice per number of tokens in a batch. Servers find
them by SGLANG_MOE_CONFIG_DIR=OUT.

Both products of a layer share one sorting of tokens into blocks, so that BLOCK_SIZE_M is chosen once for both. A choice
is timed in a CUDA graph over several random routings, as a server runs it, and compared with an fp32 product before it
is written. Prints a line per shape and number of tokens: microseconds of both products as SGLang comes and as tuned,
and what reading the experts' weights once would take at the GPU's measured bandwidth.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

# Beside this file lies a sglang.py, which Python would take for the package.
sys.path = [path for path in sys.path if Path(path or ".").resolve() != Path(__file__).resolve().parent]

import torch  # noqa: E402
from triton.errors import TritonError  # noqa: E402

HIDDEN_SIZE = 2880
TOP_K = 4
TOKENS = (64, 256, 8, 1, 4096, 16, 128, 1024, 32, 8192, 48, 2048, 96, 512, 4, 192, 24, 2)
"""Tokens of a batch, those that matter most first, in case time runs out. A server takes the nearest."""
COMPILED_FOR = (1, 4, 16)
"""Triton compiles again where an argument is divisible by 16 or not; these batches cover the combinations there are."""
SHARED_MEMORY = 227 * 1024
"""Bytes that one block of threads may use on Hopper."""
ROUTINGS = 6
"""Random routings in turn, so that a small batch does not find its experts in the L2 cache."""


@dataclass(frozen=True)
class Shape:
    experts: int
    intermediate_size: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        experts, intermediate_size = text.split("x")
        return cls(int(experts), int(intermediate_size))


@dataclass(frozen=True)
class Settings:
    """One choice for the kernel, under the names that SGLang's files have."""

    BLOCK_SIZE_M: int
    BLOCK_SIZE_N: int
    BLOCK_SIZE_K: int
    GROUP_SIZE_M: int
    num_warps: int
    num_stages: int


def candidates(block_m: int) -> list[Settings]:
    """What is worth trying for blocks of so many rows: what fits into shared memory and keeps the tensor cores fed.

    Blocks of few rows wait for weights, so every depth of prefetching is tried; blocks of many rows compute, in wide
    tiles."""
    sizes = (32, 64, 128, 256)
    few_rows = block_m <= 32
    found = []
    for block_n, block_k, warps, stages in itertools.product(sizes, sizes, (4, 8), (2, 3, 4, 5)):
        if not few_rows and (block_n < 64 or block_k > 128 or stages not in (3, 4)):
            continue

        staged_bytes = stages * (block_m + block_n) * block_k * 2
        if staged_bytes > SHARED_MEMORY:
            continue

        # Fewer bytes in flight than this and loads of weights do not hide the memory's latency.
        if staged_bytes < 24 * 1024:
            continue

        # Accumulators: at most 128 fp32 registers of each thread; at least one 16 x 16 tile for each warp.
        accumulators = block_m * block_n / (32 * warps)
        if accumulators > 128 or block_m * block_n < 256 * warps:
            continue

        for group in (1,) if few_rows else (1, 16):
            found.append(Settings(block_m, block_n, block_k, group, warps, stages))
    return found


def block_sizes(tokens: int, experts: int) -> list[int]:
    """Rows per block that suit the average number of rows of an expert."""
    rows = tokens * TOP_K / experts
    return [block for block in (16, 32, 64, 128) if block <= max(16, 4 * rows) and block >= min(128, rows / 4)]


class Layer:
    """The weights of one layer's experts, its inputs, and the two products of SGLang's kernel over them."""

    def __init__(self, shape: Shape, tokens: int, weights: dict[str, torch.Tensor]) -> None:
        self.shape, self.tokens, self.weights = shape, tokens, weights
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

    def run(self, product: str, settings: dict[str, Any], routing: int) -> None:
        import triton.language as tl
        from sglang.kernels.ops.moe.fused_moe_triton_kernels import invoke_fused_moe_kernel

        is_up = product == "up"
        invoke_fused_moe_kernel(
            self.inputs[product],
            self.weights[product],
            self.weights[f"{product}_bias"],
            self.outputs[product],
            None,
            None,
            None,
            self.router_weights,
            self.ids[routing],
            *self.sorted(settings["BLOCK_SIZE_M"])[routing],
            not is_up,
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
        """For each routing: tokens sorted by expert and padded to whole blocks, as SGLang's kernel takes them."""
        from sglang.srt.layers.moe.moe_runner.triton_utils.moe_align_block_size import moe_align_block_size

        if block_m not in self._sorted:
            self._sorted[block_m] = [moe_align_block_size(ids, block_m, self.shape.experts) for ids in self.ids]
        return self._sorted[block_m]

    def microseconds(self, product: str, settings: dict[str, Any], rounds: int) -> float:
        """Median time of one launch, in a CUDA graph of one launch per routing."""
        self.sorted(settings["BLOCK_SIZE_M"])
        self.run(product, settings, 0)
        torch.cuda.synchronize()

        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for routing in range(ROUTINGS):
                self.run(product, settings, routing)

        graph.replay()
        times = []
        for _ in range(rounds):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1000 / ROUTINGS)
        return median(times)

    def relative_error(self, product: str, settings: dict[str, Any]) -> float:
        """Of the kernel's rows for the first 32 tokens, against a product in fp32."""
        self.outputs[product].fill_(torch.nan)
        self.run(product, settings, 0)
        count = min(self.tokens, 32)
        computed = self.outputs[product].view(self.tokens, TOP_K, -1)[:count].float()

        expected = torch.empty_like(computed)
        for token, choice in itertools.product(range(count), range(TOP_K)):
            expert = int(self.ids[0, token, choice])
            row = self.inputs[product][token if product == "up" else token * TOP_K + choice].float()
            value = self.weights[product][expert].float() @ row + self.weights[f"{product}_bias"][expert].float()
            expected[token, choice] = value if product == "up" else value / TOP_K
        return float((computed - expected).norm() / expected.norm())


def make_weights(shape: Shape) -> dict[str, torch.Tensor]:
    """One layer's experts as SGLang holds them: [experts, outputs, inputs] bf16 and biases."""
    sizes = {"up": (2 * shape.intermediate_size, HIDDEN_SIZE), "down": (HIDDEN_SIZE, shape.intermediate_size)}
    weights = {}
    for product, (outputs, inputs) in sizes.items():
        weight = torch.empty(shape.experts, outputs, inputs, device="cuda", dtype=torch.bfloat16)
        weights[product] = weight.normal_(0, 0.02)
        weights[f"{product}_bias"] = torch.randn(shape.experts, outputs, device="cuda", dtype=torch.bfloat16)
    return weights


def compile_share(shape: Shape, share: list[tuple[int, Settings]]) -> None:
    """Launch choices once, in a process of its own: Triton keeps what it compiles on disk for all."""
    weights = make_weights(shape)
    layers = {tokens: Layer(shape, tokens, weights) for tokens in COMPILED_FOR}
    for (tokens, settings), product in itertools.product(share, ("up", "down")):
        try:
            layers[tokens].run(product, asdict(settings), 0)
            torch.cuda.synchronize()
        except TritonError as error:
            print(f"{settings} does not compile: {type(error).__name__}", flush=True)


def compile_all(shape: Shape, jobs: int) -> None:
    """Compile all candidates for a shape, several at a time."""
    work = [
        (tokens, settings)
        for block_m in (16, 32, 64, 128)
        for settings in candidates(block_m)
        for tokens in (COMPILED_FOR if block_m == 16 else COMPILED_FOR[-1:])
    ]
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=compile_share, args=(shape, work[job::jobs])) for job in range(jobs)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


def default_settings(tokens: int, experts: int) -> dict[str, Any]:
    """What SGLang 0.5.17 takes without a file (``get_default_config``)."""
    if tokens <= experts:
        return {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 32, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1}
    return {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 32, "GROUP_SIZE_M": 8}


@dataclass
class Choice:
    """The best settings of both products for one number of tokens; microseconds of one launch each."""

    up: Settings
    down: Settings
    up_time: float
    down_time: float


def tune(layer: Layer) -> Choice:
    """Time every candidate briefly and the best five of each product again, for each number of rows in a block."""
    best: Choice | None = None
    for block_m in block_sizes(layer.tokens, layer.shape.experts):
        fastest: dict[str, tuple[float, Settings]] = {}
        for product in ("up", "down"):
            timed = []
            for settings in candidates(block_m):
                try:
                    timed.append((layer.microseconds(product, asdict(settings), rounds=1), settings))
                except TritonError as error:
                    # Out of registers or shared memory: another choice will do.
                    print(f"{settings} does not run: {type(error).__name__}", flush=True)
            timed.sort(key=lambda pair: pair[0])
            again = [(layer.microseconds(product, asdict(settings), rounds=7), settings) for _, settings in timed[:5]]
            again.sort(key=lambda pair: pair[0])
            fastest[product] = again[0]

        (up_time, up), (down_time, down) = fastest["up"], fastest["down"]
        if best is None or up_time + down_time < best.up_time + best.down_time:
            best = Choice(up, down, up_time, down_time)
    assert best is not None
    return best


def read_bandwidth() -> float:
    """Bytes per second that this GPU reads, measured by summing 4 GB."""
    data = torch.ones(1 << 30, device="cuda", dtype=torch.float32)
    times = []
    for _ in range(5):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        data.sum()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1000)
    return data.numel() * 4 / median(times)


def write(directory: Path, shape: Shape, choices: dict[int, Choice]) -> None:
    """Write both files of a shape under the names that SGLang looks for."""
    import triton

    folder = directory / "configs" / f"triton_{triton.__version__.replace('.', '_')}"
    folder.mkdir(parents=True, exist_ok=True)
    device = torch.cuda.get_device_name().replace(" ", "_")
    stem = f"E={shape.experts},N={shape.intermediate_size},device_name={device}"
    for suffix, product in (("", "up"), ("_down", "down")):
        content = {str(tokens): asdict(getattr(choice, product)) for tokens, choice in choices.items()}
        (folder / f"{stem}{suffix}.json").write_text(json.dumps(content, indent=2) + "\n")


def tune_shape(shape: Shape, tokens: list[int], seconds: float, jobs: int, out: Path) -> None:
    """Tune a shape for each number of tokens, and write what there is after each of them."""
    began = time.monotonic()
    compile_all(shape, jobs)
    bandwidth = read_bandwidth()
    name = torch.cuda.get_device_name()
    print(f"{name}, {shape}: compiled in {time.monotonic() - began:.0f} s, {bandwidth / 1e12:.2f} TB/s", flush=True)

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
    """Check a choice against fp32 and print what it gains; RuntimeError if the kernel is wrong with it."""
    errors = [layer.relative_error("up", asdict(choice.up)), layer.relative_error("down", asdict(choice.down))]
    if not max(errors) < 1e-2:
        raise RuntimeError(f"{layer.shape}, {layer.tokens} tokens: {choice} is wrong, relative errors {errors}")

    default = default_settings(layer.tokens, layer.shape.experts)
    default_time = sum(layer.microseconds(product, default, rounds=7) for product in ("up", "down"))
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["32x2880"], help="EXPERTSxSIZE")
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes that compile")
    parser.add_argument("--seconds", type=float, default=1e9, help="per shape; what is not reached is left out")
    arguments = parser.parse_args()
    shapes = [Shape.parse(text) for text in arguments.shapes]

    for shape in shapes:
        tune_shape(shape, arguments.tokens, arguments.seconds, arguments.jobs, arguments.out)


if __name__ == "__main__":
    main()
