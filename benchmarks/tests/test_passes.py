"""``benchmarks.train passes``: variants of a training step, and the time of its passes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.train.passes import PassClock, Step, episode_lengths, median_times
from megatron_gptoss import step_clock
from tests.support.forked_workers import forked_python

ROOT = Path(__file__).parents[2]


def test_passes_are_timed_separately_from_communication(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(step_clock, "time", SimpleNamespace(perf_counter=lambda: now))
    clock = PassClock()
    clock.begin()
    for seconds in (0.02, 0.04):
        clock.enter("forward")
        now += seconds
        clock.enter("communication")
        now += 0.03
        clock.leave()
        now += seconds
        clock.leave()
        clock.enter("backward")
        now += 0.01
        clock.leave()
    parts = clock.end()
    assert clock.passes["forward"] == pytest.approx([0.04, 0.08])
    assert clock.passes["backward"] == pytest.approx([0.01, 0.01])
    for name, seconds in clock.passes.items():
        assert sum(seconds) == pytest.approx(parts[name])
    assert parts["communication"] == pytest.approx(0.06)


def test_episodes_have_different_lengths_and_fill_the_step() -> None:
    lengths = episode_lengths(65_536, longest=4096)
    assert 60_000 < sum(lengths) <= 65_536
    assert len(set(lengths)) > len(lengths) / 2
    assert max(lengths) <= 4096
    assert 1200 < sum(lengths) / len(lengths) < 2200


def test_row_has_times_per_token() -> None:
    steps = [
        Step({"forward": f, "backward": 0.4, "communication": 0.1, "other": 0.0}, f / 2, f / 4)
        for f in (0.2, 0.3, 0.9)
    ]
    row = median_times(steps, tokens=1000)
    assert row["forward, us/token"] == pytest.approx(300)
    assert row["forward / backward"] == pytest.approx(0.75)
    assert row["first forward, ms"] == pytest.approx(150)
    assert row["other forwards, ms"] == pytest.approx(75)


def test_passes_benchmark_runs_on_a_cpu(tmp_path: Path) -> None:
    out = tmp_path / "rows"
    program = [*forked_python(), "-m", "benchmarks.train", "passes", "--tiny", "--steps", "2"]
    program += ["--variants", "benchmark", "loop", "--micro-batches", "2", "--out", str(out)]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    benchmark, loop = (json.loads(line) for line in out.read_text().splitlines())
    assert benchmark["variant"] == "benchmark"
    assert benchmark["tokens"] == 2048
    assert 1500 < loop["tokens"] <= 2048
    for row in (benchmark, loop):
        assert row["forward, us/token"] > 0 and row["backward, us/token"] > 0
    assert done.stdout.splitlines()[-1].startswith("| loop | ")
