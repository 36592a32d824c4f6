"""Learning curves of several models on the same tasks, such as GPT-OSS and a dense model.

    gptoss sft configs/sft/tiny_retool.yaml && gptoss rl configs/rl/tiny_retool.yaml
    gptoss sft configs/sft/tiny_dense.yaml && gptoss rl configs/rl/tiny_dense.yaml
    python -m benchmarks.learning comparison "GPT-OSS=runs/tiny_retool" "dense=runs/tiny_dense" \\
        --figure curves.png

Needs no GPU. A run is a directory that ``gptoss rl`` wrote, finished or not. Runs with the same
label are seeds: lines are means, and shaded areas are ranges. The runs must have equal tasks,
seeds, budget, rewards and algorithm. Otherwise the first difference is printed and nothing is
drawn. The following may differ:

- models, vocabularies, prompts and learning rates,
- token limits, because a task has a different length in another vocabulary,
- routing replay, because a dense model has no routes.

Prints a table. The first three columns are means over the last third of the steps. The last three
are the largest values of all steps.

    reward       mean of a step's episodes
    gradient     norm before clipping
    entropy      of the policy, in nats per sampled token
    kl           k3 estimate of KL of engine and trainer, in nats per sampled token
    perplexity   largest log-perplexity difference of engine and trainer of an episode, in nats
    clipped      fraction of clipped tokens
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rl_loop.config.load import load_rl_config
from rl_loop.tracking.run_directory import read_json_lines


@dataclass(frozen=True)
class Panel:
    """One metric of the figure."""

    metric: str
    """Name in ``metrics.jsonl``."""
    title: str
    """Title of the panel and of the table's column."""
    is_largest: bool = False
    """True if the table shows the largest of all steps, not the mean of the last third."""
    is_logarithmic: bool = False


PANELS = (
    Panel("reward", "reward"),
    Panel("grad_norm", "gradient norm"),  # 0 in a step whose groups have no signal
    Panel("entropy", "entropy"),
    Panel("mismatch/kl_k3", "KL engine, trainer (k3)", is_largest=True, is_logarithmic=True),
    Panel(
        "mismatch/log_perplexity_gap_max",
        "log-perplexity difference",
        is_largest=True,
        is_logarithmic=True,
    ),
    Panel("clip_fraction", "clip fraction", is_largest=True),
)

EQUAL = (
    "tasks",
    "reward",
    "training.steps",
    "evaluate_every",
    "rollout.tasks_per_step",
    "rollout.samples_per_task",
    "rollout.max_turns",
    "rollout.temperature",
    "rollout.top_p",
    "rollout.purification",
    "algorithm",
)
"""Configuration keys that must be equal in all runs. Seeds are compared by label."""


@dataclass(frozen=True)
class Run:
    """An RL run."""

    directory: Path
    seeds: tuple[int, int]
    """Seeds of the run and of its tasks."""
    settings: dict[str, Any]
    """Values of the configuration by key in ``EQUAL``."""
    curves: dict[str, np.ndarray]
    """Values of each metric by step, float64 [steps]."""


Runs = dict[str, list[Run]]
"""Runs by label."""


class NotComparableError(ValueError):
    """Raised if runs differ in more than their models. The message names the difference."""


# ---- reading


def read_run(directory: Path) -> Run:
    """Read a run.

    Raises:
        NotComparableError: if the directory is not a run or has no trained step.
    """
    file = directory / "config.yaml"
    if not file.exists():
        raise NotComparableError(f"{directory} is no run: it has no config.yaml")
    config = load_rl_config(file).model_dump(mode="json")

    records = read_json_lines(directory / "metrics.jsonl")
    steps = [record for record in records if all(panel.metric in record for panel in PANELS)]
    if not steps:
        raise NotComparableError(f"{directory}: no step has trained yet")
    curves = {
        panel.metric: np.array([step[panel.metric] for step in steps], dtype=np.float64)
        for panel in PANELS
    }

    task_seed = config["tasks"].pop("seed")
    # A dense model has no routes. Models with experts may be compared with and without replay.
    del config["algorithm"]["routing_replay"]
    settings = {key: look_up(config, key) for key in EQUAL}
    return Run(directory, (config["seed"], task_seed), settings, curves)


