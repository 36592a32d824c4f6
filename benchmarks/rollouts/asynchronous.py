"""Effect of asynchronous rollouts on real runs: a tiny policy with slow tools.

    gptoss sft configs/sft/tiny_retool.yaml
    python -m benchmarks.rollouts asynchronous runs/tiny_retool_sft
    python -m benchmarks.rollouts asynchronous runs/tiny_retool_sft --max-staleness 0 1 2 4 --out async_loop.md

Needs no GPU. Every run is a separate ``gptoss rl`` with real processes for trainer and rollouts,
from the same weights. Tool calls sleep for the published times, multiplied by ``--gaps``
(``slow_tools.py``). Runs of one seed have the same tasks and delays. They run in sequence, and
every other seed in the opposite order, so that other load on the machine affects all values of k.

Prints a table. Ranges are over the seeds.

    s/step        wall time per step without the first step, which also evaluates
    x             speed-up over the first row with the same seed, median over the seeds
    training      seconds per step for estimates and updates
    waiting       seconds per step in which the trainer waits for episodes
    stale         staleness of trained tokens in weight versions, mean and largest
    before, after accuracy on the held-out tasks
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "configs/rl/tiny_retool.yaml"
ENVIRONMENT = "benchmarks.rollouts.slow_tools:SlowReTool"


@dataclass(frozen=True)
class Workload:
    """Settings that all runs share."""

    start: Path
    """Run with the initial policy."""
    steps: int
    tasks: int
    """Number of tasks of a step."""
    samples: int
    """Number of episodes of a task."""
    held_out: int
    """Number of held-out tasks, which measure accuracy."""
    gap_scale: float
    overrides: tuple[str, ...]
    """KEY=VALUE overrides of the configuration."""

    def command(self, directory: Path, staleness: int, seed: int) -> list[str]:
        """Return the command of one run.

        Args:
            directory: parent of the run directory, which is called ``run``.
            staleness: value of ``algorithm.max_staleness``.
            seed: seed of the run and of its tasks.
        """
        source = f"{{environment: '{ENVIRONMENT}', options: {{instructions: null, gap_scale: {self.gap_scale}}}}}"
        return [
            sys.executable, "-m", "launch", "rl", str(CONFIG),
            "name=run",
            f"output_dir={directory}",
            f"initial_weights={self.start.resolve()}",
            f"tasks.sources.retool={source}",
            f"tasks.held_out_tasks={self.held_out}",
            f"seed={seed}",
            f"tasks.seed={seed}",
            f"training.steps={self.steps}",
            # No evaluation or checkpoint between the first step and the last.
            f"evaluate_every={self.steps}",
            f"training.checkpoint_every={self.steps}",
            "rollout.workers=1",
            f"rollout.tasks_per_step={self.tasks}",
            f"rollout.samples_per_task={self.samples}",
            f"algorithm.max_staleness={staleness}",
            *self.overrides,
        ]  # fmt: skip


@dataclass(frozen=True)
class Measurement:
    """Measurements of one run. Seconds are per step."""

    staleness: int
    seed: int
    seconds: float
    training: float
    waiting: float
    stale_mean: float
    stale_max: int
    accuracy_before: float
    accuracy_after: float


def measure(workload: Workload, staleness: int, seed: int) -> Measurement:
    """Train with one value of k and one seed."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")]),
        # One core for the trainer and one for the engine.
        "OMP_NUM_THREADS": "1",
    }
    with tempfile.TemporaryDirectory() as directory:
        command = workload.command(Path(directory), staleness, seed)
        finished = subprocess.run(
            command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False
        )
        if finished.returncode:
            sys.exit(f"{' '.join(command)}\n{finished.stdout[-2000:]}\n{finished.stderr[-2000:]}")
        run = Path(directory) / "run"
        lines = (run / "metrics.jsonl").read_text().splitlines()
        summary = json.loads((run / "summary.json").read_text())
    steps = [step for step in map(json.loads, lines) if "reward" in step]
    return summarize(steps, summary, staleness, seed)


