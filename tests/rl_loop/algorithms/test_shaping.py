"""Terms that shape the rewards before advantages are computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from rl_loop.algorithms.config import AlgorithmConfig
from rl_loop.config.errors import ConfigError
from rl_loop.config.run import check_reward_parts
from rl_loop.data.credit import assign_advantages, rewards_differ
from rl_loop.data.samples import to_samples
from rl_loop.data.shaping import relative_length, shaping_terms
from rl_loop.data.trajectory import Trajectory, TrajectoryGroup
from rl_loop.tracking.metrics import StepMetrics
from rl_loop.tracking.step_metrics import add_shaping_metrics

SHORT = {"short": {"type": "relative_length", "weight": 0.5}}


def episode(tokens: int, correct: float, **parts: float) -> Trajectory:
    """Return an episode of a prompt token and ``tokens`` sampled tokens."""
    return Trajectory(
        "t",
        token_ids=[1] * (tokens + 1),
        loss_mask=[0] + [1] * tokens,
        rollout_log_probs=[0.0] + [-1.0] * tokens,
        reward=2 * correct - 1,
        reward_parts={"correct": correct, **parts},
    )


MIXED = [episode(10, 1.0), episode(40, 1.0), episode(2, 0.0), episode(80, 0.0)]
SOLVED = [episode(10, 1.0), episode(40, 1.0)]


def advantages(episodes: Sequence[Trajectory], **algorithm: Any) -> list[float]:
    """Return the advantage of every episode of one task."""
    config = AlgorithmConfig(**algorithm)
    groups = [TrajectoryGroup("t", list(episodes))]
    samples = assign_advantages(to_samples(groups, config, version=0), groups, config, 100)
    return [float(row[-1]) for row in samples.rows("advantages")]


def test_short_correct_answers_gain_and_wrong_answers_do_not() -> None:
    assert relative_length(MIXED) == [1.0, 0.25, 0.0, 0.0]
    assert relative_length([episode(3, 0.0), episode(9, 0.0)]) == [0.0, 0.0]
    short, long, *wrong = advantages(MIXED, advantage="dr_grpo", shaping=SHORT)
    assert short > long > wrong[0] == wrong[1]


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "gdpo", "reinforce"])
def test_every_advantage_without_a_critic_uses_the_terms(name: str) -> None:
    advantage: dict[str, Any] = {"type": name}
    if name == "gdpo":
        advantage["reward_weights"] = {"correct": 1.0}
    assert advantages(SOLVED, advantage=advantage) == [0, 0]
    short, long = advantages(SOLVED, advantage=advantage, shaping=SHORT)
    assert short > 0 > long


def test_gae_adds_the_terms_to_the_last_token() -> None:
    config = AlgorithmConfig(advantage="gae", critic={}, shaping=SHORT)
    groups = [TrajectoryGroup("t", [episode(2, 1.0), episode(4, 1.0)])]
    samples = to_samples(groups, config, version=0)
    values = {"values": 0 * samples.column("rollout_log_probs")}
    credited = assign_advantages(samples.with_columns(**values), groups, config, 100)
    assert [float(row[-1]) for row in credited.rows("advantages")] == [1.5, 1.25]


def test_reward_part_counts_with_its_weight() -> None:
    episodes = [episode(4, 1.0, polite=1.0), episode(4, 1.0)]
    shaping = {"manners": {"type": "part", "weight": 0.2, "options": {"name": "polite"}}}
    gained, lost = advantages(episodes, advantage="dr_grpo", shaping=shaping)
    assert (gained, lost) == pytest.approx((0.1, -0.1))

    metrics = StepMetrics(0)
    groups = [TrajectoryGroup("t", episodes), TrajectoryGroup("lost", [])]
    add_shaping_metrics(metrics, groups, AlgorithmConfig(shaping=shaping))
    assert metrics.values()["shaping/manners"] == pytest.approx(0.1)


def test_shaping_is_no_reason_to_keep_a_group() -> None:
    config = AlgorithmConfig(shaping=SHORT)
    assert not rewards_differ(TrajectoryGroup("t", SOLVED), config)
    assert rewards_differ(TrajectoryGroup("t", MIXED), config)


def too_few(episodes: Sequence[Trajectory]) -> list[float]:
    return [0.0]


def not_finite(episodes: Sequence[Trajectory]) -> list[float]:
    return [float("nan")] * len(episodes)


@pytest.mark.parametrize("function", ["too_few", "not_finite"])
def test_wrong_result_of_a_term_names_the_term(function: str) -> None:
    config = AlgorithmConfig(shaping={"mine": f"{__name__}:{function}"})
    with pytest.raises(ValueError, match=r"algorithm\.shaping\.mine returned .*task t, expected 2"):
        shaping_terms([TrajectoryGroup("t", SOLVED)], config)


def test_wrong_options_and_unknown_parts_are_rejected() -> None:
    with pytest.raises(ValueError, match="shaping term part does not accept the options"):
        AlgorithmConfig(shaping={"mine": "part"})
    with pytest.raises(ValueError, match="there is no shaping term"):
        AlgorithmConfig(shaping={"mine": "shorter"})
    unknown = AlgorithmConfig(shaping={"mine": {"type": "part", "options": {"name": "polite"}}})

    class Config:
        algorithm = unknown

    with pytest.raises(ConfigError, match=r"algorithm\.shaping: no environment .* polite"):
        check_reward_parts(Config(), {"correct"})  # type: ignore[arg-type]
