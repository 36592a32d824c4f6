"""Kills all processes of a run, including Ray, at random times and compares the curves."""

import random
import time
from contextlib import closing
from pathlib import Path

from tests.faults import results
from tests.faults.checks import examine
from tests.faults.observed_run import Attempt, ObservedRun
from tests.faults.options import Options
from tests.faults.reference import Reference
from tests.faults.results import Results, RunResult, WholeRunKill

MOST_STEPS_BETWEEN = 5
LONGEST_START = 30.0
"""Seconds after the start of an attempt within which a kill during its start happens."""
LAST_STEPS = 4
"""Number of steps after the last kill."""


def kill_whole_runs(
    options: Options, directory: Path, kills: int, file: Path | None = None
) -> Results:
    """Kill all processes of a run ``kills`` times, resume it, and compare all steps and episodes.

    A kill happens at any time from the first second to the last step.
    """
    found = Results()
    chance = random.Random(options.seed)
    reference = Reference(options, directory)
    try:
        runs = 0
        while len(found.kills) < kills:
            result = RunResult(f"killed_{runs}", options.seed)
            with closing(ObservedRun(options, directory / result.name)) as run:
                _kill_and_resume(run, options, chance, kills, found, file)
            runs += 1

            recorded = run.recorded()
            result.attempts = len(run.attempts)
            result.steps = len(recorded)
            result.episodes = sum(count.total() for count in run.episodes().values())
            result.failure = examine(run, reference.up_to(recorded[-1].step), options)
            found.runs.append(result)
            results.append(file, result)
    finally:
        reference.close()
    return found


def _kill_and_resume(
    run: ObservedRun,
    options: Options,
    chance: random.Random,
    kills: int,
    found: Results,
    file: Path | None,
) -> None:
    """Kill and resume the run until it is complete or has been killed ``kills`` times."""
    while True:
        attempt = run.start(resume=True)
        began = time.monotonic()
        is_last = len(found.kills) >= kills
        _wait_for_moment(run, attempt, chance, is_last)
        if attempt.has_ended or is_last:
            break

        kill = WholeRunKill(run.directory.name, len(run.recorded()), options.seed)
        kill.after = round(time.monotonic() - began, 2)
        kill.processes = attempt.kill_everything()
        found.kills.append(kill)
        results.append(file, kill)
        print(
            f"kill {len(found.kills):>2} after {kill.step:>2} steps, {kill.after:5.1f} s into the "
            f"attempt: {kill.processes} processes",
            flush=True,
        )

    if not attempt.has_ended:
        attempt.stop_after_step(options.limit())
    if attempt.driver.poll() not in (0, 143):
        attempt.kill_everything()
        raise SystemExit(f"a run cannot be continued:\n{attempt.output[-3000:]}")


def _wait_for_moment(
    run: ObservedRun, attempt: Attempt, chance: random.Random, is_last: bool
) -> None:
    """Wait for the next kill, within the start of the attempt or within a step."""
    steps = LAST_STEPS if is_last else chance.randint(0, MOST_STEPS_BETWEEN)
    if steps == 0:
        _sleep(attempt, chance.uniform(0, LONGEST_START))
        return

    seen: set[float] = set()
    while len(seen) < steps and not attempt.has_ended:
        newest = run.newest_time()
        if newest > attempt.began:
            seen.add(newest)
        time.sleep(0.1)
    _sleep(attempt, chance.uniform(0, 2))


def _sleep(attempt: Attempt, seconds: float) -> None:
    """Sleep, but at most until the attempt ends."""
    deadline = time.monotonic() + seconds
    while not attempt.has_ended and time.monotonic() < deadline:
        time.sleep(0.05)
