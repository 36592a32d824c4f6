"""Plans of steps whose sequences share prefixes: trees in micro-batches, routes, and mini-batches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_gptoss.packing import build_batch
from megatron_gptoss.samples import TrainingSamples
from megatron_gptoss.step_results import SharedTokens
from rl_loop.data.rollout_batch import RlUpdates
from rl_loop.tracking.metrics import StepMetrics
from rl_loop.tracking.step_metrics import add_update_metrics
from rl_loop.trainer.rank_inputs import RankInputs, RankInputStore
from rl_loop.trainer.step_plan import StepPlan, plan_step
from tests.support.megatron_gptoss.branching import branching_samples
from tests.support.rl_loop.trainer.settings import LIMIT, MODEL, build_settings


def store(samples: TrainingSamples, plan: StepPlan) -> list[RankInputs]:
    """Return each rank's inputs, without a store."""
    return RankInputStore(lambda value: value).store(samples, plan)


def sharing(scope: str = "all", min_shared: int = 1) -> dict[str, Any]:
    return {"share_prefixes": scope, "min_shared": min_shared}


def collect_labels(
    samples: TrainingSamples, inputs: list[RankInputs]
) -> dict[Any, tuple[Any, ...]]:
    """Return what each label of all ranks is computed from, by (mini-batch, sample, position)."""
    seen: dict[Any, tuple[Any, ...]] = {}
    for rank in inputs:
        for number, batches in enumerate(rank.pack(4)):
            for batch in batches:
                assert batch.tokens <= LIMIT
                if batch.routed_experts is None:  # A row of padding.
                    continue
                # The order of experts is no difference.
                experts = batch.routed_experts.sort(dim=-1).values
                ids, positions, routes = (
                    batch.at_labels(column).tolist()
                    for column in (batch.token_ids, batch.position_ids, experts)
                )
                for i in (batch.sample_ids >= 0).nonzero()[:, 0].tolist():
                    key = (number, int(batch.sample_ids[i]), positions[i])
                    assert key not in seen
                    seen[key] = (
                        ids[i],
                        int(batch.labels[i]),
                        float(batch.advantages[i]),
                        routes[i],
                    )
    return seen


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 3), st.sampled_from(["prompts", "all"]))
def test_every_label_keeps_its_input_and_routes(seed: int, ranks: int, scope: str) -> None:
    samples = branching_samples(seed, longest=14, model=MODEL, with_routes=True, unequal_routes=0.1)
    whole = plan_step(samples, build_settings(ranks))
    shared = plan_step(samples, build_settings(ranks, **sharing(scope)))
    got = collect_labels(samples, store(samples, shared))
    assert got == collect_labels(samples, store(samples, whole))
    saved = shared.shared_tokens
    assert saved is not None and whole.shared_tokens is None
    assert saved.tokens == len(got)
    assert saved.computed <= saved.tokens


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 3), st.integers(1, 6))
def test_rows_have_the_planned_tokens(seed: int, ranks: int, min_shared: int) -> None:
    samples = branching_samples(seed, longest=14, model=MODEL)
    plan = plan_step(samples, build_settings(ranks, **sharing("all", min_shared)))
    inputs = store(samples, plan)
    computed = sum(batch.tokens for rank in inputs for batch in rank.pack(1)[0])
    # Ranks without sequences have one token of padding in each micro-batch.
    empty = sum(not rows for rank in inputs for rows in rank.mini_batches[0].micro_batches)
    assert plan.shared_tokens is not None
    assert computed - empty == plan.shared_tokens.computed


def group_samples(prompts: int, samples: int, tokens: int, own: int) -> TrainingSamples:
    """Return groups of samples with a common prompt, all of the same length."""
    rows = []
    for prompt in range(prompts):
        for number in range(samples):
            ids = [prompt] * tokens + [100 + number] * own
            rows.append({"token_ids": ids, "loss_mask": [0] * tokens + [1] * own})
    groups = np.repeat(np.arange(prompts), samples)
    return replace(TrainingSamples.join(rows), groups=groups)


