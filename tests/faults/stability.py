"""Long-running stability test: trends of memory, open files, threads and disk.

    python -m tests.faults.stability --minutes 120       # the tiny loop, asynchronous rollouts, k = 1
    python -m tests.faults.stability --minutes 10 --max-staleness 0

Samples all processes of the run every --every seconds. The first quarter is a warm-up. The
remaining samples are averaged in BLOCKS blocks of equal length, and a straight line is fitted to
the averages. Averages of adjacent blocks depend less on each other than single samples. A quantity
is flat if the 95% confidence interval of its slope contains 0 or less than --flat of its mean per
hour. Ray's objects and the bytes of its store are requested from its raylet, which needs no
dashboard.

Prints a table of slopes per hour and per 1,000 steps. Metrics and recorded episodes grow by design,
so they are counted per step. Exits with code 1 if anything else grows, or if the run ends early.
Then the table covers the time until the end, and the output of the run is printed.
"""

import argparse
import json
import math
import re
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

from tests.faults import CONFIG, Attempt, ObservedRun, Options

BLOCKS = 10
STEPS = "steps"
"""Key of samples for the number of completed steps."""
NAMED = "threads named "
"""Prefix of quantities that the table lists only if they are not flat."""
STUDENT_95 = 2.306
"""Quantile of Student's t for BLOCKS - 2 degrees of freedom."""
NAMES = {
    "ray::TrainerProcess": "trainer",
    "ray::RolloutWorker": "rollout workers",
    "-m launch": "driver",
    "raylet/raylet": "raylet",
    "gcs_server": "gcs",
    "rl_loop.forked_server": "checkers",
    "sandbox": "sandboxes",
    "bwrap": "sandboxes",
    "dashboard": "dashboard",
}
"""Process name by a part of its command line. The first match counts."""


@dataclass(frozen=True)
class Slope:
    """A straight line, fitted to the measurements of one quantity."""

    mean: float
    per_hour: float
    error: float
    """Half of the 95% confidence interval of ``per_hour``."""

    def is_flat(self, share: float) -> bool:
        least = max(0.0, abs(self.per_hour) - self.error)
        return least <= share * abs(self.mean)


def fit(hours: Sequence[float], values: Sequence[float]) -> Slope:
    """Fit a line to the averages of BLOCKS blocks.

    Args:
        hours: time of each value, at least two for each block.
        values: measurements.
    """
    x = np.array([block.mean() for block in np.array_split(np.asarray(hours), BLOCKS)])
    y = np.array([block.mean() for block in np.array_split(np.asarray(values), BLOCKS)])
    slope, start = np.polyfit(x, y, 1)
    spread = ((x - x.mean()) ** 2).sum()
    variance = ((y - start - slope * x) ** 2).sum() / (BLOCKS - 2)
    return Slope(float(y.mean()), float(slope), STUDENT_95 * math.sqrt(variance / spread))


def sample(attempt: Attempt) -> dict[str, float]:
    """Measure all processes of a run. Processes of one name are summed."""
    found: dict[str, float] = defaultdict(float)
    address = ""
    for process in attempt.processes():
        with suppress(psutil.Error):
            line = " ".join(process.cmdline())
            name = next((name for part, name in NAMES.items() if part in line), "others")
            found[f"{name}: own memory, MB"] += own_memory(process.pid) / 1e6
            found[f"{name}: open files"] += process.num_fds()
            found[f"{name}: threads"] += process.num_threads()
            for thread in thread_names(process.pid):
                found[f"{name}: {NAMED}{thread}"] += 1
            for argument in process.cmdline():
                if "raylet" in line and argument.startswith("--gcs-address="):
                    address = argument.partition("=")[2]
    found["all: processes"] = len(attempt.processes())
    if address:
        found |= ray_objects(address)
    return dict(found)


def own_memory(pid: int) -> int:
    """Return the bytes that a process has written, in memory and swapped out.

    Pages of files, such as libraries, are excluded. Other programs of the machine determine how
    many of these pages count as shared (psutil's ``uss``). Ray's store is counted separately.
    """
    kilobytes = 0
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            key, _, value = line.partition(":")
            if key in ("RssAnon", "VmSwap"):
                kilobytes += int(value.split()[0])
    return 1024 * kilobytes


def thread_names(pid: int) -> list[str]:
    """Return the name of every thread of a process. Names of pool threads have no numbers."""
    names = []
    for thread in Path(f"/proc/{pid}/task").glob("*/comm"):
        with suppress(OSError):  # the process has exited
            names.append(re.sub(r"\d+", "#", thread.read_text().strip()))
    return names


def ray_objects(address: str) -> dict[str, float]:
    """Request the contents of processes and stores from the raylets of the Ray at ``address``.

    Return an empty result if Ray does not answer, because it is busy or not ready.
    """
    from ray._private.internal_api import node_stats
    from ray._raylet import GcsClient

    found: dict[str, float] = defaultdict(float)
    try:
        nodes = GcsClient(address=address).get_all_node_info(timeout=10)
        for node in nodes.values():
            stats = node_stats(node.node_manager_address, node.node_manager_port, False)
            found["ray: objects in its store"] += stats.store_stats.num_local_objects
            found["ray: bytes in its store, MB"] += stats.store_stats.object_store_bytes_used / 1e6
            for process in stats.core_workers_stats:
                found["ray: references to objects"] += process.num_object_refs_in_scope
                found["ray: objects owned"] += process.num_owned_objects
    except Exception:
        return {}
    return dict(found)


