"""Learning signals of all combinations that can be configured.

Equal rewards give no gradient, and masked tokens do not change any gradient. A new advantage, loss
or correction is tested as soon as it is registered.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_gptoss.packing import PackedBatch
from megatron_gptoss.samples import TrainingSamples
from rl_loop.algorithms.advantages import BatchRewards, group_advantages, sample_advantages, whiten
from rl_loop.algorithms.config import AlgorithmConfig, CorrectionConfig, KlConfig
from rl_loop.algorithms.correction import mismatch_sums, rollout_correction
from rl_loop.algorithms.objectives import policy_objective, value_objective
from rl_loop.algorithms.policy_loss import kl_estimate
from rl_loop.algorithms.registry import ADVANTAGES, POLICY_LOSSES
from rl_loop.algorithms.sequences import SequenceIndex
from rl_loop.data.credit import assign_advantages, rewards_differ
from rl_loop.data.samples import to_samples
from rl_loop.data.trajectory import Trajectory, TrajectoryGroup
from rl_loop.tracking.metrics import MetricName, StepMetrics
from rl_loop.tracking.step_metrics import add_zero_advantage_fraction
from tests.support.rl_loop.algorithms import build_sample_batch, loss_tokens


def choices(model: Any, field: str) -> tuple[str, ...]:
    """Return all values that a field of a configuration allows."""
    return get_args(model.model_fields[field].annotation)


CORRECTIONS = choices(CorrectionConfig, "weight")
DEVIATIONS = choices(AlgorithmConfig, "standard_deviation")
REJECTIONS: dict[str, dict[str, Any]] = {
    "sequence_mis": {"weight": "sequence_mis"},
    "icepop": {"weight": "icepop"},
    "geometric_bounds": {"geometric_bounds": (0.8, 1.25)},
    "k3_limit": {"k3_limit": 0.1},
    "veto": {"veto": 1e-2},
    "off_policy_limit": {"off_policy_limit": 0.5},
}
"""Settings that drop tokens, by the field of CorrectionConfig or by the kind of weight."""


def test_every_rejection_rule_is_tested() -> None:
    not_rejecting = {"weight", "cap", "bounds"}
    fields = set(CorrectionConfig.model_fields) - not_rejecting
    rejecting_weights = {name for name in CORRECTIONS if CorrectionConfig(weight=name).rejects}
    assert set(REJECTIONS) == fields | rejecting_weights


def algorithm(advantage: str, **settings: Any) -> AlgorithmConfig:
    """Return a configuration with this advantage and its required settings."""
    section: dict[str, Any] = {"type": advantage}
    if advantage == "gae":
        settings = {"critic": {}} | settings
    if advantage == "gdpo":
        section["reward_weights"] = settings.pop("reward_weights", {"score": 1.0, "style": -0.5})
    return AlgorithmConfig.model_validate({"advantage": section} | settings)


def episode(reward: float, tokens: int = 5, task: str = "t", **fields: Any) -> Trajectory:
    """Return an episode of one prompt token and ``tokens - 1`` sampled tokens."""
    parts = {"correct": 0.0, "format_error": 0.0, "score": reward, "style": 3 * reward}
    return Trajectory(
        task,
        token_ids=list(range(tokens)),
        loss_mask=[0] + [1] * (tokens - 1),
        rollout_log_probs=[0.0] + [-0.5] * (tokens - 1),
        reward=reward,
        reward_parts=fields.pop("reward_parts", parts),
        **fields,
    )


def group(rewards: list[float], task: str = "t") -> TrajectoryGroup:
    return TrajectoryGroup(
        task, [episode(reward, 3 + i % 4, task) for i, reward in enumerate(rewards)]
    )


def credited(
    groups: list[TrajectoryGroup], config: AlgorithmConfig, limit: int = 100
) -> TrainingSamples:
    """Return samples with advantages. The values of a critic are 0."""
    samples = to_samples(groups, config, version=0)
    if config.advantage.type == "gae":
        samples = samples.with_columns(values=np.zeros(samples.tokens, dtype=np.float32))
    return assign_advantages(samples, groups, config, limit)


# ---- equal rewards


def every_advantage() -> Iterator[AlgorithmConfig]:
    """Yield every advantage with every normalization."""
    # "none" ignores rewards.
    for name, deviation in itertools.product(sorted(set(ADVANTAGES) - {"none"}), DEVIATIONS):
        yield algorithm(name, standard_deviation=deviation)
        for over in ("tokens", "samples"):
            if (name, over) != ("gae", "samples"):
                yield algorithm(name, standard_deviation=deviation, whiten_advantages=over)


finite = st.floats(-1e30, 1e30)


@settings(max_examples=40, deadline=None)
@given(reward=finite, sizes=st.lists(st.integers(1, 17), min_size=1, max_size=3))
@example(reward=-0.8, sizes=[8])
@example(reward=10.1, sizes=[8])
@example(reward=0.1, sizes=[3, 5])
def test_batch_of_equal_rewards_has_exactly_zero_advantages(
    reward: float, sizes: list[int]
) -> None:
    groups = [group([reward] * size, f"t{i}") for i, size in enumerate(sizes)]
    for config in every_advantage():
        if config.advantage.type == "gae" and not config.whiten_advantages:
            continue  # gae compares with the critic, not with other episodes
        assert not np.any(credited(groups, config).advantages), config


@settings(max_examples=40, deadline=None)
@given(reward=finite, size=st.integers(1, 17), others=st.lists(finite, min_size=2, max_size=6))
@example(reward=-0.8, size=8, others=[-1.0, 1.0, 0.3])
def test_task_of_equal_rewards_has_exactly_zero_advantages(
    reward: float, size: int, others: list[float]
) -> None:
    groups = [group([reward] * size, "silent"), group(others, "other")]
    for config in every_advantage():
        if config.advantage.type in ("gae", "reinforce") or config.whitens_over == "tokens":
            continue  # these compare with other tasks, or move everything by the mean over tokens
        for row in credited(groups, config).rows("advantages")[:size]:
            assert not np.any(row), config


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("estimator", sorted(set(ADVANTAGES) - {"gae", "none"}))
@settings(max_examples=50, deadline=None)
@given(
    st.floats(-1e6, 1e6, width=32).filter(lambda x: abs(x) > 1e-6),
    st.lists(st.integers(-2, 2), min_size=2, max_size=16),
)
@example(10.1, [0, 1, 0, 0, -1, 0, 0, 0])
def test_rewards_that_differ_by_rounding_count_as_equal(
    estimator: str, dtype: torch.dtype, reward: float, ulps: list[int]
) -> None:
    step = np.spacing(np.float32(reward)).item()
    rewards = torch.tensor([reward + n * step for n in ulps], dtype=dtype)
    batch = BatchRewards(rewards, rewards[:, None], [1.0], [len(ulps)])
    assert not sample_advantages(algorithm(estimator), batch).any()
    assert not whiten(rewards).any()


@pytest.mark.parametrize(
    "config", list(every_advantage()), ids=lambda config: config.advantage.type
)
def test_advantages_are_finite_if_tasks_lost_episodes(config: AlgorithmConfig) -> None:
    groups = [group([]), group([1.0]), group([0.0, 1.0, 1.0]), group([])]
    samples = credited(groups, config)
    assert len(samples) == 4
    assert np.isfinite(samples.advantages).all()  # type: ignore[arg-type]
    if config.advantage.type not in ("gae", "reinforce") and config.whitens_over != "tokens":
        assert not np.any(samples.rows("advantages")[0]), "it has nothing to be compared with"
    assert len(credited([group([])], config)) == 0
    assert not rewards_differ(groups[0], config)


def test_reward_differences_of_any_scale_have_advantages() -> None:
    for scale in (1e-3, 1.0, 1e6):
        got = group_advantages(torch.tensor([0.0, 1.0, 1.0, 0.0]) * scale, "grpo", "population")
        assert got.tolist() == pytest.approx([-1, 1, 1, -1], rel=3e-3)
    assert group_advantages(torch.tensor([100.0, 100.01]), "dr_grpo").tolist() == pytest.approx(
        [-0.005, 0.005], rel=1e-3
    )


def test_whitening_does_not_amplify_rounding_errors() -> None:
    noise = torch.randn(64, generator=torch.Generator().manual_seed(0)) * 1e-7
    assert whiten(noise).abs().max() < 0.01


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_reward_that_is_not_a_number_is_rejected_with_its_task(reward: float) -> None:
    with pytest.raises(ValueError, match="task odd: rewards must be finite numbers"):
        credited([group([0.0, 1.0]), group([1.0, reward], "odd")], algorithm("grpo"))


# ---- excluded tokens

EXCLUSIONS = ("masked", "excluded episode", "too old", *REJECTIONS)


def exclusion(kind: str, loss: str) -> tuple[AlgorithmConfig, list[dict[str, Any]], np.ndarray]:
    """Return a configuration with every term, samples, and a mask of tokens to exclude.

    The mask is for the tokens of the first sample, as labels.
    """
    correction: dict[str, Any] = {"weight": "sequence_tis", "cap": 5.0}
    correction = REJECTIONS.get(kind, correction)
    bounds = {} if loss == "reinforce" else {"clip_low": 0.9, "clip_high": 5.0}
    config = AlgorithmConfig.model_validate(
        {
            # Wide bounds, because clipping would hide the terms of a sequence's ratio.
            "policy_loss": {"type": loss} | bounds,
            "mini_batches": 2,
            "max_staleness": 1,
            "kl": {"coefficient": 0.1},
            "entropy_bonus": 0.1,
            "correction": {"weight": "token_tis"} | correction,
        }
    )
    samples: list[dict[str, Any]] = []
    for sign in (-1.0, 1.0):
        rollout = [-0.5, -0.5, -0.7, -0.9, -1.1, -1.3]
        samples.append(
            {
                "token_ids": list(range(6)),
                "loss_mask": [0, 1, 1, 1, 1, 1],
                "advantages": [sign] * 6,
                "rollout_log_probs": rollout,
                "old_log_probs": [x + 0.01 for x in rollout],
                "reference_log_probs": [x - 0.2 for x in rollout],
                "values": [0.1 * i for i in range(6)],
                "returns": [1.0] * 6,
                "staleness": [0] * 6,
            }
        )
    first = samples[0]
    out = np.array([0, 0, 0, 1, 1, 0], dtype=bool)
    if kind == "masked":
        first["loss_mask"] = [0, 1, 1, 0, 0, 1]
    elif kind == "excluded episode":
        first["loss_mask"], out = [0] * 6, np.array([1] * 6, dtype=bool)
    elif kind == "too old":
        first["staleness"] = [0, 0, 1, 2, 3, 0]
    elif kind == "icepop":
        first["rollout_log_probs"] = [-0.5, -0.5, -0.7, -8.0, -8.0, -1.3]
    elif kind == "off_policy_limit":
        first["old_log_probs"], out = [5.0] * 6, np.array([1] * 6, dtype=bool)
    else:
        # Tokens with a tiny importance weight drop their sequence.
        first["rollout_log_probs"], out = (
            [-0.5, -0.5, -0.7, 9.0, 9.0, -1.3],
            np.array([1] * 6, dtype=bool),
        )
    return config, samples, out


def packed(samples: list[dict[str, Any]]) -> PackedBatch:
    return build_sample_batch(samples, align=4)


def gradients(
    config: AlgorithmConfig,
    samples: list[dict[str, Any]],
    batch: PackedBatch,
    log_probs: torch.Tensor,
    entropy: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Return the policy's loss and its gradients by log-probs and entropies."""
    log_probs, entropy = log_probs.clone().requires_grad_(), entropy.clone().requires_grad_()
    loss = policy_objective(config, loss_tokens(samples), 50)(log_probs, entropy, batch).loss
    loss.backward()
    assert log_probs.grad is not None and entropy.grad is not None
    return loss.detach(), log_probs.grad, entropy.grad


