"""Claims about RL of GPT-OSS, on an upcycled model with real weights.

    python -m benchmarks.learning claims runs/upcycled_heal/export --gsm8k gsm8k \\
        --claims sinks correction --seeds 0 1 --out claims.md

The model is SmolLM2 as a GPT-OSS model, after healing (docs/upcycling.md). Every run is RL on the
easy part of GSM8K, from one warm start, as in ``reference-model train``. A claim compares variants
of the configuration with the run "all correct", which all claims share:

    sinks         the trainer, or only its backward pass, ignores the sinks
    ratio         a second forward pass gives the old log-probs, with noise on the router
    correction    no rollout correction
    replay        experts of the engine (R3), of the old log-probs (R2), or of the trainer
    attention     attention is frozen
    purification  failed tool calls are retried and replaced
    quantization  experts in MXFP4 in trainer and engine; adapters
    output        the engine computes logits in fp32, or in bf16

Prints a table with one row per run and claim:

    before, after  accuracy on held-out problems before the first RL step and after the last one
    reward         mean of the first and of the last quarter of the steps
    gradient       median and largest norm
    k3             largest KL (k3) of engine and trainer, in nats per sampled token
    ratio          largest deviation of the importance ratio from 1
    minutes        training time

Finished runs are not repeated, and interrupted runs resume. ``--jobs`` runs share the GPU: lower
``rollout.engine.memory_fraction`` accordingly.
"""

import argparse
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean, median

from benchmarks.learning.reference_model import (
    ROOT,
    Plan,
    prepare_tasks,
    read_trained_steps,
    run,
    warm_start,
)

WARM_START = ("load_balancing_loss=0.1", "optimizer.lr=3.0e-4")
"""Overrides of the warm start. Without the first, it would leave experts without tokens."""

REPLAY = ["algorithm.routing_replay=R3"]
"""Overrides of every run, before those of its variant."""

BASELINE = "all correct"
ROUTER_NOISE = ["ablation.router_noise=0.5", "algorithm.correction.weight=none"]
CLAIMS: dict[str, dict[str, list[str]]] = {
    "sinks": {
        "trainer without sinks": ["ablation.without=[trainer_sinks]"],
        "backward pass without sinks": ["ablation.without=[sink_backward]"],
    },
    "ratio": {
        "two passes, router noise": [*ROUTER_NOISE, "algorithm.old_log_probs=forward"],
        "one pass, router noise": ROUTER_NOISE,
    },
    "correction": {"no correction": ["algorithm.correction.weight=none"]},
    "replay": {
        "R2": ["algorithm.routing_replay=R2", "algorithm.old_log_probs=forward"],
        "no replay": ["algorithm.routing_replay=none"],
    },
    "attention": {"attention frozen": ["ablation.freeze=[attention]"]},
    "purification": {"purification": ["rollout.purification={}"]},
    "quantization": {
        "MXFP4": ["quantization=mxfp4", "rollout.engine.quantization=mxfp4"],
        "adapters": ["adapter={}"],
    },
    "output": {"output layer in bf16": ["rollout.engine.fp32_logits=false"]},
}
"""Overrides of the variants of each claim."""

HEADER = (
    "claim",
    "variant",
    "seed",
    "before",
    "after",
    "reward",
    "gradient",
    "k3",
    "ratio",
    "minutes",
)


def select_variants(claims: Sequence[str]) -> dict[str, list[str]]:
    """Return the overrides of all variants of some claims, and of the run that they share."""
    variants: dict[str, list[str]] = {BASELINE: REPLAY}
    for claim in claims:
        variants |= {name: [*REPLAY, *CLAIMS[claim][name]] for name in CLAIMS[claim]}
    return variants


def train(plan: Plan, claims: Sequence[str], seeds: Sequence[int], jobs: int) -> str:
    """Run the warm start, then all variants with every seed, and return the table."""
    prepare_tasks(plan)
    warm_start(plan)

    variants = select_variants(claims)
    runs = {
        (variant, seed): plan.rl(seed, build_run_name(variant, seed), overrides)
        for seed in seeds
        for variant, overrides in variants.items()
    }
    pending = [
        command
        for (variant, seed), command in runs.items()
        if not (plan.work / build_run_name(variant, seed) / "summary.json").exists()
    ]
    with ThreadPoolExecutor(jobs) as pool:
        # The first failure ends the program, with the output of the run.
        for number, _ in enumerate(pool.map(run, pending), start=1):
            print(f"{number} of {len(pending)} runs", flush=True)
    return table(plan.work, claims, seeds)


def build_run_name(variant: str, seed: int) -> str:
    """Return the name of a run."""
    return f"{variant.replace(',', '').replace(' ', '_')}-{seed}"


def table(work: Path, claims: Sequence[str], seeds: Sequence[int]) -> str:
    """Return the Markdown table of all runs."""
    lines = ["| " + " | ".join(HEADER) + " |", "|---" * len(HEADER) + "|"]
    rows = [("", BASELINE), *((claim, variant) for claim in claims for variant in CLAIMS[claim])]
    for claim, variant in rows:
        for seed in seeds:
            cells = [claim, variant, str(seed), *read_cells(work / build_run_name(variant, seed))]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def read_cells(directory: Path) -> list[str]:
    """Return the table cells of a run."""
    summary = json.loads((directory / "summary.json").read_text())
    steps = list(read_trained_steps(directory))
    quarter = max(1, len(steps) // 4)
    rewards = [step["reward"] for step in steps]
    gradients = [step["grad_norm"] for step in steps]
    return [
        f"{summary['held_out_accuracy_sft']:.3f}",
        f"{summary['held_out_accuracy_rl']:.3f}",
        f"{mean(rewards[:quarter]):.3f}, {mean(rewards[-quarter:]):.3f}",
        f"{median(gradients):.2f}, {max(gradients):.2f}",
        f"{max(step['mismatch/kl_k3'] for step in steps):.1e}",
        f"{summary['max_ratio_deviation']:.1e}",
        f"{summary['seconds'] / 60:.1f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path, help="healed model")
    parser.add_argument("--claims", nargs="+", choices=[*CLAIMS], default=[*CLAIMS])
    parser.add_argument("--gsm8k", type=Path, required=True, help="directory of GSM8K's files")
    parser.add_argument("--work", type=Path, default=ROOT / "runs/claims")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--sft-steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--cpu", action="store_true", help="tiny steps, as a test")
    parser.add_argument("--out", type=Path, help="Markdown file for the table")
    parser.add_argument("overrides", nargs="*", help="KEY=VALUE of the configuration of RL")
    options = parser.parse_intermixed_args()

    plan = Plan(
        model=options.directory,
        work=options.work.absolute(),
        steps=options.steps,
        sft_steps=options.sft_steps,
        gsm8k=options.gsm8k,
        is_cpu=options.cpu,
        overrides=tuple(options.overrides),
        sft_overrides=WARM_START,
    )
    printed = train(plan, options.claims, options.seeds, options.jobs)
    print(printed)
    if options.out:
        options.out.write_text(printed + "\n")


if __name__ == "__main__":
    main()
