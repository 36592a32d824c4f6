"""Advantages and returns, against sums that are computed token by token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rl_loop.algorithms.advantages import TIME_BLOCK, generalized_advantages, whiten
from rl_loop.algorithms.choices import GaeAdvantage
from rl_loop.algorithms.config import AlgorithmConfig
from rl_loop.data.credit import assign_advantages
from rl_loop.data.samples import to_samples
from rl_loop.data.trajectory import Trajectory, TrajectoryGroup

LENGTHS = [2, 3 * TIME_BLOCK + 7, TIME_BLOCK + 1, 40, 2 * TIME_BLOCK, 2]


def batch(
    config: AlgorithmConfig, seed: int
) -> tuple[list[TrajectoryGroup], dict[str, np.ndarray]]:
    """Return episodes with tool results. The last episode has no sampled token."""
    generator = np.random.default_rng(seed)
    groups = []
    for number, length in enumerate(LENGTHS):
        mask = generator.random(length) < 0.7
        mask[0] = False
        mask[-1] = number != len(LENGTHS) - 1
        log_probs = np.where(mask, -generator.exponential(1, length), 0).astype(np.float32)
        ids = generator.integers(0, 1000, length).astype(np.int32)
        episode = Trajectory(
            "t",
            token_ids=ids,
            loss_mask=mask,
            rollout_log_probs=log_probs,
            reward=float(generator.normal()),
        )
        groups.append(TrajectoryGroup("t", [episode]))

    tokens = sum(LENGTHS)
    values = generator.normal(size=tokens).astype(np.float32)
    estimates = {"values": values}
    if config.kl:
        estimates["reference_log_probs"] = generator.normal(size=tokens).astype(np.float32)
    return groups, estimates


def expected(
    groups: list[TrajectoryGroup], estimates: dict[str, np.ndarray], config: AlgorithmConfig
) -> tuple[list[float], list[float]]:
    """Return the advantages and returns of all tokens by the recursion of GAE."""
    gae = config.advantage
    assert isinstance(gae, GaeAdvantage)
    advantages: list[float] = []
    returns: list[float] = []
    for group in groups:
        (episode,) = group.trajectories
        first = len(advantages)
        advantages += [0.0] * len(episode)
        returns += [0.0] * len(episode)
        reward, next_value, running = episode.reward, 0.0, 0.0
        for i in reversed(np.flatnonzero(episode.loss_mask).tolist()):
            value = float(estimates["values"][first + i])
            penalty = 0.0
            if "reference_log_probs" in estimates:
                assert config.kl is not None
                log_ratio = float(episode.rollout_log_probs[i]) - float(
                    estimates["reference_log_probs"][first + i]
                )
                penalty = config.kl.coefficient * log_ratio
            delta = reward - penalty + gae.gamma * next_value - value
            running = delta + gae.gamma * gae.gae_lambda * running
            advantages[first + i], returns[first + i] = running, running + value
            reward, next_value = 0.0, value
    return advantages, returns


@pytest.mark.parametrize(
    "kl", [None, {"coefficient": 0.1, "estimator": "k1", "apply_to": "reward"}]
)
@pytest.mark.parametrize("whiten_advantages", [None, "tokens"])
def test_gae_of_any_lengths_equals_the_recursion(
    whiten_advantages: str | None, kl: dict[str, Any] | None
) -> None:
    config = AlgorithmConfig.model_validate(
        {
            "advantage": {"type": "gae", "gamma": 0.99, "gae_lambda": 0.95},
            "critic": {},
            "kl": kl,
            "whiten_advantages": whiten_advantages,
        }
    )
    groups, estimates = batch(config, seed=1)
    samples = to_samples(groups, config, version=0).with_columns(**estimates)
    credited = assign_advantages(samples, groups, config, 10_000)

    advantages, returns = expected(groups, estimates, config)
    wanted = np.array(advantages)
    if whiten_advantages:
        sampled = torch.from_numpy(wanted[samples.loss_mask])
        wanted[samples.loss_mask] = whiten(sampled, config.standard_deviation).numpy()
    assert credited.advantages is not None and credited.returns is not None
    np.testing.assert_allclose(credited.advantages, wanted.astype(np.float32), rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(credited.returns, np.float32(returns), rtol=1e-6, atol=1e-9)
    assert not credited.advantages[~samples.loss_mask].any()
    assert credited.values is estimates["values"]


def test_gae_over_time_blocks_is_bitwise_equal_to_one_recursion() -> None:
    generator = torch.Generator().manual_seed(0)
    shape = (3, 2 * TIME_BLOCK + 5)
    rewards = torch.randn(shape, generator=generator, dtype=torch.float64)
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    advantages, returns = generalized_advantages(rewards, values, 0.99, 0.95)

    running = torch.zeros(3, dtype=torch.float64)
    following = torch.zeros(3, dtype=torch.float64)
    for t in reversed(range(shape[1])):
        delta = rewards[:, t] + 0.99 * following - values[:, t]
        running = delta + 0.99 * 0.95 * running
        following = values[:, t]
        assert torch.equal(advantages[:, t], running)
        assert torch.equal(returns[:, t], running + values[:, t])


def test_only_sampled_tokens_have_the_episodes_advantage() -> None:
    config = AlgorithmConfig.model_validate({"advantage": "dr_grpo"})
    episodes = [
        Trajectory(
            "t",
            token_ids=[1] * 4,
            loss_mask=[0, 1, 0, 1],
            rollout_log_probs=[0.0, -1.0, 0.0, -1.0],
            reward=-1.0,
        ),  # type: ignore[arg-type]
        Trajectory(
            "t",
            token_ids=[1] * 3,
            loss_mask=[0, 1, 1],
            rollout_log_probs=[0.0, -1.0, -1.0],
            reward=1.0,
            excluded=True,
        ),  # type: ignore[arg-type]
        Trajectory(
            "t",
            token_ids=[1] * 3,
            loss_mask=[0, 0, 1],
            rollout_log_probs=[0.0, 0.0, -1.0],
            reward=3.0,
        ),  # type: ignore[arg-type]
    ]
    groups = [TrajectoryGroup("t", episodes)]
    credited = assign_advantages(to_samples(groups, config, version=0), groups, config, 100)
    assert credited.advantages is not None
    assert credited.advantages.dtype == np.float32
    assert credited.advantages.tolist() == [0, -2, 0, -2, 0, 0, 0, 0, 0, 2]
    assert not np.signbit(credited.advantages[[0, 2, 4, 5, 6, 7, 8]]).any(), "0 and not -0"
    assert credited.returns is None


# ---- episodes of several sequences


@pytest.mark.parametrize("advantage", ["grpo", "rloo", "gdpo", "gae"])
def test_episode_of_several_sequences_counts_once(
    advantage: str,
) -> None:
    """The advantages equal those of the same episodes with one sequence each."""
    settings: dict[str, Any] = {"advantage": advantage}
    if advantage == "gae":
        settings |= {"critic": {}}
    if advantage == "gdpo":
        settings["advantage"] = {"type": "gdpo", "reward_weights": {"score": 1.0}}
    config = AlgorithmConfig.model_validate(settings)

    def episode(reward: float, branches: int) -> Trajectory:
        first, *others = [
            Trajectory(
                "t",
                token_ids=[1, 2, 3],
                loss_mask=[False, True, True],
                rollout_log_probs=[0.0, -0.5, -0.5],
                reward=reward,
                reward_parts={"score": reward},
            )
            for _ in range(1 + branches)
        ]
        first.branches = others
        return first

    def compute_advantages(branches: list[int]) -> list[np.ndarray]:
        rewards = [1.0, -1.0, 0.5, -1.0]
        episodes = [episode(r, n) for r, n in zip(rewards, branches, strict=True)]
        groups = [TrajectoryGroup("t", episodes[:2]), TrajectoryGroup("u", episodes[2:])]
        samples = to_samples(groups, config, version=0)
        if advantage == "gae":
            samples = samples.with_columns(values=np.zeros(samples.tokens, dtype=np.float32))
        credited = assign_advantages(samples, groups, config, max_response_tokens=100)
        return [np.array(row) for row in credited.rows("advantages")]

    alone = compute_advantages([0, 0, 0, 0])
    branched = compute_advantages([0, 2, 1, 0])
    assert len(branched) == 7
    for row, of_episode in zip(branched, [0, 1, 1, 1, 2, 2, 3], strict=True):
        np.testing.assert_array_equal(row, alone[of_episode])
    assert any(row.any() for row in alone)
