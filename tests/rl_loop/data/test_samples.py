"""From trajectories to training samples: columns, staleness, spliced turns and routes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from megatron_gptoss.token_columns import ColumnError
from rl_loop.algorithms.config import AlgorithmConfig
from rl_loop.data.samples import OffPolicyError, max_staleness, to_samples
from rl_loop.data.trajectory import Trajectory, TrajectoryGroup, WeightVersionSpan

STALE = AlgorithmConfig(max_staleness=9, mini_batches=2)
ON_POLICY = AlgorithmConfig()


def episode(task: str, tokens: int, version: int = 5, **fields: Any) -> Trajectory:
    """Return an episode of two prompt tokens and tokens sampled with weights ``version``."""
    mask = [0, 0] + [1] * (tokens - 2)
    log_probs = [0.0, 0.0] + [-i / 8 for i in range(1, tokens - 1)]
    spans = [WeightVersionSpan(2, tokens, version)]
    first = 100 * tokens
    ids = list(range(first, first + tokens))
    return Trajectory(
        task,
        token_ids=ids,
        loss_mask=mask,
        rollout_log_probs=log_probs,
        **{"weight_versions": spans} | fields,
    )  # type: ignore[arg-type]


def groups(*episodes: Trajectory) -> list[TrajectoryGroup]:
    return [TrajectoryGroup(trajectory.task_id, [trajectory]) for trajectory in episodes]


def test_episodes_are_concatenated_with_their_task_names() -> None:
    short, long = episode("a", 4), episode("b", 7)
    samples = to_samples([TrajectoryGroup("a", [short]), *groups(long)], ON_POLICY, version=5)
    assert samples.offsets.tolist() == [0, 4, 11]
    assert list(samples.names) == ["a", "b"]
    for name in ("token_ids", "loss_mask", "rollout_log_probs"):
        expected = np.concatenate([getattr(short, name), getattr(long, name)])
        assert np.array_equal(getattr(samples, name), expected), name
    assert samples.staleness is None and samples.is_off_policy is None
    assert samples.advantages is None and samples.routed_experts is None
    assert max_staleness(samples) == 0


def test_zero_episodes_make_zero_samples() -> None:
    samples = to_samples([TrajectoryGroup("a", [])], ON_POLICY, version=5)
    assert (len(samples), samples.tokens, max_staleness(samples)) == (0, 0, 0)


def test_excluded_episode_stays_without_loss_tokens() -> None:
    excluded = episode("a", 5, excluded=True)
    samples = to_samples(groups(excluded, episode("b", 4)), ON_POLICY, version=5)
    assert samples.loss_mask.tolist() == [False] * 7 + [True] * 2
    assert excluded.loss_mask.any(), "the episode itself stays as it was"


def test_sampled_tokens_have_staleness_and_spliced_ones_none() -> None:
    spans = [WeightVersionSpan(2, 4, 3), WeightVersionSpan(4, 7, 2), WeightVersionSpan(7, 9, 5)]
    old = episode("a", 9, weight_versions=spans, spliced=[(3, 5)])
    samples = to_samples(groups(episode("b", 4), old), STALE, version=5)
    assert samples.staleness is not None and samples.is_off_policy is not None
    assert samples.staleness.tolist() == [0] * 4 + [0, 0, 2, 0, 0, 3, 3, 0, 0]
    assert np.flatnonzero(samples.is_off_policy).tolist() == [7, 8]
    assert max_staleness(samples) == 3


def test_constrained_tokens_are_marked_and_keep_their_staleness() -> None:
    old = episode("a", 6, version=4, constrained=[(3, 5)], spliced=[(5, 6)])
    samples = to_samples(groups(old), STALE, version=5)
    assert samples.is_off_policy is not None and samples.staleness is not None
    assert np.flatnonzero(samples.is_off_policy).tolist() == [3, 4, 5]
    assert samples.staleness.tolist() == [0, 0, 1, 1, 1, 0]


def test_future_weight_versions_are_rejected() -> None:
    for config in (ON_POLICY, STALE):
        with pytest.raises(OffPolicyError, match="task a: the engine reports weight version 6"):
            to_samples(groups(episode("b", 4), episode("a", 5, version=6)), config, version=5)


def test_stale_tokens_are_rejected_on_policy_unless_spliced() -> None:
    with pytest.raises(OffPolicyError, match="task a: tokens sampled 2 weight versions ago"):
        to_samples(groups(episode("b", 4), episode("a", 5, version=3)), ON_POLICY, version=5)

    spliced = episode("a", 5, version=3, spliced=[(2, 5)])
    samples = to_samples(groups(spliced), ON_POLICY, version=5)
    assert samples.staleness is None, "an age of nothing is no age"


def test_routes_are_passed_unchanged_and_missing_ones_are_named() -> None:
    routes = np.zeros((4, 2, 4), dtype=np.uint8)
    with_routes = episode("a", 5, routed_experts=routes)
    replayed = AlgorithmConfig(routing_replay="R3")
    (row,) = to_samples(groups(with_routes), replayed, version=5).routed_experts or [None]
    assert row is routes
    assert to_samples(groups(with_routes), ON_POLICY, version=5).routed_experts is None
    with pytest.raises(
        ValueError,
        match=r"task b: algorithm\.routing_replay=R3 needs the expert routes of the engine",
    ):
        to_samples(groups(with_routes, episode("b", 5)), replayed, version=5)


def test_estimates_become_columns_or_are_rejected_by_name() -> None:
    samples = to_samples(groups(episode("a", 4), episode("b", 5)), ON_POLICY, version=5)
    values = np.arange(9, dtype=np.float32)
    assert samples.with_columns(values=values).values is values
    assert samples.with_columns(values=values).reference_log_probs is None
    with pytest.raises(ColumnError, match=r"column values of a to b has the shape \[8\]"):
        samples.with_columns(values=values[:8])
    with pytest.raises(ColumnError, match="column reference_log_probs of a to b holds float64"):
        samples.with_columns(reference_log_probs=values.astype(np.float64))


def test_samples_keep_the_episode_of_each_sequence() -> None:
    """The sequences of an episode stay together through a selection of samples."""

    def sequence() -> Trajectory:
        return Trajectory("t", token_ids=[1, 2], loss_mask=[0, 1], rollout_log_probs=[0.0, -0.5])  # type: ignore[arg-type]

    branched = sequence()
    branched.branches = [sequence(), sequence()]
    groups = [TrajectoryGroup("t", [sequence(), branched]), TrajectoryGroup("u", [sequence()])]
    samples = to_samples(groups, AlgorithmConfig(), version=0)
    assert samples.episodes is not None
    assert samples.episodes.tolist() == [0, 1, 1, 1, 2]
    taken = samples.take([4, 2])
    assert taken.episodes is not None
    assert taken.episodes.tolist() == [2, 1]
