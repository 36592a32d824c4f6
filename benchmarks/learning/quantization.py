r"""Effect of MXFP4 on the RL demo, and comparison of rules for block scales.

    gptoss sft configs/sft/tiny_retool.yaml
    python -m benchmarks.learning quantization run runs/tiny_retool_sft --variant trained --seed 0
    python -m benchmarks.learning quantization table
    python -m benchmarks.learning quantization scales runs/tiny_retool_sft --steps 12

Needs no GPU.

``run`` trains one variant with one seed, in one process on one core, and writes to OUT:

    none      unquantized experts in trainer and engine
    trained   quantization=mxfp4: trained, sampled and exported in MXFP4
    sampled   trained unquantized and sampled in MXFP4, as if quantized only for serving

``table`` prints the complete runs in OUT: held-out accuracy, reward, and differences of engine and
trainer.

``scales`` trains a variant ("trained" by default). On the weights of every step, it compares rules
for block scales. It prints their rounding errors and how often they change scales and values.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptoss_kernels import mxfp4
from megatron_gptoss.layers.quantized_experts import QuantizedExpertLinear
from rl_loop.config.load import load_config
from rl_loop.config.run import RlConfig
from rl_loop.loop import RlLoop
from rl_loop.tracking.metrics import MetricName
from rl_loop.tracking.run_directory import metric_curve, read_json_lines
from tests.support.in_process import local_loop

CONFIG = Path(__file__).parents[2] / "configs/rl/tiny_retool.yaml"
# The canary would stop "sampled" before its first step.
VARIANTS = {
    "none": [],
    "trained": ["quantization=mxfp4"],
    "sampled": ["rollout.engine.quantization=mxfp4", "canary_tolerance=100"],
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("run", "scales"):
        command = commands.add_parser(name)
        command.add_argument("start", type=Path, help="the run directory of a supervised start")
        command.add_argument("--variant", choices=VARIANTS, default="trained")
        command.add_argument("--seed", type=int, default=0)
        command.add_argument("--steps", type=int, default=24)
    commands.add_parser("table")
    for command in commands.choices.values():
        command.add_argument("--out", type=Path, default=Path("runs/quantization"))
        command.add_argument("--set", nargs="*", default=[], dest="overrides", metavar="KEY=VALUE")
    options = parser.parse_args()

    torch.set_num_threads(1)
    if options.command == "run":
        run(options)
    elif options.command == "scales":
        compare_scale_rules(options)
    else:
        print(table(options.out))


def configuration(options: argparse.Namespace) -> RlConfig:
    """Return the configuration of the demo with a variant."""
    settings = [
        f"initial_weights={options.start}",
        f"output_dir={options.out}",
        f"name={options.variant}-{options.seed}",
        f"seed={options.seed}",
        f"training.steps={options.steps}",
        f"training.checkpoint_every={options.steps}",
        "evaluate_every=1000",
        "optimizer.schedule=constant",
        "rollout.workers=1",
    ]
    return load_config(CONFIG, RlConfig, settings + VARIANTS[options.variant] + options.overrides)


# -- variants ------------------------------------------------------------------------------------


def run(options: argparse.Namespace) -> None:
    """Train one variant and write its results."""
    config = configuration(options)
    with local_loop(config) as loop:
        loop.train()
        final = loop.evaluate().values()

    steps = read_json_lines(config.directory / "metrics.jsonl")
    result = {
        "variant": options.variant,
        "seed": options.seed,
        "steps": options.steps,
        "before": metric_curve(steps, MetricName.HELD_OUT_ACCURACY)[1][0],
        "after": final[MetricName.HELD_OUT_ACCURACY],
        "reward": statistics.mean(metric_curve(steps, MetricName.REWARD)[1][-8:]),
        "gap": statistics.mean(metric_curve(steps, MetricName.LOG_PROB_GAP)[1]),
        "largest gap": max(metric_curve(steps, "mismatch/log_prob_gap_max")[1]),
        "k3": statistics.mean(metric_curve(steps, MetricName.KL)[1]),
        "ratio": max(metric_curve(steps, "ratio/deviation_max")[1]),
    }
    (config.directory / "result.json").write_text(json.dumps(result))
    print(json.dumps(result))


def table(directory: Path) -> str:
    """Return a Markdown table of all runs in ``directory`` with the means over seeds."""
    results = [json.loads(file.read_text()) for file in sorted(directory.glob("*/result.json"))]
    columns = ("before", "after", "reward", "gap", "largest gap", "k3", "ratio")
    lines = [
        "| variant | seed | steps | " + " | ".join(columns) + " |",
        "|---" * (len(columns) + 3) + "|",
    ]

    by_variant: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for result in results:
        by_variant[result["variant"]].append(result)
    for variant, runs in by_variant.items():
        for result in runs:
            lines.append(_row(variant, str(result["seed"]), result["steps"], result, columns))
        means = {name: statistics.mean(result[name] for result in runs) for name in columns}
        lines.append(_row(variant, f"mean of {len(runs)}", runs[0]["steps"], means, columns))
    return "\n".join(lines)


def _row(
    variant: str, seed: str, steps: int, values: dict[str, Any], columns: tuple[str, ...]
) -> str:
    cells = " | ".join(f"{values[name]:.3g}" for name in columns)
    return f"| {variant} | {seed} | {steps} | {cells} |"


# -- scales --------------------------------------------------------------------------------------


def smallest_that_fits(blocks: Tensor, last: Tensor | None) -> Tensor:
    """Return log2 of ``mxfp4.quantize``'s scale 2^ceil(log2(amax / 6)). No value is clipped."""
    return torch.log2(_largest(blocks) / 6).ceil()


