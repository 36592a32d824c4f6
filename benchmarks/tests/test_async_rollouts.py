"""Simulator of asynchronous rollouts: its clock, and its workload against published values."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from statistics import mean

import pytest

from benchmarks.rollouts import simulation as async_rollouts
from benchmarks.rollouts.simulation import (
    CALLS,
    GAPS,
    POLICIES,
    Costs,
    Engines,
    Episode,
    EpisodePlan,
    Outcome,
    Row,
    Simulation,
    TaskLengths,
    Workload,
    compare,
    control_for,
    plan_group,
    quantile,
    training_speed,
)
from launch.rollout_plan import LoopPrediction

SMALL = Workload(groups_per_step=8, samples=4, steps=24)
EXACT = Costs(
    slots=2,
    token_seconds=1.0,
    token_seconds_per_sequence=0.5,
    prefill_tokens_per_second=10.0,
    sync_seconds=3.0,
)


@pytest.fixture(scope="module")
def rows() -> dict[tuple[str, int], Row]:
    compared = compare(SMALL, Costs(), staleness=(0, 1, 2, 4), policies=POLICIES)
    return {(row.policy, row.max_staleness): row for row in compared}


def test_workload_has_published_quantiles_and_means() -> None:
    shares = [(i + 0.5) / 100_000 for i in range(100_000)]
    assert mean(quantile(CALLS, share) for share in shares) == pytest.approx(7.8, rel=0.02)
    assert mean(quantile(GAPS, share) for share in shares) == pytest.approx(37, rel=0.02)
    assert [quantile(CALLS, share) for share in (0.25, 0.5, 0.9, 0.99)] == [0, 1, 20, 86]
    assert [quantile(GAPS, share) for share in (0.5, 0.75, 0.9)] == pytest.approx([1.6, 8.6, 44])

    calls = [len(plan.gaps) for n in range(2000) for plan in plan_group(Workload(), n)]
    assert mean(calls) == pytest.approx(7.8, rel=0.1)


def test_workload_is_similar_per_task_and_equal_for_all_policies() -> None:
    groups = [[len(plan.gaps) for plan in plan_group(Workload(), n)] for n in range(500)]
    long = [calls[1] for calls in groups if calls[0] >= 20]
    short = [calls[1] for calls in groups if calls[0] == 0]
    assert mean(long) > 3 * mean(short)
    assert plan_group(Workload(), 7) == plan_group(Workload(), 7)
    assert plan_group(Workload(), 7) != plan_group(Workload(seed=1), 7)


def episode(group: int, *turns: int, gap: float = 0.0) -> Episode:
    plan = EpisodePlan(turns, (gap,) * (len(turns) - 1), tool_tokens=5)
    return Episode(group, plan, context=10)


def test_simulated_clock_counts_prefill_decoding_and_tools() -> None:
    engines = Engines(EXACT)
    for group, tokens in enumerate((4, 2)):
        engines.begin(episode(group, tokens))
    engines.run()
    # Two prompts of 10 tokens, then steps of 1 + 2 x 0.5 s, of which the shorter turn needs two.
    assert engines.now == pytest.approx(2 + 2 * 2)
    assert [e.group for e in engines.ended] == [1]
    engines.ended.clear()
    engines.run()
    assert engines.now == pytest.approx(6 + 2 * 1.5)

    engines = Engines(EXACT)
    engines.begin(episode(0, 2, 2, gap=20.0))
    engines.run()
    # After the tool, only its answer is prefilled. The 2 sampled tokens are in the cache.
    assert engines.now == pytest.approx(1 + 2 * 1.5 + 20 + 0.5 + 2 * 1.5)
    assert engines.idle_seconds == pytest.approx(20)


def test_sync_keeps_token_versions_and_prefills_again() -> None:
    engines = Engines(EXACT)
    engines.begin(episode(0, 6))
    engines.run(until=1 + 2 * 1.5)
    engines.sync(1)
    assert engines.now == pytest.approx(4 + 3)
    engines.run()
    assert engines.now == pytest.approx(7 + 12 / 10 + 4 * 1.5)
    assert engines.recomputed_tokens == 12
    assert engines.ended[0].by_version == pytest.approx({0: 2, 1: 4})


def test_sequences_beyond_the_slots_wait() -> None:
    engines = Engines(EXACT)
    for group in range(3):
        engines.begin(episode(group, 2))
    ended = []
    while len(ended) < 3:
        engines.run()
        ended += [e.group for e in engines.ended]
        engines.ended.clear()
    assert ended == [0, 1, 2]
    assert engines.now == pytest.approx(2 + 2 * 2 + 1 + 2 * 1.5)


def test_staleness_2_gives_1_8x_steps_and_loses_no_task(
    rows: dict[tuple[str, int], Row],
) -> None:
    assert rows["in_order", 0].speed_up == pytest.approx(1)
    assert rows["in_order", 1].speed_up > 1.3
    assert rows["in_order", 2].speed_up >= 1.8
    for k in (0, 1, 2, 4):
        row = rows["in_order", k]
        assert row.long_trained == 1, "a long task was trained less often than sampled"
        assert row.calls_trained == 1
        assert row.outcome.staleness_max <= k


def test_in_order_steps_train_on_their_own_episodes(
    rows: dict[tuple[str, int], Row],
) -> None:
    def lengths(outcome: Outcome) -> list[Counter[int]]:
        return [
            Counter(len(plan.gaps) for n in batch for plan in plan_group(SMALL, n))
            for batch in outcome.trained
        ]

    on_policy = lengths(rows["in_order", 0].outcome)
    for k in (1, 2, 4):
        assert lengths(rows["in_order", k].outcome) == on_policy


def test_dropping_stale_episodes_starves_long_tasks(rows: dict[tuple[str, int], Row]) -> None:
    for k in (1, 2):
        row = rows["discard", k]
        assert row.long_trained < 0.8
        assert row.calls_trained < 0.9
        assert row.outcome.staleness_max <= k


def test_simulated_training_speed_is_the_requested_one() -> None:
    costs = Costs(rollouts_over_training=2.0)
    speed = async_rollouts.training_speed(SMALL, costs)
    control = async_rollouts.control_for("in_order", 0, SMALL)
    simulation = async_rollouts.Simulation(SMALL, costs, control)
    outcome = simulation.run(speed)
    rollouts = simulation.mean_rollout_seconds * outcome.steps
    assert rollouts / outcome.training_seconds == pytest.approx(2, rel=0.02)
    syncs = costs.sync_seconds * outcome.steps
    assert outcome.seconds == pytest.approx(rollouts + outcome.training_seconds + syncs)


def test_ten_percent_of_simulated_tasks_are_long() -> None:
    lengths = TaskLengths(SMALL)
    long = [n for n in range(SMALL.steps * SMALL.groups_per_step) if lengths.is_long(n)]
    assert 0.08 < len(long) / (SMALL.steps * SMALL.groups_per_step) < 0.15


def test_simulation_command_prints_table_and_draws_charts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--steps", "3", "--groups", "2", "--samples", "2", "--max-staleness", "0", "1"]
    files = ["--out", f"{tmp_path}/t.md", "--plot", f"{tmp_path}/p.png"]
    monkeypatch.setattr(sys, "argv", ["async_rollouts.py", *sizes, *files])
    async_rollouts.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 2 * 2
    assert (tmp_path / "t.md").read_text().splitlines() == lines
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_planned_step_seconds_match_the_simulated_loop() -> None:
    workload, costs = Workload(steps=20), Costs(rollouts_over_training=2.0)
    speed = training_speed(workload, costs)

    def simulate(staleness: int) -> Simulation:
        return Simulation(workload, costs, control_for("in_order", staleness, workload))

    turns = simulate(0)
    outcome = turns.run(speed)
    prediction = LoopPrediction(
        update_seconds=outcome.training_seconds / workload.steps,
        engine_seconds=0.0,  # mostly idle
        rollout_seconds=turns.mean_rollout_seconds,
        tokens_per_gpu=0.0,  # not used
    )
    errors = []
    for staleness in (0, 1, 2, 4, 8):
        simulated = simulate(staleness).run(speed).seconds / workload.steps
        errors.append(prediction.step_seconds(staleness) / simulated - 1)
    assert max(errors) < 0.03, "no loop is faster than what bounds it"
    assert min(errors) > -0.25
    assert abs(mean(errors)) < 0.15
