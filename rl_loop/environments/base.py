"""The interface between the agent loop and an environment."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from rl_loop.harmony import ParsedMessage, Tool, ToolOutput


@dataclass(frozen=True)
class Task:
    """One problem. JSON-serialisable."""

    task_id: str
    messages: list[dict[str, str]]
    """The prompt: {"role": "developer" or "user", "content": text}."""
    ground_truth: str
    environment: str = "retool"
    """A name in ``registry.ENVIRONMENTS``."""
    metadata: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """One line of a task file."""
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class StepResult:
    """What a turn of the agent led to. ``reward_parts`` and ``reward`` count when ``done``."""

    tool_outputs: list[ToolOutput] = field(default_factory=list)
    """What the agent observes before its next turn."""
    done: bool = False
    reward: float = 0.0
    reward_parts: dict[str, float] = field(default_factory=dict)
    """What the reward is made of, for the metrics; "correct" (0 or 1) is always there."""
    tool_calls: int = 0
    tool_errors: int = 0
    format_error: str | None = None
    """Why the turn cannot be acted on, if it cannot; the episode then ends."""


class Environment(Protocol):
    """The world of one episode; a new object for every episode."""

    def prompt(self) -> list[dict[str, str]]:
        """The messages that the agent starts from: {"role": "developer" or "user", "content": text}."""
        ...

    def tools(self) -> Sequence[Tool]:
        """The functions that the developer message describes; the built-in ``python`` is none of them."""
        ...

    async def step(self, messages: Sequence[ParsedMessage]) -> StepResult:
        """Act on the messages of one assistant turn; only the last may call a tool."""
        ...

    def unfinished(self) -> StepResult:
        """The reward when the episode ends without a final answer: out of turns, tokens or time."""
        ...

    def illegal(self, reason: str) -> StepResult:
        """The reward when what was sampled is not a legal Harmony message."""
        ...
