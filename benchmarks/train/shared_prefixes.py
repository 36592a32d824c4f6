"""Training steps on sequences that share prefixes: computed once, and as whole sequences.

    python -m benchmarks.train shared-prefixes --layers 4
    python -m benchmarks.train shared-prefixes --layers 4 --prefix 300 --own 1800 --samples 8 --groups 8
    python -m benchmarks.train shared-prefixes gradients --layers 4 --prefix 512 --own 128 --samples 8
    python -m benchmarks.train shared-prefixes --layers 4 --profile
    python -m benchmarks.train shared-prefixes --tiny        # on a CPU, a test of the command

Needs one GPU. Weights are random, tokens are uniform, and routing follows from them. Both variants
train one model in one process, in alternating steps. ``--groups`` groups of ``--samples`` sequences
are packed by ``schedule``, as the trainer packs them. A sequence has ``--prefix`` tokens that its
group shares and ``--own`` tokens that are in the loss.

``steps`` prints a table with one row per variant: seconds of an update and of scoring, peak memory,
and whether two backward passes have the same bits. If not, it names the last parameter that
differs. ``--deterministic`` selects deterministic algorithms. ``gradients`` compares the gradients of both
variants in bf16 with those of whole sequences in fp32, whose experts all of them replay. Its
table has a row per kind of parameter: the norm of the difference relative to the norm of the fp32
gradient, and the ratio of both variants. ``--out FILE`` appends a JSON object per row. ``steps
--profile`` also prints the most expensive kernels of one micro-batch of each variant, and a table
with the time of all kernels relative to that of the call.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.harness import peak, reset_peak, synchronize
from benchmarks.train.profiled import profile_call
from benchmarks.train.release import release
from benchmarks.train.steps import TINY, sft_loss
from megatron_gptoss import distributed
from megatron_gptoss.config import OptimizerConfig, ParallelConfig
from megatron_gptoss.determinism import select_deterministic_algorithms
from megatron_gptoss.families.gpt_oss.config import GptOssModelConfig
from megatron_gptoss.model import build_model
from megatron_gptoss.packing import PackedBatch, build_batch, schedule
from megatron_gptoss.planning.flops import forward_flops
from megatron_gptoss.prefix_tree import PrefixKeys, PrefixSharing, SortedPrefixes
from megatron_gptoss.routes import route_digests
from megatron_gptoss.routing_replay import RoutingReplay
from megatron_gptoss.samples import TrainingSamples
from megatron_gptoss.step_results import LossFunction
from megatron_gptoss.tensor_hash import digest_of_bits
from megatron_gptoss.trainer import PolicyTrainer

VARIANTS = {"whole": None, "shared": PrefixSharing()}
WARM_UP = 2


def argument_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("mode", nargs="?", default="steps", choices=["steps", "gradients"])
    add("--layers", type=int, default=24)
    add("--experts", type=int, default=32)
    add("--prefix", type=int, default=8000, help="tokens that the sequences of a group share")
    add("--own", type=int, default=1000, help="further tokens of a sequence")
    add("--samples", type=int, default=16, help="sequences of a group")
    add("--groups", type=int, default=2)
    add("--max-tokens", type=int, default=32_768, help="tokens of a micro-batch")
    add("--attention", default="auto", help="backend of attention")
    add("--recompute", nargs="*", default=[])
    add("--steps", type=int, default=5, help=f"of each variant; {WARM_UP} of them warm up")
    add("--profile", action="store_true", help="print the kernels of one micro-batch")
    add("--deterministic", action="store_true", help="select deterministic algorithms")
    add("--tiny", action="store_true", help="small sizes, for a run without a GPU")
    add("--out", type=Path)
    return parser


def main() -> None:
    """Run the mode of the command line and print its table."""
    args = argument_parser().parse_args()
    if args.tiny:
        args.layers, args.experts, args.prefix, args.own = 2, 4, 96, 12
        args.samples, args.max_tokens = 4, 256
    select_deterministic_algorithms(args.deterministic)
    distributed.initialize(ParallelConfig(), port=29_792)
    try:
        rows = time_steps(args) if args.mode == "steps" else compare_gradients(args)
    finally:
        distributed.shutdown()
        select_deterministic_algorithms(False)

    if args.out:
        with args.out.open("a") as file:
            for row in rows:
                arguments = {name: value for name, value in vars(args).items() if name != "out"}
                file.write(json.dumps({"arguments": arguments, **row}) + "\n")
    print(table(rows))


def build_trainer(args: argparse.Namespace, dtype: torch.dtype) -> PolicyTrainer:
    """Return a trainer with random weights, which are the same in every dtype."""
    sizes = TINY if args.tiny else {}
    config = GptOssModelConfig(num_layers=args.layers, num_experts=args.experts, **sizes)
    parallel = ParallelConfig(recompute=tuple(args.recompute))
    backend = args.attention if dtype == torch.bfloat16 else "reference"
    model = build_model(config, parallel, dtype, attention_backend_name=backend)
    draw_weights(model)
    return PolicyTrainer(model, OptimizerConfig(clip_grad=1e9))


@torch.no_grad()
def draw_weights(model: torch.nn.Module) -> None:
    """Fill a model with random values of bf16. Norms are about 1."""
    for name, parameter in model.named_parameters():
        generator = torch.Generator(parameter.device).manual_seed(zlib.crc32(name.encode()))
        # Drawn in fp32, because each dtype has its own random numbers.
        values = torch.empty(parameter.shape, device=parameter.device)
        values.normal_(0, 0.02, generator=generator)
        parameter.copy_((values + 1 if "norm" in name else values).bfloat16())


def group_samples(args: argparse.Namespace, model: GptOssModelConfig) -> TrainingSamples:
    """Return the sequences of all groups."""
    rng = np.random.default_rng(0)
    sequences = []
    for _ in range(args.groups):
        prefix = rng.integers(0, model.vocab_size, args.prefix)
        for _ in range(args.samples):
            # The last token is only a label.
            own = rng.integers(0, model.vocab_size, args.own + 1)
            mask = np.arange(args.prefix + args.own + 1) >= args.prefix
            sequences.append({"token_ids": np.concatenate([prefix, own]), "loss_mask": mask})
    return TrainingSamples.join(sequences)


def with_random_routes(
    samples: TrainingSamples, model: GptOssModelConfig, prefix: int
) -> TrainingSamples:
    """Return the samples with random routes, which are equal where ids are equal."""
    routes = []
    for tokens in samples.rows("token_ids"):
        shared, own = (
            np.random.default_rng(int(part.astype(np.int64).sum()))
            .random((len(part), model.num_layers, model.num_experts))
            .argsort(-1)[..., : model.experts_per_token]
            for part in (tokens[:prefix], tokens[prefix:-1])
        )
        routes.append(np.concatenate([shared, own]).astype(np.uint8))
    return samples.with_routes(routes)


def pack_variant(
    samples: TrainingSamples,
    sharing: PrefixSharing | None,
    max_tokens: int,
    model: GptOssModelConfig,
) -> list[PackedBatch]:
    """Return the micro-batches of one rank, as the trainer packs them."""
    prefixes = None
    if sharing is not None:
        routes = samples.routed_experts
        digests = None if routes is None else [route_digests(row) for row in routes]
        prefixes = SortedPrefixes(PrefixKeys.of(samples, range(len(samples)), digests=digests))
    plan = schedule(
        samples.lengths,
        max_tokens,
        work=lambda length: forward_flops(model, [length]),
        prefixes=prefixes,
        min_shared=1 if sharing is None else sharing.min_shared,
    )
    return [build_batch(samples, rows, 8, sharing=sharing) for rows in plan.micro_batches[0]]


def time_steps(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Time updates and scoring of both variants, and return a table row of each."""
    trainer = build_trainer(args, torch.bfloat16)
    model = trainer.chunks[0].config.architecture
    samples = group_samples(args, model)
    loss = sft_loss(int(samples.loss_tokens.sum()))
    batches = {
        name: pack_variant(samples, sharing, args.max_tokens, model)
        for name, sharing in VARIANTS.items()
    }

    def update(name: str, learning_rate: float) -> Callable[[], Any]:
        return lambda: trainer.train_step(batches[name], loss, learning_rate=learning_rate)

    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    score_seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    losses: dict[str, float] = {}
    peaks: dict[str, int] = {}
    # Alternating, so that clocks and temperature affect both variants.
    for _ in range(args.steps):
        for name in VARIANTS:
            gc.collect()
            reset_peak()
            # Weights stay the same, so that the losses can be compared.
            spent, statistics = timed(update(name, 0.0))
            seconds[name].append(spent)
            losses[name] = statistics.sums["loss"]
            peaks[name] = peak()
            spent, _ = timed(lambda name=name: trainer.score(batches[name]))
            score_seconds[name].append(spent)

    rows = []
    for name in VARIANTS:
        step = median(seconds[name][WARM_UP:])
        row = {
            "variant": name,
            "sequences' tokens": samples.tokens - len(samples),
            "computed tokens": sum(batch.tokens for batch in batches[name]),
            "micro-batches": len(batches[name]),
            "update, s": step,
            "score, s": median(score_seconds[name][WARM_UP:]),
            "speed-up": median(seconds["whole"][WARM_UP:]) / step,
            "peak, GB": peaks[name] / 1e9,
            "loss": losses[name],
            **same_bits(trainer, update(name, 0.0)),
            "all updates": [round(value, 4) for value in seconds[name]],
        }
        print(json.dumps(row), flush=True)
        rows.append(row)
    if args.profile:
        print(table(profile_micro_batches(trainer, batches, loss)), flush=True)
    release(trainer)
    return rows


