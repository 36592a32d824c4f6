"""Recovery of a full-size run after its processes are killed.

    python -m benchmarks.loop kills configs/rl/gpt-oss-20b-adapter_1x1.yaml \\
        --victims server driver --out kills.json training.checkpoint_every=1

Needs the GPUs of the configuration. Runs ``gptoss rl`` with random weights (``random_policy.py``).
They stay in ``--scratch`` until the end, because a run without a checkpoint restarts from them.
After every recorded step, the next victim gets SIGKILL ``--after`` seconds into the following step.
The benchmark checks the following:

- The run continues ("recovered") or ends.
- If it ends, it prints the reason (unless the driver was killed), leaves no process, and continues
  with ``--resume`` ("resumed").
- At the end, every step is recorded once, and each of its episodes is trained on once.

``tests/faults`` has many faults with tiny models and compares losses bit by bit. This benchmark
shows the times at full size: seconds until the run detects the kill, and until the next step.
Prints a JSON line per victim, and writes all of them to ``--out``.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import signal
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.loop import run as reference_run
from rl_loop.config.run import RlConfig
from rl_loop.tracking.episode_reader import EpisodeReader
from rl_loop.tracking.run_directory import RunDirectory, RunDirectoryError, read_json_lines
from tests.faults.observed_run import Attempt

VICTIMS = {
    "server": "sglang.launch_server",
    "trainer": "ray::TrainerProcess",
    "worker": "ray::RolloutWorker",
    "driver": "",
}
"""Substring of the command line of each kind of process. The driver is known by its id."""
LEFTOVER_SECONDS = 60.0
"""Time after the end of a run within which all of its processes have to exit, in seconds."""


@dataclass
class Kill:
    """A victim and the outcome of its kill."""

    victim: str
    step: int
    """Step in which the victim was killed, counted from 0."""
    outcome: str = ""
    """Either "recovered" or "resumed"."""
    seconds_to_end: float | None = None
    """Seconds from the kill to the end of the driver; None if the run continued."""
    seconds_to_next_step: float = 0.0
    """Seconds until the next recorded step, from the kill or from the start of the resumed run."""
    error: str = ""
    """Last line of a run that ended; empty if it continued."""


class FullSizeRun:
    """A run with all of its attempts."""

    def __init__(self, options: argparse.Namespace, config: RlConfig, scratch: Path) -> None:
        self.options = options
        self.scratch = scratch
        self.run = RunDirectory(config.directory)
        self.attempts: list[Attempt] = []
        self._arguments = [*run_overrides(options, scratch), *options.overrides]

    def start(self, resume: bool = False) -> Attempt:
        """Start the run, or resume it."""
        log = self.scratch / f"attempt_{len(self.attempts)}.log"
        arguments = [*self._arguments, *(["--resume"] if resume else [])]
        self.attempts.append(Attempt(self.options.config.resolve(), arguments, log))
        return self.attempts[-1]

    def steps(self) -> list[int]:
        """Return the recorded steps in the order of the file."""
        try:
            lines = read_json_lines(self.run.metrics)
        except RunDirectoryError:  # the file does not exist yet, or its last line is incomplete
            return []
        return [line["step"] for line in lines if line.get("loss") is not None]

    def wait_for_steps(self, attempt: Attempt, count: int) -> bool:
        """Wait until ``count`` steps are recorded.

        Returns:
            False if the attempt ends before.

        Raises:
            SystemExit: after ``--patience`` seconds.
        """
        deadline = time.monotonic() + self.options.patience
        while len(self.steps()) < count:
            if attempt.has_ended:
                return len(self.steps()) >= count
            if time.monotonic() > deadline:
                raise SystemExit(f"nothing for {self.options.patience:.0f} s:\n{tail(attempt)}")
            time.sleep(0.2)
        return True

    def kill(self, attempt: Attempt, victim: str) -> tuple[Attempt, Kill]:
        """Kill a process in the current step and wait for the next step.

        Args:
            attempt: running attempt.
            victim: key in VICTIMS.

        Returns:
            The attempt that continues, and the outcome.

        Raises:
            SystemExit: if the run does not recover as described in the module.
        """
        recorded = len(self.steps())
        kill = Kill(victim, recorded)
        if victim == "driver":
            attempt.driver.kill()
        else:
            processes = attempt.processes(VICTIMS[victim])
            if not processes:
                raise SystemExit(f"no {victim} is running")
            processes[0].kill()

        began = time.monotonic()
        if self.wait_for_steps(attempt, recorded + 1) and victim != "driver":
            kill.outcome = "recovered"
            kill.seconds_to_next_step = time.monotonic() - began
            return attempt, kill

        kill.seconds_to_end = time.monotonic() - began
        kill.error = attempt.last_error(seconds=2.0)
        if not kill.error and victim != "driver":
            raise SystemExit(f"the run ended without saying why:\n{tail(attempt)}")
        if left := attempt.leftovers(LEFTOVER_SECONDS):
            raise SystemExit(f"left behind after the death of the {victim}: {left}")

        following = self.start(resume=bool(self.run.existing()))
        began = time.monotonic()
        # A step after the latest checkpoint is repeated, and replaces the old record.
        if not self.wait_for_steps(following, recorded + 1):
            raise SystemExit(f"the run cannot be continued:\n{tail(following)}")
        kill.outcome = "resumed"
        kill.seconds_to_next_step = time.monotonic() - began
        return following, kill

    def check(self, episodes_per_step: int) -> None:
        """Check that every step and each of its episodes is recorded once.

        Raises:
            SystemExit: if a step or an episode is missing or recorded twice.
        """
        steps = self.steps()
        if steps != list(range(1, len(steps) + 1)):
            raise SystemExit(f"steps are missing or were recorded twice: {steps}")

        reader = EpisodeReader(self.run.episodes)
        reader.refresh()
        counts: dict[int, int] = dict.fromkeys(steps, 0)
        for row in reader.summary_table.to_pylist():
            if row["split"] == "train" and row["invalid"] is None and row["step"] in counts:
                counts[row["step"]] += 1
        if set(counts.values()) != {episodes_per_step}:
            raise SystemExit(f"episodes per step, {episodes_per_step} expected: {counts}")


def run_overrides(options: argparse.Namespace, scratch: Path) -> list[str]:
    """Return the overrides of the run that the benchmark needs."""
    steps = len(options.victims) + 1
    return [
        "name=kills",
        f"output_dir={scratch}",
        f"initial_weights={scratch / 'weights'}",
        f"training.steps={steps}",
        f"evaluate_every={steps + 1}",
        "tasks.held_out_tasks=4",
        "optimizer.schedule=constant",
        "reward.tool_use_bonus=true",
        # Random weights agree less than trained ones.
        "canary_tolerance=10",
    ]


def tail(attempt: Attempt) -> str:
    """Return the end of an attempt's output."""
    return attempt.output[-3000:]


