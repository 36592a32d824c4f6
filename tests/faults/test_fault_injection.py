"""Fault-injection and stability tests: their computations, and short runs."""

from __future__ import annotations

import math
import subprocess
import uuid
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from tests.faults import Attempt, ObservedRun, observed_run, results, whole_run
from tests.faults.checks import examine, find_named_damage, judge_outcome
from tests.faults.injector import FaultInjector
from tests.faults.kinds import (
    KINDS,
    Moment,
    NotPossibleYetError,
    can_close_connections,
    can_mount,
    fill,
    possible_kinds,
)
from tests.faults.observed_run import MARK, Numbers, RecordedStep, own_environment
from tests.faults.options import Options
from tests.faults.results import Injection, Results, RunResult, WholeRunKill
from tests.faults.stability import BLOCKS, fit, slopes
from tests.support.forked_workers import forked_python
from tests.support.waiting import PATIENCE_SECONDS, wait_until


@pytest.fixture
def all_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every kind possible on this machine."""
    for name, kind in KINDS.items():
        monkeypatch.setitem(KINDS, name, replace(kind, is_possible=lambda: True))


@pytest.mark.usefixtures("all_kinds")
def test_plan_has_equal_kind_counts_and_depends_on_seed(
    tmp_path: Path,
) -> None:
    plan = FaultInjector(Options(seed=3, count=3 * len(KINDS)), tmp_path).left
    assert set(Counter(plan).values()) == {3} and set(plan) == set(KINDS)
    assert plan == FaultInjector(Options(seed=3, count=3 * len(KINDS)), tmp_path).left
    assert plan != FaultInjector(Options(seed=4, count=3 * len(KINDS)), tmp_path).left


def test_impossible_kinds_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without ``ss`` and ``mount``, no connection is cut and no disk is filled."""
    monkeypatch.setenv("PATH", str(tmp_path))
    can_close_connections.cache_clear()
    can_mount.cache_clear()
    assert set(KINDS) - set(possible_kinds()) == {"cut", "fill"}
    can_close_connections.cache_clear()
    can_mount.cache_clear()

    moment = Moment(cast(ObservedRun, Recorded({}, directory=tmp_path)), *3 * [cast(Any, None)])
    with pytest.raises(NotPossibleYetError, match="no file system of its own"):
        fill(moment)
    assert list(tmp_path.iterdir()) == []


