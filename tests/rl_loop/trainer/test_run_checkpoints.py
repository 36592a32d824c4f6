"""Checkpoints of a policy and its critic: waiting for writes, and the choice of ``--resume``."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_gptoss.checkpoint import writer as checkpoint_writer
from megatron_gptoss.checkpoint.directory import latest_checkpoint
from megatron_gptoss.checkpoint.errors import CheckpointError
from rl_loop.config.load import load_config
from rl_loop.config.run import RlConfig
from rl_loop.trainer.group import TrainerGroup
from rl_loop.trainer.run_checkpoints import RunCheckpoints
from tests.support.in_process import local_trainer
from tests.support.rl_loop.tiny_runs import CONFIGS, RL
from tests.support.rl_loop.trainer.damage import damage


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainerGroup]:
    """A trainer with a policy and a critic."""
    settings = [
        *RL,
        f"output_dir={tmp_path_factory.mktemp('run')}",
        "algorithm.advantage=gae",
        "algorithm.critic={lr: 1.0e-3, warmup_steps: 0}",
        "training.keep_checkpoints=3",
    ]
    config = load_config(CONFIGS / "rl/tiny_retool.yaml", RlConfig, settings)
    group = local_trainer(config)
    yield group
    group.close()


@pytest.fixture
def run(trainer: TrainerGroup) -> Path:
    for step in (1, 2, 3):
        trainer.save(step, {"step": step, "seconds": 0.0}, True)
    return Path(trainer._settings.directory)


def test_resume_uses_the_checkpoint_before_a_damaged_one(trainer: TrainerGroup, run: Path) -> None:
    assert trainer.resume().damages == []
    file = damage(run / "checkpoints/step_000003")
    resumed = trainer.resume()
    assert resumed.state["step"] == 2
    assert len(resumed.damages) == 1 and resumed.damages[0].startswith(f"{file}: damaged; ")

    # Every later attempt gives the same result until the step is saved again.
    assert trainer.resume().state["step"] == 2
    trainer.save(3, {"step": 3, "seconds": 1.0}, True)
    assert trainer.resume().state == {"step": 3, "seconds": 1.0}


def test_resume_skips_a_checkpoint_with_a_damaged_critic(trainer: TrainerGroup, run: Path) -> None:
    file = damage(run / "critic_checkpoints/step_000003")
    (run / "critic_checkpoints/step_000002/training_state.json").unlink()
    resumed = trainer.resume()
    assert resumed.state["step"] == 1
    assert resumed.damages[0].startswith(f"{file}: damaged")
    assert resumed.damages[1].endswith("critic_checkpoints/step_000002: missing or incomplete")


def test_resume_names_every_damaged_file_if_none_is_intact(
    trainer: TrainerGroup, run: Path
) -> None:
    files = [damage(run / f"checkpoints/step_00000{step}") for step in (3, 2, 1)]
    with pytest.raises(CheckpointError, match="has no checkpoint that can be loaded") as error:
        trainer.resume()
    positions = [str(error.value).index(str(file)) for file in files]
    assert positions == sorted(positions)
    assert "start again with --overwrite" in str(error.value)


# -- while a checkpoint is written ----------------------------------------------------------------


def checkpoints_in(directory: Path, trainer: TrainerGroup) -> RunCheckpoints:
    """Return the checkpoints of another run with the same models, which keeps one of them."""
    worker = trainer.ranks.worker
    settings = worker.settings
    training = settings.training.model_copy(update={"keep_checkpoints": 1})
    settings = settings.model_copy(
        update={"output_dir": directory.parent, "name": directory.name, "training": training}
    )
    return RunCheckpoints(settings, worker.trainer, worker.critic)


@pytest.mark.parametrize("unpublished", ["critic_checkpoints", "checkpoints"])
def test_failed_save_keeps_the_last_checkpoint_of_both_models(
    trainer: TrainerGroup, tmp_path: Path, unpublished: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = checkpoint_writer.publish

    def publish_other(final: Path, keep: int) -> None:
        if final.parent.name == unpublished:
            raise OSError("the disk is gone")
        publish(final, keep)

    checkpoints = checkpoints_in(tmp_path, trainer)
    checkpoints.start(1, {"step": 1})
    checkpoints.finish(block=True)
    checkpoints.start(2, {"step": 2})
    with monkeypatch.context() as disk:
        disk.setattr(checkpoint_writer, "publish", publish_other)
        with pytest.raises(CheckpointError, match="the disk is gone"):
            checkpoints.finish(block=True)

    resumed = checkpoints_in(tmp_path, trainer).resume()
    assert resumed is not None and resumed.state == {"step": 1} and resumed.damages == []
    # An unfinished save would disturb the next test.
    checkpoints.finish(block=True)


def test_only_a_blocking_save_waits_for_the_disk(
    trainer: TrainerGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write = threading.Event()
    write = checkpoint_writer._write_and_hash
    waited: list[bool] = []

    def write_later(*arguments: Any) -> Any:
        waited.append(may_write.wait(5))
        return write(*arguments)

    monkeypatch.setattr(checkpoint_writer, "_write_and_hash", write_later)
    checkpoints = checkpoints_in(tmp_path, trainer)
    checkpoints.start(1, {"step": 1})
    checkpoints.finish(block=False)
    checkpoints.publish_if_complete()
    assert latest_checkpoint(tmp_path / "checkpoints") is None

    may_write.set()
    checkpoints.finish(block=True)
    assert waited == [True, True]
    for root in ("checkpoints", "critic_checkpoints"):
        assert latest_checkpoint(tmp_path / root) == tmp_path / root / "step_000001"
