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
from tests.faults.course import Attempt, Course, small_file_system
from tests.faults.kinds import PROCESSES, Kind, Moment, NotPossibleYet, possible_kinds
from tests.faults.options import Options
from tests.faults.pairs import SEPARATOR, OnlyFirst, kind_of, plan_pairs
from tests.faults.reference import Reference
from tests.faults.results import CourseResult, Injection, Results

MOST_RETRIES = 20
"""Times that faults of a kind are put off because what they need is not there yet."""
START_PATIENCE = 5
"""How much longer an attempt may take to its first step than a fault to heal."""
STEPS_TO_HEAL = 2
"""Recorded after a fault. The step under way may have been past what the fault can do to it."""
STEPS_UNNOTICED = 10
"""After which a run that should have ended goes on."""


class Campaign:
    """Injects the faults of a seed that its file of results does not have yet."""

    def __init__(self, options: Options, directory: Path, file: Path | None = None) -> None:
        """``directory``: of the runs, deleted afterwards. ``file``: of results."""
        self.options = options
        self.results = results.read([file] if file else [])
        self.left = self._plan(self.results)
        self._file = file
        self._directory = directory
        # Another moment for every invocation, and the same ones for a new campaign.
        self._random = random.Random(f"{options.seed}/{len(self.results.injections)}")
        # From the first step on: how long a run takes to start is up to the machine.
        self._planned_end = math.inf
        self._retries: Counter[str] = Counter()
        self._injected = 0
        self._reference: Reference | None = None

    def _plan(self, done: Results) -> list[str]:
        """Choose the kinds: every one as often as any other, in a random order, but for those that
        were done."""
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
        """When no fault is injected any more, by the monotonic clock."""
        return self._planned_end if self._injected >= self.options.fewest else math.inf

    def run(self) -> Results:
        """Run courses until all faults have been injected, or time is up."""
        self._reference = Reference(self.options, self._directory)
        try:
            courses = len(self.results.courses)
            while not self._is_over:
                directory = self._directory / f"course_{courses}"
                with (
                    small_file_system(directory),
                    closing(Course(self.options, directory)) as course,
                ):
                    self._run_course(course)
                shutil.rmtree(directory, ignore_errors=True)
                courses += 1
        finally:
            self._reference.close()
        return self.results

    # -- a course ---------------------------------------------------------------------------------

    def _run_course(self, course: Course) -> None:
        name = f"{course.directory.name}_{int(time.time())}"
        result = CourseResult(name, self.options.seed)
        attempt = course.start()
        if not course.wait_for_step(attempt, START_PATIENCE * self.options.limit()):
            attempt.kill_everything()
            raise SystemExit(f"a run has not begun:\n{attempt.said[-3000:]}")

        if self._planned_end == math.inf:
            self._planned_end = time.monotonic() + 60 * self.options.minutes
        injected = 0
        while injected < self.options.faults_per_course and not self._is_over:
            if len(course.recorded()) > self.options.steps:
                break
            time.sleep(self._random.uniform(0, 3))
            if attempt.has_ended:
                if not course.is_finished():
                    result.failure = f"it ended without a fault: {attempt.last_error()}"
                break

            injection = Injection(self.left.pop(0), len(course.recorded()), course=name)
            injection.seed = self.options.seed
            attempt = self._inject(course, attempt, injection)
            self._record(injection)
            if injection.outcome != "not injected":
                injected += 1
                self._injected += 1
            if injection.failure or course.is_finished():
                break
        self._end_course(course, attempt, result)

    def _end_course(self, course: Course, attempt: Attempt, result: CourseResult) -> None:
        """Stop the run and look at all that it has recorded."""
        if not result.failure and not attempt.stop_after_step(self.options.limit()):
            result.failure = f"it cannot be stopped: {attempt.last_error()}"
        if not attempt.has_ended:
            attempt.kill_everything()

        assert self._reference is not None
        steps = course.recorded()
        if steps and not result.failure:
            reference = self._reference.up_to(steps[-1].step)
            result.failure = examine(course, reference, self.options)
        result.attempts = len(course.attempts)
        result.steps = len(steps)
        with suppress(Exception):  # a file that cannot be read has been reported
            result.episodes = sum(count.total() for count in course.episodes().values())
        self.results.courses.append(result)
        results.append(self._file, result)
        print(f"{result.course}: {result.steps} steps  {result.failure or 'ok'}", flush=True)

    # -- a fault ----------------------------------------------------------------------------------

    def _inject(self, course: Course, attempt: Attempt, injection: Injection) -> Attempt:
        """Inject a fault and wait for what becomes of it. Returns the attempt that goes on."""
        moment = Moment(course, attempt, self._random, self.options, self._end)
        with moment.undo:
            try:
                injection.detail = kind_of(injection.kind).inject(moment)
            except OnlyFirst as one:
                self._put_back(injection.kind)
                injection.kind = one.kind
                injection.detail = one.detail
            except (NotPossibleYet, psutil.NoSuchProcess, FileNotFoundError) as error:
                self._put_off(injection, str(error))
            except AssertionError as error:
                injection.failure = str(error)
            if injection.outcome != "not injected":
                self._await_outcome(course, attempt, injection)
            if injection.outcome != "not injected":
                injection.failure = injection.failure or judge_outcome(attempt, injection)

        if attempt.has_ended and not course.is_finished():
            attempt = self._resume(course, attempt, injection)
        assert self._reference is not None
        injection.failure = injection.failure or compare_curves(
            course, self._reference.curve(), self.options.tolerance
        )
        return attempt

    def _put_off(self, injection: Injection, reason: str) -> None:
        injection.outcome = "not injected"
        injection.said = reason
        self._put_back(injection.kind)

    def _put_back(self, kind: str) -> None:
        self._retries[kind] += 1
        if self._retries[kind] <= MOST_RETRIES:
            self.left.insert(min(2, len(self.left)), kind)

    def _await_outcome(self, course: Course, attempt: Attempt, injection: Injection) -> None:
        """Wait until the run has recorded steps that began after the fault, or has ended."""
        kind = kind_of(injection.kind)
        enough = STEPS_UNNOTICED if kind.must_end else STEPS_TO_HEAL
        began = time.time()
        steps_after: set[float] = set()
        while not injection.outcome:
            # the load may rise meanwhile
            injection.limit = max(injection.limit, self.options.limit())
            newest = course.newest_time()
            if newest > began:
                steps_after.add(newest)
            if attempt.has_ended and course.is_finished():
                injection.outcome = "healed"
                if len(steps_after) < STEPS_TO_HEAL:
                    self._put_off(injection, "the run came to its end before it could be told")
            elif attempt.has_ended:
                injection.outcome = "ended"
                injection.said = attempt.last_error(seconds=2.0)
            elif len(steps_after) >= enough and _is_complete(course, attempt, kind):
                injection.outcome = "healed"
            elif time.time() > began + injection.limit:
                has_healed = len(steps_after) >= STEPS_TO_HEAL
                if has_healed and _is_complete(course, attempt, kind):
                    injection.outcome = "healed"
                else:
                    injection.outcome = "hung"
                if injection.outcome == "hung":
                    attempt.kill_everything()
            else:
                time.sleep(0.2)
        injection.seconds = round(time.time() - began, 2)

    def _resume(self, course: Course, attempt: Attempt, injection: Injection) -> Attempt:
        """Look for processes that were left behind, go on, and wait for a step."""
        left = attempt.leftovers(self.options.limit())
        if left:
            injection.failure = injection.failure or f"left behind: {left}"

        following = course.start(resume=True)
        if not course.wait_for_step(following, START_PATIENCE * self.options.limit()):
            problem = f"--resume did not go on: {following.last_error()}"
            injection.failure = injection.failure or problem
        has_damage = "corrupt_checkpoint" in injection.kind.split(SEPARATOR)
        if has_damage and injection.outcome != "not injected":
            injection.said = find_named_damage(following, injection.detail.rpartition("/")[2])
            if not injection.said:
                injection.failure = injection.failure or "--resume has not named the damage"
        return following

    def _record(self, injection: Injection) -> None:
        self.results.injections.append(injection)
        results.append(self._file, injection)
        verdict = f"FAILED: {injection.failure}" if injection.failure else "ok"
        print(
            f"{injection.kind:<20} after {injection.step:>2} steps  {injection.outcome:<7}"
            f"{injection.seconds:6.1f} s  {verdict}  [{injection.detail}] {injection.said[:160]}",
            flush=True,
        )


def _is_complete(course: Course, attempt: Attempt, kind: Kind) -> bool:
    """Return whether as many processes are running as there were of what the fault has hit."""
    if not kind.comes_back:
        return True
    return len(attempt.processes(PROCESSES[kind.comes_back])) >= course.servers
