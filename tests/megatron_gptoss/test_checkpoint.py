from __future__ import annotations

import errno
import itertools
import os
import queue
import resource
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import wait
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.dist_checkpointing.strategies.filesystem_async import get_write_results_queue

from megatron_gptoss import new_directory
from megatron_gptoss.checkpoint import writer as checkpoint_writer
from megatron_gptoss.checkpoint.directory import (
    clean_up_after_crash,
    find_checkpoint,
    latest_checkpoint,
    publish,
)
from megatron_gptoss.checkpoint.errors import CheckpointError
from megatron_gptoss.checkpoint.loader import load_checkpoint
from megatron_gptoss.checkpoint.megatron_workarounds import lower_half, master_weight
from megatron_gptoss.checkpoint.writer import CheckpointWriter
from megatron_gptoss.config import OptimizerConfig, ParallelConfig
from megatron_gptoss.model import build_model
from megatron_gptoss.packing import build_batch
from megatron_gptoss.trainer import PolicyTrainer
from tests.support.megatron_gptoss.reference import (
    TINY,
    documents,
    mean_cross_entropy,
    save_checkpoint,
)

pytestmark = pytest.mark.usefixtures("process_groups")


BATCH = build_batch(documents([20, 13]))


def trainer(
    seed: int = 0, dtype: torch.dtype = torch.float32, offload: float = 0.0, **settings: float
) -> PolicyTrainer:
    model = build_model(TINY, ParallelConfig(), dtype)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.1, generator=generator)
    return PolicyTrainer(model, OptimizerConfig(offload_fraction=offload, **settings))


