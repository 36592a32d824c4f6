"""Checkpoints detect damage, and a complete one exists whenever the process ends."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from converters.errors import ConversionError
from converters.megatron_checkpoint import MegatronCheckpoint
from megatron_gptoss import new_directory
from megatron_gptoss.checkpoint.checksums import checksum_file, compare_checksums, compute_checksum
from megatron_gptoss.checkpoint.directory import (
    clean_up_after_crash,
    earlier_checkpoints,
    latest_checkpoint,
    publish,
)
from megatron_gptoss.checkpoint.errors import CheckpointError
from megatron_gptoss.checkpoint.loader import find_damage, load_checkpoint, load_model_weights
from megatron_gptoss.checkpoint.pickled_metadata import data_only
from megatron_gptoss.checkpoint.writer import _PendingSave
from megatron_gptoss.config import OptimizerConfig, ParallelConfig
from megatron_gptoss.model import build_model
from megatron_gptoss.new_directory import partial_name
from megatron_gptoss.packing import build_batch
from megatron_gptoss.trainer import PolicyTrainer
from tests.support.megatron_gptoss.reference import (
    TINY,
    documents,
    mean_cross_entropy,
    save_checkpoint,
)

pytestmark = pytest.mark.usefixtures("process_groups")


FILES = {
    ".metadata",
    "__0_0.distcp",
    "gptoss_config.json",
    "metadata.json",
    "training_state.json",
}
"""Files of a checkpoint of one rank, without the checksums."""


@pytest.fixture(scope="module")
def policy() -> PolicyTrainer:
    model = build_model(TINY, ParallelConfig(), torch.float32)
    return PolicyTrainer(model, OptimizerConfig())


@pytest.fixture(scope="module")
def saved(policy: PolicyTrainer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save the checkpoints of two steps."""
    root = tmp_path_factory.mktemp("saved")
    batch = build_batch(documents([20, 13]))
    for step in (1, 2):
        policy.train_step([batch], mean_cross_entropy(31), 1e-2)
        save_checkpoint(root, policy, step, {"step": step})
    return root


@pytest.fixture
def root(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "checkpoints"))


def flip_a_bit(path: Path, place: float) -> None:
    content = bytearray(path.read_bytes())
    content[int(place * (len(content) - 1))] ^= 1
    path.write_bytes(content)


# -- damage ----------------------------------------------------------------------------------------


def test_every_file_of_a_checkpoint_has_a_checksum(root: Path) -> None:
    path = latest_checkpoint(root)
    listed = json.loads((path / "checksums.json").read_text())
    assert set(listed) == FILES == {file.name for file in path.iterdir()} - {"checksums.json"}
    for name, values in listed.items():
        content = (path / name).read_bytes()
        assert compute_checksum(content) == checksum_file(path / name)
        assert values == {"size": len(content), "xxh3_128": compute_checksum(content).xxh3_128}


@pytest.mark.parametrize("name", sorted(FILES))
@pytest.mark.parametrize("place", [0, 0.3, 1])
def test_any_flipped_bit_is_detected_with_its_file(
    name: str, place: float, root: Path, policy: PolicyTrainer
) -> None:
    path = latest_checkpoint(root)
    flip_a_bit(path / name, place)
    expected = (
        rf"{name}: damaged; its content is not what was written.*the one before it is .*step_000001"
    )
    for load in (load_checkpoint, load_model_weights):
        with pytest.raises(CheckpointError, match=expected):
            load(path, policy if load is load_checkpoint else policy.module)
    with pytest.raises(ConversionError, match=rf"{name}: damaged.* is .*step_000001$"):
        MegatronCheckpoint(path)


def test_short_or_missing_file_is_named(root: Path, policy: PolicyTrainer) -> None:
    path = latest_checkpoint(root)
    data = path / "__0_0.distcp"
    content = data.read_bytes()
    data.write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match=rf"has {len(content) - 1} bytes, and {len(content)}"):
        load_checkpoint(path, policy)
    data.unlink()
    assert find_damage(path) == f"{data}: missing"


