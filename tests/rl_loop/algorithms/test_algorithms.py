"""Advantages, losses and KL estimates against plain implementations of their formulas, in fp64."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_loop.algorithms.advantages import (
    gdpo_advantages,
    generalized_advantages,
    group_advantages,
    overlong_penalty,
    reinforce_advantages,
    whiten,
)
from rl_loop.algorithms.config import AlgorithmConfig
from rl_loop.algorithms.correction import mismatch_sums
from rl_loop.algorithms.objectives import policy_objective, value_objective
from rl_loop.algorithms.policy_loss import (
    LossInputs,
    PolicyLoss,
    cispo_loss,
    gspo_loss,
    kl_estimate,
    ppo_loss,
    reinforce_loss,
    value_loss,
)
from rl_loop.algorithms.registry import POLICY_LOSSES
from rl_loop.algorithms.sequences import SequenceIndex, sample_weights
from tests.support.rl_loop.algorithms import (
    CONFIGS,
    build_sample_batch,
    in_fp64,
    loss_tokens,
    samples,
)

rewards = st.lists(st.sampled_from([-1.0, 0.0, 0.25, 1.0]), min_size=2, max_size=12)
EXACT = {"rel": 1e-6, "abs": 1e-6}


def tensor(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


# ---- advantages


DEVIATIONS = {"sample": statistics.stdev, "population": statistics.pstdev}


@pytest.mark.parametrize("deviation", DEVIATIONS)
@given(rewards)
def test_group_advantages_equal_the_papers_formulas(deviation: str, values: list[float]) -> None:
    mean, spread, n = statistics.fmean(values), DEVIATIONS[deviation](values), len(values)
    names = ("grpo", "dr_grpo", "rloo")
    got = {name: group_advantages(tensor(values), name, deviation).tolist() for name in names}
    assert got["grpo"] == pytest.approx([(v - mean) / (spread + 1e-6) for v in values], **EXACT)
    assert got["dr_grpo"] == pytest.approx([v - mean for v in values], **EXACT)
    others = [statistics.fmean(values[:i] + values[i + 1 :]) for i in range(n)]
    assert got["rloo"] == pytest.approx(
        [v - o for v, o in zip(values, others, strict=True)], **EXACT
    )


def test_group_of_one_or_of_equal_rewards_has_zero_advantage() -> None:
    assert group_advantages(tensor([1.0])).tolist() == [0.0]
    assert not group_advantages(tensor([1.0, 1.0])).any()


@pytest.mark.parametrize("deviation", DEVIATIONS)
@given(
    st.lists(
        st.tuples(st.sampled_from([0.0, 1.0]), st.sampled_from([0.0, 0.5, 2.0])),
        min_size=2,
        max_size=8,
    )
)
def test_gdpo_normalizes_every_reward_separately(
    deviation: str, parts: list[tuple[float, float]]
) -> None:
    weights = [1.0, -0.3]
    want = [0.0] * len(parts)
    for k, weight in enumerate(weights):
        column = [p[k] for p in parts]
        mean, spread = statistics.fmean(column), DEVIATIONS[deviation](column)
        want = [
            w + weight * (c - mean) / (spread + 1e-6) for w, c in zip(want, column, strict=True)
        ]
    assert gdpo_advantages(tensor(parts), weights, deviation).tolist() == pytest.approx(
        want, **EXACT
    )


@pytest.mark.parametrize("deviation", DEVIATIONS)
@given(rewards)
def test_reinforce_subtracts_the_mean_and_whitening_scales(
    deviation: str, values: list[float]
) -> None:
    mean, spread = statistics.fmean(values), DEVIATIONS[deviation](values)
    assert reinforce_advantages(tensor(values)).tolist() == pytest.approx(
        [v - mean for v in values], **EXACT
    )
    want = [(v - mean) / math.sqrt(spread**2 + 1e-8) for v in values]
    assert whiten(tensor(values), deviation).tolist() == pytest.approx(want, **EXACT)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0)])
def test_gae_is_the_discounted_sum_of_residuals(gamma: float, lam: float) -> None:
    generator = torch.Generator().manual_seed(1)
    lengths = [5, 2, 7]
    reward, value = torch.zeros(2, 3, 7, dtype=torch.float64)
    for i, n in enumerate(lengths):
        reward[i, :n], value[i, :n] = torch.randn(2, n, generator=generator, dtype=torch.float64)
    advantages, returns = generalized_advantages(reward, value, gamma, lam)
    for i, n in enumerate(lengths):
        v = [*value[i, :n].tolist(), 0.0]
        delta = [float(reward[i, t]) + gamma * v[t + 1] - v[t] for t in range(n)]
        for t in range(n):
            want = sum((gamma * lam) ** k * delta[t + k] for k in range(n - t))
            assert advantages[i, t].item() == pytest.approx(want, **EXACT)
            assert returns[i, t].item() == pytest.approx(want + v[t], **EXACT)
        assert not advantages[i, n:].any()


def test_return_of_every_token_is_the_reward_without_discount() -> None:
    reward, value = tensor([[0.0, 0.0, 1.0]]), tensor([[0.3, 0.1, 0.9]])
    advantages, returns = generalized_advantages(reward, value)
    assert returns.tolist() == [pytest.approx([1.0, 1.0, 1.0])]
    assert advantages.tolist() == [pytest.approx([0.7, 0.9, 0.1])]


def test_overlong_penalty_rises_over_the_buffer() -> None:
    assert [overlong_penalty(n, 100, 20) for n in (50, 80, 90, 100, 120)] == [0, 0, -0.5, -1, -1]


# ---- policy losses

LOG_PROBS = [-0.5, -1.2, -0.1, -2.0, -0.7, -3.0, -0.05]
RATIOS = [0.05, 0.79, 0.81, 1.0, 1.27, 1.29, 9.0]
ADVANTAGES = [1.5, -1.5, 0.5, -0.5, 2.0, -2.0, -1.0]
OLD = [lp - math.log(r) for lp, r in zip(LOG_PROBS, RATIOS, strict=True)]
SEQUENCE = [0, 0, 0, 1, 1, 1, 1]
SEQUENCES = SequenceIndex(torch.tensor(SEQUENCE), 2)
SEQUENCE_ADVANTAGES = [1.5 if s == 0 else -0.5 for s in SEQUENCE]


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def plain_ppo(lp: list[float], dual_clip: float | None = None) -> list[float]:
    losses = []
    for new, old, a in zip(lp, OLD, ADVANTAGES, strict=True):
        r = math.exp(new - old)
        loss = max(-r * a, -clip(r, 0.8, 1.28) * a)
        losses.append(min(loss, -dual_clip * a) if dual_clip and a < 0 else loss)
    return losses


def plain_gspo(lp: list[float]) -> list[float]:
    losses = []
    for i, own in enumerate(SEQUENCE):
        members = [j for j, other in enumerate(SEQUENCE) if other == own]
        s = math.exp(sum(lp[j] - OLD[j] for j in members) / len(members))
        a = SEQUENCE_ADVANTAGES[i]
        losses.append(max(-s * a, -clip(s, 0.4, 1.6) * a))
    return losses


def plain_cispo(lp: list[float]) -> list[float]:
    constant = [clip(math.exp(a - b), 0.0, 1.28) for a, b in zip(LOG_PROBS, OLD, strict=True)]
    return [-c * a * x for c, a, x in zip(constant, ADVANTAGES, lp, strict=True)]


def plain_reinforce(lp: list[float]) -> list[float]:
    return [-a * x for a, x in zip(ADVANTAGES, lp, strict=True)]


MASK = torch.ones(7, dtype=torch.bool)


def inputs(
    log_probs: torch.Tensor, advantages: list[float], old: list[float] | None = OLD
) -> LossInputs:
    old_log_probs = None if old is None else tensor(old)
    return LossInputs(log_probs, old_log_probs, tensor(advantages), MASK, SEQUENCES)


LOSSES: dict[
    str, tuple[Callable[[list[float]], list[float]], Callable[[torch.Tensor], PolicyLoss]]
] = {
    "ppo": (plain_ppo, lambda lp: ppo_loss(inputs(lp, ADVANTAGES), clip_low=0.2, clip_high=0.28)),
    "ppo with dual clip": (
        lambda lp: plain_ppo(lp, 3.0),
        lambda lp: ppo_loss(inputs(lp, ADVANTAGES), clip_low=0.2, clip_high=0.28, dual_clip=3.0),
    ),
    "gspo": (
        plain_gspo,
        lambda lp: gspo_loss(inputs(lp, SEQUENCE_ADVANTAGES), clip_low=0.6, clip_high=0.6),
    ),
    "cispo": (
        plain_cispo,
        lambda lp: cispo_loss(inputs(lp, ADVANTAGES), clip_low=1.0, clip_high=0.28),
    ),
    "reinforce": (plain_reinforce, lambda lp: reinforce_loss(inputs(lp, ADVANTAGES))),
}


@pytest.mark.parametrize("name", LOSSES)
def test_policy_losses_and_gradients_equal_their_formulas(name: str) -> None:
    plain, ours = LOSSES[name]
    log_probs = tensor(LOG_PROBS).requires_grad_()
    loss = ours(log_probs).loss
    assert loss.tolist() == pytest.approx(plain(LOG_PROBS), **EXACT)
    loss.sum().backward()
    assert log_probs.grad is not None
    for i in range(len(LOG_PROBS)):
        shifted = [[x + h * (i == j) for j, x in enumerate(LOG_PROBS)] for h in (1e-6, -1e-6)]
        difference = (sum(plain(shifted[0])) - sum(plain(shifted[1]))) / 2e-6
        assert log_probs.grad[i].item() == pytest.approx(difference, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_every_policy_loss_has_reinforces_gradient_on_policy(name: str) -> None:
    log_probs = tensor(LOG_PROBS).requires_grad_()
    arguments = AlgorithmConfig.model_validate({"policy_loss": name}).policy_loss.arguments
    policy_loss = POLICY_LOSSES.resolve(name)
    result = policy_loss(inputs(log_probs, SEQUENCE_ADVANTAGES, old=None), **arguments)
    assert torch.equal(result.ratio, torch.ones_like(result.ratio))
    assert not result.clipped.any()
    result.loss.sum().backward()
    assert torch.equal(log_probs.grad, -tensor(SEQUENCE_ADVANTAGES))


def test_value_loss_is_clipped_around_the_old_values() -> None:
    new, old, returns = [0.0, 1.0, 3.0, -2.0], [0.0, 0.0, 0.0, 0.0], [1.0, 2.0, 1.0, -3.0]
    want = [
        max((v - r) ** 2, (clip(v, o - 0.5, o + 0.5) - r) ** 2) / 2
        for v, o, r in zip(new, old, returns, strict=True)
    ]
    loss, clipped = value_loss(tensor(new), tensor(old), tensor(returns), 0.5)
    assert loss.tolist() == pytest.approx(want, **EXACT)
    assert clipped.tolist() == [False, True, False, True]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimators_equal_their_definitions(estimator: str) -> None:
    d = [a - b for a, b in zip(LOG_PROBS, OLD, strict=True)]
    want = {
        "k1": d,
        "k2": [x * x / 2 for x in d],
        "k3": [math.exp(-x) - 1 + x for x in d],
    }[estimator]
    log_probs = tensor(LOG_PROBS).requires_grad_()
    got = kl_estimate(log_probs, tensor(OLD), estimator)
    assert got.tolist() == pytest.approx(want, **EXACT)
    assert torch.autograd.gradcheck(lambda x: kl_estimate(x, tensor(OLD), estimator), log_probs)


def test_k1_and_k3_average_to_the_divergence() -> None:
    p, q = tensor([0.5, 0.3, 0.2]), tensor([0.2, 0.5, 0.3])
    divergence = (p * (p / q).log()).sum()
    for estimator in ("k1", "k3"):
        assert (p * kl_estimate(p.log(), q.log(), estimator)).sum() == pytest.approx(
            float(divergence)
        )


# ---- aggregation and objectives


def test_aggregations_weigh_tokens_as_in_the_literature() -> None:
    losses = [[1.0, 2.0, 3.0], [4.0], []]
    want = {
        "token-mean": 10 / 4,
        "seq-mean-token-mean": (2.0 + 4.0) / 2,
        "seq-mean-token-sum": (6.0 + 4.0) / 2,
        "seq-mean-token-sum-norm": (6.0 + 4.0) / 2 / 100,
    }
    for name, total in want.items():
        weights = sample_weights(torch.tensor([len(x) for x in losses]), name, 100)
        got = sum(float(w) * sum(x) for w, x in zip(weights, losses, strict=True))
        assert got == pytest.approx(total, abs=1e-12), name


def test_sequences_of_an_episode_count_as_one_episode() -> None:
    """An agent that branches twice must not weigh three times as much."""
    losses = [[1.0, 2.0, 3.0], [4.0], [], [7.0, 9.0]]
    episodes = torch.tensor([5, 5, 5, 7])
    want = {
        "token-mean": 26 / 6,
        "seq-mean-token-mean": (10.0 / 4 + 8.0) / 2,
        "seq-mean-token-sum": (10.0 + 16.0) / 2,
        "seq-mean-token-sum-norm": (10.0 + 16.0) / 2 / 100,
    }
    tokens = torch.tensor([len(x) for x in losses])
    for name, total in want.items():
        weights = sample_weights(tokens, name, 100, episodes)
        got = sum(float(w) * sum(x) for w, x in zip(weights, losses, strict=True))
        assert got == pytest.approx(total, abs=1e-12), name

        # If every episode has one sequence, the weights do not depend on the episode numbers.
        numbers = torch.arange(4)
        assert torch.equal(
            sample_weights(tokens, name, 100, numbers), sample_weights(tokens, name, 100)
        )


def evaluate(
    config: AlgorithmConfig, everyone: list[dict[str, Any]], parts: list[list[int]]
) -> tuple[float, dict[str, float]]:
    objective = policy_objective(config, loss_tokens(everyone), 50)
    if config.critic:
        objective = value_objective(config, loss_tokens(everyone), 50)
    total, sums = 0.0, {}
    for part in parts:
        batch = in_fp64(build_sample_batch(everyone, part, align=4))
        log_probs = -0.1 * (batch.labels.double() + 1)
        output = objective(
            *((log_probs,) if config.critic else (log_probs, log_probs.abs())), batch
        )
        total += float(output.loss)
        sums = {key: sums.get(key, 0.0) + float(value) for key, value in output.sums.items()}
    return total, sums


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_batch_without_loss_tokens_has_zero_loss_and_gradient(name: str, aggregation: str) -> None:
    config = CONFIGS[name].model_copy(update={"aggregation": aggregation})
    masked = [s | {"loss_mask": [0] * len(s["token_ids"])} for s in samples()]
    batch = in_fp64(build_sample_batch(masked, align=4))
    predicted = (-0.1 * (batch.labels.double() + 1)).requires_grad_()
    if config.critic:
        output = value_objective(config, loss_tokens(masked), 50)(predicted, batch)
    else:
        output = policy_objective(config, loss_tokens(masked), 50)(
            predicted, predicted.abs(), batch
        )
    output.loss.backward()
    assert predicted.grad is not None and not predicted.grad.any()
    figures = (output.loss.detach(), *output.sums.values(), *output.maxima.values())
    assert {float(value.detach()) for value in figures} == {0.0}


@pytest.mark.parametrize("name", CONFIGS)
def test_micro_batches_do_not_change_loss_or_sums(name: str) -> None:
    everyone = samples()
    whole = evaluate(CONFIGS[name], everyone, [[0, 1, 2, 3]])
    cut = evaluate(CONFIGS[name], everyone, [[2, 0], [3], [1]])
    assert whole[0] != 0
    assert cut[0] == pytest.approx(whole[0], abs=1e-6)
    assert cut[1] == pytest.approx(whole[1], abs=1e-6)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(list(CONFIGS)), st.integers(0, 22), st.floats(-30, 30))
def test_values_outside_the_mask_do_not_change_gradients(
    name: str, position: int, change: float
) -> None:
    config, everyone = CONFIGS[name], samples()
    objective = (value_objective if config.critic else policy_objective)(
        config, loss_tokens(everyone), 50
    )
    batch = in_fp64(build_sample_batch(everyone, align=4))
    position %= batch.tokens
    off = batch.loss_mask == 0
    touched = torch.zeros(batch.tokens, dtype=torch.bool)
    touched[position] = bool(off[position])
    generator = torch.Generator().manual_seed(2)
    log_probs = -torch.rand(batch.tokens, generator=generator, dtype=torch.float64)
    columns = [
        "advantages",
        "rollout_log_probs",
        "old_log_probs",
        "reference_log_probs",
        "values",
        "returns",
    ]
    altered = replace(batch, **{c: getattr(batch, c) + change * touched for c in columns})
    gradients = []
    for b, lp in ((batch, log_probs), (altered, log_probs + change * touched)):
        lp = lp.clone().requires_grad_()
        objective(*((lp,) if config.critic else (lp, lp.exp())), b).loss.backward()
        gradients.append(lp.grad)
    assert not gradients[1][off].any()
    assert torch.equal(gradients[0][~off], gradients[1][~off])


def test_objective_reports_ratio_1_and_no_clipping_on_policy() -> None:
    everyone = [s | {"old_log_probs": None} for s in samples()]
    config = AlgorithmConfig()
    batch = build_sample_batch(everyone)
    output = policy_objective(config, loss_tokens(everyone))(
        batch.rollout_log_probs + 0.1, batch.loss_mask, batch
    )
    assert output.sums["clip_fraction"] == 0
    assert output.sums["ratio/mean"] == output.sums["tokens"]
    assert output.maxima["ratio/deviation_max"] == 0


# ---- mismatch


def test_mismatch_estimators_equal_their_definitions() -> None:
    train, rollout = tensor([-1.0, -2.0, -0.5, -9.0]), tensor([-1.1, -1.7, -0.5, 0.0])
    mask = torch.tensor([True, True, True, False])
    sums, maxima = mismatch_sums(train, rollout, mask, SequenceIndex(torch.tensor([0, 1, 1, 1]), 2))
    d = [0.1, -0.3, 0.0]
    want = {
        "mismatch/log_prob_gap_mean": 0.4,
        "mismatch/kl_k1": -sum(d),
        "mismatch/kl_k2": sum(x * x / 2 for x in d),
        "mismatch/kl_k3": sum(math.exp(x) - 1 - x for x in d),
        "mismatch/prob_ratio": sum(math.exp(abs(x)) for x in d),
        "mismatch/chi_square": sum((math.exp(x) - 1) ** 2 for x in d),
        "mismatch/log_perplexity_trainer": 3.5,
        "mismatch/log_perplexity_rollout": 3.3,
        "mismatch/log_perplexity_gap_mean": 0.1 + 0.15,
        "sequences": 2,
    }
    assert {name: float(value) for name, value in sums.items()} == pytest.approx(want, **EXACT)
    assert maxima["mismatch/log_prob_gap_max"].item() == pytest.approx(0.3)
    assert maxima["mismatch/log_perplexity_gap_max"].item() == pytest.approx(0.15)
