"""Resume after the driver is killed while off-policy rollouts run."""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rl_loop.config.load import load_config
from rl_loop.config.run import RlConfig
from rl_loop.run_parts import build_tasks
from rl_loop.tracking.episode_reader import EpisodeReader
from rl_loop.tracking.run_directory import RunDirectory, read_json_lines
from tests.support.rl_loop.lifecycle.driver import ROOT, Driver
from tests.support.rl_loop.tiny_runs import CONFIGS, RL
from tests.support.waiting import wait_until

STEPS, TASKS, SAMPLES, STALENESS = 6, 2, 4, 2
KILLED_IN = 3
"""Step in which the driver is killed. Every second step is saved, so the newest is step 2."""

pytestmark = pytest.mark.slow  # two whole runs each


def overrides(directory: Path) -> list[str]:
    return [
        *RL,
        f"output_dir={directory}",
        "rollout.workers=2",
        f"rollout.tasks_per_step={TASKS}",
        f"rollout.samples_per_task={SAMPLES}",
        f"algorithm.max_staleness={STALENESS}",
        f"training.steps={STEPS}",
        "training.checkpoint_every=2",
    ]


def trained_tasks(run: RunDirectory) -> dict[int, Counter[str]]:
    """Return the number of recorded training episodes per task, by step."""
    reader = EpisodeReader(run.episodes)
    reader.refresh()
    tasks: dict[int, Counter[str]] = {}
    for row in reader.summary_table.to_pylist():
        if row["split"] == "train":
            updates = row["step"] - 1  # before the step
            assert updates - STALENESS <= row["oldest_version"] <= row["newest_version"] <= updates
            tasks.setdefault(row["step"], Counter())[row["task_id"]] += 1
    return tasks


def read_steps(run: RunDirectory) -> list[dict[str, Any]]:
    return [step for step in read_json_lines(run.metrics) if "reward" in step]


@pytest.mark.parametrize(
    ("moment", "saved"), [("rollouts", 2), ("sync", 2), ("update", 2), ("checkpoint", None)]
)
def test_killed_run_resumes_and_trains_every_group_once(
    moment: str, saved: int | None, tmp_path: Path
) -> None:
    settings = overrides(tmp_path)
    config = load_config(CONFIGS / "rl/tiny_retool.yaml", RlConfig, settings)
    run = RunDirectory(config.directory)

    script = str(ROOT / "tests/support/rl_loop/lifecycle/killed_driver.py")
    killed = Driver([script, f"{moment}:{KILLED_IN}"], settings)
    assert killed.wait() == -signal.SIGKILL, killed.said
    assert killed.started, "no process was ever seen"
    wait_until(lambda: not killed.still_at_work(), killed.still_at_work, seconds=60)
    killed.end_what_is_left()

    before = read_steps(run)
    latest = int((run.checkpoints / "latest").read_text().rpartition("_")[2])
    # A kill during the write may leave the checkpoint complete or incomplete.
    assert latest in ({saved} if saved is not None else {2, 4})
    assert len(before) == (KILLED_IN + 1 if moment in ("update", "checkpoint") else KILLED_IN)

    resumed = Driver(["-m", "launch"], [*settings, "--resume"])
    assert resumed.wait() == 0, resumed.said

    # Steps up to the checkpoint keep their exact metrics. Later steps run again.
    after = read_steps(run)
    assert [step["step"] for step in after] == list(range(1, STEPS + 1))
    assert after[:latest] == before[:latest]
    assert all(step["time"] > before[-1]["time"] for step in after[latest:])

    # Every step trains on the same tasks as in an uninterrupted run.
    tasks = build_tasks(config)
    expected = {
        step + 1: Counter({task.task_id: SAMPLES for task in tasks.train(step * TASKS, TASKS)})
        for step in range(STEPS)
    }
    assert trained_tasks(run) == expected

    # The staleness limit holds, and no more groups begin than in another run.
    assert max(step["rollout/staleness_max"] for step in after) <= STALENESS
    assert [step["rollout/async_groups"] for step in after] == [4, 4, 4, 4, 2, 0]
    for step in after:
        assert step["correction/dropped_fraction/too_old"] == 0
        assert (
            sum(
                value for name, value in step.items() if name.startswith("rollout/invalid_fraction")
            )
            == 0
        )
