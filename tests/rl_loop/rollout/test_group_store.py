"""Groups saved with a checkpoint: restored unchanged, or sampled again."""

from __future__ import annotations

import logging
import math
import tracemalloc
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from rl_loop.data.trajectory import (
    FinishReason,
    InvalidReason,
    Trajectory,
    TrajectoryGroup,
    Turn,
    WeightVersionSpan,
)
from rl_loop.rollout.group_store import GroupStore

EPISODE = Trajectory(
    task_id="t-1",
    token_ids=[5, 6, 7, 8],
    loss_mask=[0, 1, 0, 1],
    rollout_log_probs=[0.0, -0.1, 0.0, -1e-7],
    weight_versions=[WeightVersionSpan(1, 2, 3), WeightVersionSpan(3, 4, 4)],
    turns=[Turn("prompt", 0, 1, "\ud800 lone"), Turn("assistant", 1, 2, "ü")],
    routed_experts=np.arange(12, dtype=np.uint8).reshape(3, 2, 2),
    finish_reason=FinishReason.MAX_TURNS,
    reward=0.1 + 0.2,
    reward_parts={"correct": 1.0, "score": np.float32(0.1)},  # type: ignore[dict-item]
    tool_calls=2,
    tool_errors=1,
    format_error="channel",
    excluded=True,
    spliced=[(1, 2)],
    constrained=[(3, 4)],
    reusable_tokens=9,
    cached_tokens=8,
    answer="42",
)
FAILED = Trajectory(
    "t-1",
    token_ids=[5],
    loss_mask=[0],
    rollout_log_probs=[0.0],
    reward=math.nan,
    invalid=InvalidReason("tool", "refused"),
)
BRANCHED = replace(EPISODE, branches=[replace(EPISODE, answer="43"), EPISODE])
GROUPS = {
    7: (2, TrajectoryGroup("t-1", [EPISODE, BRANCHED])),
    9: (3, TrajectoryGroup("t-2", [EPISODE])),
}


def same(a: object, b: object) -> bool:
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, list) and a and isinstance(a[0], Trajectory):
        assert isinstance(b, list)
        return len(a) == len(b) and all(
            same(getattr(ours, field.name), getattr(theirs, field.name))
            for ours, theirs in zip(a, b, strict=True)
            for field in fields(Trajectory)
        )
    if isinstance(a, float) and math.isnan(a):
        return isinstance(b, float) and math.isnan(b)
    return a == b and type(a) is type(b)


def test_loaded_groups_equal_the_saved_ones_in_every_field(tmp_path: Path) -> None:
    GroupStore(tmp_path / "async", keep_checkpoints=2, sampled_with="a").save(4, GROUPS)
    loaded = GroupStore(tmp_path / "async", keep_checkpoints=2, sampled_with="a").load(4)
    assert {number: version for number, (version, _) in loaded.items()} == {7: 2, 9: 3}
    for number, (_, group) in GROUPS.items():
        got = loaded[number][1]
        assert got.task_id == group.task_id
        for restored, original in zip(got.trajectories, group.trajectories, strict=True):
            for field in fields(Trajectory):
                a, b = getattr(restored, field.name), getattr(original, field.name)
                assert same(a, b), field.name


def test_load_finds_the_groups_of_its_step_and_nothing_later(tmp_path: Path) -> None:
    store = GroupStore(tmp_path / "async", keep_checkpoints=1, sampled_with="a")
    for step in (2, 4, 6):
        store.save(step, GROUPS)
    assert sorted(path.name for path in (tmp_path / "async").iterdir()) == [
        "step_000004.npz",
        "step_000006.npz",
    ]
    assert set(store.load(4)) == {7, 9}
    assert store.load(6) == {}, "files of steps that are taken again are deleted"
    assert store.load(2) == {}

    store.save(4, GROUPS)
    store.save(4, {})
    assert store.load(4) == {}, "no group had ended"


def test_groups_with_other_settings_or_damage_are_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = GroupStore(tmp_path / "async", keep_checkpoints=2, sampled_with="a")
    store.save(4, GROUPS)
    assert GroupStore(tmp_path / "async", keep_checkpoints=2, sampled_with="b").load(4) == {}

    store.save(4, GROUPS)
    path = tmp_path / "async/step_000004.npz"
    path.write_bytes(path.read_bytes()[:-40])
    with caplog.at_level(logging.WARNING):
        assert store.load(4) == {}
    assert "step_000004.npz cannot be read; sampling its episodes again" in caplog.text


def test_run_without_finished_groups_has_no_directory(tmp_path: Path) -> None:
    store = GroupStore(tmp_path / "async", keep_checkpoints=2, sampled_with="a")
    assert store.load(0) == {}
    store.save(1, {})
    assert not (tmp_path / "async").exists()


BROKEN = {
    "failed": TrajectoryGroup("t-1", [EPISODE], [FAILED]),
    "skipped": TrajectoryGroup("t-1", [], skipped="its prompt is too long"),
    "not finite": TrajectoryGroup(
        "t-1", [replace(EPISODE, rollout_log_probs=np.array([0, math.nan, 0, -1], np.float32))]
    ),
    "partly covered": TrajectoryGroup(
        "t-1", [EPISODE, replace(EPISODE, weight_versions=[WeightVersionSpan(1, 2, 3)])]
    ),
}


@pytest.mark.parametrize("why", BROKEN)
def test_untrainable_groups_are_dropped(why: str, tmp_path: Path) -> None:
    """Otherwise every resume would restore these groups and fail again."""
    store = GroupStore(tmp_path, keep_checkpoints=2, sampled_with="a")
    store.save(4, GROUPS | {8: (2, BROKEN[why])})
    assert set(store.load(4)) == {7, 9}


def test_groups_of_a_crashed_attempt_are_dropped(tmp_path: Path) -> None:
    """An attempt that restored the groups and crashed may have crashed because of them."""
    store = GroupStore(tmp_path, keep_checkpoints=2, sampled_with="a")
    store.save(4, GROUPS)
    assert set(store.load(4)) == {7, 9}
    assert store.load(4) == {}

    store.save(4, GROUPS)
    assert set(store.load(4)) == {7, 9}
    store.release(4)
    assert set(store.load(4)) == {7, 9}, "the attempt ended on request"


def test_groups_of_later_weights_are_dropped(tmp_path: Path) -> None:
    store = GroupStore(tmp_path, keep_checkpoints=2, sampled_with="a")
    store.save(4, {7: (5, TrajectoryGroup("t-1", [EPISODE]))})
    assert store.load(4) == {}


def test_saving_groups_does_not_copy_all_arrays_at_once(tmp_path: Path) -> None:
    """Arrays are written in sequence, because the driver has no memory for a second copy."""
    columns = {
        "token_ids": np.zeros(1 << 20, np.int32),
        "loss_mask": np.ones(1 << 20, np.bool_),
        "rollout_log_probs": np.zeros(1 << 20, np.float32),
    }
    group = TrajectoryGroup("t", [Trajectory("t", **columns)] * 16)
    store = GroupStore(tmp_path, keep_checkpoints=2, sampled_with="a")
    tracemalloc.start()
    try:
        store.save(1, {0: (0, group)})
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (tmp_path / "step_000001.npz").stat().st_size > 16 * 9 << 20
    assert peak < 48 << 20