def label_mask(out: np.ndarray, batch: PackedBatch) -> torch.Tensor:
    """Return a mask over the packed row for tokens of the first sample."""
    mask = torch.zeros(batch.tokens, dtype=torch.bool)
    mask[: len(out) - 1] = torch.from_numpy(out[1:])
    return mask


GARBAGE = [math.nan, math.inf, -math.inf, -1e30, -77.0, 0.0]


@pytest.mark.parametrize("loss", POLICY_LOSSES)
@pytest.mark.parametrize("kind", EXCLUSIONS)
def test_excluded_tokens_have_no_gradient_and_no_influence(kind: str, loss: str) -> None:
    config, samples, out = exclusion(kind, loss)
    batch = packed(samples)
    mask = label_mask(out, batch)
    log_probs = batch.rollout_log_probs.clamp(max=-0.01) + 0.02
    entropy = torch.full_like(log_probs, 2.0)
    want = gradients(config, samples, batch, log_probs, entropy)
    assert want[1].any() and want[2].any(), "the others learn"
    for gradient in want[1:]:
        assert not gradient[mask].any()

    for garbage in GARBAGE:
        noise = torch.full_like(log_probs, garbage)
        columns = {"advantages": torch.where(mask, -7.0, batch.advantages)}
        names = ["reference_log_probs"]
        if kind not in REJECTIONS:  # rejections depend on these log-probs
            names += ["rollout_log_probs", "old_log_probs"]
        columns |= {name: torch.where(mask, noise, getattr(batch, name)) for name in names}
        got = gradients(
            config,
            samples,
            replace(batch, **columns),
            log_probs if kind == "off_policy_limit" else torch.where(mask, noise, log_probs),
            torch.where(mask, noise, entropy),
        )
        for value, expected in zip(got, want, strict=True):
            assert torch.equal(value, expected), (garbage, value, expected)


