"""Task data: JSONL and Parquet files, and data sets of the Hugging Face hub, read row by row where they are."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rl_loop.environments.base import Environment, Task
from rl_loop.environments.registry import environment_class


class TaskFileError(ValueError):
    """Task data cannot be used; the message names the file and, if one is to blame, the line."""


class TaskData:
    """The tasks of a file or a hub data set, in its order; only row positions stay in memory.

    ``place``: a path (.jsonl, .parquet), or "hub:NAME:SPLIT" or "hub:NAME:CONFIGURATION:SPLIT". A row is a ``Task``
    (task_id, messages, ground_truth, ...) or what ``environment.from_record`` reads; all are checked once, here. Raises
    TaskFileError."""

    def __init__(self, place: str, name: str, environment: type[Environment], options: Any) -> None:
        self._place, self._name, self._environment, self._options = place, name, environment, options
        self._rows = _rows(place)
        self._kept: list[int] = []
        self.task_ids: list[str] = []
        seen: set[str] = set()
        for number in range(len(self._rows)):
            if (task := self._read(number)) is not None:
                if task.task_id in seen:
                    raise TaskFileError(f"{self._where(number)}: task_id {task.task_id!r} is there twice")
                seen.add(task.task_id)
                self.task_ids.append(task.task_id)
                self._kept.append(number)
        if not self._kept:
            raise TaskFileError(f"{place} holds no task")

    def keep(self, wanted: Sequence[bool]) -> None:
        """Leave out the tasks for which ``wanted`` is false. Raises TaskFileError if none is left."""
        self._kept = [number for number, good in zip(self._kept, wanted, strict=True) if good]
        self.task_ids = [task_id for task_id, good in zip(self.task_ids, wanted, strict=True) if good]
        if not self._kept:
            raise TaskFileError(f"{self._place}: no task is left after filtering by pass rate and held-out prompts")

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[Task]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> Task:
        task = self._read(self._kept[index])
        if task is None:
            raise TaskFileError(f"{self._place} has changed while it was in use")
        return task

    def _read(self, number: int) -> Task | None:
        try:
            record = self._rows[number]
            if not isinstance(record, dict):
                raise ValueError("a task must be a JSON object")
            if {"messages", "task_id"} & set(record):
                return checked_task(record, self._name)
            task = self._environment.from_record(record, f"{self._name}-{number}", self._options)
            return None if task is None else checked_task(vars(task), self._name)
        except (ValueError, KeyError, RecursionError, AttributeError, TypeError, IndexError) as error:
            kind = "not JSON: " if isinstance(error, json.JSONDecodeError) else ""
            kind = f"{self._environment.__name__} misses " if isinstance(error, KeyError) else kind
            raise TaskFileError(f"{self._where(number)}: {kind}{error}") from None

    def _where(self, number: int) -> str:
        line = self._rows.lines[number] if isinstance(self._rows, JsonLines) else number + 1
        return f"{self._place}, line {line}"


class JsonLines:
    """The values of a JSONL file; empty lines are skipped."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        self.lines: list[int] = []
        self._offsets: list[int] = []
        offset = 0
        for number, line in enumerate(self._file, start=1):
            if line.strip():
                self.lines.append(number)
                self._offsets.append(offset)
            offset += len(line)

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: int) -> Any:
        self._file.seek(self._offsets[index])
        return json.loads(self._file.readline().decode("utf-8"))


def _rows(place: str) -> Any:
    """Something with a length, whose items are the rows; memory-mapped unless it is JSONL."""
    try:
        if place.startswith("hub:"):
            from datasets import load_dataset

            *name, split = place.removeprefix("hub:").split(":")
            return load_dataset(*name, split=split)
        if place.endswith(".parquet"):
            from datasets import Dataset
            from datasets.table import InMemoryTable
            from pyarrow.parquet import read_table

            return Dataset(InMemoryTable(read_table(place, memory_map=True)))
        return JsonLines(Path(place))
    except Exception as error:  # whatever pyarrow and the hub raise
        raise TaskFileError(f"{place}: cannot be read: {error}") from None


def checked_task(record: dict[str, Any], environment: str) -> Task:
    """``environment`` is that of a record which names none. Raises ValueError saying what is wrong."""
    try:
        task = Task(**{"environment": environment} | record)
    except TypeError as error:
        raise ValueError(str(error).replace("Task.__init__() ", "")) from None
    if not all(isinstance(text, str) for text in (task.task_id, task.ground_truth, task.environment)):
        raise ValueError("task_id, ground_truth and environment must be text")
    if not isinstance(task.messages, list) or not task.messages or not all(map(_is_message, task.messages)):
        raise ValueError('messages must be a list of {"role": "developer" or "user", "content": text}')
    if not isinstance(task.metadata, dict):
        raise ValueError("metadata must be an object")
    environment_class(task.environment)
    for text in (task.task_id, task.ground_truth, *(message["content"] for message in task.messages)):
        text.encode()  # UnicodeEncodeError is a ValueError: half a surrogate pair cannot be tokenised
    return task


def _is_message(message: Any) -> bool:
    if not isinstance(message, dict) or set(message) != {"role", "content"}:
        return False
    return message["role"] in ("developer", "user") and isinstance(message["content"], str)
