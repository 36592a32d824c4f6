"""Independence of a run's objective and checks from settings of other sections."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_gptoss.samples import TrainingSamples
from rl_loop.config.every_run import RunConfig
from rl_loop.config.load import load_config
from rl_loop.config.run import RlConfig, SftConfig
from rl_loop.data.response_check import ResponseMismatchError, check_sampled_by_policy
from tests.support.in_process import local_trainer

CONFIGS = Path(__file__).parents[3] / "configs"
SMALL = ["model.num_layers=2", "initial_weights=null"]
ROLLOUT = [
    "rollout.temperature=0.5",
    "rollout.evaluation_temperature=0.3",
    "rollout.top_p=0.5",
    "rollout.max_episode_tokens=100000",
    "rollout.max_turns=7",
    "rollout.samples_per_task=3",
    "rollout.workers=3",
]


def load_settings(kind: type[RunConfig], directory: Path, *overrides: str) -> Any:
    file = CONFIGS / kind.command / "tiny_retool.yaml"
    return load_config(file, kind, [*SMALL, f"output_dir={directory}", *overrides])


def demonstrations() -> TrainingSamples:
    chance = np.random.default_rng(0)
    return TrainingSamples.join(
        [
            {"token_ids": chance.integers(0, 500, 40), "loss_mask": [0] * 20 + [1] * 20}
            for _ in range(4)
        ]
    )


def test_sft_objective_ignores_rollout_temperature(tmp_path: Path) -> None:
    """The loss of supervised fine-tuning is the cross-entropy of the exported model."""
    samples = demonstrations()
    losses = []
    for override in ("rollout.temperature=1", "rollout.temperature=0.5"):
        trainer = local_trainer(load_settings(SftConfig, tmp_path, override))
        try:
            before = -trainer.score(samples)[samples.loss_mask].mean()
            update = trainer.sft_step(samples, 0)
        finally:
            trainer.close()
        losses.append(update.sums["loss"] / update.sums["tokens"])
        assert losses[-1] == pytest.approx(before, abs=1e-4)
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)


def test_sft_balances_loads_if_configured(tmp_path: Path) -> None:
    """The loss of the data is the same, and the load-balancing loss is a separate figure."""
    samples = demonstrations()
    updates = []
    for coefficient in (0, 10):
        settings = load_settings(SftConfig, tmp_path, f"load_balancing_loss={coefficient}")
        trainer = local_trainer(settings)
        try:
            updates.append(trainer.sft_step(samples, 0))
        finally:
            trainer.close()
    plain, balanced = updates
    assert plain.load_balancing_loss is None
    assert balanced.load_balancing_loss == pytest.approx(1, abs=0.5)
    assert balanced.sums == plain.sums
    assert balanced.grad_norm > plain.grad_norm


def test_sft_settings_ignore_all_of_rollout(tmp_path: Path) -> None:
    """The inputs of the trainer from other sections stay equal."""

    def read_by_trainer(*overrides: str) -> tuple[object, ...]:
        config = load_settings(SftConfig, tmp_path, *overrides)
        return config.objective, config.training_temperature, config.memory_inputs

    plain = read_by_trainer()
    for override in ROLLOUT:
        assert read_by_trainer(override) == plain, override


def test_mismatched_response_is_detected_without_recording(tmp_path: Path) -> None:
    """An answer to another request is detected even if no episodes are recorded."""
    settings = load_settings(RlConfig, tmp_path, "tracking.episodes=0")
    samples = demonstrations()
    mask = samples.loss_mask
    wrong = np.where(mask, np.float32(-20), np.float32(0))
    samples = replace(samples, rollout_log_probs=wrong, advantages=mask.astype(np.float32))
    trainer = local_trainer(settings)
    try:
        updates = trainer.rl_step(samples, 0)
    finally:
        trainer.close()
    with pytest.raises(ResponseMismatchError):
        check_sampled_by_policy(samples, updates.tokens, 0.1, 0)


@pytest.mark.parametrize("kind", [RlConfig, SftConfig])
def test_deterministic_key_selects_torchs_algorithms(
    kind: type[RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention asks torch for the mode. Other operations without a deterministic form warn."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    modes = []
    for overrides in (["training.deterministic=true"], []):
        local_trainer(load_settings(kind, tmp_path, *overrides)).close()
        modes.append(torch.are_deterministic_algorithms_enabled())
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    # A process without the key has torch's defaults again.
    assert modes == [True, False]