def profile_micro_batches(
    trainer: PolicyTrainer, batches: dict[str, list[PackedBatch]], loss: LossFunction
) -> list[dict[str, Any]]:
    """Print the kernels of the first micro-batch of each variant, and return a table row per call.

    An update contains an optimizer step.
    """
    rows = []
    for name, (first, *_) in batches.items():
        calls: dict[str, Callable[[], Any]] = {
            "update": lambda first=first: trainer.train_step([first], loss, learning_rate=0.0),
            "score": lambda first=first: trainer.score([first]),
        }
        for call_name, call in calls.items():
            figures, kernels = profile_call(call)
            print(f"\n{name}, {call_name}: {first.tokens:,} tokens\n{kernels}", flush=True)
            row = {"variant": name, "call": call_name, "tokens": first.tokens, **figures}
            print(json.dumps(row), flush=True)
            rows.append(row)
    return rows


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds and the result of a call."""
    synchronize()
    started = time.perf_counter()
    result = call()
    synchronize()
    return time.perf_counter() - started, result


def same_bits(trainer: PolicyTrainer, update: Callable[[], Any]) -> dict[str, Any]:
    """Return whether two backward passes give the same gradients, and the last other parameter.

    The backward pass begins with the last parameter, so earlier ones differ because of it.
    """
    digests = []
    for _ in range(2):
        update()
        named = trainer.module.named_parameters()
        digests.append({name: digest_of_bits(p.main_grad) for name, p in named})
    first, second = digests
    differing = [name for name in first if first[name] != second[name]]
    return {"same bits": not differing, "differing from": differing[-1] if differing else "-"}


def compare_gradients(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the errors of the bf16 gradients of both variants by kind of parameter."""
    gradients: dict[str, dict[str, torch.Tensor]] = {}
    for name, dtype in {
        "exact": torch.float32,
        "whole": torch.bfloat16,
        "shared": torch.bfloat16,
    }.items():
        trainer = build_trainer(args, dtype)
        model = trainer.chunks[0].config.architecture
        samples = with_random_routes(group_samples(args, model), model, args.prefix)
        trainer.replay = RoutingReplay(trainer.module)
        batches = pack_variant(samples, VARIANTS.get(name), args.max_tokens, model)
        trainer.train_step(batches, sft_loss(int(samples.loss_tokens.sum())), learning_rate=0.0)
        gradients[name] = {
            parameter: p.main_grad.float().cpu()
            for parameter, p in trainer.module.named_parameters()
        }
        tokens = sum(batch.tokens for batch in batches)
        print(json.dumps({"variant": name, "computed tokens": tokens}), flush=True)
        release(trainer)
        del trainer

    rows = []
    for kind in sorted({strip_numbers(name) for name in gradients["exact"]}):
        names = [name for name in gradients["exact"] if strip_numbers(name) == kind]
        errors = {
            variant: relative_error(gradients[variant], gradients["exact"], names)
            for variant in VARIANTS
        }
        rows.append(
            {
                "parameters": kind,
                "error, whole": errors["whole"],
                "error, shared": errors["shared"],
                "ratio": errors["shared"] / errors["whole"] if errors["whole"] else 1.0,
            }
        )
    return rows


def strip_numbers(name: str) -> str:
    """Return the name of a parameter without numbers of layers and experts."""
    return re.sub(r"\.\d+|(?<=weight)\d+|(?<=bias)\d+", "", name.removeprefix("module."))


def relative_error(
    got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], names: list[str]
) -> float:
    """Return the norm of the difference of some tensors relative to the norm of ``want``."""
    error = sum(float((got[name] - want[name]).double().square().sum()) for name in names)
    norm = sum(float(want[name].double().square().sum()) for name in names)
    return (error / norm) ** 0.5


def table(rows: list[dict[str, Any]]) -> str:
    """Return a Markdown table of the rows."""
    names = [name for name in rows[0] if name != "all updates"]
    lines = ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
    for row in rows:
        lines.append("| " + " | ".join(cell(row[name]) for name in names) + " |")
    return "\n".join(lines)


def cell(value: Any) -> str:
    """Format the value of a table cell."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