@pytest.mark.parametrize("kind", sorted(set(EXCLUSIONS) - {"off_policy_limit"}))
def test_critic_excludes_the_tokens_that_the_policy_excludes(kind: str) -> None:
    config, samples, out = exclusion(kind, "ppo")
    config = config.model_copy(update={"advantage": "gae", "critic": algorithm("gae").critic})
    batch = packed(samples)
    mask = label_mask(out, batch)
    values = torch.linspace(-1, 1, batch.tokens)

    def gradient(batch: PackedBatch, values: torch.Tensor) -> torch.Tensor:
        values = values.clone().requires_grad_()
        value_objective(config, loss_tokens(samples), 50)(values, batch).loss.backward()
        assert values.grad is not None
        return values.grad

    want = gradient(batch, values)
    assert want.any() and not want[mask].any()
    for garbage in GARBAGE:
        noise = torch.full_like(values, garbage)
        columns = {
            name: torch.where(mask, noise, getattr(batch, name)) for name in ("values", "returns")
        }
        assert torch.equal(
            gradient(replace(batch, **columns), torch.where(mask, noise, values)), want
        )


def combinations() -> Iterator[tuple[str, str, str]]:
    yield from itertools.product(
        sorted(set(ADVANTAGES) - {"gae", "none"}), POLICY_LOSSES, CORRECTIONS
    )