def test_mini_batches_keep_the_samples_of_a_task_together() -> None:
    samples = group_samples(prompts=5, samples=3, tokens=8, own=4)
    plan = plan_step(samples, build_settings(1, **sharing()), mini_batches=2)
    taken = [list(mini_batch.sequences) for mini_batch in plan.mini_batches]
    assert taken == [[0, 1, 2, 6, 7, 8, 12, 13, 14], [3, 4, 5, 9, 10, 11]]
    # Without sharing, samples are spread over mini-batches.
    plan = plan_step(samples, build_settings(1), mini_batches=2)
    assert [list(mini_batch.sequences) for mini_batch in plan.mini_batches] == [
        list(range(0, 15, 2)),
        list(range(1, 15, 2)),
    ]
    assert len(plan_step(samples, build_settings(1, **sharing()), 7).mini_batches) == 5


def test_prompts_are_shared_without_sampled_tokens() -> None:
    # All samples of a group are equal, also their sampled tokens.
    samples = group_samples(prompts=1, samples=4, tokens=8, own=5)
    equal = replace(samples, token_ids=np.tile(samples.token_ids[:13], 4))
    computed = {}
    for scope in ("prompts", "all"):
        plan = plan_step(equal, build_settings(1, **sharing(scope)))
        computed[scope] = plan.shared_tokens.computed
        (batch,) = store(equal, plan)[0].pack(1)[0]
        assert batch.tokens == computed[scope]
    # The last token is not an input.
    assert computed == {"prompts": 8 + 4 * 4, "all": 8 + 4}


def test_conflicts_of_routes_are_counted() -> None:
    samples = group_samples(prompts=1, samples=3, tokens=8, own=4)
    routes = [np.zeros((11, MODEL.num_layers, 2), np.uint8) for _ in range(3)]
    for row in routes:
        row[..., 1] = 1
    # The second sample has another expert at position 5, so it leaves the prompt there.
    routes[1][5, 1, 0] = 7
    samples = samples.with_routes(routes)
    plan = plan_step(samples, build_settings(1, **sharing()))
    assert plan.shared_tokens == SharedTokens(tokens=33, computed=8 + 3 + 3 * 3, route_conflicts=3)
    assert store(samples, plan)[0].pack(1)[0][0].tokens == 20

    updates = RlUpdates(shared_tokens=plan.shared_tokens)
    metrics = StepMetrics(step=1)
    add_update_metrics(metrics, updates)
    values = metrics.values()
    assert values["prefixes/saved_tokens"] == pytest.approx(13 / 33)
    assert values["prefixes/route_conflicts"] == pytest.approx(3 / 33)


def test_plans_are_for_samples_with_these_routes() -> None:
    samples = branching_samples(1, longest=14, model=MODEL, with_routes=True)
    config = build_settings(1, **sharing())
    with_routes = plan_step(samples, config)
    without_routes = plan_step(samples.without_routes(), config)
    # Rows of tokens with any routes can have fewer tokens than planned, but not more.
    assert with_routes.is_for(samples, 1)
    assert with_routes.is_for(samples.without_routes(), 1)
    assert without_routes.is_for(samples.without_routes(), 1)
    assert not without_routes.is_for(samples, 1)
    other = replace(samples, token_ids=samples.token_ids.copy())
    assert not with_routes.is_for(other, 1)
    assert plan_step(samples, build_settings(1)).is_for(other, 1)


def test_too_long_sequences_are_named() -> None:
    samples = group_samples(prompts=1, samples=2, tokens=LIMIT, own=4)
    with pytest.raises(ValueError, match="sample 0 has 68 tokens, more than max_tokens_per_micro"):
        plan_step(samples, build_settings(1, **sharing()))


def test_whole_rows_have_the_same_bits_without_sharing() -> None:
    samples = branching_samples(1, longest=14, model=MODEL, with_routes=True)
    plan = plan_step(samples, build_settings(2))
    for rank, inputs in enumerate(store(samples, plan)):
        own = samples.take(plan.list_sequences(rank))
        for batch, rows in zip(inputs.pack(4)[0], inputs.rows, strict=True):
            want = build_batch(own, rows, 4)
            assert batch.prefixes is None
            assert torch.equal(batch.token_ids, want.token_ids)
            assert torch.equal(batch.routed_experts, want.routed_experts)