def test_damaged_or_escaping_checksums_are_rejected(root: Path) -> None:
    listing = latest_checkpoint(root) / "checksums.json"
    for text in ("{", "[]", '{"a": {"size": 3}}', '{"../a": {"size": 3, "xxh3_128": ""}}'):
        listing.write_text(text)
        assert compare_checksums(listing.parent).startswith(f"{listing}: damaged (")


def test_checkpoint_without_checksums_is_loaded(root: Path, policy: PolicyTrainer) -> None:
    path = latest_checkpoint(root)
    (path / "checksums.json").unlink()
    assert load_checkpoint(path, policy) == {"step": 2}


def test_every_file_is_compared_by_one_of_the_ranks(root: Path) -> None:
    path = latest_checkpoint(root)
    for name in FILES:
        pristine = (path / name).read_bytes()
        flip_a_bit(path / name, 0.5)
        damages = [compare_checksums(path, rank, 3) for rank in range(3)]
        assert [damage is not None for damage in damages].count(True) == 1
        (path / name).write_bytes(pristine)


def test_earlier_checkpoints_are_complete_ones_of_lower_steps(root: Path) -> None:
    for name in ("step_000000", "step_000003", "step_000001.old", "step_000000.partial"):
        shutil.copytree(root / "step_000001", root / name)
    (root / "step_000000/training_state.json").unlink()
    (root / "step_000001").rename(root / "gone")
    found = earlier_checkpoints(root / "step_000002")
    assert [path.name for path in found] == ["step_000001.old"]
    assert [path.name for path in earlier_checkpoints(root / "step_000003")] == [
        "step_000002",
        "step_000001.old",
    ]


# -- the end of the process ------------------------------------------------------------------------

CALLS = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree", "os.truncate"}
"""Audit events of Python for calls that change files. They are sent before the call."""


def save_and_die(root: Path, save: _PendingSave, call: int) -> None:
    """Seal and publish a checkpoint, and exit before the ``call``-th call."""
    count = 0

    def count_call() -> None:
        nonlocal count
        if count == call:
            os._exit(9)
        count += 1

    fsync = os.fsync

    def counted_fsync(descriptor: int) -> None:
        count_call()
        fsync(descriptor)

    os.fsync = counted_fsync
    sys.addaudithook(lambda event, _: count_call() if event in CALLS else None)
    save.seal({})
    publish(save.final, keep=2)


def pending(root: Path, policy: PolicyTrainer, step: int, attempt: int) -> _PendingSave:
    """Prepare a save whose data files have been written by all ranks."""
    final = root / f"step_{step:06d}"
    clean_up_after_crash(root)
    shutil.copytree(root / "data", partial_name(final), copy_function=os.link)
    config = policy.chunks[0].config
    return _PendingSave(final, config.architecture, config.quantization, None, {"attempt": attempt})