@pytest.mark.parametrize(("advantage", "loss", "correction"), list(combinations()))
def test_equal_rewards_give_zero_gradient_for_all_losses(
    advantage: str, loss: str, correction: str
) -> None:
    config = algorithm(
        advantage, policy_loss=loss, mini_batches=2, correction={"weight": correction, "veto": 1e-4}
    )
    credit = credited([group([-0.8] * 8, "a"), group([-0.8] * 8, "b")], config)
    samples = [
        {
            "token_ids": ids,
            "loss_mask": mask,
            "advantages": advantages,
            "rollout_log_probs": log_probs,
            "old_log_probs": log_probs + 0.1,
        }
        for ids, mask, advantages, log_probs in zip(
            credit.rows("token_ids"),
            credit.rows("loss_mask"),
            credit.rows("advantages"),
            credit.rows("rollout_log_probs"),
            strict=True,
        )
    ]
    batch = packed(samples)
    log_probs = batch.rollout_log_probs + 0.3
    loss_value, gradient, _ = gradients(
        config, samples, batch, log_probs, torch.zeros_like(log_probs)
    )
    assert loss_value == 0
    assert not gradient.any()


# ---- spliced tokens


def compute_correction(
    rule: dict[str, Any], log_rho: list[list[float]], spliced: list[int]
) -> list[list[float]]:
    """Return the weights of sequences of sampled tokens followed by ``spliced`` spliced tokens."""
    rows = [torch.tensor(row + [0.0] * n) for row, n in zip(log_rho, spliced, strict=True)]
    masks = [
        torch.tensor([True] * len(row) + [False] * n)
        for row, n in zip(log_rho, spliced, strict=True)
    ]
    index = torch.cat([torch.full((len(row),), i) for i, row in enumerate(rows)])
    values = torch.cat(rows)
    advantages = -torch.ones_like(values)
    result = rollout_correction(
        CorrectionConfig(**rule),
        values,
        torch.cat(masks),
        SequenceIndex(index, len(rows)),
        advantages,
        log_old_over_new=values.abs(),
        moved_mask=torch.cat(masks),
    )
    return [row.tolist() for row in result.weights.split([len(row) for row in rows])]


