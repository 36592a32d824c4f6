"""Training steps of adapters on a frozen base: speed, memory and the time of merging.

    python -m benchmarks.train adapters
    python -m benchmarks.train adapters --cases mxfp4 bf16 --recompute moe layernorm
    python -m benchmarks.train adapters --layers 4 --cases mxfp4 bf16 full
    torchrun --nproc_per_node 2 -m benchmarks.train adapters --expert 2 --layers 36 --experts 128 \\
        --cases mxfp4
    python -m benchmarks.train adapters gemms
    python -m benchmarks.train adapters --tiny            # on a CPU, a test of the command

Needs one GPU, or several with expert parallelism (``--expert``). The cases ``mxfp4`` and ``bf16``
train adapters on a base in this format. The case ``unmerged`` has a base in MXFP4, and its experts
are not merged. The case ``full`` trains all parameters, for a comparison on few layers. Weights are
random, tokens are uniform, and routing follows from them. Every case is built, warmed up by 2 steps
and timed in the same process. One more step is profiled for the share of merging (dequantizing the
base and adding the adapters).

Prints a table. ``--out FILE`` appends a JSON object per case. Every rank has its own micro-batches.
Speeds are per GPU, and memory is the maximum over the GPUs.

``gemms`` times single kernels with the shapes of one layer: merging, and grouped GEMMs of
Transformer Engine and of torch.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from benchmarks.harness import (
    allocated,
    largest_of_ranks,
    median_milliseconds,
    peak,
    reset_peak,
    synchronize,
)
from benchmarks.train.random_adapters import draw_adapted_model
from benchmarks.train.release import release
from benchmarks.train.steps import TINY
from gptoss_kernels import mxfp4
from gptoss_kernels.adapter_merge import KERNEL_NAME
from megatron_gptoss import distributed
from megatron_gptoss.config import AdapterConfig, OptimizerConfig, ParallelConfig, Quantization
from megatron_gptoss.families.gpt_oss.config import GptOssModelConfig
from megatron_gptoss.layers import grouped_gemm
from megatron_gptoss.layers.merge import merge, merge_mxfp4
from megatron_gptoss.model import build_model
from megatron_gptoss.packing import PackedBatch, build_batch
from megatron_gptoss.planning.memory import predict_stage_memory
from megatron_gptoss.planning.memory_inputs import MemoryInputs
from megatron_gptoss.samples import TrainingSamples
from megatron_gptoss.step_results import LossOutput
from megatron_gptoss.trainer import PolicyTrainer


def argument_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("mode", nargs="?", default="steps", choices=["steps", "gemms"])
    kinds = ["mxfp4", "bf16", "unmerged", "full"]
    add("--cases", nargs="+", default=["mxfp4", "bf16"], choices=kinds)
    add("--layers", type=int, default=24)
    add("--experts", type=int, default=32)
    add("--length", type=int, default=4096, help="tokens of every sequence")
    add("--sequences", type=int, default=4, help="sequences packed into one micro-batch")
    add("--micro-batches", type=int, default=1)
    add("--expert", type=int, default=1, help="ranks that share out the experts, all of torchrun's")
    add("--rank", type=int, default=32)
    add("--expert-rank", type=int, help="default: rank / experts per token")
    add("--recompute", nargs="*", default=["moe_act", "layernorm"])
    add("--steps", type=int, default=6, help="two of them warm up")
    add("--profile", type=Path, help="directory for the device times of one step by kernel")
    add("--tiny", action="store_true", help="small sizes, for a run without a GPU")
    add("--out", type=Path)
    return parser


def main() -> None:
    """Run the mode and the cases of the command line."""
    args = argument_parser().parse_args()
    if args.mode == "gemms":
        print(gemm_table(time_gemms(args)))
        return

    results = []
    rank = int(os.environ.get("RANK", 0))
    distributed.initialize(parallel_config(args), rank, port=29_790)
    try:
        for case in args.cases:
            result = run_case(args, case)
            if rank == 0:
                print(json.dumps(result), flush=True)
            results.append(result)
            if args.out and rank == 0:
                with args.out.open("a") as file:
                    file.write(json.dumps(result) + "\n")
    finally:
        distributed.shutdown()
    if rank == 0:
        print(table(results))


def parallel_config(args: argparse.Namespace) -> ParallelConfig:
    """Return the layout: every rank has its own rows and a part of the experts."""
    return ParallelConfig(
        world_size=int(os.environ.get("WORLD_SIZE", 1)),
        expert=args.expert,
        recompute=tuple(args.recompute),
    )


def run_case(args: argparse.Namespace, case: str) -> dict[str, Any]:
    """Build a trainer, time its steps and return the values of one table row."""
    synchronize()
    reset_peak()
    started = time.perf_counter()
    trainer = build_trainer(args, case)
    synchronize()
    build_seconds = time.perf_counter() - started
    base_bytes = allocated()
    build_peak = peak()
    reset_peak()

    batches = random_batches(args, trainer.chunks[0].config.architecture.vocab_size)
    tokens = sum(batch.tokens for batch in batches)
    all_tokens = tokens * dist.get_world_size()
    losses: list[float] = []

    def step() -> None:
        statistics = trainer.train_step(batches, mean_loss(all_tokens), learning_rate=1e-5)
        assert statistics.parameters_updated, statistics.non_finite_gradients
        losses.append(statistics.sums["loss"])

    times = timed(step, args.steps)
    seconds = median(times[2:])
    step_peak = peak()
    merge_seconds = profiled_merge_seconds(step, args.profile, case)

    trained = sum(p.numel() for p in trainer.module.parameters() if p.requires_grad)
    result = {
        "case": case,
        "gpus": dist.get_world_size(),
        "experts": args.experts,
        "layers": args.layers,
        "recompute": args.recompute,
        "rank": args.rank,
        "expert_rank": args.expert_rank,
        "tokens": tokens,
        "trained_parameters": trained,
        "seconds": seconds,
        "all_seconds": [round(x, 4) for x in times],
        "tokens_per_second": tokens / seconds,
        "merge_seconds": merge_seconds,
        "merge_share": None if merge_seconds is None else merge_seconds / seconds,
        "peak_gb": largest_of_ranks(step_peak / 1e9),
        "predicted_peak_gb": predicted_peak(args, trainer, case, batches),
        "after_building_gb": base_bytes / 1e9,
        "building_peak_gb": build_peak / 1e9,
        "build_seconds": build_seconds,
        "losses": losses,
    }
    del step
    release(trainer)
    return result


def build_trainer(args: argparse.Namespace, case: str) -> PolicyTrainer:
    """Return the trainer of a case with random weights."""
    sizes = TINY if args.tiny else {}
    model_config = GptOssModelConfig(num_layers=args.layers, num_experts=args.experts, **sizes)
    on_gpu = torch.cuda.is_available()
    adapter, quantization = adapter_and_base(args, case)
    parallel = parallel_config(args)
    # The grouped GEMM is the default on GPUs. On a CPU, request it to run the same code.
    overrides = {} if on_gpu or adapter is None else {"moe_grouped_gemm": True}
    model = build_model(
        model_config,
        parallel,
        torch.bfloat16,
        adapter=adapter,
        quantization=quantization,
        **overrides,
    )
    draw_adapted_model(model)
    return PolicyTrainer(model, OptimizerConfig())


def adapter_and_base(
    args: argparse.Namespace, case: str
) -> tuple[AdapterConfig | None, Quantization | None]:
    """Return the adapters (None to train all weights) and the format of the base of a case."""
    if case == "full":
        return None, None
    adapter = AdapterConfig(
        rank=args.rank,
        alpha=32,
        expert_rank=args.expert_rank,
        merge_experts=case != "unmerged",
    )
    return adapter, None if case == "bf16" else "mxfp4"


def predicted_peak(
    args: argparse.Namespace,
    trainer: PolicyTrainer,
    case: str,
    batches: list[PackedBatch],
) -> float:
    """Return the trainer's memory in an update, as predicted by ``gptoss plan``, in GB."""
    adapter, quantization = adapter_and_base(args, case)
    inputs = MemoryInputs(
        trainer.chunks[0].config.architecture,
        parallel_config(args),
        trainer.config,
        max(batch.tokens for batch in batches),
        micro_batches=len(batches),
        adapter=adapter,
        quantization=quantization,
    )
    phases = {phase.name: phase for phase in predict_stage_memory(inputs, gigabytes=1e3).phases}
    return phases["update"].trainer / 1e9


