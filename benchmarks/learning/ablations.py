r"""Failures and fixes in RL of a small mixture of experts with attention sinks.

    python -m benchmarks.learning ablations runs/tiny_retool_sft --steps 24 --seeds 0 1 2

Trains the demo's model from a supervised start with every entry of VARIANTS, in ``--jobs``
processes. Writes OUT/ablations.png and OUT/ablations.md with reward, entropy, gradient norm, KL,
the largest log-perplexity difference and the clip fraction. Runs that are complete in OUT are not
repeated.

The demo needs no GPU. Its sinks start at 0. A start that depends on sinks, as GPT-OSS does:

    python -m benchmarks.learning ablations runs/strong_sinks --write-initial 2
    gptoss sft configs/sft/tiny_retool.yaml name=strong_sinks_sft initial_weights=runs/strong_sinks
    python -m benchmarks.learning ablations runs/strong_sinks_sft --only sinks --steps 80 \
        --out runs/ablations_strong_sinks optimizer.lr=1e-4

On a GPU, a model of GPT-OSS's shape runs in bf16 with this project's kernels. It has 32 experts (4
active), heads of 64 channels, 8 query heads per kv head, and sinks that start at 2. Its start is
trained first if it does not exist:

    python -m benchmarks.learning ablations runs/shaped --shaped --jobs 4 \
        --out runs/ablations_shaped

``--start-steps N`` sets the SFT steps of this start.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GptOssConfig

from converters.hf_directory import write_hf_directory
from converters.names import hf_shapes
from converters.random_weights import random_hf_weights
from megatron_gptoss.config.precision import torch_dtype
from megatron_gptoss.families.gpt_oss.config import GptOssModelConfig
from rl_loop.config.load import load_config
from rl_loop.config.run import RlConfig, SftConfig
from rl_loop.engines.embedded.config import EmbeddedConfig
from rl_loop.engines.embedded.engine import TransformersEngine
from rl_loop.run_parts import build_tasks
from rl_loop.tracking.run_directory import metric_curve, read_json_lines, read_training_steps
from tests.support.in_process import LocalRollouts, local_loop, local_trainer

NO_CORRECTION = ["algorithm.correction.weight=none"]
SEQUENCE = ["algorithm.correction.weight=sequence_tis", "algorithm.correction.veto=1e-4"]
NO_SINKS = ["ablation.without=[engine_sinks]"]
ROUTER_NOISE = ["ablation.router_noise=0.5"]
ENGINE_NOISE = ["ablation.engine_noise=0.03", "rollout.routed_experts=true"]
VARIANTS: dict[str, list[str]] = {
    "all correct": [],
    "two passes, router noise": [*ROUTER_NOISE, *NO_CORRECTION, "algorithm.old_log_probs=forward"],
    "one pass, router noise": [*ROUTER_NOISE, *NO_CORRECTION],
    "engine without sinks": [*NO_SINKS, *NO_CORRECTION],
    "engine without sinks, attention frozen": [
        *NO_SINKS,
        *NO_CORRECTION,
        "ablation.freeze=[attention]",
    ],
    "engine without sinks, sequence correction": [*NO_SINKS, *SEQUENCE],
    "trainer without sinks": ["ablation.without=[trainer_sinks]", *NO_CORRECTION],
    "trainer without sinks, sequence correction": ["ablation.without=[trainer_sinks]", *SEQUENCE],
    "trainer without gradient of sinks": ["ablation.without=[sink_gradient]"],
    "backward pass without sinks": ["ablation.without=[sink_backward]"],
    "engine noise": [*ENGINE_NOISE, *NO_CORRECTION],
    "engine noise, R3": [*ENGINE_NOISE, *NO_CORRECTION, "algorithm.routing_replay=R3"],
}
PANELS = {
    "reward": "reward",
    "entropy": "entropy (nats)",
    "grad_norm": "gradient norm",
    "mismatch/kl_k3": "KL of engine and trainer, k3 (nats)",
    "mismatch/log_perplexity_gap_max": "max log-perplexity difference",
    "clip_fraction": "clip fraction",
}
CONFIG = Path(__file__).parents[2] / "configs/rl/tiny_retool.yaml"
SFT_CONFIG = Path(__file__).parents[2] / "configs/sft/tiny_retool.yaml"
SHAPED = [
    "dtype=bf16", "model.hidden_size=512", "model.intermediate_size=512", "model.initializer_std=0.04",
    "model.head_size=64", "model.num_attention_heads=16", "model.num_key_value_heads=2", "model.sliding_window=128",
    "model.num_experts=32", "model.experts_per_token=4",
]  # fmt: skip
"""Overrides that give the tiny model GPT-OSS's shape."""