SEQUENCE_RULES = {name: rule for name, rule in REJECTIONS.items() if name != "icepop"} | {
    "sequence_tis": {"weight": "sequence_tis"}
}


@pytest.mark.parametrize("name", SEQUENCE_RULES)
@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.lists(st.floats(-6, 6, width=16), min_size=1, max_size=4), min_size=1, max_size=4),
    st.data(),
)
def test_sequence_is_dropped_independently_of_spliced_tokens(
    name: str, log_rho: list[list[float]], data: st.DataObject
) -> None:
    spliced = [data.draw(st.integers(0, 5)) for _ in log_rho]
    together = compute_correction(SEQUENCE_RULES[name], log_rho, spliced)
    for row, extra, weights in zip(log_rho, spliced, together, strict=True):
        (alone,) = compute_correction(SEQUENCE_RULES[name], [row], [0])
        assert weights[: len(row)] == pytest.approx(alone, rel=1e-5)
        dropped = not any(alone)
        assert extra == 0 or (not any(weights[len(row) :])) == dropped


def test_spliced_tokens_do_not_dilute_the_mean_of_a_sequence() -> None:
    one = {
        "token_ids": [1, 2, 3, 4],
        "loss_mask": [0, 1, 1, 1],
        "advantages": [1.0] * 4,
        "rollout_log_probs": [0.0, -1.0, 0.0, 0.0],
    }
    one["is_off_policy"] = [False, False, True, True]
    config = AlgorithmConfig.model_validate({"correction": {"geometric_bounds": (0.8, 1.25)}})
    log_probs = torch.tensor(
        [-1.3, -0.1, -0.1], requires_grad=True
    )  # rho is exp(-0.3), over three tokens exp(-0.1)
    objective = policy_objective(config, loss_tokens([one]))
    output = objective(log_probs, torch.zeros(3), build_sample_batch([one]))
    output.loss.backward()
    assert not log_probs.grad.any()  # type: ignore[union-attr]
    assert output.sums["correction/dropped_fraction/geometric"] == 3


def test_spliced_tokens_train_with_any_engine_log_probs() -> None:
    config, samples, _ = exclusion("masked", "ppo")
    samples[0]["loss_mask"] = [0, 1, 1, 1, 1, 1]
    samples[0]["is_off_policy"] = [False, False, True, True, False, False]
    batch = packed(samples)
    log_probs, entropy = batch.rollout_log_probs + 0.02, torch.ones_like(batch.rollout_log_probs)
    spliced = batch.is_off_policy
    want = gradients(config, samples, batch, log_probs, entropy)
    assert want[1][spliced].all()
    for garbage in GARBAGE:
        other = replace(
            batch, rollout_log_probs=torch.where(spliced, garbage, batch.rollout_log_probs)
        )
        for value, expected in zip(
            gradients(config, samples, other, log_probs, entropy), want, strict=True
        ):
            assert torch.equal(value, expected)