def random_batches(args: argparse.Namespace, vocab_size: int) -> list[PackedBatch]:
    """Return micro-batches of ``--sequences`` sequences of ``--length`` tokens for this rank."""
    count = args.micro_batches * args.sequences
    generator = torch.Generator().manual_seed(parallel_state.get_data_parallel_rank())
    token_ids = torch.randint(0, vocab_size, (count, args.length + 1), generator=generator)
    samples = TrainingSamples(
        offsets=np.arange(count + 1, dtype=np.int64) * (args.length + 1),
        token_ids=token_ids.flatten().to(torch.int32).numpy(),
        loss_mask=np.ones(token_ids.numel(), np.bool_),
    )
    numbers = np.arange(count).reshape(args.micro_batches, args.sequences).tolist()
    return [build_batch(samples, row, align=8) for row in numbers]


def mean_loss(tokens: int) -> Callable[..., LossOutput]:
    """Return a loss function: the cross-entropy divided by ``tokens``."""

    def loss(log_probs: torch.Tensor, entropy: torch.Tensor, batch: PackedBatch) -> LossOutput:
        total = -(log_probs * batch.loss_mask).sum() / tokens
        return LossOutput(total, {"loss": total})

    return loss


def timed(call: Callable[[], None], count: int) -> list[float]:
    """Return the seconds of each of ``count`` calls."""
    times = []
    for i in range(count):
        if i == 2:
            # Equal to the trainer's worker.
            gc.collect()
            gc.freeze()
        synchronize()
        start = time.perf_counter()
        call()
        synchronize()
        times.append(time.perf_counter() - start)
    return times


