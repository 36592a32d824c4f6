"""Recipes of tinker-cookbook run unmodified and offline on a tiny model."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.rl_loop.offline_hub import write_datasets, write_tokenizer
from tests.support.rl_loop.tinker_client import MODEL
from tests.support.rl_loop.tinker_server import KEY, SMALLER, RunningServer, running_server

pytestmark = pytest.mark.slow
pytest.importorskip(
    "tinker_cookbook",
    reason="recipes need: pip install --no-deps tinker-cookbook==0.6.1 (docs/tinker.md)",
)

LONGER = [
    "model.max_length=4096",
    "training.max_tokens_per_micro_batch=4096",
    "adapter.rank=32",
    "adapter.alpha=32",
]
"""Prompts of recipes have one token for each byte here. Some recipes have rank 32 only."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("tinker"), [*SMALLER, *LONGER]) as running:
        yield running


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("hub")
    write_tokenizer(directory)
    write_datasets(directory)
    return directory


def run_recipe(server: RunningServer, hub: Path, name: str, **options: Any) -> list[dict[str, Any]]:
    """Run a recipe, and return its metrics. It logs to ``log_path`` in the directory of the hub."""
    given = {"model_name": MODEL, **options}
    command = [sys.executable, "-W", "ignore", "-m", f"tinker_cookbook.recipes.{name}"]
    command += [f"{key}={value}" for key, value in given.items()]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(hub / "cache")}
    client = {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": KEY}
    ended = subprocess.run(
        command,
        cwd=hub,
        env={**os.environ, **offline, **client},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-4000:]
    lines = (hub / str(given["log_path"]) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


KL = 1e-5
"""Limit in nats of the KL divergence between sampler and trainer."""


def assert_samplers_fit_trainer(rows: list[dict[str, Any]]) -> None:
    """Check that log-probs of samples are those of the trainer, in two steps."""
    for row in rows[:2]:
        assert abs(row["optim/kl_sample_train_v1"]) < KL


SL = {"batch_size": 8, "lora_rank": 8, "save_every": 2, "max_length": 512, "learning_rate": 0.01}


def test_sl_loop_resumes_with_equal_bits(server: RunningServer, hub: Path) -> None:
    """A second run goes on from a checkpoint in the middle of the first one."""
    whole = run_recipe(server, hub, "sl_loop", log_path="whole", max_steps=4, **SL)
    first, *_ = (hub / "whole/checkpoints.jsonl").read_text().splitlines()
    assert json.loads(first)["batch"] == 2
    (hub / "resumed").mkdir()
    (hub / "resumed/checkpoints.jsonl").write_text(first + "\n")
    resumed = run_recipe(server, hub, "sl_loop", log_path="resumed", max_steps=4, **SL)
    losses = [row["train_mean_nll"] for row in whole]
    assert losses[-1] < losses[0]
    assert [row["train_mean_nll"] for row in resumed] == losses[2:]


def test_rl_loop_runs(server: RunningServer, hub: Path) -> None:
    rows = run_recipe(
        server,
        hub,
        "rl_loop",
        log_path="rl",
        batch_size=2,
        group_size=4,
        max_steps=2,
        lora_rank=8,
        save_every=0,
        max_tokens=16,
        loss_fn="importance_sampling",
    )
    assert len(rows) == 2


def test_math_rl_runs(server: RunningServer, hub: Path) -> None:
    rows = run_recipe(
        server,
        hub,
        "math_rl.train",
        log_path="math",
        env="arithmetic",
        groups_per_batch=2,
        group_size=4,
        lora_rank=8,
        max_tokens=6,
        loss_fn="importance_sampling",
        max_steps=2,
        eval_every=0,
        save_every=0,
    )
    assert_samplers_fit_trainer(rows)


def test_on_policy_distillation_compares_with_the_teacher(server: RunningServer, hub: Path) -> None:
    rows = run_recipe(
        server,
        hub,
        "distillation.on_policy_distillation",
        log_path="opd",
        teacher_model=MODEL,
        dataset="deepmath",
        groups_per_batch=2,
        group_size=2,
        lora_rank=8,
        max_tokens=5,
        max_steps=2,
        eval_every=0,
        save_every=0,
    )
    assert_samplers_fit_trainer(rows)
    # Before the first update, the student is its teacher.
    first, second = (row["teacher_kl"] for row in rows[:2])
    assert abs(first) < 1e-5 and abs(second) > 1e-5


def test_multi_turn_recipe_runs(server: RunningServer, hub: Path) -> None:
    rows = run_recipe(
        server,
        hub,
        "multiplayer_rl.guess_number.train",
        log_path="guess",
        renderer_name="gpt_oss_no_sysprompt",
        batch_size=2,
        group_size=2,
        max_tokens=8,
        max_steps=1,
        eval_every=0,
        save_every=0,
    )
    assert rows[0]["env/all/turns_per_episode"] > 1
    assert abs(rows[0]["optim/kl_sample_train_v1"]) < KL


def test_dpo_lowers_its_loss(server: RunningServer, hub: Path) -> None:
    rows = run_recipe(
        server,
        hub,
        "preference.dpo.train",
        log_path="dpo",
        batch_size=4,
        max_steps=3,
        max_length=512,
        learning_rate=0.01,
    )
    losses = [row["dpo_loss"] for row in rows]
    # The first policy is its reference.
    assert losses[0] == pytest.approx(math.log(2), abs=1e-5)
    assert losses[2] < losses[1] < losses[0]
