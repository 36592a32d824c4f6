"""Injects faults in sequence and checks the outcome of each."""

import math
import random
import shutil
import time
from collections import Counter
from contextlib import closing, suppress
from pathlib import Path

import psutil

from tests.faults import results
from tests.faults.checks import (
    compare_curves,
    examine,
    find_named_damage,
    judge_outcome,
)
from tests.faults.kinds import PROCESSES, Kind, Moment, NotPossibleYetError, possible_kinds
from tests.faults.observed_run import Attempt, ObservedRun, small_file_system
from tests.faults.options import Options
from tests.faults.pairs import SEPARATOR, OnlyFirstError, find_kind, plan_pairs
from tests.faults.reference import Reference
from tests.faults.results import Injection, Results, RunResult

MOST_RETRIES = 20
"""Maximum number of postponed faults per kind, if a requirement is missing."""
START_PATIENCE = 5
"""Multiple of the time limit for a fault that an attempt may take to its first step."""
STEPS_TO_HEAL = 2
"""Steps after a fault that show recovery. The fault may come too late for the running step."""
STEPS_UNNOTICED = 10
"""Steps after a fault that show that a run ignores it although it should end."""


class FaultInjector:
    """Fault-injection test that injects the missing faults of its file of results."""

    def __init__(self, options: Options, directory: Path, file: Path | None = None) -> None:
        """Plan the faults.

        Args:
            directory: parent of the run directories. Each is deleted after its run.
            file: file of results; None to write no results.
        """
        self.options = options
        self.results = results.read([file] if file else [])
        self.left = self._plan(self.results)
        self._file = file
        self._directory = directory
        # A continued test gets other times than the interrupted one. A new test gets the same
        # times.
        self._random = random.Random(f"{options.seed}/{len(self.results.injections)}")
        # Infinite until the first step, because the start time depends on the machine.
        self._planned_end = math.inf
        self._retries: Counter[str] = Counter()
        self._injected = 0
        self._reference: Reference | None = None

    def _plan(self, done: Results) -> list[str]:
        """Return a random plan with equally frequent kinds, without the faults already injected."""
        chance = random.Random(self.options.seed)
        kinds = possible_kinds(self.options.kinds, servers=self.options.servers > 0)
        count = self.options.count or len(kinds)
        plan: list[str] = []
        if self.options.pairs:
            plan = plan_pairs(kinds, count, chance)
        while len(plan) < count:
            plan += chance.sample(kinds, len(kinds))

        of_seed = [fault.kind for fault in done.counted() if fault.seed == self.options.seed]
        left = []
        was_done = Counter(of_seed)
        for kind in plan[:count]:
            if was_done[kind] > 0:
                was_done[kind] -= 1
            else:
                left.append(kind)
        return left

    @property
    def _is_over(self) -> bool:
        return not self.left or time.monotonic() > self._end

    @property
    def _end(self) -> float:
        """Monotonic time after which no fault is injected."""
        return self._planned_end if self._injected >= self.options.fewest else math.inf

    def run(self) -> Results:
        """Start runs until all faults have been injected or the time is up."""
        self._reference = Reference(self.options, self._directory)
        try:
            runs = len(self.results.runs)
            while not self._is_over:
                directory = self._directory / f"run_{runs}"
                with (
                    small_file_system(directory),
                    closing(ObservedRun(self.options, directory)) as run,
                ):
                    self._inject_into_run(run)
                shutil.rmtree(directory, ignore_errors=True)
                runs += 1
        finally:
            self._reference.close()
        return self.results

    # -- runs -------------------------------------------------------------------------------------

    def _inject_into_run(self, run: ObservedRun) -> None:
        name = f"{run.directory.name}_{int(time.time())}"
        result = RunResult(name, self.options.seed)
        attempt = run.start()
        if not run.wait_for_step(attempt, START_PATIENCE * self.options.limit()):
            attempt.kill_everything()
            raise SystemExit(f"a run has not begun:\n{attempt.output[-3000:]}")

        if self._planned_end == math.inf:
            self._planned_end = time.monotonic() + 60 * self.options.minutes
        injected = 0
        while injected < self.options.faults_per_run and not self._is_over:
            if len(run.recorded()) > self.options.steps:
                break
            time.sleep(self._random.uniform(0, 3))
            if attempt.has_ended:
                if not run.is_finished():
                    result.failure = f"it ended without a fault: {attempt.last_error()}"
                break

            injection = Injection(self.left.pop(0), len(run.recorded()), run=name)
            injection.seed = self.options.seed
            attempt = self._inject(run, attempt, injection)
            self._record(injection)
            if injection.outcome != "not injected":
                injected += 1
                self._injected += 1
            if injection.failure or run.is_finished():
                break
        self._end_run(run, attempt, result)

    def _end_run(self, run: ObservedRun, attempt: Attempt, result: RunResult) -> None:
        """Stop the run and check all of its records."""
        if not result.failure and not attempt.stop_after_step(self.options.limit()):
            result.failure = f"it cannot be stopped: {attempt.last_error()}"
        if not attempt.has_ended:
            attempt.kill_everything()

        assert self._reference is not None
        steps = run.recorded()
        if steps and not result.failure:
            reference = self._reference.up_to(steps[-1].step)
            result.failure = examine(run, reference, self.options)
        result.attempts = len(run.attempts)
        result.steps = len(steps)
        with suppress(Exception):  # an unreadable file has been reported already
            result.episodes = sum(count.total() for count in run.episodes().values())
        self.results.runs.append(result)
        results.append(self._file, result)
        print(f"{result.name}: {result.steps} steps  {result.failure or 'ok'}", flush=True)

    # -- faults -----------------------------------------------------------------------------------

    def _inject(self, run: ObservedRun, attempt: Attempt, injection: Injection) -> Attempt:
        """Inject a fault and wait for its outcome. Return the attempt that continues the run."""
        moment = Moment(run, attempt, self._random, self.options, self._end)
        with moment.undo:
            try:
                injection.detail = find_kind(injection.kind).inject(moment)
            except OnlyFirstError as one:
                self._put_back(injection.kind)
                injection.kind = one.kind
                injection.detail = one.detail
            except (NotPossibleYetError, psutil.NoSuchProcess, FileNotFoundError) as error:
                self._put_off(injection, str(error))
            except AssertionError as error:
                injection.failure = str(error)
            if injection.outcome != "not injected":
                self._await_outcome(run, attempt, injection)
            if injection.outcome != "not injected":
                injection.failure = injection.failure or judge_outcome(attempt, injection)

        if attempt.has_ended and not run.is_finished():
            attempt = self._resume(run, attempt, injection)
        assert self._reference is not None
        injection.failure = injection.failure or compare_curves(
            run, self._reference.curve(), self.options.tolerance
        )
        return attempt

    def _put_off(self, injection: Injection, reason: str) -> None:
        injection.outcome = "not injected"
        injection.message = reason
        self._put_back(injection.kind)

    def _put_back(self, kind: str) -> None:
        self._retries[kind] += 1
        if self._retries[kind] <= MOST_RETRIES:
            self.left.insert(min(2, len(self.left)), kind)

    def _await_outcome(self, run: ObservedRun, attempt: Attempt, injection: Injection) -> None:
        """Wait until the run has recorded steps that began after the fault, or has ended."""
        kind = find_kind(injection.kind)
        enough = STEPS_UNNOTICED if kind.must_end else STEPS_TO_HEAL
        began = time.time()
        steps_after: set[float] = set()
        while not injection.outcome:
            # the load may increase during the wait
            injection.limit = max(injection.limit, self.options.limit())
            newest = run.newest_time()
            if newest > began:
                steps_after.add(newest)
            if attempt.has_ended and run.is_finished():
                injection.outcome = "recovered"
                if len(steps_after) < STEPS_TO_HEAL:
                    self._put_off(injection, "the run came to its end before it could be told")
            elif attempt.has_ended:
                injection.outcome = "ended"
                injection.message = attempt.last_error(seconds=2.0)
            elif len(steps_after) >= enough and _is_complete(run, attempt, kind):
                injection.outcome = "recovered"
            elif time.time() > began + injection.limit:
                has_healed = len(steps_after) >= STEPS_TO_HEAL
                if has_healed and _is_complete(run, attempt, kind):
                    injection.outcome = "recovered"
                else:
                    injection.outcome = "hung"
                if injection.outcome == "hung":
                    attempt.kill_everything()
            else:
                time.sleep(0.2)
        injection.seconds = round(time.time() - began, 2)

    def _resume(self, run: ObservedRun, attempt: Attempt, injection: Injection) -> Attempt:
        """Check for leftover processes, resume the run, and wait for a step."""
        left = attempt.leftovers(self.options.limit())
        if left:
            injection.failure = injection.failure or f"left behind: {left}"

        following = run.start(resume=True)
        if not run.wait_for_step(following, START_PATIENCE * self.options.limit()):
            problem = f"--resume did not go on: {following.last_error()}"
            injection.failure = injection.failure or problem
        has_damage = "corrupt_checkpoint" in injection.kind.split(SEPARATOR)
        if has_damage and injection.outcome != "not injected":
            injection.message = find_named_damage(following, injection.detail.rpartition("/")[2])
            if not injection.message:
                injection.failure = injection.failure or "--resume has not named the damage"
        return following

    def _record(self, injection: Injection) -> None:
        self.results.injections.append(injection)
        results.append(self._file, injection)
        verdict = f"FAILED: {injection.failure}" if injection.failure else "ok"
        print(
            f"{injection.kind:<20} after {injection.step:>2} steps  {injection.outcome:<7}"
            f"{injection.seconds:6.1f} s  {verdict}  [{injection.detail}] {injection.message[:160]}",
            flush=True,
        )


def _is_complete(run: ObservedRun, attempt: Attempt, kind: Kind) -> bool:
    """Return True if the number of processes of the affected sort is complete again."""
    if not kind.comes_back:
        return True
    return len(attempt.processes(PROCESSES[kind.comes_back])) >= run.servers