# ---- clamps


def test_sequence_products_are_not_clamped_per_token() -> None:
    # 30 - 25 - 4.5 = 0.5. Clamped at 20 nats per token it would be -4.5 and drop the sequence.
    weights = compute_correction({"weight": "sequence_mis"}, [[30.0, -25.0, -4.5]], [0])
    assert weights[0] == pytest.approx([math.exp(0.5)] * 3, rel=1e-5)
    weights = compute_correction(
        {"weight": "none", "geometric_bounds": (0.8, 1.25)}, [[30.0, -30.0]], [0]
    )
    assert weights[0] == [1.0, 1.0]


def test_k1_and_k2_are_not_clamped_and_k3_is_finite() -> None:
    log_probs = torch.tensor([-1.0, -60.0, -200.0], requires_grad=True)
    reference = torch.tensor([-51.0, -10.0, -1.0])
    assert kl_estimate(log_probs, reference, "k1").tolist() == [50.0, -50.0, -199.0]
    assert kl_estimate(log_probs, reference, "k2").tolist() == [1250.0, 1250.0, 199.0**2 / 2]
    k3 = kl_estimate(log_probs, reference, "k3")
    assert k3[0] == 49.0
    assert k3.isfinite().all()


def test_mismatch_beyond_20_nats_is_reported() -> None:
    mask = torch.ones(2, dtype=torch.bool)
    sums, maxima = mismatch_sums(
        torch.tensor([-60.0, -1.0]), torch.tensor([-1.0, -1.0]), mask, SequenceIndex(mask.long(), 2)
    )
    assert maxima["mismatch/log_prob_gap_max"] == 59
    assert sums["mismatch/kl_k1"] == 59
    assert all(value.isfinite() for value in sums.values())


# ---- rewards made of parts


def test_gdpo_treats_the_length_penalty_as_another_reward() -> None:
    lengths = [3, 3, 9, 11]
    episodes = [episode(1.0, n, reward_parts={"score": 1.0}) for n in lengths]
    config = algorithm(
        "gdpo",
        reward_weights={"score": 1.0},
        overlong_buffer_tokens=4,
        overlong_penalty=0.5,
        whiten_advantages="samples",
    )
    got = [
        float(max(row, key=abs))
        for row in credited([TrajectoryGroup("t", episodes)], config, limit=10).rows("advantages")
    ]
    penalties = torch.tensor([0.0, 0.0, -0.5, -1.0], dtype=torch.float64)
    assert got == pytest.approx(whiten(0.5 * group_advantages(penalties)).tolist())
    assert got[0] > got[2] > got[3]


def test_missing_reward_part_counts_as_zero() -> None:
    episodes = [
        episode(1.0, reward_parts={"score": 1.0}),
        episode(-1.0, reward_parts={}),
        episode(0.0),
    ]
    got = credited(
        [TrajectoryGroup("t", episodes)], algorithm("gdpo", reward_weights={"score": 1.0})
    )
    assert [np.sign(row[-1]) for row in got.rows("advantages")] == [1, -1, -1]


def test_length_penalty_counts_sampled_tokens() -> None:
    config = algorithm("dr_grpo", overlong_buffer_tokens=4)
    terse = Trajectory(
        "t", token_ids=list(range(90)), loss_mask=[0] * 85 + [1] * 5, rollout_log_probs=[0.0] * 90
    )  # a long prompt, or much tool output
    wordy = Trajectory(
        "t", token_ids=list(range(12)), loss_mask=[0] * 2 + [1] * 10, rollout_log_probs=[0.0] * 12
    )
    got = credited([TrajectoryGroup("t", [terse, wordy])], config, limit=10)
    assert [row[-1] for row in got.rows("advantages")] == [0.5, -0.5]