def profiled_merge_seconds(
    step: Callable[[], None], directory: Path | None, case: str
) -> float | None:
    """Return the device seconds of merging in one step; None without a GPU.

    Args:
        step: runs one step.
        directory: directory for CASE.txt with the times of all kernels, longest first; or None.
        case: name of the case.

    Raises:
        RuntimeError: if the step has no merge kernel of the expected name.
    """
    if not torch.cuda.is_available():
        return None
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        step()
        synchronize()
    kernels = sorted(trace.key_averages(), key=lambda kernel: -kernel.self_device_time_total)
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
        lines = []
        for kernel in kernels:
            milliseconds = kernel.self_device_time_total / 1e3
            lines.append(f"{milliseconds:9.2f} ms {kernel.count:6d} x {kernel.key[:160]}")
        (directory / f"{case}.txt").write_text("\n".join(lines) + "\n")

    merging = [kernel for kernel in kernels if KERNEL_NAME in kernel.key]
    if not merging and case != "full":
        raise RuntimeError(f"no kernel of the step is called {KERNEL_NAME}")
    return sum(kernel.self_device_time_total for kernel in merging) / 1e6


def table(results: list[dict[str, Any]]) -> str:
    """Return a Markdown table of all cases. The last column is the speed relative to the first."""
    rows = [
        "| case | GPUs | layers | tokens | trained, million | step, s | tokens/s/GPU | merging, s "
        "| share | peak, GB | predicted | after building, GB | while building, GB | building, s "
        "| ratio |",
        "|---" * 15 + "|",
    ]
    for result in results:
        merging = "-"
        share = "-"
        if result["merge_seconds"] is not None:
            merging = f"{result['merge_seconds']:.3f}"
            share = f"{100 * result['merge_share']:.1f} %"
        cells = [
            result["case"],
            str(result["gpus"]),
            str(result["layers"]),
            f"{result['tokens']:,}",
            f"{result['trained_parameters'] / 1e6:,.1f}",
            f"{result['seconds']:.3f}",
            f"{result['tokens_per_second']:,.0f}",
            merging,
            share,
            f"{result['peak_gb']:.1f}",
            f"{result['predicted_peak_gb']:.1f}",
            f"{result['after_building_gb']:.1f}",
            f"{result['building_peak_gb']:.1f}",
            f"{result['build_seconds']:.1f}",
            f"{result['tokens_per_second'] / results[0]['tokens_per_second']:.2f}",
        ]
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


