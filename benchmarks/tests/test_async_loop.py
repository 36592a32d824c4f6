"""Runs, delays and statistics of the benchmark of asynchronous rollouts (rollouts/asynchronous.py)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from benchmarks.rollouts.asynchronous import Measurement, Workload, run_order, summarize, table
from benchmarks.rollouts.simulation import GAPS, quantile
from benchmarks.rollouts.slow_tools import SlowOptions, SlowReTool
from rl_loop.config.load import load_config
from rl_loop.config.run import RlConfig
from rl_loop.environments import RewardConfig, Task
from rl_loop.run_parts import build_tasks
from rl_loop.sandbox import ExecutionResult

CONFIG = Path(__file__).parents[2] / "configs/rl/tiny_retool.yaml"


def make_workload(directory: Path) -> Workload:
    return Workload(
        start=directory,
        steps=5,
        tasks=2,
        samples=4,
        held_out=3,
        gap_scale=0.5,
        overrides=("optimizer.lr=1e-3",),
    )


def test_run_configuration_is_valid_and_sets_tool_delays(tmp_path: Path) -> None:
    command = make_workload(tmp_path).command(tmp_path, staleness=2, seed=7)
    overrides = command[command.index("rl") + 2 :]
    config = load_config(CONFIG, RlConfig, overrides)
    assert (config.algorithm.max_staleness, config.seed, config.optimizer.lr) == (2, 7, 1e-3)
    assert config.directory == tmp_path / "run"
    tasks = build_tasks(config)
    assert len(tasks.held_out()) == 3
    for task in [*tasks.held_out(), *tasks.train(0, 2)]:
        assert task.metadata["gap_scale"] == 0.5


async def run_nothing(code: str, history: Any = (), /) -> ExecutionResult:
    return ExecutionResult("1\n", 0)


def delays(monkeypatch: pytest.MonkeyPatch, episodes: int) -> list[float]:
    """Return the delays of two calls per episode, in a process without earlier episodes."""
    monkeypatch.setattr(SlowReTool, "_episodes_of", type(SlowReTool._episodes_of)())
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    async def main() -> None:
        options = SlowOptions(gap_scale=0.5)
        task: Task = SlowReTool.generate("train", 0, 3, options)
        for _ in range(episodes):
            environment = SlowReTool(task, run_nothing, RewardConfig())
            assert await environment.call("python", "print(1)") == "1\n"
            await environment.call("python", "print(1)")

    monkeypatch.setattr("benchmarks.rollouts.slow_tools.asyncio.sleep", sleep)
    asyncio.run(main())
    return slept


def test_delays_are_reproducible_and_have_published_quantiles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept = delays(monkeypatch, episodes=2000)
    assert median(slept) == pytest.approx(0.5 * quantile(GAPS, 0.5), rel=0.15)
    assert sorted(slept)[3600] == pytest.approx(0.5 * quantile(GAPS, 0.9), rel=0.3)
    assert len(set(slept)) == len(slept), "calls and episodes have delays of their own"
    assert delays(monkeypatch, episodes=2) == slept[:4]


def step_record(number: int, when: float, **values: float) -> dict[str, Any]:
    seconds = {"seconds/step": 1.0, "seconds/estimate": 0.25, "seconds/update": 0.5}
    stale = {"rollout/staleness_max": number, "rollout/staleness_mean": number / 2}
    return {"step": number, "time": when, "seconds/rollout": 2.0, **seconds, **stale, **values}


def test_step_time_is_wall_clock_without_the_first_step() -> None:
    steps = [step_record(0, 100.0), step_record(1, 104.0), step_record(2, 112.0)]
    steps[0]["seconds/update"] = 1000.0
    summary = {"held_out_accuracy_sft": 0.25, "held_out_accuracy_rl": 0.75}
    measured = summarize(steps, summary, staleness=2, seed=1)
    assert measured.seconds == 6.0
    assert (measured.training, measured.waiting) == (0.75, 2.0)
    assert (measured.stale_mean, measured.stale_max) == (0.75, 2)
    assert (measured.accuracy_before, measured.accuracy_after) == (0.25, 0.75)


def measured_run(staleness: int, seed: int, seconds: float) -> Measurement:
    return Measurement(staleness, seed, seconds, 1.0, 0.5, 0.0, staleness, 0.25, 0.5 + seed / 100)


def test_runs_alternate_and_are_compared_by_seed() -> None:
    assert run_order([0, 2], [5, 6, 7]) == [(0, 5), (2, 5), (2, 6), (0, 6), (0, 7), (2, 7)]
    seconds = {(0, 5): 4.0, (2, 5): 2.0, (0, 6): 6.0, (2, 6): 2.0, (0, 7): 10.0, (2, 7): 10.0}
    runs = [measured_run(k, seed, value) for (k, seed), value in seconds.items()]
    _, _, turns, asynchronous = table(runs[::-1]).splitlines()
    assert turns.startswith("| 0 | 6.00 (4.00 to 10.00) | 1.00 (1.00 to 1.00) |")
    # 2, 3 and 1 times
    assert asynchronous.startswith("| 2 | 2.00 (2.00 to 10.00) | 2.00 (1.00 to 3.00) |")
    assert asynchronous.endswith("| 0.250 | 0.560 (0.550 to 0.570) |")
