"""The interface between the agent loop and an environment."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rl_loop.harmony import ParsedMessage


class TaskFileError(ValueError):
    """A task file has a bad line; the message names file and line."""


@dataclass(frozen=True)
class Task:
    """One problem. JSON-serialisable."""

    task_id: str
    messages: list[dict[str, str]]
    """The prompt: {"role": "developer" or "user", "content": text}."""
    ground_truth: str
    environment: str = "retool"
    metadata: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False)


@dataclass(frozen=True)
class Observation:
    """What a tool answers."""

    tool: str
    channel: str
    text: str


@dataclass(frozen=True)
class StepResult:
    """What a turn of the agent led to. ``reward_parts`` and ``reward`` count when ``done``."""

    observations: list[Observation] = field(default_factory=list)
    done: bool = False
    reward: float = 0.0
    reward_parts: dict[str, float] = field(default_factory=dict)
    tool_calls: int = 0
    tool_errors: int = 0
    format_error: str | None = None
    """Why the turn cannot be acted on, if it cannot; the episode then ends."""


class Environment(Protocol):
    """The world of one episode; a new object for every episode."""

    def prompt(self) -> list[dict[str, str]]:
        """The messages that the agent starts from."""
        ...

    async def step(self, messages: Sequence[ParsedMessage]) -> StepResult:
        """Act on the messages of one assistant turn."""
        ...

    def unfinished(self) -> StepResult:
        """The reward when the episode ends without a final answer: out of turns, tokens or time."""
        ...

    def illegal(self, reason: str) -> StepResult:
        """The reward when what was sampled is not a legal Harmony message."""
        ...


def read_tasks(path: Path) -> list[Task]:
    """Read a JSONL file with one task a line. Raises TaskFileError naming the file and the line."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TaskFileError(f"{path}: cannot be read: {error}") from None
    tasks, seen = [], set()
    for number, line in enumerate(lines, start=1):
        where = f"{path}, line {number}"
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            task = Task(**record)
        except json.JSONDecodeError as error:
            raise TaskFileError(f"{where}: not JSON: {error}") from None
        except TypeError as error:
            raise TaskFileError(f"{where}: {str(error).replace('Task.__init__() ', '')}") from None
        if not isinstance(task.messages, list) or not all(
            isinstance(m, dict) and isinstance(m.get("content"), str) and m.get("role") in ("developer", "user")
            for m in task.messages
        ):
            raise TaskFileError(f"{where}: messages must be a list of {{role: developer or user, content: text}}")
        if not isinstance(task.ground_truth, str) or not isinstance(task.task_id, str):
            raise TaskFileError(f"{where}: task_id and ground_truth must be text")
        if task.task_id in seen:
            raise TaskFileError(f"{where}: task_id {task.task_id!r} is there twice")
        seen.add(task.task_id)
        tasks.append(task)
    if not tasks:
        raise TaskFileError(f"{path} holds no task")
    return tasks
