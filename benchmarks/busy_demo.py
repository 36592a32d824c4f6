"""How much longer the demo takes beside something else that uses the processor.

    python -m benchmarks.busy_demo                      # the whole demo, alone and with one busy loop beside it
    python -m benchmarks.busy_demo --share 0.1          # a tenth of its steps, in minutes
    python -m benchmarks.busy_demo --loops 1 2 --repeat 3

Runs the two commands of ``make demo`` in a folder of their own, as often as asked, the loads in
turn so that what else the machine does meets all of them alike. Prints seconds of each command,
tokens per second of the last steps of ``gptoss rl``, and medians as multiples of those without a
load. Busy loops run at the same priority as the demo."""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rl_loop.cluster.placement import end_with_parent

ROOT = Path(__file__).resolve().parents[1]
GPTOSS = [sys.executable, "-c", "from launch.cli import main; main()"]
STEPS = {"sft": 900, "rl": 80}
"""Of configs/sft/tiny_retool.yaml and configs/rl/tiny_retool.yaml."""


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Keep ``count`` cores busy."""
    command = [sys.executable, "-S", "-c", "while True: pass"]
    loops = [subprocess.Popen(command, preexec_fn=end_with_parent) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def train(kind: str, steps: int, folder: Path) -> float:
    """Run one of the demo's commands with ``steps`` steps and return its seconds."""
    arguments = [
        kind,
        f"configs/{kind}/tiny_retool.yaml",
        f"training.steps={steps}",
        f"output_dir={folder}",
    ]
    if kind == "rl":
        arguments.append(f"initial_weights={folder / 'tiny_retool_sft'}")
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    log = folder / f"{kind}.log"

    started = time.monotonic()
    with log.open("wb") as output:
        command = [*GPTOSS, *arguments]
        result = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=output,
            check=False,
        )
    if result.returncode:
        raise SystemExit(f"gptoss {kind} failed:\n{log.read_text()[-3000:]}")
    return time.monotonic() - started


def run_demo(loops: int, share: float) -> dict[str, float]:
    """Run the demo and return seconds of both commands and in all, and tokens per second of RL in
    its last half."""
    with tempfile.TemporaryDirectory(prefix="busy_demo_") as name:
        folder = Path(name)
        with busy_loops(loops):
            seconds = {
                kind: train(kind, max(2, round(share * steps)), folder)
                for kind, steps in STEPS.items()
            }

        metrics = (folder / "tiny_retool/metrics.jsonl").read_text()
        records = [json.loads(line) for line in metrics.splitlines()]
        speeds = [
            record["tokens_per_second"] for record in records if "tokens_per_second" in record
        ]
        recent = speeds[len(speeds) // 2 :]
        return {"seconds": sum(seconds.values()), **seconds, "tokens/s": statistics.median(recent)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--loops",
        type=int,
        nargs="+",
        default=[1],
        help="busy loops beside the demo",
    )
    parser.add_argument("--share", type=float, default=1.0, help="of the demo's training steps")
    parser.add_argument("--repeat", type=int, default=1, help="rounds of all loads")
    options = parser.parse_args()

    loads = [0, *options.loops]
    measured: dict[int, list[dict[str, float]]] = {loops: [] for loops in loads}
    for _ in range(options.repeat):
        for loops in loads:
            figures = run_demo(loops, options.share)
            measured[loops].append(figures)
            text = ", ".join(f"{name} {value:.0f}" for name, value in figures.items())
            print(f"{loops} busy loops: {text}", flush=True)

    alone = median_of_each(measured[0])
    for loops in options.loops:
        beside = median_of_each(measured[loops])
        ratios = ", ".join(f"{name} {beside[name] / alone[name]:.2f}" for name in alone)
        print(f"with {loops} busy loops, times those alone: {ratios}")


def median_of_each(rounds: list[dict[str, float]]) -> dict[str, float]:
    """Return the median over the rounds of each figure."""
    return {name: statistics.median(figures[name] for figures in rounds) for name in rounds[0]}


if __name__ == "__main__":
    main()
