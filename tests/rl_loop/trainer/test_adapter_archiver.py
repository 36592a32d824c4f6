"""``training.keep_adapters``: adapters of every checkpoint, also of deleted ones."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from converters.adapter_checkpoint import export_adapter
from converters.safetensors_files import SafetensorsWriter
from megatron_gptoss import distributed
from megatron_gptoss.checkpoint.directory import latest_checkpoint
from megatron_gptoss.checkpoint.errors import CheckpointError
from megatron_gptoss.checkpoint.loader import find_damage
from rl_loop.config.load import load_config
from rl_loop.config.partial_configs import TrainerConfig
from rl_loop.config.run import RlConfig
from rl_loop.trainer import adapter_archiver
from rl_loop.trainer.group import TrainerGroup
from rl_loop.trainer.local_rank import LocalRank
from rl_loop.trainer.rank_inputs import RankInputStore
from rl_loop.trainer.step_plan import plan_step
from rl_loop.trainer.worker import TrainerWorker
from tests.support.distributed import free_port, run_distributed
from tests.support.rl_loop.trainer.adapter_rank import (
    ADAPTER,
    CONFIGS,
    SAMPLES,
    SMALL,
    open_trainer,
)
from tests.support.rl_loop.trainer.adapter_rank import base as base
from tests.support.rl_loop.trainer.adapter_rank import no_group_is_left as no_group_is_left
from tests.support.rl_loop.trainer.damage import damage

KEEPING = [ADAPTER, "training.keep_adapters=true", "initial_weights=null"]


@contextmanager
def keeping(run: Path, *overrides: str) -> Iterator[tuple[TrainerGroup, LocalRank]]:
    """Start a trainer that keeps the adapters of every checkpoint."""
    with open_trainer(run, *KEEPING, *overrides) as trainer:
        yield trainer


def content(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def train_until(is_so: Any, group: TrainerGroup) -> None:
    """Train until a condition holds. Steps publish written checkpoints."""
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        group.sft_step(SAMPLES, 0)


def save_next(group: TrainerGroup, step: int, block: bool = True) -> None:
    group.sft_step(SAMPLES, step - 1)
    group.save(step, {"step": step}, block)


def test_kept_adapters_of_every_step_equal_exported_ones(base: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    from_base = f"initial_weights={base}/hf"
    weights = {}
    with keeping(run, from_base, "training.keep_checkpoints=1") as (group, _):
        for step in (1, 2):
            save_next(group, step)
            export_adapter(
                run / f"checkpoints/step_00000{step}", tmp_path / str(step), f"{base}/hf"
            )
            weights[step] = group.weights()
        save_next(group, 3, block=False)
        save_next(group, 4)

    assert names(run / "checkpoints") == ["latest", "step_000004"]
    assert names(run / "adapters") == [f"step_00000{step}" for step in (1, 2, 3, 4)]
    for step in (1, 2):
        assert content(run / f"adapters/step_00000{step}") == content(tmp_path / str(step))
    assert content(run / "adapters/step_000001") != content(run / "adapters/step_000002")

    # Another run starts from the adapters of a deleted checkpoint.
    kept = f"initial_adapter={run}/adapters/step_000002"
    with open_trainer(tmp_path / "next", from_base, ADAPTER, kept) as (group, _):
        found = group.weights()
    assert all(torch.equal(found[name], tensor) for name, tensor in weights[2].items())
    assert not all(torch.equal(found[name], tensor) for name, tensor in weights[1].items())


def test_training_continues_while_adapters_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_read = threading.Event()

    def read_later(checkpoint: Path, *arguments: Any, **options: Any) -> None:
        assert may_read.wait(60)
        export_adapter(checkpoint, *arguments, **options)

    monkeypatch.setattr(adapter_archiver, "export_adapter", read_later)
    checkpoints = tmp_path / "run/checkpoints"
    with keeping(tmp_path / "run", "training.keep_checkpoints=1") as (group, rank):
        save_next(group, 1, block=False)
        train_until(lambda: latest_checkpoint(checkpoints) is not None, group)
        save_next(group, 2, block=False)
        writer = rank.worker._checkpoints._writers[0][0]
        train_until(lambda: writer._pending.is_written(), group)
        group.sft_step(SAMPLES, 0)
        assert names(checkpoints) == ["latest", "step_000001", "step_000002.partial"]

        may_read.set()
        train_until(lambda: latest_checkpoint(checkpoints).name == "step_000002", group)
        save_next(group, 3)
    assert names(tmp_path / "run/adapters") == [f"step_00000{step}" for step in (1, 2, 3)]


def test_full_disk_for_adapters_is_named_and_loses_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"

    def fail(self: SafetensorsWriter, name: str, tensor: torch.Tensor) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with keeping(run, "training.keep_checkpoints=1") as (group, rank):
        with monkeypatch.context() as disk:
            disk.setattr(SafetensorsWriter, "add", fail)
            save_next(group, 1, block=False)
            train_until(lambda: latest_checkpoint(run / "checkpoints") is not None, group)
            rank.worker._checkpoints._adapter_archiver.wait()
            message = rf"{run}/adapters/step_000001: .*step_000001 could not be written .*No space"
            with pytest.raises(CheckpointError, match=message):
                save_next(group, 2, block=False)
            assert names(run / "adapters") == []
        # The older checkpoint is kept, so that its adapters can be read again.
        assert names(run / "checkpoints") == ["latest", "step_000001", "step_000002"]
        assert find_damage(run / "checkpoints/step_000002") is None
        assert group.resume().state == {"step": 2}
        assert names(run / "adapters") == ["step_000001", "step_000002"]

        with monkeypatch.context() as disk:
            disk.setattr(SafetensorsWriter, "add", fail)
            with pytest.raises(CheckpointError, match=r"adapters/step_000003: .*No space"):
                save_next(group, 3)
        assert names(run / "checkpoints") == ["latest", "step_000003"]
        assert group.resume().state == {"step": 3}
    assert names(run / "adapters") == ["step_000001", "step_000002", "step_000003"]


def test_resume_writes_only_missing_adapters(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with keeping(run) as (group, _):
        for step in (1, 2, 3):
            save_next(group, step)
        expected = content(run / "adapters/step_000003")
        before = {step: (run / f"adapters/step_00000{step}").stat().st_ino for step in (1, 2)}
        # The process was killed while it wrote the newest adapters.
        (run / "adapters/step_000003").rename(run / "adapters/step_000003.partial")
        group.resume()
        assert names(run / "adapters") == [f"step_00000{step}" for step in (1, 2, 3)]
        assert content(run / "adapters/step_000003") == expected
        assert {s: (run / f"adapters/step_00000{s}").stat().st_ino for s in (1, 2)} == before


def test_adapters_of_repeated_steps_are_deleted(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with keeping(run) as (group, _):
        for step in (1, 2, 3):
            save_next(group, step)
        damage(run / "checkpoints/step_000003")
        assert group.resume().state == {"step": 2}
        assert names(run / "adapters") == ["step_000001", "step_000002"]
        save_next(group, 3)
    assert names(run / "adapters") == ["step_000001", "step_000002", "step_000003"]


def test_resume_skips_adapters_of_an_older_damaged_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    with open_trainer(run, ADAPTER, "initial_weights=null") as (group, _):
        for step in (1, 2):
            save_next(group, step)
        assert not (run / "adapters").exists()
    file = damage(run / "checkpoints/step_000001")
    with keeping(run) as (group, _):
        assert group.resume().state == {"step": 2}
    assert names(run / "adapters") == ["step_000002"]
    assert f"step_000001: {file}: damaged" in caplog.text


# -- several ranks -------------------------------------------------------------------------------


def save_on_rank(rank: int, port: int, settings: TrainerConfig) -> list[str]:
    """Save twice, the second time with a full disk for adapters. Return the error."""
    worker = TrainerWorker(settings, rank, "127.0.0.1", port, 1)
    try:
        plan = plan_step(SAMPLES, settings, 1)
        inputs = RankInputStore(lambda value: value).store(SAMPLES, plan)
        worker.sft_step(inputs[worker.position().data], 0)
        worker.save(1, {"step": 1}, True)

        def fail(*arguments: Any, **options: Any) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        adapter_archiver.export_adapter = fail
        with pytest.raises(CheckpointError) as error:
            worker.save(2, {"step": 2}, True)
        return [str(error.value)]
    finally:
        distributed.shutdown()


def test_first_rank_writes_all_experts_or_raises_on_all_ranks(
    tmp_path: Path,
) -> None:
    options = [
        *SMALL,
        *KEEPING,
        f"output_dir={tmp_path}",
        "name=run",
        "parallel.expert=2",
        "parallel.world_size=2",
    ]
    settings = load_config(CONFIGS / "rl/tiny_retool.yaml", RlConfig, options)
    (first,), (second,) = run_distributed(save_on_rank, 2, free_port(), settings)
    assert first == second
    assert "adapters/step_000002: the adapters of step_000002 could not be written" in first

    export_adapter(tmp_path / "run/checkpoints/step_000001", tmp_path / "exported")
    assert names(tmp_path / "run/adapters") == ["step_000001"]
    assert content(tmp_path / "run/adapters/step_000001") == content(tmp_path / "exported")
