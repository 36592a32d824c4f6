"""Watches what a long run holds: memory, open files, threads and disk, with slopes.

    python -m benchmarks.soak --minutes 120       # the tiny loop, rollouts a step ahead
    python -m benchmarks.soak --minutes 10 --staleness 0

Takes a sample of all processes of the run every --every seconds. After the warm-up, the first
quarter, the samples are averaged in BLOCKS blocks of equal length, through which a straight line is
laid: averages of neighbouring blocks depend little on one another, as single samples would. A
quantity is flat if its slope's 95 % confidence interval contains 0 or less than --flat of its mean
per hour. Ray's objects are counted where its dashboard runs. What grows by intention, metrics and
recorded episodes, is counted per step. Ends with status 1 if anything else grows.
"""

import argparse
import json
import math
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from benchmarks.faults import CONFIG, Attempt, Course, Options

BLOCKS = 10
STUDENT_95 = 2.306
"""Quantile of Student's t for BLOCKS - 2 degrees of freedom."""
NAMES = {
    "ray::TrainerProcess": "trainer",
    "ray::RolloutWorker": "rollout workers",
    "-m launch": "driver",
    "raylet/raylet": "raylet",
    "gcs_server": "gcs",
    "math_verify_server": "checkers",
    "sandbox": "sandboxes",
    "bwrap": "sandboxes",
    "dashboard": "dashboard",
}
"""What a part of a command line says that a process is, the first that is contained."""


@dataclass(frozen=True)
class Slope:
    """A straight line through what was measured of one quantity."""

    mean: float
    per_hour: float
    error: float
    """Half the 95 % confidence interval of ``per_hour``."""

    def is_flat(self, share: float) -> bool:
        least = max(0.0, abs(self.per_hour) - self.error)
        return least <= share * abs(self.mean)


def fit(hours: Sequence[float], values: Sequence[float]) -> Slope:
    """Fit a line to the averages of BLOCKS blocks.

    Args:
        hours: when each value was measured, at least two for each block.
        values: what was measured.
    """
    x = np.array([block.mean() for block in np.array_split(np.asarray(hours), BLOCKS)])
    y = np.array([block.mean() for block in np.array_split(np.asarray(values), BLOCKS)])
    slope, start = np.polyfit(x, y, 1)
    spread = ((x - x.mean()) ** 2).sum()
    variance = ((y - start - slope * x) ** 2).sum() / (BLOCKS - 2)
    return Slope(float(y.mean()), float(slope), STUDENT_95 * math.sqrt(variance / spread))


def sample(attempt: Attempt) -> dict[str, float]:
    """Measure all processes of a run: summed over those of one name."""
    found: dict[str, float] = defaultdict(float)
    address = ""
    for process in attempt.processes():
        with suppress(psutil.Error):
            line = " ".join(process.cmdline())
            name = next((name for part, name in NAMES.items() if part in line), "others")
            # Shared pages in equal parts: those of Ray's store would count in every process.
            found[f"{name}: memory, MB"] += process.memory_full_info().pss / 1e6
            found[f"{name}: open files"] += process.num_fds()
            found[f"{name}: threads"] += process.num_threads()
            for argument in process.cmdline():
                if "raylet" in line and argument.startswith("--gcs-address="):
                    address = argument.partition("=")[2]
    found["all: processes"] = len(attempt.processes())
    if address:
        found["ray: objects"] = ray_objects(address)
    return dict(found)


def ray_objects(address: str) -> float:
    """Return how many objects Ray's processes know; NaN if Ray does not say in time."""
    from ray.util.state import list_objects

    try:
        return float(len(list_objects(address=address, limit=10_000, timeout=10)))
    except Exception:  # its server is busy, or not there yet
        return math.nan


def disk_bytes(directory: Path, but: Sequence[str]) -> int:
    """Add up the files below a directory, but for those under folders of these names."""
    total = 0
    for path in directory.rglob("*"):
        if not any(name in path.parts for name in but):
            with suppress(OSError):
                total += path.stat().st_size
    return total


GROWING = ("episodes", "metrics.jsonl", "tensorboard", "output.log")
"""What a run adds to with every step."""


def watch(
    course: Course, minutes: float, every: float
) -> tuple[list[float], list[dict[str, float]]]:
    """Run for so long and take samples. Returns their times in hours, and what was measured."""
    attempt = course.start()
    while not course.losses():
        if attempt.has_ended:
            raise SystemExit(f"the run failed:\n{attempt.said[-3000:]}")
        time.sleep(0.5)

    began = time.monotonic()
    times: list[float] = []
    samples: list[dict[str, float]] = []
    while time.monotonic() - began < 60 * minutes and not attempt.has_ended:
        taken = sample(attempt)
        taken["disk but records, MB"] = disk_bytes(course.run.path, GROWING) / 1e6
        steps = max(1, len(course.losses()))
        records = disk_bytes(course.run.path, ()) / 1e3 - taken["disk but records, MB"] * 1e3
        taken["records per step, kB"] = records / steps
        times.append((time.monotonic() - began) / 3600)
        samples.append(taken)
        time.sleep(every)

    attempt.driver.terminate()
    attempt.driver.wait()
    left = attempt.leftovers(60)
    if left:
        raise SystemExit(f"processes were left behind: {left}")
    return times, samples


def slopes(times: Sequence[float], samples: Sequence[dict[str, float]]) -> dict[str, Slope]:
    """Fit every quantity after the warm-up."""
    first = len(times) // 4
    names = sorted({name for taken in samples for name in taken})
    fitted = {}
    for name in names:
        values = [taken.get(name, 0.0) for taken in samples[first:]]
        known = [(t, v) for t, v in zip(times[first:], values, strict=True) if not math.isnan(v)]
        if len(known) >= 2 * BLOCKS:
            fitted[name] = fit([t for t, _ in known], [v for _, v in known])
    return fitted


def report(fitted: dict[str, Slope], share: float) -> str:
    """Write a Markdown table."""
    lines = ["| quantity | mean | per hour | 95 % | |", "|---|---|---|---|---|"]
    for name, slope in fitted.items():
        verdict = "flat" if slope.is_flat(share) else "**grows**"
        if slope.per_hour < 0 and verdict != "flat":
            verdict = "falls"
        lines.append(
            f"| {name} | {slope.mean:,.1f} | {slope.per_hour:+,.2f} | ± {slope.error:,.2f} | {verdict} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--every", type=float, default=5.0, help="seconds between samples")
    parser.add_argument("--staleness", type=int, default=1, help="steps that rollouts run ahead")
    parser.add_argument("--flat", type=float, default=0.01, help="of the mean, per hour")
    parser.add_argument("--json", type=Path, help="write all samples to this file")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory(prefix="soak_") as directory:
        course = Course(
            Options(steps=10**6, deterministic=False),
            Path(directory) / "run",
            [f"algorithm.max_staleness={options.staleness}"],
        )
        times, samples = watch(course, options.minutes, options.every)
        steps = len(course.losses())

    fitted = slopes(times, samples)
    print(f"{options.minutes:g} minutes, {steps} steps of {CONFIG.stem}, {len(samples)} samples\n")
    print(report(fitted, options.flat))
    if options.json is not None:
        options.json.write_text(json.dumps({"hours": times, "samples": samples}))
    if any(slope.per_hour > 0 and not slope.is_flat(options.flat) for slope in fitted.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