def main() -> None:
    options = parse_arguments()
    # On SIGTERM, exit normally, so that the run is stopped and temporary files are removed.
    signal.signal(signal.SIGTERM, lambda *unused: sys.exit(128 + signal.SIGTERM))
    if options.scratch is not None:
        options.scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.scratch, prefix="kills_") as directory:
        scratch = Path(directory)
        settings = [*run_overrides(options, scratch), *options.overrides]
        config = reference_run.load_rl_config(options.config, settings)
        write_weights(config, options.turn_tokens)
        kills = kill_all(options, config, scratch)
    if options.out:
        options.out.write_text(json.dumps([asdict(kill) for kill in kills], indent=1))


def write_weights(config: RlConfig, turn_tokens: int) -> None:
    """Write the random policy in a separate process, so that its GPU context is freed."""
    began = time.monotonic()
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        pool.submit(reference_run.write_weights, config, turn_tokens).result()
    print(f"random weights written in {time.monotonic() - began:.1f} s", flush=True)


def kill_all(options: argparse.Namespace, config: RlConfig, scratch: Path) -> list[Kill]:
    """Kill each victim in a separate step, let the run finish, and check it.

    Args:
        options: command line.
        config: configuration of the run.
        scratch: directory of weights and run.

    Returns:
        The outcome of each kill.
    """
    run = FullSizeRun(options, config, scratch)
    began = time.monotonic()
    attempt = run.start()
    kills: list[Kill] = []
    try:
        if not run.wait_for_steps(attempt, 1):
            raise SystemExit(f"the run does not start:\n{tail(attempt)}")
        print(f"first step after {time.monotonic() - began:.1f} s", flush=True)

        for victim in options.victims:
            time.sleep(options.after)
            attempt, kill = run.kill(attempt, victim)
            kills.append(kill)
            print(json.dumps(asdict(kill)), flush=True)

        attempt.driver.wait(options.patience)
        if attempt.driver.returncode != 0:
            raise SystemExit(f"the run did not come to its end:\n{tail(attempt)}")
        run.check(config.rollout.tasks_per_step * config.rollout.samples_per_task)
    finally:
        for started in run.attempts:
            started.kill_everything()
    print(f"{len(run.steps())} steps, each once, with all of their episodes", flush=True)
    return kills


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("config", type=Path, help="of `gptoss rl`")
    add("--victims", nargs="+", choices=VICTIMS, default=["server", "driver"])
    add("--after", type=float, default=5.0, help="seconds into the step")
    add("--patience", type=float, default=900.0, help="seconds for a start and a step")
    add("--turn-tokens", type=int, default=300, help="mean length of a turn's text")
    add("--scratch", type=Path, help="where a directory for weights and run is made")
    add("--out", type=Path, help="JSON file")
    add("overrides", nargs="*", help="key=value of the configuration")
    return parser.parse_intermixed_args()