@pytest.mark.parametrize(
    ("step", "can_exchange"),
    # test_checkpoint.py has the second case with exceptions instead of exits.
    [
        (2, True),
        pytest.param(2, False, marks=pytest.mark.slow),
        pytest.param(3, True, marks=pytest.mark.slow),
    ],
)
def test_complete_checkpoint_exists_after_exit_at_any_call(
    step: int,
    can_exchange: bool,
    root: Path,
    policy: PolicyTrainer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The cases save step 2 again or save step 3."""
    if not can_exchange:
        monkeypatch.setattr(new_directory, "exchange_names", lambda a, b: False)
    data = root / "data"
    data.mkdir()
    for name in (".metadata", "metadata.json", "__0_0.distcp"):
        shutil.copy(root / "step_000002" / name, data)
    pristine = shutil.copytree(root, root.parent / "pristine")

    found: list[Any] = []
    for call in range(500):
        shutil.rmtree(root)
        shutil.copytree(pristine, root, copy_function=os.link)
        save = pending(root, policy, step, attempt=7)
        child = os.fork()
        if child == 0:
            save_and_die(root, save, call)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

        newest = latest_checkpoint(root)
        assert compare_checksums(newest) is None, call
        found.append(json.loads((newest / "training_state.json").read_text()))

        # The next process saves the step again.
        save = pending(root, policy, step, attempt=8)
        save.seal({})
        publish(save.final, keep=2)
        assert load_state(latest_checkpoint(root)) == {"attempt": 8}
        if status == 0:
            break
        assert status == 9
    assert found[0] == {"step": 2} and found[-1] == {"attempt": 7}
    assert found == sorted(found, key=lambda state: "attempt" in state)
    assert len(found) > 30


def load_state(path: Path) -> Any:
    assert compare_checksums(path) is None
    return json.loads((path / "training_state.json").read_text())


# -- pickles ---------------------------------------------------------------------------------------


class Order:
    """Pickle that calls a chosen function when it is loaded."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return (Path.touch, (self.witness,))


def test_a_pickle_in_the_metadata_is_named_and_not_run(
    root: Path, policy: PolicyTrainer, tmp_path: Path
) -> None:
    path = latest_checkpoint(root)
    witness = tmp_path / "was_run"
    with open(path / ".metadata", "rb") as file:
        metadata = pickle.load(file)
    metadata.planner_data = Order(witness)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    (path / "checksums.json").unlink()

    for load, target in ((load_checkpoint, policy), (load_model_weights, policy.module)):
        with pytest.raises(
            CheckpointError, match=r"\.metadata: damaged or unsafe \(it names pathlib\.Path"
        ):
            load(path, target)
    with pytest.raises(
        ConversionError, match=r"\.metadata: damaged or unsafe \(it names pathlib\.Path"
    ):
        MegatronCheckpoint(path)
    assert not witness.exists()
    pickle.loads(pickle.dumps(metadata))
    assert witness.exists()  # the function runs without the protection


def test_a_pickle_in_an_object_of_the_data_is_not_run(
    root: Path, policy: PolicyTrainer, tmp_path: Path
) -> None:
    """The optimizer's groups are an object, which torch loads in any case."""
    path = latest_checkpoint(root)
    witness = tmp_path / "was_run"
    with open(path / ".metadata", "rb") as file:
        metadata = pickle.load(file)
    index = next(i for i in metadata.storage_data if i.fqn.startswith("common_state"))
    place = metadata.storage_data[index]
    data = path / place.relative_path
    with open(data, "ab") as file:
        place.offset = file.tell()
        torch.save([Order(witness)], file)
        place.length = file.tell() - place.offset
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    (path / "checksums.json").unlink()

    with pytest.raises(
        CheckpointError, match=r"common_state.*not loaded, because it names getattr"
    ):
        load_checkpoint(path, policy)
    assert not witness.exists()


def test_a_data_file_outside_the_directory_is_named(root: Path, policy: PolicyTrainer) -> None:
    path = latest_checkpoint(root)
    with open(path / ".metadata", "rb") as file:
        metadata = pickle.load(file)
    next(iter(metadata.storage_data.values())).relative_path = "../step_000001/__0_0.distcp"
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    (path / "checksums.json").unlink()
    with pytest.raises(CheckpointError, match=r"names the data file '\.\./step_000001"):
        load_checkpoint(path, policy)
    with pytest.raises(ConversionError, match=r"names the data file '\.\./step_000001"):
        MegatronCheckpoint(path)


def test_concurrent_data_only_loads_are_serialized() -> None:
    """Otherwise, the first exit would restore torch's loaders for the second. They run pickles."""
    loaders: list[object] = []

    def load() -> None:
        with data_only():
            loaders.append(DefaultLoadPlanner.load_bytes)

    of_torch = DefaultLoadPlanner.load_bytes
    other = threading.Thread(target=load)
    with data_only():
        changed = DefaultLoadPlanner.load_bytes
        other.start()
        other.join(timeout=0.2)
        assert other.is_alive() and not loaders
    other.join(timeout=30)
    assert loaders == [changed] != [of_torch]
    assert DefaultLoadPlanner.load_bytes is of_torch