def steps(policy: PolicyTrainer, count: int) -> list[float]:
    return [
        policy.train_step([BATCH], mean_cross_entropy(31), 1e-2).sums["loss"] for _ in range(count)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_trainer_continues_the_same_curve_to_the_bit(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    policy = trainer(dtype=dtype)
    steps(policy, 2)
    save_checkpoint(tmp_path, policy, 2, {"step": 2, "position": 128})
    expected = steps(policy, 3)
    other = trainer(seed=1, dtype=dtype)
    state = load_checkpoint(latest_checkpoint(tmp_path), other)
    assert state == {"step": 2, "position": 128}
    assert steps(other, 3) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resumed_trainer_uses_new_optimizer_settings(dtype: torch.dtype, tmp_path: Path) -> None:
    policy = trainer(dtype=dtype)
    steps(policy, 2)
    save_checkpoint(tmp_path, policy, 2, {})
    settings = {"lr": 3e-4, "weight_decay": 0.2, "beta1": 0.5, "beta2": 0.7, "eps": 1e-3}
    policy.config = policy.config.model_copy(update=settings)  # every step sets them
    expected = steps(policy, 3)
    other = trainer(seed=1, dtype=dtype, **settings)
    load_checkpoint(latest_checkpoint(tmp_path), other)
    assert steps(other, 3) == expected
    assert {group["max_lr"] for group in other.optimizer.param_groups} == {3e-4}


def test_master_weight_is_restored_from_its_halves() -> None:
    master = torch.randn(10_000, generator=torch.Generator().manual_seed(0)) * torch.logspace(
        -38, 38, 10_000
    )
    bits = master.numpy().view(np.uint32)
    lower = bits.astype(np.uint16).view(np.int16)
    upper = (bits >> 16).astype(np.uint16) + (
        lower < 0
    )  # like the optimizer: rounded up if the upper bit is lost
    weight = torch.from_numpy(upper.astype(np.uint16).view(np.int16)).view(torch.bfloat16)
    assert torch.equal(lower_half(master), torch.from_numpy(lower))
    assert torch.equal(master_weight(weight, torch.from_numpy(lower)), master)


def test_offloaded_state_learns_and_resumes_as_any_other(tmp_path: Path) -> None:
    expected = steps(trainer(), 5)
    half = trainer(offload=0.5)
    assert steps(half, 2) == expected[:2]
    total = sum(parameter.numel() for parameter in half.module.parameters())
    resting = sum(x.numel() for (_, name), x in half.offloaded._host.items() if name == "exp_avg")
    assert 0.5 <= resting / total < 0.75  # offload moves whole parameters
    save_checkpoint(tmp_path, half, 2, {})
    other = trainer(seed=1, offload=1)
    load_checkpoint(latest_checkpoint(tmp_path), other)
    assert steps(other, 3) == expected[2:]
    for optimizer in other.optimizer.chained_optimizers:
        for parameter, state in optimizer.optimizer.state.items():
            assert state["exp_avg"] is other.offloaded._host[parameter, "exp_avg"]


def test_a_checkpoint_from_before_the_first_update_is_resumed(tmp_path: Path) -> None:
    policy = trainer()
    save_checkpoint(tmp_path, policy, 0, {"step": 0})
    expected = steps(policy, 2)
    other = trainer(seed=1)
    assert load_checkpoint(latest_checkpoint(tmp_path), other) == {"step": 0}
    assert steps(other, 2) == expected


def test_training_continues_during_a_checkpoint_write(tmp_path: Path) -> None:
    policy = trainer()
    writer = CheckpointWriter(tmp_path)
    disk_is_free = threading.Event()
    steps(policy, 2)
    checkpoint_writer.WRITER.submit(disk_is_free.wait)
    (tmp_path / "step_000001.partial").mkdir()  # left by a killed attempt
    writer.start(policy, 2, {"step": 2})
    expected = steps(policy, 3)
    writer.finish(block=False)
    assert latest_checkpoint(tmp_path) is None
    disk_is_free.set()
    writer.finish()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_000002"]
    other = trainer(seed=1)
    assert load_checkpoint(latest_checkpoint(tmp_path), other) == {"step": 2}
    assert steps(other, 3) == expected


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    policy = trainer()
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, policy, step, {}, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_000002", "step_000003"]


def test_missing_checkpoint_is_not_an_error(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path) is None


def test_a_full_disk_leaves_the_previous_checkpoint_valid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = trainer()
    steps(policy, 1)
    save_checkpoint(tmp_path, policy, 1, {"step": 1})
    expected = steps(policy, 1)

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint_writer.dist_checkpointing, "save", full)
    with pytest.raises(
        CheckpointError, match=r"step_000002 could not be written.*No space left.*MiB are free"
    ):
        save_checkpoint(tmp_path, policy, 2, {"step": 2})
    assert latest_checkpoint(tmp_path).name == "step_000001"
    assert not list(tmp_path.glob("*.partial"))
    load_checkpoint(latest_checkpoint(tmp_path), policy)
    assert steps(policy, 1) == expected


def test_full_disk_is_named_despite_vague_megatron_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron reports errors of its threads only by their class."""

    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("Worker failure: error: <class 'OSError'>")

    monkeypatch.setattr(checkpoint_writer.dist_checkpointing, "save", fail)
    for free, message in ((3 << 20, "its disk is full, 3 MiB"), (2 << 30, r"'>\"\)\); 2048 MiB")):
        room = SimpleNamespace(free=free)
        monkeypatch.setattr(
            checkpoint_writer.shutil, "disk_usage", lambda directory, room=room: room
        )
        with pytest.raises(CheckpointError, match=f"{message} are free there"):
            save_checkpoint(tmp_path, trainer(), 1, {})


def test_finish_reports_disk_that_filled_up_during_training(
    tmp_path: Path,
) -> None:
    policy = trainer()
    writer = CheckpointWriter(tmp_path)
    save_checkpoint(tmp_path, policy, 1, {"step": 1})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))  # limit per file
        writer.start(policy, 2, {"step": 2})
        steps(policy, 1)
        with pytest.raises(CheckpointError, match="step_000002 could not be written"):
            writer.finish()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_000001"]
    load_checkpoint(latest_checkpoint(tmp_path), policy)
    writer.start(policy, 3, {"step": 3})
    writer.finish()
    assert latest_checkpoint(tmp_path).name == "step_000003"


# -- a step that is saved again ------------------------------------------------------------------


class Killed(BaseException):
    """Exit of the process. No error handler catches it."""


class FailingCalls:
    """Counts the writer's file operations, and fails before or after a given one.

    A killed deletion has deleted half of the directory.
    """

    CALLS = (
        (Path, "rename"),
        (Path, "unlink"),
        (os, "replace"),
        (os, "fsync"),
        (shutil, "rmtree"),
    )

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.number = self.fail_at = 0
        self.error: BaseException | None = None
        self.done_first = False
        for owner, name in self.CALLS:
            monkeypatch.setattr(owner, name, self.counting(getattr(owner, name)))

    def counting(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            self.number += 1
            if self.error is None or self.number != self.fail_at:
                return call(*args, **options)
            if call.__name__ == "rmtree":
                files = sorted(path for path in Path(args[0]).rglob("*") if path.is_file())
                for path in files[::2]:
                    os.remove(path)
            elif self.done_first:
                call(*args, **options)
            raise self.error

        return counted

    def arm(self, number: int, error: BaseException, done_first: bool) -> None:
        self.number = 0
        self.fail_at = number
        self.error = error
        self.done_first = done_first

    def disarm(self) -> None:
        self.error = None


def content(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


IO_ERROR = OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize(
    ("error", "done_first", "can_exchange"),
    [
        # Every pair of two values. The other cases are slow.
        (Killed(), False, True),
        (Killed(), True, False),
        (IO_ERROR, False, False),
        (IO_ERROR, True, True),
        pytest.param(Killed(), False, False, marks=pytest.mark.slow),
        pytest.param(Killed(), True, True, marks=pytest.mark.slow),
        pytest.param(IO_ERROR, False, True, marks=pytest.mark.slow),
        pytest.param(IO_ERROR, True, False, marks=pytest.mark.slow),
    ],
)
def test_step_saved_again_leaves_complete_checkpoint_at_any_end(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    done_first: bool,
    can_exchange: bool,
) -> None:
    """The process exits at every call between the last byte of data and the end of ``publish``."""
    if not can_exchange:
        monkeypatch.setattr(new_directory, "exchange_names", lambda a, b: False)
    policy = trainer()
    made = tmp_path / "made"
    for attempt in (1, 2):
        save_checkpoint(made / str(attempt), policy, 2, {"attempt": attempt})
        steps(policy, 1)
    attempts = {attempt: content(made / str(attempt) / "step_000002") for attempt in (1, 2)}
    assert attempts[1] != attempts[2]

    calls = FailingCalls(monkeypatch)
    found = []
    for number in itertools.count(1):
        root = tmp_path / f"at_call_{number}"
        shutil.copytree(made / "1", root)
        shutil.copytree(made / "2/step_000002", root / "step_000002.partial")
        calls.arm(number, error, done_first)
        with suppress(Killed, OSError):
            publish(root / "step_000002", keep=2)
        survived = calls.number < number
        calls.disarm()
        newest = latest_checkpoint(root)
        found.append(
            next(attempt for attempt, files in attempts.items() if content(newest) == files)
        )

        # the next process saves the step again
        clean_up_after_crash(root)
        shutil.copytree(made / "2/step_000002", root / "step_000002.partial")
        publish(root / "step_000002", keep=2)
        assert content(latest_checkpoint(root)) == attempts[2]
        assert {path.name for path in root.iterdir() if path.suffix != ".tmp"} == {
            "latest",
            "step_000002",
        }
        if survived:
            break
    assert set(found) == {1, 2} and len(found) > 7


def test_checkpoint_is_found_after_crash_between_two_renames(
    tmp_path: Path,
) -> None:
    policy = trainer()
    for root in (tmp_path / "policy", tmp_path / "critic"):
        save_checkpoint(root, policy, 2, {"step": 2})
    (tmp_path / "policy/step_000002").rename(tmp_path / "policy/step_000002.old")
    found = latest_checkpoint(tmp_path / "policy")
    assert found.name == "step_000002.old" and load_checkpoint(found, policy) == {"step": 2}
    assert find_checkpoint(tmp_path / "critic", found.name) == tmp_path / "critic/step_000002"
    assert find_checkpoint(tmp_path / "critic", "step_000003") is None


def test_latest_checkpoint_is_kept_even_if_others_are_further(
    tmp_path: Path,
) -> None:
    """A run whose ``latest`` was set by hand continues from an earlier step."""
    policy = trainer()
    for step in (80, 100):
        save_checkpoint(tmp_path, policy, step, {"step": step})
    for step, kept in ((60, ["step_000060", "step_000100"]), (65, ["step_000060", "step_000065"])):
        save_checkpoint(tmp_path, policy, step, {"step": step})
        assert load_checkpoint(latest_checkpoint(tmp_path), policy) == {"step": step}
        assert sorted(path.name for path in tmp_path.glob("step_*")) == kept


def test_failed_save_leaves_no_results_for_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another rank fails after this rank has begun to write."""
    policy = trainer()
    submit = checkpoint_writer.WRITER.submit

    def submit_and_fail(*args: Any) -> None:
        wait([submit(*args)])
        raise OSError(errno.EIO, "another rank's disk")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_writer.WRITER, "submit", submit_and_fail)
        with pytest.raises(CheckpointError, match="another rank's disk"):
            save_checkpoint(tmp_path, policy, 1, {"step": 1})
    steps(policy, 1)
    expected = [parameter.detach().clone() for parameter in policy.module.parameters()]
    save_checkpoint(tmp_path, policy, 2, {"step": 2})
    other = trainer(seed=1)
    assert load_checkpoint(latest_checkpoint(tmp_path), other) == {"step": 2}
    assert all(torch.equal(a, b) for a, b in zip(expected, other.module.parameters(), strict=True))
    assert get_write_results_queue().empty()


