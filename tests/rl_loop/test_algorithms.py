from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_gptoss.packing import Sample, build_batch
from rl_loop.algorithms.advantages import group_advantages
from rl_loop.algorithms.mismatch import mismatch_sums
from rl_loop.algorithms.objectives import policy_objective
from rl_loop.algorithms.policy_loss import ppo_loss
from rl_loop.config import AlgorithmConfig

rewards = st.lists(st.sampled_from([-1.0, 0.0, 0.25, 1.0]), min_size=2, max_size=12)


@given(rewards)
def test_grpo_advantages_have_mean_zero_and_unit_spread(values: list[float]) -> None:
    advantages = group_advantages(torch.tensor(values), "grpo")
    assert abs(advantages.mean()) < 1e-5
    if len(set(values)) > 1:
        assert float(advantages.square().mean()) == pytest.approx(1, abs=1e-3)
    else:
        assert not advantages.any()


@given(rewards)
def test_leave_one_out_compares_each_sample_with_the_others_only(values: list[float]) -> None:
    got = group_advantages(torch.tensor(values), "leave_one_out")
    want = [v - sum(values[:i] + values[i + 1 :]) / (len(values) - 1) for i, v in enumerate(values)]
    assert got.tolist() == pytest.approx(want, abs=1e-5)


def test_dr_grpo_keeps_the_scale_of_the_rewards() -> None:
    assert group_advantages(torch.tensor([1.0, -1.0, -1.0, -1.0]), "dr_grpo").tolist() == [1.5, -0.5, -0.5, -0.5]


def test_a_group_of_one_has_no_advantage() -> None:
    assert group_advantages(torch.tensor([1.0])).tolist() == [0.0]


def test_on_policy_the_ratio_is_one_and_the_gradient_is_that_of_reinforce() -> None:
    log_probs = torch.tensor([-0.1, -3.0, -20.0], requires_grad=True)
    advantages = torch.tensor([1.0, -2.0, 0.5])
    result = ppo_loss(log_probs, None, advantages)
    assert torch.equal(result.ratio, torch.ones(3))
    assert not result.clipped.any()
    result.loss.sum().backward()
    assert torch.equal(log_probs.grad, -advantages)


@pytest.mark.parametrize("advantage", [1.5, -1.5])
@pytest.mark.parametrize("ratio", [0.05, 0.79, 0.81, 1.0, 1.27, 1.29, 9.0])
@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_off_policy_loss_equals_the_formula(advantage: float, ratio: float, dual_clip: float | None) -> None:
    clipped = min(max(ratio, 1 - 0.2), 1 + 0.28)
    want = max(-ratio * advantage, -clipped * advantage)
    if dual_clip is not None and advantage < 0:
        want = min(want, -dual_clip * advantage)
    log_probs = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    old = torch.zeros(1, dtype=torch.float64)
    result = ppo_loss(log_probs, old, torch.tensor([advantage]), 0.2, 0.28, dual_clip)
    assert result.loss.item() == pytest.approx(want)
    result.loss.sum().backward()
    active = want == pytest.approx(-ratio * advantage)
    assert log_probs.grad.item() == pytest.approx(-ratio * advantage if active else 0.0)
    assert result.clipped.item() == (not active)


def test_mismatch_estimators_agree_with_their_definitions_and_ignore_unmasked_tokens() -> None:
    train = torch.tensor([-1.0, -2.0, -0.5, -9.0])
    rollout = torch.tensor([-1.1, -1.7, -0.5, 0.0])
    sums, maxima = mismatch_sums(train, rollout, torch.tensor([1.0, 1, 1, 0]))
    d = [0.1, -0.3, 0.0]
    assert sums["logprob_gap"].item() == pytest.approx(0.4)
    assert maxima["logprob_gap_max"].item() == pytest.approx(0.3)
    assert sums["kl_k1"].item() == pytest.approx(-sum(d))
    assert sums["kl_k2"].item() == pytest.approx(sum(x * x / 2 for x in d))
    assert sums["kl_k3"].item() == pytest.approx(sum(math.exp(x) - 1 - x for x in d), abs=1e-6)
    assert sums["prob_ratio"].item() == pytest.approx(sum(math.exp(abs(x)) for x in d))
    assert sums["chi_square"].item() == pytest.approx(sum((math.exp(x) - 1) ** 2 for x in d), abs=1e-6)
    assert sums["log_perplexity_train"].item() == pytest.approx(3.5)


def test_no_mismatch_gives_zero_everywhere() -> None:
    same = -torch.rand(10)
    sums, maxima = mismatch_sums(same, same, torch.ones(10))
    assert all(sums[name] == 0 for name in ("logprob_gap", "kl_k1", "kl_k2", "kl_k3", "chi_square"))
    assert sums["prob_ratio"] == 10
    assert maxima["logprob_gap_max"] == 0


def test_cutting_a_batch_into_micro_batches_does_not_change_loss_or_sums() -> None:
    generator = torch.Generator().manual_seed(0)

    def sample(n: int) -> Sample:
        values = torch.randn(2, n, generator=generator)
        return Sample(list(range(n)), [0] + [1] * (n - 1), values[0].tolist(), (-values[1].abs()).tolist())

    samples = [sample(n) for n in (5, 9, 3)]
    tokens = sum(sum(s.loss_mask[1:]) for s in samples)
    objective = policy_objective(AlgorithmConfig(), tokens)

    def run(parts: list[list[Sample]]) -> tuple[float, dict[str, float]]:
        outputs = []
        for part in parts:
            batch = build_batch(part, align=4)
            log_probs = -0.1 * (batch.labels.float() + 1)
            outputs.append(objective(log_probs, log_probs.abs(), batch))
        sums = {key: sum(float(o.sums[key]) for o in outputs) for key in outputs[0].sums}
        return sum(float(o.loss) for o in outputs), sums

    whole, cut = run([samples]), run([samples[:1], samples[1:]])
    assert cut[0] == pytest.approx(whole[0], abs=1e-6)
    assert cut[1] == pytest.approx(whole[1], abs=1e-5)
    assert whole[1]["clipped"] == 0
    assert whole[1]["ratio"] == tokens