def exponent_of_largest(blocks: Tensor, last: Tensor | None) -> Tensor:
    """Return log2 of the OCP scale 2^(floor(log2(amax)) - 2). Values above 6 are clipped."""
    return torch.log2(_largest(blocks)).floor() - 2


def least_error(blocks: Tensor, last: Tensor | None) -> Tensor:
    """Return the smallest exponent without clipping, or 1 less if that has less squared error."""
    fits = smallest_that_fits(blocks, last)
    errors = [_squared_error(blocks, exponent) for exponent in (fits, fits - 1)]
    return torch.where(errors[1] < errors[0], fits - 1, fits)


def sticky(blocks: Tensor, last: Tensor | None) -> Tensor:
    """Return the last exponent while the largest value is between 2.5 and 7 times its scale."""
    fits = smallest_that_fits(blocks, last)
    if last is None:
        return fits
    relative = _largest(blocks) / torch.exp2(last)
    return torch.where((relative > 2.5) & (relative <= 7), last, fits)


RULES = {
    "smallest that fits (ours)": smallest_that_fits,
    "exponent of the largest (OCP)": exponent_of_largest,
    "least error of two": least_error,
    "sticky": sticky,
}


@dataclass
class RuleStatistics:
    """Statistics of a rule, over all steps except the first."""

    exponents: Tensor | None = None
    """Exponents of the previous step, [blocks]."""
    values: Tensor | None = None
    """Rounded weights of the previous step, [blocks, 32]."""
    errors: list[float] = field(default_factory=list)
    """Root mean square of the rounding error, relative to that of the weights, by step."""
    changed_scales: list[float] = field(default_factory=list)
    """Fraction of blocks whose scale changed, by step."""
    changed_values: list[float] = field(default_factory=list)
    """Fraction of weights whose rounded value changed, by step."""
    jumps: list[float] = field(default_factory=list)
    """Root mean square change of rounded weights, relative to unrounded weights, by step."""


def compare_scale_rules(options: argparse.Namespace) -> None:
    """Train and print a Markdown table of the rules."""
    config = configuration(options)
    rules = {name: RuleStatistics() for name in RULES}
    before = None
    with local_loop(config) as loop:
        for step in range(options.steps + 1):
            blocks = expert_blocks(loop)
            if step == 0:
                check_own_rule(blocks)
            for name, statistics_of_rule in rules.items():
                observe(statistics_of_rule, RULES[name], blocks, before)
            before = blocks
            if step < options.steps:
                loop.run_step(step)

    print(f"{len(before)} blocks, {options.steps} steps, seed {options.seed}")
    print("| rule | relative error | scales changed | values changed | moved, of the weights |")
    print("|---|---|---|---|---|")
    for name, rule in rules.items():
        error, *others = (
            statistics.mean(values)
            for values in (rule.errors, rule.changed_scales, rule.changed_values, rule.jumps)
        )
        scales, values, jump = others
        print(f"| {name} | {error:.4f} | {scales:.3%} | {values:.3%} | {jump:.2f} |")


def expert_blocks(loop: RlLoop) -> Tensor:
    """Return all expert matrices of the trainer, rounded to bf16: fp32 [blocks, 32]."""
    worker = loop.trainer.ranks.worker  # type: ignore[attr-defined]
    matrices = [
        module.weight.detach().bfloat16().float().reshape(-1, 32)
        for module in worker.model.modules()
        if isinstance(module, QuantizedExpertLinear)
    ]
    return torch.cat(matrices)


def check_own_rule(blocks: Tensor) -> None:
    """Check that the first rule is equal to the quantizer's."""
    rounded = round_blocks(blocks, smallest_that_fits(blocks, None))
    assert torch.equal(rounded, mxfp4.dequantize(*mxfp4.quantize(blocks.bfloat16())).float())


def observe(found: RuleStatistics, rule: Any, blocks: Tensor, blocks_before: Tensor | None) -> None:
    """Apply a rule to the weights of the next step and update its statistics.

    Args:
        found: statistics to update.
        rule: one of RULES.
        blocks: weights, [blocks, 32].
        blocks_before: weights of the previous step; None in the first step.
    """
    exponents = rule(blocks, found.exponents)
    values = round_blocks(blocks, exponents)
    if blocks_before is not None:
        assert found.exponents is not None
        assert found.values is not None
        found.errors.append(_root_mean_square(values - blocks) / _root_mean_square(blocks))
        found.changed_scales.append(float((exponents != found.exponents).float().mean()))
        found.changed_values.append(float((values != found.values).float().mean()))
        moved = _root_mean_square(blocks - blocks_before)
        found.jumps.append(_root_mean_square(values - found.values) / moved)
    found.exponents = exponents
    found.values = values


def round_blocks(blocks: Tensor, exponents: Tensor) -> Tensor:
    """Round [blocks, 32] to e2m1 with scales 2 ** exponents [blocks], ties to even."""
    unit = torch.exp2(exponents)[:, None]
    scaled = (blocks.abs() / unit).clamp(max=6)
    spacing = torch.exp2(scaled.clamp(min=1).log2().floor().clamp(max=2) - 1)
    rounded = (scaled / spacing).round() * spacing
    return torch.copysign(rounded * unit, blocks)


def _squared_error(blocks: Tensor, exponents: Tensor) -> Tensor:
    return (round_blocks(blocks, exponents) - blocks).square().sum(-1)


def _largest(blocks: Tensor) -> Tensor:
    return blocks.abs().amax(-1).clamp(min=2.0**-126)


def _root_mean_square(x: Tensor) -> float:
    return float(x.square().mean().sqrt())
