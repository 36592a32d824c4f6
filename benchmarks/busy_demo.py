"""How much longer the demo takes beside something else that uses the processor.

    python benchmarks/busy_demo.py                      # the whole demo, alone and with one busy loop beside it
    python benchmarks/busy_demo.py --share 0.1          # a tenth of its steps, in minutes
    python benchmarks/busy_demo.py --loops 1 2 --repeat 3

Runs the two commands of ``make demo`` in a folder of their own, as often as asked, the loads in turn so that what else
the machine does meets all of them alike. Prints seconds of each command, tokens per second of the last steps of
``gptoss rl``, and medians as multiples of those without a load. Busy loops run at the same priority as the demo."""

import argparse
import json
import os
import shutil
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
    """``count`` processes that each keep a core busy."""
    command = [sys.executable, "-S", "-c", "while True: pass"]
    loops = [subprocess.Popen(command, preexec_fn=end_with_parent) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def train(kind: str, steps: int, folder: Path) -> float:
    """Seconds of one of the demo's commands with ``steps`` steps."""
    arguments = [kind, f"configs/{kind}/tiny_retool.yaml", f"training.steps={steps}", f"output_dir={folder}"]
    if kind == "rl":
        arguments.append(f"initial_weights={folder / 'tiny_retool_sft'}")
    began = time.monotonic()
    with open(folder / f"{kind}.log", "wb") as log:
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
        done = subprocess.run([*GPTOSS, *arguments], cwd=ROOT, env=environment, stdout=log, stderr=log, check=False)
    if done.returncode:
        raise SystemExit(f"gptoss {kind} failed:\n{(folder / f'{kind}.log').read_text()[-3000:]}")
    return time.monotonic() - began


def run_demo(loops: int, share: float) -> dict[str, float]:
    """Seconds of both commands and in all, and tokens per second of RL in its last half."""
    folder = Path(tempfile.mkdtemp(prefix="busy_demo_"))
    try:
        with busy_loops(loops):
            found = {kind: train(kind, max(2, round(share * steps)), folder) for kind, steps in STEPS.items()}
        records = [json.loads(line) for line in (folder / "tiny_retool/metrics.jsonl").read_text().splitlines()]
        speeds = [record["tokens_per_second"] for record in records if "tokens_per_second" in record]
        found["tokens/s"] = statistics.median(speeds[len(speeds) // 2 :])
        return {"seconds": found["sft"] + found["rl"], **found}
    finally:
        shutil.rmtree(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loops", type=int, nargs="+", default=[1], help="busy loops beside the demo")
    parser.add_argument("--share", type=float, default=1.0, help="of the demo's training steps")
    parser.add_argument("--repeat", type=int, default=1, help="rounds of all loads")
    options = parser.parse_args()

    loads = [0, *options.loops]
    rounds: dict[int, list[dict[str, float]]] = {loops: [] for loops in loads}
    for _ in range(options.repeat):
        for loops in loads:
            found = run_demo(loops, options.share)
            rounds[loops].append(found)
            figures = ", ".join(f"{name} {value:.0f}" for name, value in found.items())
            print(f"{loops} busy loops: {figures}", flush=True)

    def median(loops: int, name: str) -> float:
        return statistics.median(found[name] for found in rounds[loops])

    for loops in options.loops:
        ratios = {name: median(loops, name) / median(0, name) for name in rounds[0][0]}
        print(f"with {loops} busy loops, times those alone: " + ", ".join(f"{n} {r:.2f}" for n, r in ratios.items()))


if __name__ == "__main__":
    main()