def disk_bytes(directory: Path, but: Sequence[str]) -> int:
    """Return the total size of files below a directory, except in folders with these names."""
    total = 0
    for path in directory.rglob("*"):
        if not any(name in path.parts for name in but):
            with suppress(OSError):
                total += path.stat().st_size
    return total


GROWING = ("episodes", "metrics.jsonl", "tensorboard", "output.log")
"""Files and folders that a run extends with every step."""


def watch(
    run: ObservedRun, minutes: float, every: float, record: Path | None = None
) -> tuple[list[float], list[dict[str, float]], str]:
    """Take samples while the run runs.

    Args:
        run: run to start.
        minutes: duration after the first step.
        every: seconds between two samples.
        record: file that gets every sample immediately as a JSON line.

    Returns:
        The times in hours, the samples, and the output of the run if it ended early.
    """
    attempt = run.start()
    while not run.curve():
        if attempt.has_ended:
            raise SystemExit(f"the run failed:\n{attempt.output[-3000:]}")
        time.sleep(0.5)

    began = time.monotonic()
    times: list[float] = []
    samples: list[dict[str, float]] = []
    while time.monotonic() - began < 60 * minutes and not attempt.has_ended:
        taken = sample(attempt)
        taken["disk but records, MB"] = disk_bytes(run.files.path, GROWING) / 1e6
        steps = max(1, len(run.curve()))
        taken[STEPS] = steps
        records = disk_bytes(run.files.path, ()) / 1e3 - taken["disk but records, MB"] * 1e3
        taken["records per step, kB"] = records / steps
        if attempt.has_ended:  # some processes had exited during the sample
            break

        times.append((time.monotonic() - began) / 3600)
        samples.append(taken)
        if record is not None:
            with record.open("a") as lines:
                lines.write(json.dumps({"hours": times[-1], **taken}) + "\n")
        time.sleep(every)

    ended = attempt.output[-3000:] if attempt.has_ended else ""
    attempt.driver.terminate()
    attempt.driver.wait()
    left = attempt.leftovers(60)
    if left:
        raise SystemExit(f"processes were left behind: {left}")
    return times, samples, ended


def slopes(times: Sequence[float], samples: Sequence[dict[str, float]]) -> dict[str, Slope]:
    """Fit every quantity after the warm-up."""
    first = len(times) // 4
    names = sorted({name for taken in samples for name in taken} - {STEPS})
    fitted = {}
    for name in names:
        # A missing process uses no memory. If Ray does not answer, its values are unknown.
        missing = math.nan if name.startswith("ray: ") else 0.0
        values = [taken.get(name, missing) for taken in samples[first:]]
        known = [(t, v) for t, v in zip(times[first:], values, strict=True) if not math.isnan(v)]
        if len(known) >= 2 * BLOCKS:
            fitted[name] = fit([t for t, _ in known], [v for _, v in known])
    return fitted


def report(fitted: dict[str, Slope], share: float, steps_per_hour: float = 0.0) -> str:
    """Return a Markdown table, with slopes per step if there are steps."""
    per_step = ["per 1,000 steps"] if steps_per_hour else []
    columns = ["quantity", "mean", "per hour", "95 %", *per_step, ""]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for name, slope in fitted.items():
        if NAMED in name and slope.is_flat(share):
            continue
        verdict = "flat" if slope.is_flat(share) else "**grows**"
        if slope.per_hour < 0 and verdict != "flat":
            verdict = "falls"
        cells = [name, f"{slope.mean:,.1f}", f"{slope.per_hour:+,.2f}", f"± {slope.error:,.2f}"]
        if steps_per_hour:
            cells.append(f"{1e3 * slope.per_hour / steps_per_hour:+,.3f}")
        lines.append(f"| {' | '.join([*cells, verdict])} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--every", type=float, default=5.0, help="seconds between samples")
    parser.add_argument("--max-staleness", type=int, default=1, help="algorithm.max_staleness")
    parser.add_argument("--flat", type=float, default=0.01, help="of the mean, per hour")
    parser.add_argument("--json", type=Path, help="append every sample to this file, a line each")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory(prefix="stability_") as directory:
        run = ObservedRun(
            Options(steps=10**6, deterministic=False),
            Path(directory) / "run",
            [f"algorithm.max_staleness={options.max_staleness}"],
        )
        times, samples, ended = watch(run, options.minutes, options.every, options.json)
        steps = len(run.curve())

    if len(samples) < 2:
        raise SystemExit(f"the run ended before there were two samples:\n{ended}")

    fitted = slopes(times, samples)
    print(f"{60 * times[-1]:.1f} minutes, {steps} steps of {CONFIG.stem}, {len(samples)} samples\n")
    first = len(times) // 4
    rate = (samples[-1][STEPS] - samples[first][STEPS]) / (times[-1] - times[first])
    print(report(fitted, options.flat, rate))
    if ended:
        print(f"\nthe run ended by itself:\n{ended}")
    if ended or any(
        slope.per_hour > 0 and not slope.is_flat(options.flat) for slope in fitted.values()
    ):
        sys.exit(1)


if __name__ == "__main__":
    main()
