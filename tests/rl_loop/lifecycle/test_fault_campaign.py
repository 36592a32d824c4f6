"""The fault campaign and the soak: what they compute, and a short campaign with eight kinds of faults."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from benchmarks.faults import Attempt, results
from benchmarks.faults.campaign import Campaign
from benchmarks.faults.checks import judge_outcome
from benchmarks.faults.kinds import KINDS, possible_kinds
from benchmarks.faults.options import Options
from benchmarks.faults.results import CourseResult, Injection, Results, WholeRunKill
from benchmarks.soak import BLOCKS, fit, slopes


def test_a_campaign_has_every_kind_equally_often_and_the_same_for_the_same_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.getuid", lambda: 0)
    plan = Campaign(Options(seed=3, count=3 * len(KINDS)), tmp_path).left
    assert set(Counter(plan).values()) == {3} and set(plan) == set(KINDS)
    assert plan == Campaign(Options(seed=3, count=3 * len(KINDS)), tmp_path).left
    assert plan != Campaign(Options(seed=4, count=3 * len(KINDS)), tmp_path).left

    monkeypatch.setattr("os.getuid", lambda: 1000)
    needs_root = {name for name, kind in KINDS.items() if kind.needs_root}
    assert needs_root and set(possible_kinds()) == set(KINDS) - needs_root


def test_a_campaign_goes_on_with_what_its_file_does_not_have(tmp_path: Path) -> None:
    """Faults of another seed, faults that could not be injected, and faults of a course whose
    records nobody has examined are not in the file, so to speak."""
    file = tmp_path / "faults.jsonl"
    options = Options(seed=3, kinds=("lie_nan", "lie_twice"), count=6)
    written = [
        Injection("lie_nan", 3, seed=3, course="a", outcome="healed"),
        Injection("lie_nan", 3, seed=3, course="a", outcome="not injected"),
        Injection("lie_nan", 3, seed=3, course="unexamined", outcome="healed"),
        Injection("lie_twice", 3, seed=4, course="a", outcome="healed"),
        CourseResult("a", seed=3),
        CourseResult("a", seed=4),
    ]
    for record in written:
        results.append(file, record)
    left = Campaign(options, tmp_path, file).left
    assert Counter(left) == {"lie_nan": 2, "lie_twice": 3}


def test_the_table_counts_what_was_injected_and_names_what_failed() -> None:
    found = Results(
        [
            Injection("lie_nan", 3, 5, "a", outcome="healed", seconds=1.5),
            Injection("lie_nan", 4, 5, "a", outcome="ended", seconds=2.5),
            Injection("lie_nan", 9, 5, "a", outcome="hung", seconds=61.0, failure="it hung"),
            Injection("lie_nan", 4, 5, "a", outcome="not injected"),
            Injection("fill", 4, 5, "unexamined", outcome="healed", seconds=3.0),
        ],
        [CourseResult("a", 5, attempts=2, steps=30, episodes=240)],
        [WholeRunKill("b", 3, 6)],
    )
    lines = results.table(found).splitlines()
    assert lines[2] == "| lie_nan | 3 | 1 | 1 | 2.5 | 61.0 | 1 |"
    assert not any(line.startswith("| fill") for line in lines)
    assert "seeds 5, 6; 1 courses in 2 attempts, 30 steps compared, 240 episodes" in lines[-2]
    assert "1 faults took more than 60 s; 1 kills" in lines[-2]
    assert lines[-1] == "- FAILED: lie_nan: it hung"


class Ended:
    """An attempt whose driver has ended with a status."""

    def __init__(self, status: int) -> None:
        self.driver = self
        self.returncode = status


@pytest.mark.parametrize(
    ("injection", "status", "verdict"),
    [
        (Injection("kill_worker", 1, outcome="healed"), 0, ""),
        (Injection("lie_version", 1, outcome="healed"), 0, "nothing has noticed it"),
        (Injection("kill_worker", 1, outcome="hung", limit=60), 0, "neither healed nor ended"),
        (Injection("kill_worker", 1, outcome="ended"), 1, "without saying why"),
        (
            Injection("lie_version", 1, outcome="ended", said="gptoss: no"),
            1,
            "another cause: gptoss",
        ),
        (Injection("lie_version", 1, outcome="ended", said="weights 9 sampled it"), 1, ""),
        (
            Injection("lie_version", 1, outcome="ended", said="weights 9 sampled it"),
            0,
            "with status 0",
        ),
        (Injection("kill_run", 1, outcome="ended"), -9, ""),
    ],
    ids=lambda value: value.kind if isinstance(value, Injection) else str(value)[:12],
)
def test_what_a_kind_must_do_is_asked_of_the_run(
    injection: Injection, status: int, verdict: str
) -> None:
    attempt = cast(Attempt, Ended(status))
    said = judge_outcome(attempt, injection)
    assert verdict in said and bool(said) == bool(verdict)


def test_a_leak_is_told_from_noise_and_from_a_warm_up() -> None:
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


@pytest.mark.slow  # two minutes, and which moments the faults meet depends on the machine
@pytest.mark.timeout(900)
def test_a_short_campaign_loses_and_doubles_nothing(tmp_path: Path) -> None:
    """Bounded by time, so a slow machine tries fewer kinds; half of them in any case."""
    kinds = (
        "kill_worker",
        "kill_checker",
        "kill_sandbox",
        "lie_nan",
        "lie_twice",
        "corrupt_episodes",
        "corrupt_checkpoint",
        "lie_version",
    )
    options = Options(seed=1, kinds=kinds, steps=40, patience=240, minutes=2)
    found = Campaign(options, tmp_path).run()
    assert found.failures == []
    injected = {fault.kind for fault in found.counted()}
    assert injected <= set(kinds) and len(injected) >= len(kinds) // 2