def test_results_of_writing_need_no_process(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, trainer(), 1, {"step": 1})
    assert isinstance(get_write_results_queue(), queue.Queue)


def test_an_error_of_the_writing_thread_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = checkpoint_writer.WRITER.submit

    def fail() -> None:
        raise MemoryError("no room for a buffer")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_writer.WRITER, "submit", lambda *_: submit(fail))
        with pytest.raises(
            CheckpointError, match=r"step_000001 could not be written .*no room for a buffer"
        ):
            save_checkpoint(tmp_path, trainer(), 1, {})
    assert latest_checkpoint(tmp_path) is None


def test_checkpoint_is_synced_before_its_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[tuple[int, int]] = set()
    fsync = os.fsync
    rename = Path.rename

    def recording(descriptor: int) -> None:
        fsync(descriptor)
        synced.add((os.fstat(descriptor).st_dev, os.fstat(descriptor).st_ino))

    def checking(self: Path, target: Path) -> Path:
        if self.suffix == ".partial":
            for path in (self, *self.rglob("*")):
                assert (path.stat().st_dev, path.stat().st_ino) in synced, (
                    f"{path.name} is not on the disk"
                )
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", recording)
    monkeypatch.setattr(Path, "rename", checking)
    path = save_checkpoint(tmp_path, trainer(), 1, {})
    for needed in (tmp_path, tmp_path / "latest", path / "training_state.json"):
        assert (needed.stat().st_dev, needed.stat().st_ino) in synced, needed.name


def test_latest_file_with_missing_target_is_named(tmp_path: Path) -> None:
    (tmp_path / "latest").write_text("step_000009")
    with pytest.raises(CheckpointError, match="latest names step_000009"):
        latest_checkpoint(tmp_path)


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    policy = trainer()
    steps(policy, 1)
    path = save_checkpoint(tmp_path, policy, 1, {})
    data = next(path.glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="step_000001 cannot be loaded"):
        load_checkpoint(path, policy)


def test_step_with_non_finite_gradient_changes_nothing() -> None:
    policy = trainer()
    before = [parameter.detach().clone() for parameter in policy.module.parameters()]
    good = mean_cross_entropy(31)

    def poisoned(log_probs: torch.Tensor, entropy: torch.Tensor, batch: object) -> object:
        output = good(log_probs, entropy, batch)
        output.loss = output.loss * float("nan")
        return output

    result = policy.train_step([BATCH], poisoned, 1e-2)
    assert not result.parameters_updated
    assert all(torch.equal(a, b) for a, b in zip(before, policy.module.parameters(), strict=True))
    assert policy.train_step([BATCH], good, 1e-2).parameters_updated