def test_attempt_has_separate_ray_and_inherits_python_path(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Several tests can therefore run concurrently, also next to a Ray of another user."""
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
    monkeypatch.setenv("PYTHONPATH", "/opt/packages")
    environment = own_environment("the mark")
    assert "RAY_ADDRESS" not in environment
    assert environment["PYTHONPATH"].split(":")[-1] == "/opt/packages"
    assert environment[MARK] == "the mark"


def test_attempt_finds_and_kills_only_its_own_processes() -> None:
    attempts = [Attempt.__new__(Attempt) for _ in range(2)]
    for attempt, mark in zip(attempts, ("this one", "that one"), strict=True):
        attempt.mark = mark
        environment = own_environment(mark)
        attempt.driver = subprocess.Popen(["sleep", "600"], env=environment)
    try:
        wait_until(lambda: all(attempt.processes("sleep") for attempt in attempts))
        assert attempts[0].kill_everything() == 1
        assert attempts[1].driver.poll() is None
        assert [process.pid for process in attempts[1].processes()] == [attempts[1].driver.pid]
    finally:
        attempts[1].driver.kill()
        attempts[1].driver.wait()


@pytest.mark.parametrize(
    ("is_whole_run", "reason"),
    [(False, SystemExit(143)), (True, KeyboardInterrupt())],
    ids=["faults, SIGTERM", "whole runs, Ctrl-C"],
)
def test_interrupted_fault_test_kills_its_processes(
    is_whole_run: bool, reason: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Attempt] = []

    def start(self: ObservedRun, resume: bool = False) -> Attempt:
        attempt = Attempt.__new__(Attempt)
        attempt.mark = f"interrupted {uuid.uuid4().hex}"
        # A run has several processes, and some are outside the driver's process group.
        program = "sleep 600 & setsid sleep 600 & wait"
        environment = own_environment(attempt.mark)
        attempt.driver = subprocess.Popen(["sh", "-c", program], env=environment)
        attempt.began = 0.0
        self.attempts.append(attempt)
        started.append(attempt)
        wait_until(lambda: len(attempt.processes()) == 3)
        return attempt

    def interrupt(*_: Any) -> Any:
        raise reason

    monkeypatch.setattr(ObservedRun, "start", start)
    monkeypatch.setattr(ObservedRun, "newest_time", interrupt)
    monkeypatch.setattr(whole_run, "_wait_for_moment", interrupt)
    options = Options(kinds=("answer_nan",), count=1)
    try:
        with pytest.raises(type(reason)):
            if is_whole_run:
                whole_run.kill_whole_runs(options, tmp_path, kills=1)
            else:
                FaultInjector(options, tmp_path).run()
        assert len(started) == 2  # includes the undisturbed run
        assert [attempt.processes() for attempt in started] == [[], []]
    finally:
        for attempt in started:
            attempt.kill_everything()


def test_resumed_fault_test_injects_only_missing_faults(tmp_path: Path) -> None:
    """Faults of another seed, skipped faults, and faults of unexamined runs count as missing."""
    file = tmp_path / "faults.jsonl"
    options = Options(seed=3, kinds=("answer_nan", "answer_twice"), count=6)
    written = [
        Injection("answer_nan", 3, seed=3, run="a", outcome="recovered"),
        Injection("answer_nan", 3, seed=3, run="a", outcome="not injected"),
        Injection("answer_nan", 3, seed=3, run="unexamined", outcome="recovered"),
        Injection("answer_twice", 3, seed=4, run="a", outcome="recovered"),
        RunResult("a", seed=3),
        RunResult("a", seed=4),
    ]
    for record in written:
        results.append(file, record)
    left = FaultInjector(options, tmp_path, file).left
    assert Counter(left) == {"answer_nan": 2, "answer_twice": 3}


def test_table_counts_injected_faults_and_names_failures() -> None:
    found = Results(
        [
            Injection("answer_nan", 3, 5, "a", outcome="recovered", seconds=1.5),
            Injection("answer_nan", 4, 5, "a", outcome="ended", seconds=2.5),
            Injection("answer_nan", 9, 5, "a", outcome="hung", seconds=61.0, failure="it hung"),
            Injection("answer_nan", 4, 5, "a", outcome="not injected"),
            Injection("fill", 4, 5, "unexamined", outcome="recovered", seconds=3.0),
        ],
        [RunResult("a", 5, attempts=2, steps=30, episodes=240)],
        [WholeRunKill("b", 3, 6)],
    )
    lines = results.table(found).splitlines()
    assert lines[2] == "| answer_nan | 3 | 1 | 1 | 2.5 | 61.0 | 1 |"
    assert not any(line.startswith("| fill") for line in lines)
    assert "seeds 5, 6; 1 runs in 2 attempts, 30 steps compared, 240 episodes" in lines[-2]
    assert "1 faults took more than 60 s; 1 kills" in lines[-2]
    assert lines[-1] == "- FAILED: answer_nan: it hung"


@dataclass
class Recorded:
    """A recorded run with given numbers by step, and given training episodes."""

    of_step: dict[int, Numbers]
    trained: dict[int, Counter[str]] = field(default_factory=dict)
    expected: dict[int, Counter[str]] = field(default_factory=dict)
    directory: Path = Path()
    left: list[str] = field(default_factory=list)
    """Processes that its last attempt left behind."""

    @property
    def attempts(self) -> list[Recorded]:
        return [self]

    def leftovers(self, seconds: float) -> list[str]:
        return self.left

    def recorded(self) -> list[RecordedStep]:
        return [RecordedStep(step, numbers, 0.0) for step, numbers in self.of_step.items()]

    def curve(self) -> dict[int, Numbers]:
        return self.of_step

    def episodes(self) -> dict[int, Counter[str]]:
        return self.trained

    def expected_episodes(self, steps: int) -> dict[int, Counter[str]]:
        return {step: self.expected[step] for step in range(1, steps + 1)}


UNDISTURBED = {1: Numbers(0.5, 6.25), 2: Numbers(-0.25, 6.0), 3: Numbers(0.0, 6.5)}
EPISODES = {step: Counter({f"task {step}": 4}) for step in UNDISTURBED}


@pytest.mark.parametrize(
    ("numbers", "trained", "left", "verdict"),
    [
        (UNDISTURBED, EPISODES, [], ""),
        (dict(list(UNDISTURBED.items())[:2]), {1: EPISODES[1], 2: EPISODES[2]}, [], ""),
        (
            {1: UNDISTURBED[1], 3: UNDISTURBED[3]},
            EPISODES,
            [],
            "missing or were recorded twice: [1, 3]",
        ),
        (
            UNDISTURBED | {2: Numbers(-0.2500000001, 6.0)},
            EPISODES,
            [],
            "the loss of step 2 is -0.25",
        ),
        (UNDISTURBED | {2: Numbers(math.nan, 6.0)}, EPISODES, [], "the loss of step 2 is nan"),
        (UNDISTURBED | {3: Numbers(0.0, 6.4)}, EPISODES, [], "the entropy of step 3 is 6.4"),
        (
            UNDISTURBED | {4: Numbers(0.5, 6.0)},
            EPISODES,
            [],
            "the undisturbed run does not have: [4]",
        ),
        (UNDISTURBED, EPISODES | {3: Counter({"task 3": 3})}, [], "step 3 was trained on"),
        (UNDISTURBED, EPISODES | {3: Counter({"task 3": 5})}, [], "step 3 was trained on"),
        (UNDISTURBED, EPISODES | {3: Counter({"task 2": 4})}, [], "step 3 was trained on"),
        (UNDISTURBED, EPISODES | {4: Counter({"task 4": 4})}, [], "step 4 was trained on"),
        (UNDISTURBED, EPISODES, ["ray::TrainerProcess"], "left behind"),
    ],
    ids=[
        "as undisturbed",
        "not as far",
        "a step that is missing",
        "another loss",
        "no loss",
        "other tokens of episodes that earn alike",
        "a step too many",
        "a lost episode",
        "an episode twice",
        "episodes of another step",
        "episodes of no step",
        "a process",
    ],
)
def test_run_equals_undisturbed_run_or_names_the_difference(
    numbers: dict[int, Numbers],
    trained: dict[int, Counter[str]],
    left: list[str],
    verdict: str,
) -> None:
    run = cast(
        ObservedRun, Recorded(numbers, trained, EPISODES | {3: Counter({"task 3": 4})}, left=left)
    )
    found = examine(run, UNDISTURBED, Options())
    assert verdict in found and bool(found) == bool(verdict)


def test_named_damage_must_be_of_the_same_file() -> None:
    class EndedAttempt:
        output = (
            "WARNING: /runs/x/__0_1.distcp: damaged; its content is not what was written\ngoing on"
        )

    attempt = cast(Attempt, EndedAttempt())
    named = "__0_1.distcp: damaged; its content is not what was written"
    assert find_named_damage(attempt, "__0_1.distcp") == named
    assert find_named_damage(attempt, "metadata.json") == ""


class Ended:
    """An attempt whose driver has exited with a given status."""

    def __init__(self, status: int) -> None:
        self.driver = self
        self.returncode = status


@pytest.mark.parametrize(
    ("injection", "status", "verdict"),
    [
        (Injection("kill_worker", 1, outcome="recovered"), 0, ""),
        (Injection("answer_version", 1, outcome="recovered"), 0, "nothing has noticed it"),
        (Injection("kill_worker", 1, outcome="hung", limit=60), 0, "neither recovered nor ended"),
        (Injection("stop", 1, outcome="ended"), 1, "without saying why"),
        (Injection("stop", 1, outcome="ended", message="gptoss: it hangs"), 1, ""),
        (
            Injection("kill_worker", 1, outcome="ended", message="gptoss: x"),
            1,
            "should have gone on",
        ),
        (
            Injection("answer_twice", 1, outcome="ended", message="gptoss: x"),
            1,
            "should have gone on",
        ),
        (
            Injection("answer_version", 1, outcome="ended", message="gptoss: no"),
            1,
            "another cause: gptoss",
        ),
        (
            Injection(
                "answer_version", 1, outcome="ended", message="engine reports weight version 9"
            ),
            1,
            "",
        ),
        (
            Injection(
                "answer_version", 1, outcome="ended", message="engine reports weight version 9"
            ),
            0,
            "with status 0",
        ),
        (Injection("kill_run", 1, outcome="ended"), -9, ""),
    ],
    ids=lambda value: value.kind if isinstance(value, Injection) else str(value)[:12],
)
def test_outcome_is_judged_by_kind(injection: Injection, status: int, verdict: str) -> None:
    attempt = cast(Attempt, Ended(status))
    found = judge_outcome(attempt, injection)
    assert verdict in found and bool(found) == bool(verdict)


def test_leak_differs_from_noise_and_warm_up() -> None:
    chance = np.random.default_rng(0)
    hours = np.linspace(0, 0.5, 400)
    noise = chance.normal(0, 2, 400)
    leak = fit(hours, 300 + 40 * hours + noise)
    assert 36 < leak.per_hour < 44 and leak.error < 4 and not leak.is_flat(0.01)
    assert fit(hours, 300 + noise).is_flat(0.001)

    warming = 300 - 100 * np.exp(-hours / 0.02) + noise
    samples = [{"memory": float(value), "unknown": math.nan} for value in warming]
    fitted = slopes(list(hours), samples)
    assert set(fitted) == {"memory"} and fitted["memory"].is_flat(0.01)
    assert slopes(list(hours[: 2 * BLOCKS]), samples[: 2 * BLOCKS]) == {}


def inject_kinds(
    directory: Path,
    kinds: tuple[str, ...],
    fewest: int,
    minutes: float,
    monkeypatch: pytest.MonkeyPatch,
    workers: int = 2,
    turn_tokens: int = 60,
) -> set[str]:
    """Run a fault-injection test without failures. Return the injected kinds."""
    monkeypatch.setattr(observed_run, "PYTHON", forked_python())
    # memory use of other programs must not end a run
    monkeypatch.setenv("RAY_memory_monitor_refresh_ms", "0")
    options = Options(
        seed=1,
        kinds=kinds,
        workers=workers,
        turn_tokens=turn_tokens,
        steps=40,
        patience=PATIENCE_SECONDS,
        minutes=minutes,
        fewest=fewest,
        reference_follows=True,
    )
    found = FaultInjector(options, directory).run()
    assert found.failures == []
    return {fault.kind for fault in found.counted()}


@pytest.mark.timeout(6 * PATIENCE_SECONDS)
def test_short_fault_test_loses_and_repeats_no_episode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine returns a wrong answer, and a damaged file ends an attempt.

    One worker suffices. Turns are only a little longer than those of the script.
    """
    kinds = ("answer_twice", "corrupt_checkpoint")
    injected = inject_kinds(
        tmp_path, kinds, len(kinds), 0.0, monkeypatch, workers=1, turn_tokens=30
    )
    assert injected == set(kinds)


@pytest.mark.slow
@pytest.mark.timeout(6 * PATIENCE_SECONDS)
def test_fault_test_of_8_kinds_loses_and_repeats_no_episode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time is limited, so a slow machine tries fewer kinds, but at least half of them."""
    kinds = (
        "kill_worker",
        "kill_checker",
        "corrupt_bucket",
        "answer_nan",
        "answer_twice",
        "corrupt_episodes",
        "corrupt_checkpoint",
        "answer_version",
    )
    half = len(kinds) // 2
    injected = inject_kinds(tmp_path, kinds, half, 1.5, monkeypatch)
    assert injected <= set(kinds) and len(injected) >= half
