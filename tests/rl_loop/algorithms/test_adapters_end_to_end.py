"""Adapters through the real loop in one process: engine, sandbox, Megatron, checkpoints."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_loop.config.load import load_config
from rl_loop.config.run import RlConfig
from rl_loop.tracking.run_directory import read_training_steps
from tests.support.in_process import LocalRollouts, local_loop
from tests.support.rl_loop.small_config import SMALL

CONFIGS = Path(__file__).parents[3] / "configs"
ADAPTED = [
    *SMALL,
    "model.hidden_size=64",
    "model.intermediate_size=32",
    "adapter={rank: 4, alpha: 8, targets: [q, k, v, o, experts, router]}",
    "quantization=mxfp4",
    "optimizer={lr: 1e-2}",
]
UNMERGED = "adapter.merge_experts=false"
KL = "algorithm.kl={coefficient: 0.1}"
PPO = ["algorithm=ppo", "algorithm.critic={warmup_steps: 1, lr: 1e-2}"]


def config(directory: Path, *overrides: str) -> RlConfig:
    return load_config(
        CONFIGS / "rl/tiny_retool.yaml", RlConfig, [*ADAPTED, f"output_dir={directory}", *overrides]
    )


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalRollouts]:
    shared = LocalRollouts(config(tmp_path_factory.mktemp("rollouts")))
    yield shared
    shared.close()


def train(
    settings: RlConfig, rollouts: LocalRollouts, resume: bool = False
) -> list[dict[str, Any]]:
    with local_loop(settings, rollouts, resume) as loop:
        loop.train()
    return read_training_steps(settings.directory / "metrics.jsonl")


@pytest.mark.parametrize(
    "algorithm",
    [
        ["algorithm=grpo", KL],
        # The last one replays R3, too.
        pytest.param(["algorithm=grpo", KL, "algorithm.routing_replay=R3"], marks=pytest.mark.slow),
        ["algorithm=gspo", KL, "algorithm.routing_replay=R2", "algorithm.mini_batches=2"],
        [*PPO, KL],
        # The engine merges in fp32, which rounds less than the canary's limit.
        ["algorithm=grpo", KL, "algorithm.routing_replay=R3", UNMERGED],
    ],
    ids=["grpo", "R3", "R2", "ppo", "unmerged"],
)
def test_adapters_train_on_policy_and_leave_the_reference(
    algorithm: list[str], tmp_path: Path, rollouts: LocalRollouts
) -> None:
    settings = config(tmp_path, *algorithm, "training.steps=4")
    with local_loop(settings, rollouts) as loop:
        before = loop.trainer.weights()
        loop.train()
        after = loop.trainer.weights()
    steps = read_training_steps(settings.directory / "metrics.jsonl")
    for step in steps:
        assert all(value is not None and math.isfinite(value) for value in step.values())
        assert step["mismatch/canary_gap"] < 1e-5

    trained = [step for step in steps if "loss" in step]
    assert max(step["grad_norm"] for step in trained) > 0
    if settings.algorithm.old_log_probs_from == "detach":
        # Until the first update the policy equals the reference, also with the engine's routes.
        assert trained[0]["kl_reference"] == 0
        assert {step["ratio/deviation_max"] for step in trained} == {0}
    assert trained[-1]["kl_reference"] > 0
    if "algorithm=ppo" in algorithm:
        assert steps[-1]["critic/loss"] < steps[0]["critic/loss"]

    frozen = ("norm.weight", "bias", "sinks", "embed_tokens.weight", "lm_head.weight")
    for name, tensor in before.items():
        is_changed = not torch.equal(after[name], tensor)
        assert is_changed == (not name.endswith(frozen)), name


@pytest.mark.parametrize(
    "merging",
    [pytest.param([], marks=pytest.mark.slow), [UNMERGED]],
    ids=["merged", "unmerged"],
)
def test_resumed_adapter_run_continues_the_same_curve(
    merging: list[str], tmp_path: Path, rollouts: LocalRollouts
) -> None:
    options = [*PPO, KL, "optimizer.schedule=constant", *merging]
    whole = train(config(tmp_path / "whole", *options, "training.steps=4"), rollouts)
    train(config(tmp_path / "cut", *options, "training.steps=2"), rollouts)
    resumed = train(config(tmp_path / "cut", *options, "training.steps=4"), rollouts, resume=True)

    # The batches of an engine differ between runs, so the last bits differ, too.
    for name in ("reward", "loss", "grad_norm", "kl_reference", "critic/loss", "critic/grad_norm"):
        found, expected = ([step.get(name, 0.0) for step in curve] for curve in (resumed, whole))
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-6), name