# -- single kernels ----------------------------------------------------------------------------


def time_gemms(args: argparse.Namespace) -> dict[str, float]:
    """Return milliseconds of merging and of grouped GEMMs with the shapes of one layer."""
    sizes = GptOssModelConfig(num_layers=1, num_experts=args.experts)
    rows = args.sequences * args.length * sizes.experts_per_token
    result: dict[str, float] = {}
    for name, out, columns in (
        ("gate_up", 2 * sizes.intermediate_size, sizes.hidden_size),
        ("down", sizes.hidden_size, sizes.intermediate_size),
    ):
        for call_name, call in gemm_calls(args.experts, rows, out, columns).items():
            result[f"{name}: {call_name}"] = median_milliseconds(call)
    return result


def gemm_calls(experts: int, rows: int, out: int, columns: int) -> dict[str, Callable[[], Any]]:
    """Return the calls that ``time_gemms`` measures.

    Args:
        experts: number of experts.
        rows: token rows of all experts together.
        out: output features of an expert's matrix.
        columns: input features of an expert's matrix.
    """
    bf16 = {"device": "cuda", "dtype": torch.bfloat16}
    blocks = torch.randint(
        0, 256, (experts, out, columns // 32, 16), dtype=torch.uint8, device="cuda"
    )
    scales = torch.full((experts, out, columns // 32), 120, dtype=torch.uint8, device="cuda")
    weights = mxfp4.dequantize(blocks, scales)
    merged = torch.empty_like(weights)
    x = torch.randn(rows, columns, **bf16)
    grad = torch.randn(rows, out, **bf16)

    # Experts get different numbers of rows, as in routing.
    shares = torch.linspace(0.2, 1.8, experts, dtype=torch.float64)
    counts = (shares / shares.sum() * rows).long().tolist()
    counts[-1] += rows - sum(counts)
    ends = torch.tensor(counts, device="cuda").cumsum(0, dtype=torch.int32)

    calls: dict[str, Callable[[], Any]] = {
        "dequantise": lambda: mxfp4.dequantize(blocks, scales, out=merged),
        "copy bf16": lambda: merged.copy_(weights),
    }
    for rank in (0, 8, 32):
        a = torch.randn(experts, rank, columns, **bf16)
        b = torch.randn(experts, out, rank, **bf16)
        calls[f"merge mxfp4, rank {rank}"] = lambda a=a, b=b: merge_mxfp4(
            blocks, scales, a, b, 4.0, merged
        )
        calls[f"merge bf16, rank {rank}"] = lambda a=a, b=b: merge(weights, a, b, 4.0, out=merged)
    a = torch.randn(experts, 8, columns, **bf16)
    b = torch.randn(experts, out, 8, **bf16)
    narrow = torch.randn(rows, 8, **bf16)
    calls |= {
        "x W^T, Transformer Engine": lambda: grouped_gemm.multiply_by_weights(x, weights, counts),
        "x W^T, torch": lambda: torch.nn.functional.grouped_mm(x, weights.mT, offs=ends),
        "dY W, Transformer Engine": lambda: grouped_gemm.multiply_by_transposed_weights(
            grad, weights, counts
        ),
        "dY W, torch": lambda: torch.nn.functional.grouped_mm(grad, weights, offs=ends),
        "x A^T": lambda: grouped_gemm.project(x, a.mT, counts),
        "dY B": lambda: grouped_gemm.project(grad, b, counts),
        "dB": lambda: grouped_gemm.outer_products(grad, narrow, counts),
        "dA": lambda: grouped_gemm.outer_products(narrow, x, counts),
    }
    return calls


def gemm_table(milliseconds: dict[str, float]) -> str:
    """Return a Markdown table of the milliseconds."""
    rows = ["| | ms |", "|---|---|"]
    rows += [f"| {name} | {value:.3f} |" for name, value in milliseconds.items()]
    return "\n".join(rows)
