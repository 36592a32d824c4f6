"""What rollouts that run ahead bring to the real loop, on CPUs: a tiny policy whose tools are slow.

    gptoss sft configs/sft/tiny_retool.yaml
    python benchmarks/async_loop.py runs/tiny_retool_sft
    python benchmarks/async_loop.py runs/tiny_retool_sft --staleness 0 1 2 4 --order ready_first

Trainer, engine, agent loop and sandbox are real and run in this process; every call of a tool waits
as long as published (``async_rollouts.GAPS``) times --gaps before it runs. All runs take the same
steps on the same tasks; held-out accuracy is measured before and after, not in between.

Columns:

    s/step            wall clock per step, its mean over all steps but the first; with the range over seeds
    x                 of the first row's, over this one's
    rollout           share of that time in which the trainer waits for episodes
    stale             mean and largest age of trained tokens, in weight versions
    accuracy          held-out, after the last step; with the range over seeds
"""

import argparse
import asyncio
import random
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from async_rollouts import GAPS, quantile
from in_process import LocalRollouts, local_loop

from rl_loop.config.load import load_config
from rl_loop.config.run import RlConfig
from rl_loop.sandbox import ExecutionResult
from rl_loop.tracking.run_directory import read_json_lines

CONFIG = Path(__file__).parent.parent / "configs/rl/tiny_retool.yaml"


class SlowSandbox:
    """A sandbox before which every program waits for as long as a tool takes."""

    def __init__(self, sandbox: Any, gap_scale: float, seed: int) -> None:
        self._sandbox = sandbox
        self._gap_scale = gap_scale
        self._chance = random.Random(seed)

    async def run(
        self, code: str, history: Sequence[str] = (), on_begin: Callable[[], None] | None = None
    ) -> ExecutionResult:
        await asyncio.sleep(self._gap_scale * quantile(GAPS, self._chance.random()))
        result: ExecutionResult = await self._sandbox.run(code, history, on_begin=on_begin)
        return result

    def close(self) -> Awaitable[None]:
        closing: Awaitable[None] = self._sandbox.close()
        return closing


@dataclass(frozen=True)
class Measured:
    """One run."""

    seconds_per_step: float
    waiting_share: float
    staleness_mean: float
    staleness_max: float
    accuracy: float
    """Held-out, after the last step."""


def measure(options: argparse.Namespace, staleness: int, seed: int) -> Measured:
    """Train with one k and one seed."""
    with tempfile.TemporaryDirectory() as directory:
        overrides = [
            f"initial_weights={options.start}",
            f"output_dir={directory}",
            f"seed={seed}",
            f"training.steps={options.steps}",
            f"training.checkpoint_every={options.steps}",
            "optimizer.schedule=constant",
            f"evaluate_every={options.steps + 1}",
            "rollout.workers=1",
            f"rollout.tasks_per_step={options.tasks}",
            f"rollout.samples_per_task={options.samples}",
            f"algorithm.max_staleness={staleness}",
            f"algorithm.order={options.order}",
            *options.overrides,
        ]
        config = load_config(CONFIG, RlConfig, overrides)
        rollouts = LocalRollouts(config)
        slow: Any = SlowSandbox(rollouts._worker.sandbox, options.gaps, seed)
        rollouts._worker.sandbox = slow
        try:
            with local_loop(config, rollouts) as loop:
                loop.train()
                after = loop.evaluate().values()
                steps = read_json_lines(loop.recorder.run.metrics)[1 : options.steps]
        finally:
            rollouts.close()

    seconds = mean(step["seconds/step"] for step in steps)
    return Measured(
        seconds_per_step=seconds,
        waiting_share=mean(step["seconds/rollout"] for step in steps) / seconds,
        staleness_mean=mean(step.get("rollout/staleness_mean", 0.0) for step in steps),
        staleness_max=max(step["rollout/staleness_max"] for step in steps),
        accuracy=after["held_out/accuracy"],
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("start", type=Path, help="run whose policy is trained on")
    add("overrides", nargs="*", help="KEY=VALUE of the configuration")
    add("--steps", type=int, default=12)
    add("--tasks", type=int, default=6, help="of a step")
    add("--samples", type=int, default=4, help="episodes of a task")
    add("--gaps", type=float, default=0.02, help="factor of the seconds that tools take")
    add("--staleness", type=int, nargs="+", default=[0, 2], help="values of k")
    add("--order", choices=("in_order", "ready_first"), default="in_order")
    add("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()

    print("| k | s/step | x | rollout | stale | accuracy |\n|---|---|---|---|---|---|", flush=True)
    slowest: float | None = None
    for staleness in options.staleness:
        runs = [measure(options, staleness, seed) for seed in options.seeds]
        seconds = [run.seconds_per_step for run in runs]
        accuracy = [run.accuracy for run in runs]
        slowest = slowest or mean(seconds)
        cells = (
            f"{staleness}",
            f"{mean(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f})",
            f"{slowest / mean(seconds):.2f}",
            f"{mean(run.waiting_share for run in runs):.0%}",
            f"{mean(run.staleness_mean for run in runs):.2f}, "
            f"{max(run.staleness_max for run in runs):.0f}",
            f"{mean(accuracy):.3f} ({min(accuracy):.3f} to {max(accuracy):.3f})",
        )
        print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
