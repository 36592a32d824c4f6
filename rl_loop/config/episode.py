"""Limits of an episode and retries of tool calls: the part of ``rollout`` for the agent loop."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class EpisodeLimits(BaseModel):
    """Limits at which an episode ends, independent of the agent."""

    # Not StrictModel: agents and the gateway use these limits without the trainer's configuration.
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    max_turns: int = Field(4, gt=0)
    """Maximum assistant turns of an episode. Tool calls in the last turn have no use."""
    max_episode_tokens: int = Field(8192, gt=0)
    """Maximum tokens of an episode, including prompt and tool outputs. Tasks with a prompt of this
    length or more are left out."""
    max_tool_calls: int | None = Field(None, gt=0)
    """Maximum tool calls of an episode. null for no limit. When a turn reaches it, further calls of
    the turn are not run, and the episode ends with the turn."""
    max_sampled_tokens: int | None = Field(None, gt=0)
    """Maximum sampled tokens of an episode. null for no limit except max_episode_tokens."""
    max_episode_seconds: float = Field(600.0, gt=0)
    """Time limit of an episode in seconds (wall clock), for sampling, tools and the check of its
    answer. Time in the engine's queue, or for retries after infrastructure failures, does not
    count."""
    max_observation_bytes: int = Field(65536, ge=256)
    """Maximum UTF-8 bytes of tool outputs, or of the user's message, between two turns. Longer
    texts are cut in the middle."""
    truncated_episodes: Literal["penalize", "mask"] = "penalize"
    """Treatment of an episode that a limit ends. penalize: it counts as a failure. mask: it is not
    trained on, but counts in the mean of its group."""


class PurificationConfig(BaseModel):
    """Retries of failed tool calls."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    probability: float = Field(1.0, gt=0, le=1)
    """Share of failed turns that are retried. Below 1 the policy still sees errors."""
    retries: int = Field(3, gt=0)
    """Maximum retries of a turn. After them the error stays."""
