"""Forward and backward time of the RL loop's updates, by differences from ``benchmarks.train step``.

    python -m benchmarks.train passes --layers 4
    torchrun --nproc_per_node 4 -m benchmarks.train passes --layers 24 --expert 4
    python -m benchmarks.train passes --tiny        # on a CPU, a test of the command

In runs of the RL loop, forward took 0.75 to 0.9 of the backward time, and in ``benchmarks.train
step`` 0.5. One model takes alternating steps of these variants, each with one difference from
``benchmark`` except for ``pinned`` and ``loop``, which has all others:

- ``benchmark``: 4 sequences of a micro-batch have equal lengths, routers choose the experts, and the
  loss is a cross-entropy.
- ``lengths``: sequences have the lengths of multi-turn episodes, packed as the trainer packs them.
- ``routes``: experts are replayed (R3). They are the experts that the routers choose, so the loads
  of experts are the same.
- ``pinned``: as ``routes``, and the routes are in page-locked memory, so that their copy to the GPU
  does not wait for the previous micro-batch.
- ``objective``: policy loss with its metrics and correction, and its columns.
- ``released``: torch's cache is released before each step, as before servers resume.
- ``busy``: ``--spinning`` processes use a core each, as schedulers of paused servers do.

Needs one GPU, or several with torchrun. Weights are random, and learning rates are 0. Prints a
table: microseconds per token of forward and backward, their ratio, and milliseconds of the first
forward pass of a step and of the others. Dispatch to experts of other ranks counts as communication,
as in the metrics of a run. Values are those of rank 0.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from benchmarks.train.cases import use_clock
from benchmarks.train.release import release
from benchmarks.train.steps import TINY, random_weights, sft_loss
from launch.rollout_time import OUTPUT_TOKENS, PROMPT_TOKENS, EpisodeLengths
from megatron_gptoss import distributed
from megatron_gptoss.config import OptimizerConfig, ParallelConfig
from megatron_gptoss.families.gpt_oss.config import GptOssModelConfig
from megatron_gptoss.gpu_memory import release_cached_memory
from megatron_gptoss.model import build_model
from megatron_gptoss.packing import PackedBatch, build_batch, schedule
from megatron_gptoss.planning.flops import forward_flops
from megatron_gptoss.routes import route_dtype
from megatron_gptoss.routing_replay import RoutingReplay
from megatron_gptoss.samples import TrainingSamples
from megatron_gptoss.step_clock import StepClock
from megatron_gptoss.step_results import LossFunction
from megatron_gptoss.trainer import PolicyTrainer
from rl_loop.algorithms.config import AlgorithmConfig
from rl_loop.algorithms.objectives import policy_objective

WARM_UP = 1
"""Steps of a variant that are not counted."""
SEQUENCES = 4
"""Sequences of a micro-batch with equal lengths."""
TURNS = 8
TURN_TOKENS = 185
"""Turns of an episode and mean sampled tokens of a turn, as in docs/performance/loop.md."""


@dataclass(frozen=True)
class Variant:
    """Differences of a step from ``benchmarks.train step``."""

    lengths: bool = False
    routes: bool = False
    pinned: bool = False
    objective: bool = False
    released: bool = False
    busy: bool = False


VARIANTS = {
    "benchmark": Variant(),
    "lengths": Variant(lengths=True),
    "routes": Variant(routes=True),
    "pinned": Variant(routes=True, pinned=True),
    "objective": Variant(objective=True),
    "released": Variant(released=True),
    "busy": Variant(busy=True),
    "loop": Variant(lengths=True, routes=True, objective=True, released=True, busy=True),
}


class PassClock(StepClock):
    """Clock that also keeps the time of every forward and backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.passes: dict[str, list[float]] = {}
        """Seconds of the passes of the last step in their order, by "forward" and "backward"."""

    def end(self) -> dict[str, float]:
        """End the step, see ``StepClock.end``."""
        marks = self._marks or []
        parts = super().end()
        self.passes = {"forward": [], "backward": []}
        last = ""
        for (start, part), (stop, _) in pairwise(marks):
            # Communication interrupts a pass.
            if part not in self.passes:
                continue
            if part != last:
                self.passes[part].append(0.0)
                last = part
            is_host_time = isinstance(start, float)
            self.passes[part][-1] += (
                stop - start if is_host_time else start.elapsed_time(stop) / 1000
            )
        return parts


@dataclass
class Step:
    """Measured times of one step."""

    parts: dict[str, float]
    """Seconds by part of a step."""
    first_forward: float
    other_forwards: float
    """Mean of the later forward passes, or the first if there is only one."""


