"""Where an episode ends, and what is tried again: the part of ``rollout``
that the agent loop knows."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class EpisodeLimits(BaseModel):
    """Where an episode ends without the agent's doing."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    max_turns: int = Field(4, gt=0)
    """Assistant turns per episode; the last may not call a tool usefully any more."""
    max_tokens: int = Field(8192, gt=0)
    """Tokens of a whole episode, prompt and tool outputs included. Tasks whose prompt alone is as
    long are left out."""
    max_tool_calls: int | None = Field(None, gt=0)
    """Tool calls of a whole episode; null for no limit. The call that reaches it is the last that
    is run: calls behind it in the same turn are not, and the episode ends with that turn."""
    max_sampled_tokens: int | None = Field(None, gt=0)
    """Sampled tokens of a whole episode; null for no limit but max_tokens."""
    episode_seconds: float = Field(600.0, gt=0)
    """Wall-clock limit of one episode: of sampling, tools and the judging of its answer. Waiting
    in the engine's queue, or for infrastructure that failed, does not count."""
    max_observation_bytes: int = Field(65536, ge=256)
    """UTF-8 bytes of what tools answer, or the user says, between two turns. What is
    longer is cut in its middle."""
    truncated_episodes: Literal["penalise", "mask"] = "penalise"
    """What a limit ends counts as a failure, or is left out of training (but
    not of the group's mean)."""


class PurificationConfig(BaseModel):
    """How often failed tool calls are retried."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    probability: float = Field(1.0, gt=0, le=1)
    """Share of failed turns that are retried; below 1 the policy goes on meeting errors."""
    retries: int = Field(3, gt=0)
    """Most retries of one turn; after that the error stays."""