Curves = dict[tuple[str, int], dict[str, list[float]]]
"""Values per step, by (variant, seed) and metric."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "start",
        type=Path,
        help="the run directory of `gptoss sft configs/sft/tiny_retool.yaml`",
    )
    parser.add_argument(
        "--write-initial",
        type=float,
        metavar="SINK",
        help="only write START: weights with these sinks",
    )
    parser.add_argument(
        "--shaped",
        action="store_true",
        help="a model of GPT-OSS's shape, on a GPU",
    )
    parser.add_argument(
        "--start-steps",
        type=int,
        metavar="N",
        help="SFT steps of the start of --shaped; those of the configuration by default",
    )
    parser.add_argument(
        "--only",
        default="",
        metavar="WORDS",
        help="only variants named so, and the first",
    )
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, on the GPUs in turn")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("runs/ablations"))
    parser.add_argument("overrides", nargs="*", help="key=value for every run")
    options = parser.parse_intermixed_args()

    if options.write_initial is not None:
        write_initial(options.start, options.write_initial, load_config(CONFIG, RlConfig).model)
        return

    torch.set_num_threads(1)
    if options.shaped and not (options.start / "config.json").exists():
        steps = [f"training.steps={options.start_steps}"] if options.start_steps else []
        supervised_start(options.start, [*options.overrides, *steps])

    curves = run_all(options)
    draw(curves, options.out / "ablations.png")
    (options.out / "ablations.md").write_text(table(curves))


def run_all(options: argparse.Namespace) -> Curves:
    """Run the chosen variants with every seed, ``options.jobs`` at a time."""
    first = next(iter(VARIANTS))  # the baseline of the comparison
    chosen = [name for name in VARIANTS if name == first or options.only in name]
    runs = [(name, seed) for seed in options.seeds for name in chosen]
    configs = []
    for name, seed in runs:
        settings = common_settings(options, name, seed) + VARIANTS[name] + options.overrides
        configs.append(load_config(CONFIG, RlConfig, settings))

    context = get_context("spawn")
    started_processes = context.Value("i", 0)
    curves = {}
    with ProcessPoolExecutor(options.jobs, context, begin_process, (started_processes,)) as pool:
        for (name, seed), curve in zip(runs, pool.map(run, configs), strict=True):
            curves[name, seed] = curve
            print(
                f"{name} (seed {seed}): reward {statistics.mean(curve['reward'][-5:]):.2f}",
                flush=True,
            )
    return curves


def write_initial(directory: Path, sink: float, model: GptOssModelConfig) -> None:
    """Write the untrained model with all sink logits shifted by ``sink``.

    Args:
        directory: Hugging Face directory to write.
        sink: value added to the sink logits.
        model: configuration of the model.
    """
    weights = random_hf_weights(model, seed=0)

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name in hf_shapes(model):
            tensor = weights(name)
            if name.endswith(".sinks"):
                tensor = tensor + sink
            yield name, tensor

    write_hf_directory(directory, model, tensors())


def supervised_start(directory: Path, overrides: list[str]) -> None:
    """Train the shaped model on the demo's demonstrations.

    Args:
        directory: Hugging Face directory to write.
        overrides: key=value of the SFT configuration.
    """
    untrained = directory.with_name(f"{directory.name}_untrained")
    settings = [*SHAPED, "optimizer.lr=5e-4", f"initial_weights={untrained}", *overrides]
    config = load_config(SFT_CONFIG, SftConfig, settings)
    write_initial(untrained, 2.0, config.model)

    source = build_tasks(config)
    trainer = local_trainer(config)
    count = config.sequences_per_step
    for step in range(config.training.steps):
        samples = source.demonstrations(step * count, count, config.demonstrations)
        update = trainer.sft_step(samples, step)
        if step % 50 == 0 or step == config.training.steps - 1:
            loss = update.sums["loss"] / update.sums["tokens"]
            print(
                f"start, step {step}: loss {loss:.3f}, gradient norm {update.grad_norm:.2f}",
                flush=True,
            )

    weights = trainer.weights()
    trainer.close()
    write_hf_directory(directory, config.model, weights.items())


def engine_on_gpu(config: RlConfig) -> TransformersEngine:
    """Return the embedded engine on the GPU. In a normal run it is on the CPU."""
    settings = GptOssConfig(**config.model.to_hf_config())
    model = AutoModelForCausalLM.from_config(settings, dtype=torch_dtype(config.dtype))
    assert isinstance(config.rollout.engine, EmbeddedConfig)
    return TransformersEngine(model.to("cuda"), max_batch_size=config.rollout.engine.max_batch_size)


def common_settings(options: argparse.Namespace, name: str, seed: int) -> list[str]:
    """Return the overrides that all variants share.

    Args:
        options: command line.
        name: name of the variant.
        seed: seed of the run.
    """
    settings = [
        f"initial_weights={options.start}",
        f"output_dir={options.out}",
        f"name={name.replace(' ', '_').replace(',', '')}-{seed}",
        f"seed={seed}",
        f"training.steps={options.steps}",
        f"training.checkpoint_every={options.steps}",
        "training.keep_checkpoints=1",
        "evaluate_every=1000",
        "tasks.held_out_tasks=1",
        "canary_tolerance=100",  # otherwise the canary stops most of these runs at the start
        "optimizer.schedule=constant",
        "rollout.workers=1",
        "rollout.tasks_per_step=4",
        "rollout.routed_experts=true",
    ]
    if options.shaped:
        settings += SHAPED
    return settings


def begin_process(started_processes: Any) -> None:
    """Initialize a process of the pool and select its GPU in rotation.

    Args:
        started_processes: shared counter.
    """
    torch.set_num_threads(1)
    with started_processes.get_lock():
        number = started_processes.value
        started_processes.value += 1
    if torch.cuda.is_available():
        gpu = number % torch.cuda.device_count()
        os.environ["LOCAL_RANK"] = str(gpu)
        torch.cuda.set_device(gpu)


def run(config: RlConfig) -> dict[str, list[float]]:
    """Train a variant with one seed, unless it is complete, and return its curves by metric."""
    file = config.directory / "metrics.jsonl"
    if len(read_training_steps(file)) < config.training.steps:
        engine = engine_on_gpu(config) if torch.cuda.is_available() else None
        rollouts = LocalRollouts(config, engine)
        with local_loop(config, rollouts) as loop:
            loop.train()
        rollouts.close()

    records = read_json_lines(file)
    curves = {}
    for name in PANELS:
        _, curves[name] = metric_curve(records, name)
    return curves


def over_seeds(curves: Curves, variant: str, metric: str) -> torch.Tensor:
    """Return the curves of a variant, [seeds, steps]."""
    return torch.tensor(
        [values[metric] for (name, _), values in curves.items() if name == variant],
    )


def draw(curves: Curves, file: Path) -> None:
    """Draw a panel for each metric with the mean and range over seeds of each variant."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    # The dark colors of all hues come before the light ones.
    palette = matplotlib.colormaps["tab20"].colors
    colors = palette[::2] + palette[1::2]

    figure, axes = pyplot.subplots(2, 3, figsize=(17, 9))
    for axis, (metric, title) in zip(axes.flat, PANELS.items(), strict=True):
        axis.set_prop_cycle(color=colors)
        for variant in dict.fromkeys(name for name, _ in curves):
            values = over_seeds(curves, variant, metric)
            steps = range(values.shape[1])
            (line,) = axis.plot(steps, values.mean(dim=0), label=variant, linewidth=1.3)
            axis.fill_between(
                steps,
                values.amin(dim=0),
                values.amax(dim=0),
                color=line.get_color(),
                alpha=0.1,
            )
        axis.set(title=title, xlabel="step")
        if metric.startswith(("mismatch", "grad")):
            axis.set_yscale("log")

    figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="lower center", ncols=3)
    figure.tight_layout(rect=(0, 0.09, 1, 1))
    figure.savefig(file, dpi=70)


def table(curves: Curves) -> str:
    """Return a Markdown table of means over seeds and the last third of the steps.

    The clip fraction is the mean over all steps.
    """
    lines = ["| variant | " + " | ".join(PANELS.values()) + " |", "|---" * (len(PANELS) + 1) + "|"]
    for variant in dict.fromkeys(name for name, _ in curves):
        cells = []
        for metric in PANELS:
            values = over_seeds(curves, variant, metric)
            if metric != "clip_fraction":
                last_third = math.ceil(values.shape[1] / 3)
                values = values[:, -last_third:]
            cells.append(f"{values.mean().item():.3g}")
        lines.append(f"| {variant} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