def argument_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--layers", type=int, default=4)
    add("--experts", type=int, default=32)
    add("--expert", type=int, default=1, help="expert parallel size")
    add("--max-tokens", type=int, default=16_384, help="tokens of a micro-batch")
    add("--micro-batches", type=int, default=4)
    add("--recompute", nargs="*", default=["moe_act", "layernorm"])
    add("--quantization", choices=["mxfp4"], help="format through which experts are trained")
    add("--spinning", type=int, default=os.cpu_count() or 1, help="processes of the variant busy")
    add("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    add("--steps", type=int, default=4, help=f"of each variant; {WARM_UP} of them warms up")
    add("--tiny", action="store_true", help="small sizes, for a run without a GPU")
    add("--out", type=Path, help="file to which a JSON object per variant is appended")
    return parser


def main() -> None:
    """Measure the variants of the command line and print their table."""
    args = argument_parser().parse_args()
    if args.tiny:
        args.layers, args.experts, args.max_tokens, args.spinning = 2, 4, 1024, 1
    rank = int(os.environ.get("RANK", "0"))
    distributed.initialize(parallel_config(args), rank, port=29_794)
    try:
        rows = measure(args)
    finally:
        distributed.shutdown()
    if rank > 0:
        return
    if args.out:
        with args.out.open("a") as file:
            for row in rows:
                file.write(json.dumps(row) + "\n")
    print(table(rows))


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Time alternating steps of all variants and return a table row of each."""
    trainer = build_trainer(args)
    model = trainer.chunks[0].config.architecture
    replay = RoutingReplay(trainer.module)
    attach(trainer, None)
    packed = {
        has_lengths: micro_batches(args, model, has_lengths=has_lengths)
        for has_lengths in {VARIANTS[name].lengths for name in args.variants}
    }
    for batches in packed.values():
        add_own_routes(trainer, replay, batches)

    steps: dict[str, list[Step]] = {name: [] for name in args.variants}
    # Alternating, so that clocks and temperature affect all variants.
    for number in range(args.steps):
        if number == WARM_UP:
            # As after the first update of a run.
            gc.collect()
            gc.freeze()
        for name in args.variants:
            variant = VARIANTS[name]
            steps[name].append(
                take_step(trainer, replay, variant, packed[variant.lengths], args.spinning)
            )

    rows = []
    for name in args.variants:
        tokens = sum(len(batch.labels) for batch in packed[VARIANTS[name].lengths])
        rows.append(
            {"variant": name, "tokens": tokens} | median_times(steps[name][WARM_UP:], tokens)
        )
    release(trainer)
    return rows


def parallel_config(args: argparse.Namespace) -> ParallelConfig:
    """Return the layout of the arguments."""
    return ParallelConfig(
        world_size=int(os.environ.get("WORLD_SIZE", "1")),
        expert=args.expert,
        recompute=tuple(args.recompute),
    )


def build_trainer(args: argparse.Namespace) -> PolicyTrainer:
    """Return a trainer with random weights and a ``PassClock``."""
    sizes = TINY if args.tiny else {}
    config = GptOssModelConfig(num_layers=args.layers, num_experts=args.experts, **sizes)
    model = build_model(
        config, parallel_config(args), torch.bfloat16, quantization=args.quantization
    )
    random_weights(model)
    trainer = PolicyTrainer(model, OptimizerConfig(moment_dtype="bf16"))
    use_clock(trainer, PassClock())
    return trainer


def attach(trainer: PolicyTrainer, replay: RoutingReplay | None) -> None:
    """Let the routers replay experts, or choose them if ``replay`` is None."""
    trainer.replay = replay
    layers = {} if replay is None else {id(layer.router): layer for layer in replay.layers}
    for module in trainer.module.modules():
        if hasattr(module, "replay"):
            module.replay = layers.get(id(module))


def micro_batches(
    args: argparse.Namespace, model: GptOssModelConfig, *, has_lengths: bool
) -> list[PackedBatch]:
    """Return micro-batches with the columns of an RL step.

    Args:
        args: command line.
        model: configuration of the model.
        has_lengths: whether sequences have the lengths of episodes instead of equal ones.
    """
    total = args.max_tokens * args.micro_batches
    lengths = [args.max_tokens // SEQUENCES] * SEQUENCES * args.micro_batches
    if has_lengths:
        lengths = episode_lengths(total, longest=args.max_tokens // SEQUENCES)
    # All ranks have the same lengths, so that they have the same number of micro-batches.
    random = np.random.default_rng(parallel_state.get_data_parallel_rank())
    rows = []
    for length in lengths:
        # The last token is only a label.
        tokens = length + 1
        rows.append(
            {
                "token_ids": random.integers(0, model.vocab_size, tokens).astype(np.int32),
                "loss_mask": np.ones(tokens, np.bool_),
                "advantages": random.normal(size=tokens).astype(np.float32),
                "rollout_log_probs": np.full(tokens, -12.0, np.float32),
            }
        )
    samples = TrainingSamples.join(rows)
    plan = schedule(
        samples.lengths, args.max_tokens, work=lambda length: forward_flops(model, [length])
    )
    return [build_batch(samples, chosen, 8, sample_ids=chosen) for chosen in plan.micro_batches[0]]


def episode_lengths(total: int, longest: int) -> list[int]:
    """Return the tokens of multi-turn episodes, which together have nearly ``total`` tokens.

    Args:
        total: tokens of all episodes.
        longest: limit of an episode.
    """
    mean = TURN_TOKENS * min(1.0, longest / (TURNS * TURN_TOKENS))
    limits = EpisodeLengths(mean, TURNS, 1024, max_tokens=longest)
    lengths: list[int] = []
    for turns in limits.sample(total):
        fixed = PROMPT_TOKENS + OUTPUT_TOKENS * (len(turns) - 1)
        length = min(longest, sum(turns) + fixed)
        if sum(lengths) + length > total:
            break
        lengths.append(length)
    return lengths


def add_own_routes(
    trainer: PolicyTrainer, replay: RoutingReplay, batches: Sequence[PackedBatch]
) -> None:
    """Fill the routes of all micro-batches with the experts that the routers choose."""
    attach(trainer, replay)
    replay.start_recording()
    trainer.score(batches)
    for batch, recorded in zip(batches, replay.recorded(), strict=True):
        dtype = route_dtype(trainer.chunks[0].config.architecture.num_experts)
        routes = torch.stack(recorded.layers, dim=1).cpu().numpy().astype(dtype)
        batch.routed_experts = torch.from_numpy(routes)
    replay.agreement()
    attach(trainer, None)


def take_step(
    trainer: PolicyTrainer,
    replay: RoutingReplay,
    variant: Variant,
    batches: Sequence[PackedBatch],
    spinning: int,
) -> Step:
    """Take one step of a variant and return its times."""
    attach(trainer, replay if variant.routes else None)
    loss, batches = build_loss(variant, batches)
    if variant.released:
        release_cached_memory()
    with spinning_processes(spinning if variant.busy and dist.get_rank() == 0 else 0):
        statistics = trainer.train_step(batches, loss, learning_rate=0.0)
    clock = trainer.clock
    assert isinstance(clock, PassClock)
    first, *others = clock.passes["forward"]
    return Step(
        parts=statistics.seconds_by_part,
        first_forward=first,
        other_forwards=sum(others) / len(others) if others else first,
    )


def build_loss(
    variant: Variant, batches: Sequence[PackedBatch]
) -> tuple[LossFunction, list[PackedBatch]]:
    """Return the loss of a variant, and the micro-batches with the columns that it needs."""
    batches = list(batches)
    if not variant.routes:
        batches = [replace(batch, routed_experts=None) for batch in batches]
    elif variant.pinned and torch.cuda.is_available():
        batches = [
            replace(batch, routed_experts=batch.routed_experts.pin_memory()) for batch in batches
        ]
    if not variant.objective:
        labels = sum(int(batch.loss_mask.sum()) for batch in batches)
        bare = [replace(batch, advantages=None, rollout_log_probs=None) for batch in batches]
        return sft_loss(labels), bare
    samples = 1 + max(int(batch.sample_ids.max()) for batch in batches)
    loss_tokens = torch.zeros(samples, dtype=torch.long)
    for batch in batches:
        loss_tokens += torch.bincount(batch.sample_ids[batch.loss_mask], minlength=samples)
    group = parallel_state.get_context_parallel_group()
    longest = int(loss_tokens.max())
    return policy_objective(
        AlgorithmConfig(routing_replay="R3"), loss_tokens, longest, group
    ), batches


@contextmanager
def spinning_processes(count: int) -> Iterator[None]:
    """Run ``count`` processes that use a core each."""
    program = [sys.executable, "-c", "while True: pass"]
    started = [subprocess.Popen(program) for _ in range(count)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def median_times(steps: Sequence[Step], tokens: int) -> dict[str, float]:
    """Return the median times of a variant.

    Args:
        steps: its steps.
        tokens: tokens of a step.
    """

    def part(name: str) -> float:
        return median(step.parts[name] for step in steps)

    forward, backward = part("forward"), part("backward")
    return {
        "forward, us/token": 1e6 * forward / tokens,
        "backward, us/token": 1e6 * backward / tokens,
        "forward / backward": forward / backward,
        "first forward, ms": 1e3 * median(step.first_forward for step in steps),
        "other forwards, ms": 1e3 * median(step.other_forwards for step in steps),
        "communication, us/token": 1e6 * part("communication") / tokens,
        "other, us/token": 1e6 * part("other") / tokens,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Return a Markdown table of the rows."""
    lines = ["| " + " | ".join(rows[0]) + " |", "|---" * len(rows[0]) + "|"]
    for row in rows:
        cells = [
            f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values()
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
