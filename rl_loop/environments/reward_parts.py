"""Rewards from user code: a score, or a dictionary with "score" and further parts."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Real

from rl_loop.environments.base import StepResult
from rl_loop.infrastructure import InfrastructureError

RESERVED_PARTS = ("correct", "format_error", "score")
"""Reward parts that every environment has."""


def check_parts(parts: list[str]) -> list[str]:
    """Return the names of further parts. Raises ValueError for a name in RESERVED_PARTS."""
    if any(name in RESERVED_PARTS for name in parts):
        raise ValueError(f"{', '.join(RESERVED_PARTS)} are parts of every episode. Remove them")
    return parts


def read_parts(reward: object, parts: Sequence[str], giver: str) -> dict[str, float]:
    """Return the score and the further parts of a reward.

    Args:
        reward: a number, or a mapping with "score" and ``parts``.
        parts: expected names.
        giver: function that returned the reward, for messages.

    Raises:
        InfrastructureError: if names are missing or unexpected, or a value is not a finite number.
    """
    named = reward if isinstance(reward, Mapping) else {"score": reward}
    expected = {"score", *parts}
    # GDPO compares each part over episodes, so every episode needs exactly these.
    if set(named) != expected:
        names = ", ".join(sorted(map(str, named)))
        expected_names = ", ".join(sorted(expected))
        reason = f"{giver} returned the reward parts {names}. Expected: {expected_names}"
        raise InfrastructureError("checker", reason, giver)

    numbers: dict[str, float] = {}
    for name, value in named.items():
        # A NaN in one reward would make all advantages of its group NaN.
        if not isinstance(value, Real) or not math.isfinite(value):
            reason = f"{giver}: {name} is {value!r}, expected a finite number"
            raise InfrastructureError("checker", reason, giver)
        numbers[name] = float(value)
    return numbers


def with_parts(ended: StepResult, parts: Mapping[str, float]) -> StepResult:
    """Return ``ended`` with additional reward parts."""
    return replace(ended, reward_parts=ended.reward_parts | dict(parts))
