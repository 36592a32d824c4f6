"""The fault campaign and the soak: what they compute, and a short campaign with four kinds of faults."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from benchmarks.faults import KINDS, NEEDS_ROOT, Campaign, Injection, Options, report
from benchmarks.soak import BLOCKS, fit, slopes


def test_a_campaign_has_every_kind_equally_often_and_the_same_for_the_same_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.getuid", lambda: 0)
    plan = Campaign(Options(seed=3, count=3 * len(KINDS)), tmp_path)._left
    assert set(Counter(plan).values()) == {3} and set(plan) == set(KINDS)
    assert plan == Campaign(Options(seed=3, count=3 * len(KINDS)), tmp_path)._left
    assert plan != Campaign(Options(seed=4, count=3 * len(KINDS)), tmp_path)._left

    monkeypatch.setattr("os.getuid", lambda: 1000)
    assert set(Campaign(Options(), tmp_path)._left) == set(KINDS) - set(NEEDS_ROOT)


def test_the_table_counts_what_was_injected(tmp_path: Path) -> None:
    campaign = Campaign(Options(seed=5), tmp_path)
    campaign.injections = [
        Injection("lie_nan", 3, outcome="healed", seconds=1.5),
        Injection("lie_nan", 4, outcome="ended", seconds=2.5, failure="it ended without a word"),
        Injection("lie_nan", 4, outcome="not injected"),
    ]
    assert report(campaign).splitlines()[-1] == "| lie_nan | 2 | 1 | 1 | 2.5 | 1 |"


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


@pytest.mark.slow  # five starts of a run with Ray
def test_a_short_campaign_loses_and_doubles_nothing(tmp_path: Path) -> None:
    kinds = ("kill_worker", "lie_nan", "lie_twice", "corrupt_checkpoint", "kill_driver")
    campaign = Campaign(Options(seed=1, kinds=kinds, steps=24, patience=240), tmp_path)
    campaign.measure_reference()
    campaign.run_all()
    assert {i.kind for i in campaign.injections if i.outcome != "not injected"} == set(kinds)
    assert [i for i in campaign.injections if i.failure] == []