def look_up(tree: dict[str, Any], key: str) -> Any:
    """Return the value of a dotted key."""
    value: Any = tree
    for part in key.split("."):
        value = value[part]
    return value


def read_runs(arguments: Sequence[str]) -> Runs:
    """Read runs given as LABEL=DIRECTORY.

    Raises:
        NotComparableError: if an argument is malformed or the runs are not comparable.
    """
    runs: Runs = {}
    for argument in arguments:
        label, separator, directory = argument.partition("=")
        if not separator:
            raise NotComparableError(f"{argument}: expected LABEL=DIRECTORY")
        runs.setdefault(label, []).append(read_run(Path(directory)))
    check_comparable(runs)
    return runs


def check_comparable(runs: Runs) -> None:
    """Check that runs have equal tasks, budget, reward and algorithm, and labels equal seeds.

    Raises:
        NotComparableError: naming the first difference.
    """
    everything = [run for of_label in runs.values() for run in of_label]
    first, *others = everything
    for run in others:
        for key in EQUAL:
            if run.settings[key] != first.settings[key]:
                raise NotComparableError(
                    f"{key}: {first.settings[key]} in {first.directory}, "
                    f"{run.settings[key]} in {run.directory}"
                )

    seeds = {label: sorted(run.seeds for run in of_label) for label, of_label in runs.items()}
    for label, found in seeds.items():
        expected = next(iter(seeds.values()))
        if found != expected:
            raise NotComparableError(
                f"seeds (run, tasks): {expected} of {next(iter(seeds))}, {found} of {label}"
            )


# ---- showing


def over_seeds(of_label: Sequence[Run], metric: str) -> np.ndarray:
    """Return a metric of all seeds, float64 [seeds, steps], up to the shortest run's last step."""
    curves = [run.curves[metric] for run in of_label]
    shortest = min(len(curve) for curve in curves)
    return np.stack([curve[:shortest] for curve in curves])


def draw(runs: Runs, file: Path) -> None:
    """Draw a panel for each metric with the mean and range over seeds of each label."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 3, figsize=(14, 7))
    for axis, panel in zip(axes.flat, PANELS, strict=True):
        for label, of_label in runs.items():
            values = over_seeds(of_label, panel.metric)
            steps = range(values.shape[1])
            (line,) = axis.plot(steps, values.mean(axis=0), label=label, linewidth=1.3)
            axis.fill_between(
                steps,
                values.min(axis=0),
                values.max(axis=0),
                color=line.get_color(),
                alpha=0.15,
            )
        axis.set(title=panel.title, xlabel="step")
        if panel.is_logarithmic:
            axis.set_yscale("log")
        elif panel.metric != "reward":
            axis.set_ylim(bottom=0)

    figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="lower center", ncols=len(runs))
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(file, dpi=70)
    pyplot.close(figure)


def table(runs: Runs) -> str:
    """Return a Markdown table with a row per label."""
    titles = [panel.title for panel in PANELS]
    lines = [f"| | seeds | steps | {' | '.join(titles)} |", "|---" * (len(PANELS) + 3) + "|"]
    for label, of_label in runs.items():
        steps = over_seeds(of_label, "reward").shape[1]
        cells = [format_figure(of_label, panel) for panel in PANELS]
        lines.append(f"| {label} | {len(of_label)} | {steps} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def format_figure(of_label: Sequence[Run], panel: Panel) -> str:
    """Return the table cell of a metric."""
    values = over_seeds(of_label, panel.metric)
    if panel.is_largest:
        return f"{values.max():.2g}"
    last_third = -(-values.shape[1] // 3)
    return f"{values[:, -last_third:].mean():.3g}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", metavar="LABEL=DIRECTORY")
    parser.add_argument("--figure", type=Path, help="PNG file for the curves")
    options = parser.parse_args()

    try:
        runs = read_runs(options.runs)
    except NotComparableError as error:
        sys.exit(str(error))
    if options.figure:
        draw(runs, options.figure)
    print(table(runs), end="")
