"""Comparison of runs of several models."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks.learning.comparison import PANELS, NotComparableError, draw, read_runs, table
from rl_loop.config.load import dump_config, load_rl_config
from tests.support.forked_workers import forked_python

ROOT = Path(__file__).parents[2]


def write_run(
    directory: Path, name: str, *overrides: str, rewards: tuple[float, ...] = (0, 0, 3)
) -> Path:
    config = load_rl_config(ROOT / f"configs/rl/{name}.yaml", list(overrides))
    directory.mkdir()
    (directory / "config.yaml").write_text(dump_config(config))
    records = [{"step": 0, "held_out/accuracy": 0.5}]
    for step, reward in enumerate(rewards):
        values = {panel.metric: 0.1 for panel in PANELS}
        records.append(
            {"step": step, **values, "reward": reward, "clip_fraction": 0.1 * (step == 1)}
        )
    (directory / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return directory


def test_models_are_compared_on_the_same_tasks_and_seeds(tmp_path: Path) -> None:
    shaped = write_run(tmp_path / "gpt-oss", "tiny_retool")
    dense = write_run(tmp_path / "dense", "tiny_dense", rewards=(0, 0, 1))
    runs = read_runs([f"GPT-OSS={shaped}", f"dense={dense}"])

    _, _, first, second = table(runs).splitlines()
    # The mean of the last third of the rewards, the largest of all clip fractions.
    assert first == "| GPT-OSS | 1 | 3 | 3 | 0.1 | 0.1 | 0.1 | 0.1 | 0.1 |"
    assert second == "| dense | 1 | 3 | 1 | 0.1 | 0.1 | 0.1 | 0.1 | 0.1 |"
    draw(runs, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_seeds_of_a_label_are_averaged_over_common_steps(tmp_path: Path) -> None:
    seeds = [
        write_run(
            tmp_path / f"seed{seed}",
            "tiny_dense",
            f"seed={seed}",
            f"tasks.seed={seed}",
            rewards=(0, 0, float(seed), 100)[: 3 + seed],
        )
        for seed in (0, 1)
    ]
    runs = read_runs([f"dense={directory}" for directory in seeds])
    assert table(runs).splitlines()[2].startswith("| dense | 2 | 3 | 0.5 |")


def test_comparison_allows_routing_replay_next_to_dense_model(tmp_path: Path) -> None:
    overrides = ("algorithm.routing_replay=R3", "rollout.routed_experts=true")
    replayed = write_run(tmp_path / "replayed", "tiny_retool", *overrides)
    dense = write_run(tmp_path / "dense", "tiny_dense")
    assert list(read_runs([f"GPT-OSS={replayed}", f"dense={dense}"])) == ["GPT-OSS", "dense"]


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("training.steps=7", r"training\.steps: 80 in .*, 7 in"),
        ("rollout.tasks_per_step=2", r"rollout\.tasks_per_step: 12"),
        ("reward.format_error=-2", "reward: "),
        ("algorithm.policy_loss.clip_low=0.5", "algorithm: "),
        ("tasks.held_out_tasks=2", "tasks: "),
        ("seed=1", r"seeds \(run, tasks\): \[\(0, 0\)\] of a, \[\(1, 0\)\] of b"),
        ("tasks.seed=1", r"seeds \(run, tasks\)"),
    ],
)
def test_comparison_rejects_runs_with_other_settings(
    tmp_path: Path, override: str, reason: str
) -> None:
    one = write_run(tmp_path / "one", "tiny_retool")
    other = write_run(tmp_path / "other", "tiny_dense", override)
    with pytest.raises(NotComparableError, match=reason):
        read_runs([f"a={one}", f"b={other}"])


def test_comparison_names_directory_without_a_run(tmp_path: Path) -> None:
    begun = write_run(tmp_path / "begun", "tiny_dense", rewards=())
    with pytest.raises(NotComparableError, match="no step has trained yet"):
        read_runs([f"a={begun}"])
    with pytest.raises(NotComparableError, match="expected LABEL=DIRECTORY"):
        read_runs([str(begun)])
    command = [*forked_python(), "-m", "benchmarks.learning", "comparison", f"a={tmp_path}"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr.strip() == f"{tmp_path} is no run: it has no config.yaml"