def summarize(
    steps: Sequence[dict[str, Any]], summary: dict[str, Any], staleness: int, seed: int
) -> Measurement:
    """Average over the steps of a run, without the first one, which includes the evaluation."""
    timed = steps[1:]
    wall_clock = timed[-1]["time"] - steps[0]["time"]
    return Measurement(
        staleness=staleness,
        seed=seed,
        seconds=wall_clock / len(timed),
        training=mean(step["seconds/estimate"] + step["seconds/update"] for step in timed),
        waiting=mean(step["seconds/rollout"] for step in timed),
        stale_mean=mean(step.get("rollout/staleness_mean", 0.0) for step in timed),
        stale_max=int(max(step["rollout/staleness_max"] for step in timed)),
        accuracy_before=summary["held_out_accuracy_sft"],
        accuracy_after=summary["held_out_accuracy_rl"],
    )


def run_order(staleness: Sequence[int], seeds: Sequence[int]) -> list[tuple[int, int]]:
    """Return (k, seed) of all runs. Every other seed has the opposite order of k."""
    runs = []
    for place, seed in enumerate(seeds):
        order = staleness if place % 2 == 0 else list(reversed(staleness))
        runs += [(k, seed) for k in order]
    return runs


HEADER = ("k", "s/step", "x", "training", "waiting", "stale", "before", "after")


def table(measured: Sequence[Measurement]) -> str:
    """Return a Markdown table with a row for every k."""
    lines = ["| " + " | ".join(HEADER) + " |", "|---" * len(HEADER) + "|"]
    by_k: dict[int, dict[int, Measurement]] = {}
    for run in sorted(measured, key=lambda run: run.staleness):
        by_k.setdefault(run.staleness, {})[run.seed] = run

    first = next(iter(by_k.values()))
    for k, runs in by_k.items():
        ratios = [first[seed].seconds / run.seconds for seed, run in runs.items()]
        cells = (
            f"{k}",
            _with_range([run.seconds for run in runs.values()]),
            _with_range(ratios),
            f"{median(run.training for run in runs.values()):.2f}",
            f"{median(run.waiting for run in runs.values()):.2f}",
            f"{mean(run.stale_mean for run in runs.values()):.2f}, "
            f"{max(run.stale_max for run in runs.values())}",
            f"{mean(run.accuracy_before for run in runs.values()):.3f}",
            _with_range([run.accuracy_after for run in runs.values()], digits=3),
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _with_range(values: Sequence[float], digits: int = 2) -> str:
    low, high = min(values), max(values)
    return f"{median(values):.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("start", type=Path, help="run whose policy is trained on")
    add("overrides", nargs="*", help="KEY=VALUE of the configuration")
    add("--steps", type=int, default=20)
    add("--tasks", type=int, default=8, help="of a step")
    add("--samples", type=int, default=8, help="episodes of a task")
    add("--held-out", type=int, default=200, help="tasks on which accuracy is measured")
    add("--gaps", type=float, default=0.004, help="factor of the seconds that tools take")
    add("--max-staleness", type=int, nargs="+", default=[0, 2], help="values of k")
    add("--seeds", type=int, nargs="+", default=[0, 1, 2])
    add("--out", type=Path, help="Markdown file for the table")
    options = parser.parse_args()

    workload = Workload(
        start=options.start,
        steps=options.steps,
        tasks=options.tasks,
        samples=options.samples,
        held_out=options.held_out,
        gap_scale=options.gaps,
        overrides=tuple(options.overrides),
    )
    measured = []
    for staleness, seed in run_order(options.max_staleness, options.seeds):
        measured.append(measure(workload, staleness, seed))
        print(measured[-1], file=sys.stderr, flush=True)

    text = table(measured)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")
