"""Selection of training tasks by the pass rates that a run measures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rl_loop.config.errors import ConfigError
from rl_loop.config.load import load_config
from rl_loop.config.run import SftConfig
from rl_loop.config.tasks import PassRateConfig
from rl_loop.data.trajectory import InvalidReason, Trajectory, TrajectoryGroup
from rl_loop.run_parts import build_tasks
from rl_loop.tasks.pass_rates import MIN_PROBABILITY, TaskSelection
from tests.support.rl_loop.scripted_loop import from_file
from tests.support.rl_loop.small_config import config

ROOT = Path(__file__).resolve().parents[3]

POSITIONS = range(4000)


def group(task_id: str, *correct: float) -> TrajectoryGroup:
    columns = {"token_ids": [1, 2], "loss_mask": [0, 1], "rollout_log_probs": [0.0, -1.0]}
    episodes = [Trajectory(task_id, **columns, reward_parts={"correct": c}) for c in correct]
    return TrajectoryGroup(task_id, episodes)


def selection(retry: float = 0.5, delay: int = 0) -> TaskSelection:
    return TaskSelection(PassRateConfig(retry=retry), "seed", delay)


def used_share(chosen: TaskSelection, task_id: str, step: int = 100) -> float:
    """Return the share of positions at which a task would be used."""
    used = sum(not chosen.skips(task_id, position, step) for position in POSITIONS)
    return used / len(POSITIONS)


def test_solved_and_unsolved_tasks_are_skipped_more_often() -> None:
    chosen = selection()
    for step in range(2):
        chosen.add_groups(step, [group("easy", 1, 1), group("hard", 0, 0), group("fit", 0, 1)])
    assert used_share(chosen, "fit") == used_share(chosen, "new") == 1
    assert used_share(chosen, "easy") == pytest.approx(0.25, abs=0.03)
    assert used_share(chosen, "hard") == pytest.approx(0.25, abs=0.03)

    for step in range(2, 30):
        chosen.add_groups(step, [group("easy", 1, 1)])
    assert used_share(chosen, "easy") == pytest.approx(MIN_PROBABILITY, abs=0.02)
    # One group within the limits is enough.
    chosen.add_groups(30, [group("easy", 1, 0)])
    assert used_share(chosen, "easy") == 1


def test_infrastructure_failures_measure_no_pass_rate() -> None:
    chosen = selection()
    chosen.add_groups(0, [group("easy", 1, 1)])
    before = used_share(chosen, "easy")
    failed = group("easy", 0, 0)
    for episode in failed.trajectories:
        episode.invalid = InvalidReason("tool", "down")
    chosen.add_groups(1, [TrajectoryGroup("easy", [], failed.trajectories)])
    assert used_share(chosen, "easy") == before < 1


def test_a_step_ignores_groups_that_end_after_it_may_begin() -> None:
    chosen = selection(delay=2)
    chosen.add_groups(4, [group("hard", 0)])
    assert used_share(chosen, "hard", step=6) == 1
    assert used_share(chosen, "hard", step=7) < 1
    for step in range(5, 9):
        chosen.add_groups(step, [])
    assert used_share(chosen, "hard", step=9) == pytest.approx(0.5, abs=0.03)


def test_tasks_of_an_evaluation_are_skipped_not_dropped(tmp_path: Path) -> None:
    rest = {"sample": 0, "answer": None, "category": "retool"}
    record = {"task_id": "retool-held_out-0", "reward_parts": {"correct": 0}, **rest}
    (tmp_path / "episodes.jsonl").write_text(json.dumps(record) + "\n")
    limits = f"{{episodes: {tmp_path}/episodes.jsonl, retry: 0.01}}"
    overrides = [*from_file(tmp_path, 4), f"tasks.sources.retool.pass_rate={limits}"]
    tasks = build_tasks(config(tmp_path, *overrides))
    assert {task.task_id for task in tasks.train(0, 4)} == {f"retool-train-{i}" for i in range(4)}

    positions = tasks.select(0, 600, step=0)
    used = [tasks.train(position, 1)[0].task_id for position in positions]
    assert 0 < used.count("retool-train-0") < 40
    assert len(set(used)) == 4
    assert positions[-1] > 600


def test_selection_without_limits_is_rejected() -> None:
    with pytest.raises(ValueError, match="neither episodes nor retry"):
        PassRateConfig()


def test_fine_tuning_measures_no_pass_rates() -> None:
    file = ROOT / "configs/sft/tiny_retool.yaml"
    overrides = [
        "tasks.sources.retool.train_path=train.jsonl",
        "tasks.sources.retool.held_out_path=test.jsonl",
    ]
    load_config(file, SftConfig, overrides)
    with pytest.raises(ConfigError, match=r"retool\.pass_rate\.retry .* samples none"):
        load_config(file, SftConfig, [*overrides, "tasks.sources.retool.pass_rate={retry: 0.5}"])
