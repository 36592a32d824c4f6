"""``--resume`` with a damaged checkpoint: which one a trainer goes on from, and what it says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from benchmarks.in_process import local_trainer
from megatron_gptoss.checkpoint.errors import CheckpointError
from rl_loop.config.load import load_config
from rl_loop.config.run import RlConfig
from rl_loop.session import trainer_settings
from rl_loop.trainer.group import TrainerGroup
from tests.rl_loop.test_loop_on_ray import CONFIGS, RL


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainerGroup]:
    """A policy and a critic whose steps 1 to 3 were saved."""
    settings = [
        *RL,
        f"output_dir={tmp_path_factory.mktemp('run')}",
        "algorithm.advantage=gae",
        "algorithm.critic={optimizer: {lr: 1.0e-3}, warmup_steps: 0}",
        "training.keep_checkpoints=3",
    ]
    config = load_config(CONFIGS / "rl/tiny_retool.yaml", RlConfig, settings)
    group = local_trainer(trainer_settings(config))
    yield group
    group.close()


@pytest.fixture
def run(trainer: TrainerGroup) -> Path:
    for step in (1, 2, 3):
        trainer.save(step, {"step": step, "seconds": 0.0}, True)
    return Path(trainer._settings.directory)


def damage(path: Path) -> Path:
    data = next(path.glob("*.distcp"))
    content = np.fromfile(data, np.uint8)
    content[len(content) // 2] ^= 1
    content.tofile(data)
    return data


def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one(
    trainer: TrainerGroup, run: Path
) -> None:
    assert trainer.resume().damages == []
    file = damage(run / "checkpoints/step_000003")
    resumed = trainer.resume()
    assert resumed.state["step"] == 2
    assert len(resumed.damages) == 1 and resumed.damages[0].startswith(f"{file}: damaged; ")

    # Until that step is saved again, the next attempt finds the same.
    assert trainer.resume().state["step"] == 2
    trainer.save(3, {"step": 3, "seconds": 1.0}, True)
    assert trainer.resume().state == {"step": 3, "seconds": 1.0}


def test_a_damaged_critic_is_as_bad_as_a_damaged_policy(trainer: TrainerGroup, run: Path) -> None:
    file = damage(run / "critic_checkpoints/step_000003")
    (run / "critic_checkpoints/step_000002/training_state.json").unlink()
    resumed = trainer.resume()
    assert resumed.state["step"] == 1
    assert resumed.damages[0].startswith(f"{file}: damaged")
    assert resumed.damages[1].endswith("critic_checkpoints/step_000002: missing or incomplete")


def test_without_an_intact_checkpoint_every_damaged_file_is_named(
    trainer: TrainerGroup, run: Path
) -> None:
    files = [damage(run / f"checkpoints/step_00000{step}") for step in (3, 2, 1)]
    with pytest.raises(CheckpointError, match="has no checkpoint that can be loaded") as error:
        trainer.resume()
    places = [str(error.value).index(str(file)) for file in files]
    assert places == sorted(places)
    assert "begin again with --overwrite" in str(error.value)
