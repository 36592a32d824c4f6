"""Rewards of ``verifiers`` episodes. test_programs.py uses the real package."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rl_loop.agents.verifiers_env import compute_score
from rl_loop.infrastructure import InfrastructureError


def trace(reward: float, *errors: Any, is_timeout: bool = False) -> SimpleNamespace:
    return SimpleNamespace(reward=reward, errors=list(errors), is_timeout=is_timeout)


def episode(
    *traces: Any, ok: bool = True, errors: tuple[Any, ...] = (), is_timeout: bool = False
) -> SimpleNamespace:
    return SimpleNamespace(ok=ok, is_timeout=is_timeout, errors=list(errors), traces=list(traces))


AWAY = SimpleNamespace(type="ToolError", message="the database is away")


def test_verifiers_episode_has_the_mean_reward_of_its_agents() -> None:
    assert compute_score(episode(trace(1.0), trace(0.5))) == 0.75
    assert compute_score(episode()) == 0.0


def test_verifiers_reward_before_a_time_limit_counts() -> None:
    late = SimpleNamespace(type="Timeout", message="60 s are over")
    assert compute_score(episode(trace(0.25, late, is_timeout=True), ok=False)) == 0.25
    assert compute_score(episode(trace(0.25), ok=False, errors=(late,), is_timeout=True)) == 0.25


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (episode(trace(1.0), ok=False, errors=(AWAY,)), "ToolError: the database is away"),
        (episode(trace(1.0), trace(0.5, AWAY), ok=False), "ToolError: the database is away"),
        (episode(trace(1.0), ok=False), "failed without an error"),
    ],
)
def test_other_verifiers_errors_are_infrastructure_failures(
    broken: SimpleNamespace, reason: str
) -> None:
    with pytest.raises(InfrastructureError) as failure:
        compute_score(broken)
    assert failure.value.component == "environment"
    assert failure.value.reason == reason
