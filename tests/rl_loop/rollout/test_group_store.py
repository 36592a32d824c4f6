"""Groups in a file beside a checkpoint: they come back as they were."""

from __future__ import annotations

import logging
import math
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
    grafted=[(1, 2)],
    reusable_tokens=9,
    cached_tokens=8,
    answer="42",
)
FAILED = Trajectory(
    "t-1", [5], [0], [0.0], reward=math.nan, invalid=InvalidReason("tool", "refused")
)
BRANCHED = replace(EPISODE, branches=[replace(EPISODE, answer="43"), EPISODE])
GROUPS = {
    7: (2, TrajectoryGroup("t-1", [EPISODE, BRANCHED], [FAILED])),
    9: (3, TrajectoryGroup("t-2", [], skipped="its prompt is too long")),
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


def test_groups_come_back_as_they_were_in_every_field(tmp_path: Path) -> None:
    GroupStore(tmp_path / "ahead", keep_checkpoints=2, max_staleness=2).save(4, GROUPS)
    loaded = GroupStore(tmp_path / "ahead", keep_checkpoints=2, max_staleness=2).load(4)
    assert {number: version for number, (version, _) in loaded.items()} == {7: 2, 9: 3}
    for number, (_, group) in GROUPS.items():
        got = loaded[number][1]
        assert (got.task_id, got.skipped) == (group.task_id, group.skipped)
        pairs = [*zip(got.trajectories, group.trajectories, strict=True)]
        pairs += zip(got.invalid, group.invalid, strict=True)
        for restored, original in pairs:
            for field in fields(Trajectory):
                a, b = getattr(restored, field.name), getattr(original, field.name)
                assert same(a, b), field.name


def test_a_resume_finds_what_belongs_to_its_step_and_nothing_later(tmp_path: Path) -> None:
    store = GroupStore(tmp_path / "ahead", keep_checkpoints=1, max_staleness=2)
    for step in (2, 4, 6):
        store.save(step, GROUPS)
    assert sorted(path.name for path in (tmp_path / "ahead").iterdir()) == [
        "step_000004.npz",
        "step_000006.npz",
    ]
    assert set(store.load(4)) == {7, 9}
    assert store.load(6) == {}, "of the steps that are taken anew"
    assert store.load(2) == {}

    store.save(4, {})
    assert store.load(4) == {}, "nothing had ended"


def test_groups_with_other_limits_or_in_a_damaged_file_are_run_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = GroupStore(tmp_path / "ahead", keep_checkpoints=2, max_staleness=2)
    store.save(4, GROUPS)
    assert GroupStore(tmp_path / "ahead", keep_checkpoints=2, max_staleness=1).load(4) == {}

    path = tmp_path / "ahead/step_000004.npz"
    path.write_bytes(path.read_bytes()[:-40])
    with caplog.at_level(logging.WARNING):
        assert store.load(4) == {}
    assert "step_000004.npz cannot be read; its episodes are run again" in caplog.text


def test_a_run_without_anything_ahead_has_no_such_directory(tmp_path: Path) -> None:
    store = GroupStore(tmp_path / "ahead", keep_checkpoints=2, max_staleness=0)
    assert store.load(0) == {}
    store.save(1, {})
    assert not (tmp_path / "ahead").exists()
