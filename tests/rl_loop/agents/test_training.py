"""RL of an external agent with real Ray, Megatron, HTTP, agent process, checkpoints and export."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rl_loop.config.load import load_config
from rl_loop.config.run import RlConfig
from rl_loop.infrastructure import InfrastructureOutageError
from rl_loop.run import RunInterrupted, run_rl
from rl_loop.tracking.episode_reader import EpisodeReader
from rl_loop.tracking.run_directory import read_json_lines
from tests.support.forked_workers import local_ray
from tests.support.rl_loop.conversations.written_by_hand import chat, said, user
from tests.support.rl_loop.tiny_runs import RL, Quiet, curve

ROOT = Path(__file__).parents[3]
PROGRAMS = "tests.support.rl_loop.agents.programs"


@pytest.fixture(scope="module", autouse=True)
def one_ray() -> Iterator[None]:
    with local_ray(num_cpus=2, object_store_bytes=200 << 20):
        yield


def config(folder: Path, agent: str, *overrides: str) -> RlConfig:
    chats = folder / "chats.jsonl"
    chats.write_text(json.dumps(chat(user("Hi train 1. Count held_out 2."), said("Hello."))) + "\n")
    options = f'{{agent: "{PROGRAMS}:{agent}", tasks: "{PROGRAMS}:tasks"}}'
    settings = [
        *RL,
        "model.vocab_size=600",
        f"vocabulary_data.path={chats}",
        f"tasks.sources.clerk.options={options}",
        f"output_dir={folder}",
        "rollout.max_sampled_tokens_per_turn=50",
        "training.steps=2",
        "evaluate_every=2",
        *overrides,
    ]
    return load_config(ROOT / "configs/rl/tiny_clerk.yaml", RlConfig, settings)


def read_episodes(run: Path) -> list[dict[str, Any]]:
    reader = EpisodeReader(run / "episodes")
    reader.refresh()
    return list(reader.summary_table.to_pylist(maps_as_pydicts="strict"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RlConfig:
    settings = config(tmp_path_factory.mktemp("whole"), "two_talks", "rollout.routed_experts=true",
                      "algorithm.routing_replay=R3")  # fmt: skip
    run_rl(settings, Quiet())
    return settings


def test_tokens_sampled_through_the_gateway_train_unchanged(
    whole: RlConfig,
) -> None:
    summary = json.loads((whole.directory / "summary.json").read_text())
    assert summary["max_ratio_deviation"] == 0
    assert summary["mean_log_prob_gap"] < 1e-4
    steps = [r for r in read_json_lines(whole.directory / "metrics.jsonl") if "reward" in r]
    assert len(steps) == 2
    assert all(step["grad_norm"] > 0 for step in steps)
    assert all(step["rollout/invalid_fraction/environment"] == 0 for step in steps)

    # 16 episodes per step. Episodes of two conversations have two rows and count once in means.
    rows = [row for row in read_episodes(whole.directory) if row["split"] == "train"]
    assert len({(row["step"], row["group"], row["sample"]) for row in rows}) == 2 * 16
    assert len(rows) > 2 * 16
    for step in steps:
        of_step = [row for row in rows if row["step"] == step["step"]]
        episodes = {(row["group"], row["sample"]): row for row in of_step}
        assert len(episodes) == 16
        rewards = [row["reward"] for row in episodes.values()]
        assert step["reward"] == pytest.approx(sum(rewards) / 16)
        assert step["turns"] == pytest.approx(sum(r["assistant_turns"] for r in of_step) / 16)
        for row in of_step:
            same = episodes[row["group"], row["sample"]]
            assert row["advantage"] == pytest.approx(same["advantage"])


# Slow, because tests/rl_loop/test_loop_on_ray.py resumes a run without external agents.
@pytest.mark.slow
def test_interrupted_agent_run_resumes_with_the_same_curve(whole: RlConfig, tmp_path: Path) -> None:
    interrupted = config(tmp_path, "two_talks", "rollout.routed_experts=true",
                         "algorithm.routing_replay=R3")  # fmt: skip

    def stop(step: int) -> None:
        if step == 1:
            raise KeyboardInterrupt

    with pytest.raises(RunInterrupted):
        run_rl(interrupted, Quiet(stop))
    resumed = run_rl(interrupted, Quiet(), resume=True)
    assert curve(resumed) == pytest.approx(curve(whole.directory), rel=1e-4, abs=1e-6)


def test_off_policy_agent_episodes_continue_across_weight_syncs(tmp_path: Path) -> None:
    """Prompts of a task's samples are computed once."""
    settings = config(
        tmp_path,
        "two_talks",
        "algorithm.max_staleness=2",
        "training.steps=4",
        "training.share_prefixes=all",
        "training.min_shared=8",
    )
    run = run_rl(settings, Quiet())
    rows = [row for row in read_episodes(run) if row["split"] == "train"]
    assert not any(row["invalid"] for row in rows)
    assert any(row["oldest_version"] != row["step"] - 1 for row in rows)
    steps = [r for r in read_json_lines(run / "metrics.jsonl") if "reward" in r]
    assert len(steps) == 4
    assert all(step["prefixes/saved_tokens"] > 0 for step in steps)
    assert all(step["grad_norm"] > 0 for step in steps)


@pytest.mark.slow
def test_dense_model_trains_on_agent_tokens_unchanged(tmp_path: Path) -> None:
    settings = config(
        tmp_path,
        "two_talks",
        "model=tiny_dense",
        "model.vocab_size=600",
        "chatml.system=null",
        "training.steps=2",
    )
    run_rl(settings, Quiet())
    summary = json.loads((settings.directory / "summary.json").read_text())
    assert summary["max_ratio_deviation"] == 0
    assert summary["mean_log_prob_gap"] < 1e-4
    steps = [r for r in read_json_lines(settings.directory / "metrics.jsonl") if "reward" in r]
    assert len(steps) == 2
    assert all(step["grad_norm"] > 0 for step in steps)
    # Every episode has two conversations, and both are trained on.
    rows = [row for row in read_episodes(settings.directory) if row["split"] == "train"]
    assert len(rows) > len({(row["step"], row["group"], row["sample"]) for row in rows})


def test_broken_agent_ends_the_run_and_is_named(tmp_path: Path) -> None:
    with pytest.raises(InfrastructureOutageError, match=rf"{PROGRAMS}:exiting: SystemExit: enough"):
        run_rl(config(tmp_path, "exiting"), Quiet())
