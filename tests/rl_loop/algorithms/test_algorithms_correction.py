"""Rollout correction: every rule against a plain implementation, also with asymmetric bounds."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_loop.algorithms.config import AlgorithmConfig, CorrectionConfig
from rl_loop.algorithms.correction import rollout_correction
from rl_loop.algorithms.objectives import policy_objective
from rl_loop.algorithms.sequences import SequenceIndex
from tests.support.rl_loop.algorithms import build_sample_batch, loss_tokens

SEQUENCE = [0, 0, 0, 1, 1, 1, 2]
MASK = [True, True, True, True, False, True, True]
log_ratios = st.lists(st.floats(-3, 3), min_size=7, max_size=7)


def plain(
    config: CorrectionConfig, log_rho: list[float], advantages: list[float], drift: list[float]
) -> list[float]:
    """Return the weight of every token, computed one by one. Tokens outside the mask have NaN."""
    out = []
    for t, own in enumerate(SEQUENCE):
        if not MASK[t]:
            out.append(math.nan)
            continue
        members = [i for i, s in enumerate(SEQUENCE) if s == own and MASK[i]]
        rho = [math.exp(log_rho[i]) for i in members]
        product, mean = math.prod(rho), sum(log_rho[i] for i in members) / len(members)
        low, high = config.bounds or ((0.5, 5.0) if config.weight == "icepop" else (0.5, 2.0))
        weight = {
            "none": 1.0,
            "token_tis": min(math.exp(log_rho[t]), config.cap),
            "sequence_tis": min(product, config.cap),
            "sequence_mis": min(product, config.cap) if low <= product <= high else 0.0,
            "icepop": math.exp(log_rho[t]) if low <= math.exp(log_rho[t]) <= high else 0.0,
        }[config.weight]
        bounds = config.geometric_bounds
        if bounds and not bounds[0] <= math.exp(mean) <= bounds[1]:
            weight = 0.0
        if config.k3_limit and sum(r - 1 - math.log(r) for r in rho) / len(rho) > config.k3_limit:
            weight = 0.0
        if config.veto and min(rho) < config.veto:
            weight = 0.0
        shift = sum(drift[i] for i in members) / len(members)
        if config.off_policy_limit and advantages[t] < 0 and shift > config.off_policy_limit:
            weight = 0.0
        out.append(weight)
    return out


RULES: list[dict[str, Any]] = [
    {"weight": "none"},
    {"weight": "token_tis"},
    {"weight": "sequence_tis", "cap": 5.0},
    {"weight": "sequence_mis"},
    {"weight": "sequence_mis", "bounds": (0.9, 8.0), "cap": 4.0},
    {"weight": "icepop"},
    {"weight": "icepop", "bounds": (0.1, 1.5)},
    {"geometric_bounds": (0.5, 1.1)},
    {"k3_limit": 0.5},
    {"veto": 0.2},
    {"off_policy_limit": 0.05, "weight": "none"},
]


@pytest.mark.parametrize("rule", RULES, ids=str)
@settings(max_examples=20, deadline=None)
@given(log_ratios, log_ratios, st.booleans())
def test_correction_weights_equal_those_of_the_rule(
    rule: dict[str, Any], log_rho: list[float], drift: list[float], negative: bool
) -> None:
    config = CorrectionConfig(**rule)
    advantages = [-1.0 if negative else 1.0] * 7
    fp64 = {"dtype": torch.float64}
    got = rollout_correction(
        config,
        torch.tensor(log_rho, **fp64),
        torch.tensor(MASK),
        SequenceIndex(torch.tensor(SEQUENCE), 3),
        torch.tensor(advantages, **fp64),
        torch.tensor(drift, **fp64),
    )
    want = plain(config, log_rho, advantages, drift)
    for t, on in enumerate(MASK):
        if on:
            assert got.weights[t].item() == pytest.approx(want[t], rel=1e-6, abs=1e-6)


def sample(
    staleness: list[int] | None = None, is_off_policy: list[bool] | None = None
) -> dict[str, Any]:
    return {
        "token_ids": [1, 2, 3, 4],
        "loss_mask": [0, 1, 1, 1],
        "advantages": [1.0] * 4,
        "rollout_log_probs": [0.0, -1.0, -1.0, -1.0],
        "staleness": staleness,
        "is_off_policy": is_off_policy,
    }


def run(
    config: AlgorithmConfig, one: dict[str, Any], log_probs: list[float]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    values = torch.tensor(log_probs).requires_grad_()
    loss = policy_objective(config, loss_tokens([one]))
    output = loss(values, torch.zeros(3), build_sample_batch([one]))
    output.loss.backward()
    assert values.grad is not None
    return -3 * values.grad, output.sums


def test_rho_is_the_trainers_probability_over_the_engines() -> None:
    config = AlgorithmConfig.model_validate(
        {"correction": {"weight": "icepop", "bounds": (0.5, 10.0)}}
    )
    weights, sums = run(config, sample(), [-1.0, -1.0 + math.log(8), -1.0 - math.log(8)])
    # 8 is within the bounds and 1/8 is not. With swapped bounds it would be the opposite.
    assert weights.tolist() == pytest.approx([1.0, 8.0, 0.0])
    assert sums["correction/dropped_fraction/icepop"] == 1


def test_veto_of_one_token_drops_its_sequence() -> None:
    config = AlgorithmConfig.model_validate({"correction": {"veto": 1e-4}})
    weights, sums = run(config, sample(), [-1.0, -1.0, -12.0])
    assert not weights.any()
    assert sums["correction/dropped_fraction/veto"] == 3
    assert sums["tokens"] == 3  # still in the denominator


def test_tokens_beyond_the_staleness_limit_are_dropped() -> None:
    config = AlgorithmConfig.model_validate(
        {"max_staleness": 1, "old_log_probs": "rollout", "correction": {"weight": "none"}}
    )
    one = sample([0, 0, 1, 2])
    one["old_log_probs"] = one["rollout_log_probs"]
    weights, sums = run(config, one, [-1.0, -1.0, -1.0])
    assert weights.tolist() == pytest.approx([1.0, 1.0, 0.0])
    assert sums["correction/dropped_fraction/too_old"] == 1


def test_spliced_tokens_train_without_correction_or_mismatch() -> None:
    weights, sums = run(
        AlgorithmConfig(),
        sample(is_off_policy=[False, False, True, False]),
        [-1.0, -3.0, -1.0 + math.log(1.5)],
    )
    assert weights.tolist() == pytest.approx([1.0, 1.0, 1.5])
    assert sums["comparable"] == 2
    assert sums["mismatch/log_prob_gap_mean"].item() == pytest.approx(math.log(1.5))
