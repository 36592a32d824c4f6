"""Time to save a checkpoint of adapters, on a CPU with the tensors of the full 20B.

    python -m benchmarks.train adapter-checkpoint
    python -m benchmarks.train adapter-checkpoint --tiny --layers 2 --experts 4   # a short test

Needs no GPU. The trainer is real: adapters, Megatron's optimizer after a step (bf16 weights, fp32
master weights and moments), and ``CheckpointWriter``. The frozen base is allocated but not written,
so it takes no memory. Gradients are random numbers.

Prints a table with one row per save. The first save includes one-time work. ``--out FILE`` appends
a JSON object per save. The columns:

- ``start`` is the time that training waits: planning and the copy to host memory (here from host
  memory).
- ``finish`` is the time to wait for the writing thread and to publish the checkpoint.
- ``adapters`` is the time of the thread of ``training.keep_adapters``, from the checkpoint to the
  adapters in PEFT's format.
- ``held up`` is the time that the main thread, which multiplies matrices, waits for Python's global
  lock during ``adapters``. Linux counts this time neither as running nor as ready to run.
"""

from __future__ import annotations

import argparse
import json
import pickle
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.train.steps import TINY
from megatron_gptoss import distributed
from megatron_gptoss.checkpoint import state
from megatron_gptoss.checkpoint.writer import CheckpointWriter
from megatron_gptoss.config import AdapterConfig, OptimizerConfig, ParallelConfig
from megatron_gptoss.families.gpt_oss.config import GptOssModelConfig
from megatron_gptoss.layers.adapters import initialize_adapters
from megatron_gptoss.model import build_model
from megatron_gptoss.trainer import PolicyTrainer
from rl_loop.tracking.run_directory import RunDirectory
from rl_loop.trainer.adapter_archiver import AdapterArchiver


def argument_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--layers", type=int, default=24)
    add("--experts", type=int, default=32)
    add("--rank", type=int, default=32)
    add("--expert-rank", type=int, help="default: rank / experts per token")
    add("--saves", type=int, default=4)
    add("--directory", type=Path, help="to save in; default: a temporary one")
    add("--tiny", action="store_true", help="small sizes")
    add("--label", default="this code", help="first cell of every row")
    add("--out", type=Path)
    return parser


def main() -> None:
    """Run the benchmark with the options of the command line."""
    args = argument_parser().parse_args()
    distributed.initialize(ParallelConfig(), port=29_791)
    try:
        trainer = build_trainer(args)
        with tempfile.TemporaryDirectory(dir=args.directory) as directory:
            results = time_saves(args, trainer, Path(directory))
    finally:
        distributed.shutdown()

    if args.out:
        with args.out.open("a") as file:
            for result in results:
                file.write(json.dumps(result) + "\n")
    print(table(results))


def build_trainer(args: argparse.Namespace) -> PolicyTrainer:
    """Return a trainer of adapters whose optimizer has made a step."""
    sizes = TINY if args.tiny else {}
    model_config = GptOssModelConfig(num_layers=args.layers, num_experts=args.experts, **sizes)
    adapter = AdapterConfig(rank=args.rank, alpha=32, expert_rank=args.expert_rank)
    model = build_model(
        model_config, ParallelConfig(), torch.bfloat16, adapter=adapter, quantization="mxfp4"
    )
    initialize_adapters(model, seed=0)
    trainer = PolicyTrainer(model, OptimizerConfig())

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.main_grad.normal_()
    trainer.optimizer.step()
    trainer.updated = True

    # Runs compute the digest of their base when they load it, not for every checkpoint.
    state.base_digest = lambda model: "0" * 16
    return trainer


def time_saves(
    args: argparse.Namespace, trainer: PolicyTrainer, directory: Path
) -> list[dict[str, Any]]:
    """Save ``args.saves`` times and return the measurements of each save."""
    trained = sum(p.numel() for p in trainer.module.parameters() if p.requires_grad)
    run = RunDirectory(directory)
    archiver = AdapterArchiver(run, base=None)
    writer = CheckpointWriter(run.checkpoints, keep=1, reader=archiver)
    results = []
    for step in range(args.saves):
        started = time.perf_counter()
        path = writer.start(trainer, step, {"step": step})
        planned = time.perf_counter()
        writer.finish()
        finished = time.perf_counter()
        held_up = time_held_up(archiver)
        kept = time.perf_counter()
        archiver.finish()

        metadata = pickle.loads((path / ".metadata").read_bytes())
        results.append(
            {
                "label": args.label,
                "save": step + 1,
                "trained_parameters": trained,
                "chunks": len(metadata.storage_data),
                "gigabytes": gigabytes(path),
                "adapter_gigabytes": gigabytes(run.adapters / path.name),
                "start_seconds": planned - started,
                "finish_seconds": finished - planned,
                "adapter_seconds": kept - finished,
                "held_up_seconds": held_up,
            }
        )
    return results


def time_held_up(archiver: AdapterArchiver) -> float:
    """Multiply matrices until the adapters are written.

    Returns:
        Seconds in which this thread waited for Python's global lock: it was neither on a core nor
        ready to run.
    """
    matrix = torch.rand(256, 256)
    started = time.perf_counter()
    before = scheduled_seconds()
    while archiver.is_reading():
        torch.mm(matrix, matrix)
    return time.perf_counter() - started - (scheduled_seconds() - before)


def scheduled_seconds() -> float:
    """Return the seconds in which this thread was on a core or ready to run."""
    running, ready, _ = Path("/proc/thread-self/schedstat").read_text().split()
    return (int(running) + int(ready)) / 1e9


def gigabytes(directory: Path) -> float:
    """Return the size of all files of a directory in GB (1e9)."""
    return sum(file.stat().st_size for file in directory.iterdir()) / 1e9


def table(results: list[dict[str, Any]]) -> str:
    """Return a Markdown table of all saves."""
    rows = [
        "| | save | trained, million | chunks | GB | start, s | finish, s | together, s "
        "| adapters, GB | adapters, s | held up, s |",
        "|---" * 11 + "|",
    ]
    for result in results:
        together = result["start_seconds"] + result["finish_seconds"]
        cells = [
            result["label"],
            str(result["save"]),
            f"{result['trained_parameters'] / 1e6:,.1f}",
            f"{result['chunks']:,}",
            f"{result['gigabytes']:.2f}",
            f"{result['start_seconds']:.2f}",
            f"{result['finish_seconds']:.2f}",
            f"{together:.2f}",
            f"{result['adapter_gigabytes']:.3f}",
            f"{result['adapter_seconds']:.2f}",
            f"{result['held_up_seconds']:.2f}",
        ]
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)
