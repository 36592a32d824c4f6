"""Episodes as columns: conversion of lists, and errors that name the rejected array."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megatron_gptoss.token_columns import ColumnError
from rl_loop.data.stored_routes import StoredRoutes
from rl_loop.data.trajectory import Trajectory, WeightVersionSpan

TOKENS = 300


def columns(**others: Any) -> dict[str, Any]:
    """Columns of an episode that samples all but its first token, some replaced."""
    mask = np.ones(TOKENS, dtype=np.bool_)
    mask[0] = False
    made = {
        "token_ids": np.arange(TOKENS, dtype=np.int32),
        "loss_mask": mask,
        "rollout_log_probs": np.where(mask, -0.5, 0).astype(np.float32),
        "routed_experts": np.zeros((TOKENS - 1, 2, 4), dtype=np.uint8),
    }
    return made | others


def episode(**others: Any) -> Trajectory:
    return Trajectory("algebra/7", **columns(**others))


def test_lists_become_columns_and_columns_stay_unchanged() -> None:
    listed = Trajectory(
        "t", token_ids=[1, 2, 3], loss_mask=[0, 1, True], rollout_log_probs=[0.0, -1.0, -0.25]
    )  # type: ignore[arg-type]
    assert listed.token_ids.dtype == np.int32
    assert listed.loss_mask.dtype == np.bool_
    assert listed.rollout_log_probs.dtype == np.float32
    assert listed.token_ids.tolist() == [1, 2, 3]
    assert listed.loss_mask.tolist() == [False, True, True]
    assert listed.rollout_log_probs.tolist() == [0.0, -1.0, -0.25]

    given = columns()
    kept = Trajectory("t", **given)
    assert all(getattr(kept, name) is column for name, column in given.items()), "no copies"


def test_more_than_255_sampled_tokens_are_counted() -> None:
    assert episode().sampled_tokens == TOKENS - 1
    assert type(episode().sampled_tokens) is int, "it is written as JSON"


REFUSED: dict[str, tuple[str, Any]] = {
    "fewer entries": ("loss_mask", np.ones(TOKENS - 1, dtype=np.bool_)),
    "fewer entries in a list": ("rollout_log_probs", [0.0] * (TOKENS - 1)),
    "more entries": ("rollout_log_probs", np.zeros(TOKENS + 1, dtype=np.float32)),
    "wider numbers": ("token_ids", np.arange(TOKENS)),
    "wider log-probs": ("rollout_log_probs", np.zeros(TOKENS)),
    "numbers for a mask": ("loss_mask", np.ones(TOKENS, dtype=np.uint8)),
    "other bytes first": ("token_ids", np.arange(TOKENS, dtype=">i4")),
    "other bytes first in log-probs": ("rollout_log_probs", np.zeros(TOKENS, dtype=">f4")),
    "every second entry": ("token_ids", np.arange(2 * TOKENS, dtype=np.int32)[::2]),
    "two dimensions": ("loss_mask", np.ones((TOKENS, 1), dtype=np.bool_)),
    "a mask of other numbers": ("loss_mask", [2] * TOKENS),
    "fractions for ids": ("token_ids", [0.5] * TOKENS),
    "ids beyond int32": ("token_ids", [2**31] * TOKENS),
    "None among numbers": ("rollout_log_probs", [None] * TOKENS),
    "text among numbers": ("rollout_log_probs", ["-0.5"] * TOKENS),
    "routes of every token": ("routed_experts", np.zeros((TOKENS, 2, 4), dtype=np.uint8)),
    "wide routes": ("routed_experts", np.zeros((TOKENS - 1, 2, 4), dtype=np.int32)),
    "routes with other bytes first": ("routed_experts", np.zeros((TOKENS - 1, 2, 4), dtype=">i2")),
    "flat routes": ("routed_experts", np.zeros((TOKENS - 1, 8), dtype=np.uint8)),
    "routes by layer": (
        "routed_experts",
        np.zeros((2, TOKENS - 1, 4), dtype=np.uint8).transpose(1, 0, 2),
    ),
    "stored routes of other tokens": (
        "routed_experts",
        StoredRoutes(None, (TOKENS - 2, 2, 4), np.dtype(np.uint8)),
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_invalid_column_is_rejected_with_column_and_task(kind: str) -> None:
    name, column = REFUSED[kind]
    with pytest.raises(ColumnError, match=rf"column {name} of task algebra/7 "):
        episode(**{name: column})
    with pytest.raises(ColumnError, match=rf"column {name} of task algebra/7 "):
        replace(episode(), **{name: column})


def test_untrainable_episode_is_rejected_with_the_task() -> None:
    def refused(match: str, **others: Any) -> None:
        with pytest.raises(ValueError, match=f"trajectory of task algebra/7: {match}"):
            episode(**others).validate()

    episode().validate()
    nan = columns()["rollout_log_probs"].copy()
    nan[7] = np.nan
    refused("rollout_log_probs contains nan", rollout_log_probs=nan)
    refused("values contains nan", values=nan)
    outside = columns()["rollout_log_probs"].copy()
    outside[0] = -0.5
    refused("rollout_log_probs is non-zero outside the loss mask", rollout_log_probs=outside)
    spans = [WeightVersionSpan(1, TOKENS - 1, 3)]
    refused("weight_versions cover 298 tokens, but 299 were sampled", weight_versions=spans)
