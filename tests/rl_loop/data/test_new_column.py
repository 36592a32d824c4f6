"""A per-token column that someone adds reaches the loss, or is missed by name."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_gptoss.samples import TOKEN_COLUMNS, ColumnError, columns_of, with_fields_for

ROOT = Path(__file__).parents[3]

PLACES = {
    "megatron_gptoss/samples.py": [
        ('    "is_grafted": np.dtype(np.bool_),\n', '    "weighs": np.dtype(np.float32),\n'),
        ("    is_grafted: Any = None\n", "    weighs: Any = None\n"),
        ("    is_grafted: np.ndarray | None = None\n", "    weighs: np.ndarray | None = None\n"),
    ],
    "megatron_gptoss/packing.py": [
        ("    is_grafted: torch.Tensor | None = None\n", "    weighs: torch.Tensor | None = None\n"),
    ],
    "rl_loop/data/trajectory.py": [
        ("    turns: list[Turn] = field(default_factory=list)\n", "    weighs: np.ndarray | None = None\n"),
    ],
}  # fmt: skip
"""Everything that someone writes for a column: text, and what goes in front of it."""

PROGRAM = """
import sys
from pathlib import Path
import numpy as np
from megatron_gptoss.packing import build_batch
from megatron_gptoss.samples import TOKEN_COLUMNS
from rl_loop.algorithms.config import AlgorithmConfig
from rl_loop.data.samples import to_samples
from rl_loop.data.trajectory import Trajectory, TrajectoryGroup
from rl_loop.rollout.group_store import GroupStore
from rl_loop.trainer.shipment import Shipper, plan_step
from tests.support.rl_loop.trainer.settings import settings_of

assert "weighs" in TOKEN_COLUMNS
weighs = np.arange(6, dtype=np.float32)
episode = Trajectory("t", [1] * 6, [0, 0, 1, 1, 1, 1], [0, 0, -1, -1, -1, -1], weighs=weighs)
plain = Trajectory("t", [1] * 6, [0, 0, 1, 1, 1, 1], [0, 0, -1, -1, -1, -1])

store = GroupStore(Path(sys.argv[1]), 2, "settings")
store.save(1, {0: (0, TrajectoryGroup("t", [episode, plain]))})
_, group = store.load(1)[0]
samples = to_samples([group], AlgorithmConfig(), 1)
(shipment,) = Shipper(lambda value: value).ship(samples, plan_step(samples, settings_of(1)))
(mini_batch,) = shipment.unpack(1)
packed = [batch.weighs for batch in mini_batch.micro_batches]
assert sorted(float(v) for row in packed for v in row) == [0, 0, 0, 0, 0, 1, 2, 3, 4, 5], packed
sharded = build_batch(samples).context_parallel_shard(0, 2)
assert len(sharded.weighs) == len(sharded.labels)
"""


def project_with(places: dict[str, list[tuple[str, str]]], directory: Path) -> Path:
    for package in ("megatron_gptoss", "rl_loop", "converters"):
        shutil.copytree(ROOT / package, directory / package)
    for file, additions in places.items():
        path = directory / file
        text = path.read_text()
        for before, addition in additions:
            assert before in text, (file, before)
            text = text.replace(before, addition + before)
        path.write_text(text)
    return directory


def run(directory: Path) -> subprocess.CompletedProcess[str]:
    paths = [directory, ROOT / "kernels", ROOT]
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, str(directory / "ahead")],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": ":".join(map(str, paths))},
        capture_output=True,
        text=True,
        check=False,
    )


def test_new_column_reaches_the_micro_batch(tmp_path: Path) -> None:
    """By way of the store of kept groups, samples, shipments and context-parallel shards."""
    done = run(project_with(PLACES, tmp_path))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("file", "number", "named"),
    [
        ("megatron_gptoss/samples.py", 0, "Trajectory.weighs is an array, but"),
        ("megatron_gptoss/samples.py", 1, "Sample has no field for column weighs"),
        ("megatron_gptoss/samples.py", 2, "TrainingSamples has no field for column weighs"),
        ("megatron_gptoss/packing.py", 0, "PackedBatch has no field for column weighs"),
        ("rl_loop/data/trajectory.py", 0, "unexpected keyword argument 'weighs'"),
    ],
)
def test_forgotten_place_is_named(file: str, number: int, named: str, tmp_path: Path) -> None:
    places = {**PLACES, file: [a for i, a in enumerate(PLACES[file]) if i != number]}
    done = run(project_with(places, tmp_path))
    assert done.returncode != 0
    assert named in done.stderr, done.stderr


def test_class_without_a_column_is_refused() -> None:
    @dataclass
    class Half:
        token_ids: int
        returns: int

    assert columns_of(Half) == ("token_ids", "returns")
    with pytest.raises(ColumnError, match=r"Half has no field for column advantages, .*values"):
        with_fields_for(TOKEN_COLUMNS)(Half)
