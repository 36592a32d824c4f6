"""Rewards that an agent or a judge posts to ``/v1/rewards``."""

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, FiniteFloat

from rl_loop.gateway.errors import ApiError
from rl_loop.gateway.parameters import validated

SCORE = "score"
"""Name of the reward part for a plain number."""


class _RewardBody(BaseModel):
    """The JSON of a request."""

    # Without strict, pydantic would accept true and "1" as numbers.
    model_config = ConfigDict(extra="forbid", strict=True)

    # Python's JSON accepts NaN, which would make the advantages of the whole group NaN.
    reward: FiniteFloat | dict[str, FiniteFloat]
    response_id: str | None = None


@dataclass(frozen=True)
class SubmittedReward:
    """A reward for a session, or for one of its responses."""

    parts: dict[str, float]
    """Parts of the reward. The part "score" is 1 for perfect and 0 for doing nothing."""
    response_id: str | None = None
    """Rewarded response. None for the whole session."""


class SessionRewards:
    """Rewards of one session. A later reward of a response replaces the earlier one."""

    def __init__(self) -> None:
        self._parts: dict[str | None, dict[str, float]] = {}
        """Response -> its reward. The key None is the whole session."""

    def add(self, reward: SubmittedReward) -> None:
        """Add a reward."""
        # Replaced instead of added, so that a request that a client repeats counts once.
        self._parts[reward.response_id] = reward.parts

    def totals(self) -> dict[str, float] | None:
        """Return the sum of each reward part. None without rewards."""
        if not self._parts:
            return None
        totals: dict[str, float] = {}
        for parts in self._parts.values():
            for name, value in parts.items():
                totals[name] = totals.get(name, 0.0) + value
        return totals


def read_reward(body: Any) -> SubmittedReward:
    """Read ``{"reward": 0.5}`` or ``{"reward": {"score": 0.5, ...}, "response_id": "..."}``.

    Raises:
        ApiError: the body has another form.
    """
    if not isinstance(body, dict):
        raise ApiError(400, "invalid_request", "the body must be a JSON object")
    request = validated(_RewardBody, body)
    parts = request.reward
    if not isinstance(parts, dict):
        parts = {SCORE: parts}
    return SubmittedReward(parts, request.response_id)
