"""Task data: JSONL and Parquet files, and data sets of the Hugging Face hub, read row by row where they are."""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_gptoss.user_error import UserError
from rl_loop.environments.base import Environment, Task
from rl_loop.environments.registry import environment_class
from rl_loop.harmony.conversation import prompt_messages

REQUIRED = ("task_id", "messages", "ground_truth")
KEYS = tuple(field.name for field in dataclasses.fields(Task))


class TaskFileError(UserError, ValueError):
    """Task data cannot be used; the message names the file and, if one is to blame, the line."""


class TaskData:
    """The tasks of a file or a hub data set, in its order; only row positions stay in memory.

    ``place``: a path (.jsonl, .parquet), or "hub:NAME:SPLIT" or "hub:NAME:CONFIGURATION:SPLIT". A row is a ``Task``
    (task_id, messages, ground_truth, ...) or what ``environment.from_record`` reads; all are checked once, here.
    ``environment_name`` is that of rows which name none. Ids are ``prefix`` and the row's own id or its number; a
    prefix tells the tasks of one file from those of another. Raises TaskFileError."""

    def __init__(
        self, place: str, environment_name: str, environment: type[Environment], options: Any, prefix: str = ""
    ) -> None:
        self._place, self._name, self._environment, self._options = place, environment_name, environment, options
        self._prefix = prefix
        self._rows = _rows(place)
        self._kept: list[int] = []
        self.row_ids: list[str] = []  # without the prefix
        seen: dict[str, int] = {}
        for number in range(len(self._rows)):
            if (task := self._read(number)) is not None:
                row_id = task.task_id.removeprefix(prefix)
                if row_id in seen:
                    first = f"{self._unit()} {self._line(seen[row_id])} has it, too"
                    raise TaskFileError(f"{self._where(number)}: task_id {row_id!r} is there twice; {first}")
                seen[row_id] = number
                self.row_ids.append(row_id)
                self._kept.append(number)
        if not self._kept:
            raise TaskFileError(f"{place} holds no task")

    def keep(self, wanted: Sequence[bool]) -> None:
        """Leave out the tasks for which ``wanted`` is false. Raises TaskFileError if none is left."""
        self._kept = [number for number, good in zip(self._kept, wanted, strict=True) if good]
        self.row_ids = [row_id for row_id, good in zip(self.row_ids, wanted, strict=True) if good]
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
                raise ValueError(f"a task must be a JSON object, not {_kind(record)}")
            if {"messages", "task_id"} & set(record):
                task = checked_task(record, self._name)
                return replace(task, task_id=f"{self._prefix}{task.task_id}")
            found = self._environment.from_record(record, f"{self._prefix}{number}", self._options)
            return None if found is None else checked_task(vars(found), self._name)
        except json.JSONDecodeError as error:
            reason = f"not JSON: {error.msg} at character {error.colno}"
        except UnicodeDecodeError as error:
            reason = f"not UTF-8: byte {error.start} is 0x{error.object[error.start]:02x}"
        except RecursionError:
            reason = "not JSON that can be read: maximum recursion depth exceeded"
        except KeyError as error:
            keys = ", ".join(map(str, record)) or "no keys"
            reason = f"{self._environment.__name__} misses {error}; the row has {keys}"
        except ValueError as error:
            reason = str(error)
        except (AttributeError, TypeError, IndexError) as error:
            reason = f"{self._environment.__name__}.from_record cannot read it: {type(error).__name__}: {error}"
        raise TaskFileError(f"{self._where(number)}: {reason}")

    def _where(self, number: int) -> str:
        return f"{self._place}, {self._unit()} {self._line(number)}"

    def _unit(self) -> str:
        return "line" if isinstance(self._rows, JsonLines) else "row"

    def _line(self, number: int) -> int:
        """Counted from 1, as editors do."""
        return self._rows.lines[number] if isinstance(self._rows, JsonLines) else number + 1


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
    """The task that a record is, with ``environment`` for one that names none. Raises ValueError naming the key that is
    missing or wrong, or the message that cannot be rendered."""
    given = {key: value for key, value in record.items() if value is not None or key in REQUIRED}
    if missing := [key for key in REQUIRED if key not in given]:
        raise ValueError(f"a task needs {', '.join(missing)}; the row has {', '.join(map(str, record))}")
    if unknown := [str(key) for key in given if key not in KEYS]:
        raise ValueError(f"{', '.join(unknown)}: a task has no such key; it has {', '.join(KEYS)}")

    task = Task(**{"environment": environment} | given)
    for key in ("task_id", "ground_truth", "environment"):
        _check_text(key, getattr(task, key))
    if not task.task_id:
        raise ValueError("'task_id' is empty")
    if not isinstance(task.metadata, dict):
        raise ValueError(f"'metadata' must be an object, not {_kind(task.metadata)}")
    if not isinstance(task.messages, list) or not task.messages:
        raise ValueError(f"'messages' must be a list of at least one message, not {_kind(task.messages)}")

    try:
        prompt_messages(task.messages)
    except ValueError as error:
        raise ValueError(f"'messages': {error}") from None
    environment_class(task.environment)
    return task


def _check_text(key: str, value: Any) -> None:
    if not isinstance(value, str):
        raise ValueError(f"{key!r} must be text, not {_kind(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        place = f"half of a surrogate pair at place {error.start}"
        raise ValueError(f"{key!r} has {place}, which is no text (surrogates not allowed)") from None


def _kind(value: Any) -> str:
    """What JSON calls it."""
    if value is None:
        return "null"
    names = {bool: "true or false", int: "a number", float: "a number", str: "text", dict: "an object"}
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    return names.get(type(value), type(value).__name__)