def penalized(prompt: int, sampled: int, config: AlgorithmConfig) -> float:
    """Return the length penalty of an episode. The context has 100 tokens."""
    columns = [0] * prompt + [1] * sampled
    episodes = [
        Trajectory(
            "t",
            token_ids=list(range(len(mask))),
            loss_mask=mask,
            rollout_log_probs=[0.0] * len(mask),
        )  # type: ignore[arg-type]
        for mask in (columns, [0, 1])
    ]
    groups = [TrajectoryGroup("t", episodes)]
    samples = to_samples(groups, config, version=0)
    got = assign_advantages(samples, groups, config, 100, max_episode_tokens=100)
    # dr_grpo compares with the mean of both episodes, and the other episode has no penalty.
    return 2 * float(got.rows("advantages")[0][-1])


@pytest.mark.parametrize("prompt", [1, 30, 70, 95])
def test_length_penalty_is_full_at_the_end_of_the_context(prompt: int) -> None:
    """After a long prompt the context ends before the limit of sampled tokens."""
    config = algorithm("dr_grpo", overlong_buffer_tokens=40)
    room = 100 - prompt
    assert penalized(prompt, room, config) == -1.0
    # The buffer is 40% of the remaining context, so half of the penalty is at 80%.
    assert penalized(prompt, round(0.8 * room), config) == pytest.approx(-0.5, abs=0.26)
    assert penalized(prompt, max(1, int(0.55 * room)), config) == 0.0


# ---- signal


def test_dynamic_sampling_compares_the_rewards_of_the_advantage() -> None:
    parts = TrajectoryGroup(
        "t",
        [
            episode(0.0, reward_parts={"score": s, "style": t})
            for s, t in ((1.0, -1.0), (-1.0, 1.0))
        ],
    )
    assert rewards_differ(parts, algorithm("gdpo"))
    assert not rewards_differ(parts, algorithm("grpo"))
    unweighted = TrajectoryGroup(
        "t", [episode(r, reward_parts={"score": 1.0, "style": r}) for r in (0.0, 1.0)]
    )
    assert not rewards_differ(
        unweighted, algorithm("gdpo", reward_weights={"score": 1.0, "style": 0.0})
    )
    assert rewards_differ(unweighted, algorithm("grpo"))
    rounded = TrajectoryGroup("t", [episode(r) for r in (0.3, 0.1 + 0.2)])
    assert not rewards_differ(rounded, algorithm("grpo"))


def test_group_with_all_episodes_excluded_has_no_signal() -> None:
    excluded = TrajectoryGroup("t", [replace(episode(r), excluded=True) for r in (0.0, 1.0)])
    assert not rewards_differ(excluded, algorithm("grpo"))
    metrics = StepMetrics(0)
    groups = [excluded, group([1.0, 1.0]), group([0.0, 1.0])]
    add_zero_advantage_fraction(metrics, groups, credited(groups, algorithm("grpo")))
    assert metrics.values()[MetricName.ZERO_ADVANTAGE_FRACTION] == pytest.approx(2 / 3)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_stale_tokens_do_not_enter_a_kl_penalty_in_the_reward(estimator: str) -> None:
    config = algorithm(
        "dr_grpo", kl=KlConfig(apply_to="reward", estimator=estimator, coefficient=1.0),
        old_log_probs="rollout", correction={"weight": "none"},
    )  # fmt: skip
    groups = [group([0.0, 1.0])]
    samples = to_samples(groups, config, version=0)
    assert samples.rollout_log_probs is not None
    reference = samples.rollout_log_probs - np.float32(0.3)
    staleness = np.zeros(samples.tokens, dtype=np.int32)
    staleness[1] = 1  # one of the three tokens of the first sample
    samples = samples.with_columns(reference_log_probs=reference, staleness=staleness)
    first = assign_advantages(samples, groups, config, 10)

    changed = samples.rollout_log_probs.copy()
    changed[1] = -50.0
    second = assign_advantages(samples.with_columns(rollout_log_probs=changed), groups, config, 10)
    assert np.array_equal(second.rows("advantages")[1], first.rows("advantages")[1])
