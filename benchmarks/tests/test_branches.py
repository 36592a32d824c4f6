"""Comparison of updates on the episodes of a branching agent."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.learning import branches
from megatron_gptoss.samples import TrainingSamples
from rl_loop.config.run import RlConfig
from rl_loop.trainer.group import TrainerGroup
from tests.support.megatron_gptoss.branching import branching_samples

SMALL = [
    "model.num_layers=2",
    "model.hidden_size=64",
    "model.intermediate_size=32",
    "model.head_size=16",
    "initial_weights=null",
    "rollout.max_episode_tokens=100",
]


def build_configs(directory: Path) -> dict[str, RlConfig]:
    options = [*SMALL, f"output_dir={directory}", "training.max_tokens_per_micro_batch=200"]
    minimum = {"whole": [], "shared": ["training.min_shared=2"]}
    return {
        name: branches.read_config(directory, name, [*options, *minimum[name]])
        for name in branches.VARIANTS
    }


def build_samples(config: RlConfig) -> TrainingSamples:
    samples = branching_samples(5, trees=3, longest=15, model=config.model)
    return replace(samples, groups=np.arange(len(samples)))


def test_updates_with_shared_prefixes_have_equal_gradients(tmp_path: Path) -> None:
    configs = build_configs(tmp_path)
    samples = build_samples(configs["whole"])
    row = branches.compare_updates(samples, configs, steps=2)
    assert row["sequences"] == len(samples)
    assert row["tokens"] == samples.tokens - len(samples)
    assert row["saved"] == round(1 - row["computed"] / row["tokens"], 3) > 0.25
    assert row["gradient_error"] < 1e-5 and row["log_prob_error"] < 1e-5
    assert row["speed_up"] > 0 and row["processor_speed_up"] > 0


def test_errors_of_gradients_and_log_probs_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs = build_configs(tmp_path)
    samples = build_samples(configs["whole"])
    update, score = TrainerGroup.rl_step, TrainerGroup.score

    def wrong(trainer: TrainerGroup, samples: TrainingSamples, step: int) -> object:
        if trainer._settings.training.share_prefixes == "all":
            samples = samples.with_columns(advantages=1.01 * samples.advantages)
        return update(trainer, samples, step)

    def wrong_score(trainer: TrainerGroup, samples: TrainingSamples) -> np.ndarray:
        is_shared = trainer._settings.training.share_prefixes == "all"
        return score(trainer, samples) * (1.01 if is_shared else 1)

    monkeypatch.setattr(TrainerGroup, "rl_step", wrong)
    monkeypatch.setattr(TrainerGroup, "score", wrong_score)
    row = branches.compare_updates(samples, configs, steps=2)
    assert row["gradient_error"] == pytest.approx(0.01, rel=0.01)
    assert row["log_prob_error"] > 0.01
