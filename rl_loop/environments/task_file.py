"""Task files: JSONL, one task a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rl_loop.environments.base import Task
from rl_loop.environments.registry import ENVIRONMENTS


class TaskFileError(ValueError):
    """A task file cannot be used; the message names the file and, if one is to blame, the line."""


def read_tasks(path: Path) -> list[Task]:
    """The tasks of a JSONL file in its order; empty lines are skipped. Raises TaskFileError."""
    try:
        # not splitlines: that would also split at characters that JSON allows inside a string
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise TaskFileError(f"{path}: cannot be read: {error}") from None
    tasks: list[Task] = []
    seen: set[str] = set()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            task = _task_of(json.loads(line))
            if task.task_id in seen:
                raise ValueError(f"task_id {task.task_id!r} is there twice")
        except (ValueError, RecursionError) as error:
            kind = "not JSON: " if isinstance(error, json.JSONDecodeError) else ""
            raise TaskFileError(f"{path}, line {number}: {kind}{error}") from None
        seen.add(task.task_id)
        tasks.append(task)
    if not tasks:
        raise TaskFileError(f"{path} holds no task")
    return tasks


def _task_of(record: Any) -> Task:
    """Raises ValueError saying what is wrong."""
    if not isinstance(record, dict):
        raise ValueError("a task must be a JSON object")
    try:
        task = Task(**record)
    except TypeError as error:
        raise ValueError(str(error).replace("Task.__init__() ", "")) from None
    if not all(isinstance(text, str) for text in (task.task_id, task.ground_truth, task.environment)):
        raise ValueError("task_id, ground_truth and environment must be text")
    if not isinstance(task.messages, list) or not task.messages or not all(map(_is_message, task.messages)):
        raise ValueError('messages must be a list of {"role": "developer" or "user", "content": text}')
    if not isinstance(task.metadata, dict):
        raise ValueError("metadata must be an object")
    if task.environment not in ENVIRONMENTS:
        raise ValueError(f"there is no environment {task.environment!r}; known: {', '.join(sorted(ENVIRONMENTS))}")
    for text in (task.task_id, task.ground_truth, *(message["content"] for message in task.messages)):
        text.encode()  # UnicodeEncodeError is a ValueError: half a surrogate pair cannot be tokenised
    return task


def _is_message(message: Any) -> bool:
    if not isinstance(message, dict) or set(message) != {"role", "content"}:
        return False
    return message["role"] in ("developer", "user") and isinstance(message["content"], str)
