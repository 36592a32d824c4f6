"""Task data, read row by row: JSONL and Parquet files, and data sets of the Hugging Face hub."""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_gptoss.user_error import UserError
from rl_loop.data.columns import rename_columns
from rl_loop.data.hub import hub_name, is_hub_dataset
from rl_loop.data.untrusted_data import check_parquet, read_line
from rl_loop.environments.base import Environment, Task
from rl_loop.environments.registry import environment_class
from rl_loop.harmony.conversation import prompt_messages

REQUIRED = ("task_id", "messages", "ground_truth")
KEYS = tuple(field.name for field in dataclasses.fields(Task) if field.compare)


class TaskFileError(UserError, ValueError):
    """Task data that cannot be used. The message names the file, and the line if known."""


class TaskData:
    """Tasks of a file or a hub data set, in its order. Only row positions stay in memory.

    A row is a ``Task`` (task_id, messages, ground_truth, ...) or a record for
    ``environment.from_record``. All rows are checked once, when the data is opened.
    """

    def __init__(
        self,
        place: str,
        environment_name: str,
        environment: type[Environment],
        options: Any,
        prefix: str = "",
        columns: Mapping[str, str] | None = None,
    ) -> None:
        """Read and check all rows.

        Args:
            place: path (.jsonl, .parquet), "hub:NAME:SPLIT" or "hub:NAME:CONFIGURATION:SPLIT".
            environment_name: environment of rows that do not name one.
            environment: class of that environment.
            options: options of the environment.
            prefix: prefix of the tasks' ids, which end with the row's id or number.
            columns: column mapping, see ``SourceConfig``.

        Raises:
            TaskFileError: if the data cannot be used.
        """
        self._place = place
        self._name = environment_name
        self._environment = environment
        self._options = options
        self._prefix = prefix
        self._columns = columns or {}
        self._rows = _open_rows(place)

        self._numbers: list[int] = []
        """Row number of every task, including those left out."""
        self.places: list[int] = []
        """Indices in ``_numbers`` of the tasks that are not left out."""
        self.row_ids: list[str] = []
        """Ids of these tasks without the prefix."""
        self._index_rows()

    def _index_rows(self) -> None:
        """Read every row once.

        Raises:
            TaskFileError: for a bad row, for a duplicate id, or if there is no task.
        """
        # Pass rates, cursors and groups find tasks by their ids.
        first_rows: dict[str, int] = {}
        for number in range(len(self._rows)):
            # Tasks are read again when they are used, so only positions stay in memory.
            task = self._read(number)
            if task is None:
                continue

            row_id = task.task_id.removeprefix(self._prefix)
            if row_id in first_rows:
                first = f"also in {self._unit()} {self._line(first_rows[row_id])}"
                raise TaskFileError(
                    f"{self._where(number)}: task_id {row_id!r} is not unique, {first}. Change "
                    "one of them"
                )
            first_rows[row_id] = number
            self.row_ids.append(row_id)
            self._numbers.append(number)

        if not self._numbers:
            raise TaskFileError(f"{self._place} contains no task")
        self.places = list(range(self.total))

    @property
    def total(self) -> int:
        """Number of tasks, including those left out."""
        return len(self._numbers)

    def filter(self, mask: Sequence[bool]) -> None:
        """Leave out the tasks for which ``mask`` is false.

        Raises:
            TaskFileError: if none is left.
        """
        self.places = [place for place, kept in zip(self.places, mask, strict=True) if kept]
        self.row_ids = [row_id for row_id, kept in zip(self.row_ids, mask, strict=True) if kept]
        if not self.places:
            raise TaskFileError(
                f"{self._place}: no task is left after filtering by pass rate and held-out prompts"
            )

    def __len__(self) -> int:
        return len(self.places)

    def __iter__(self) -> Iterator[Task]:
        return (self.task_at(place) for place in self.places)

    def __getitem__(self, index: int) -> Task:
        return self.task_at(self.places[index])

    def task_at(self, place: int) -> Task:
        """Return a task by its index among all tasks."""
        task = self._read(self._numbers[place])
        if task is None:
            raise TaskFileError(f"{self._place} has changed while it was in use")
        return task

    def _read(self, number: int) -> Task | None:
        """Return the task of a row. None if the environment leaves it out.

        Raises:
            TaskFileError: if the row is invalid.
        """
        record: Any = None
        try:
            record = self._rows[number]
            return self._to_task(record, number)
        except (ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
            reason = _explain(error, record, self._environment.__name__)
        raise TaskFileError(f"{self._where(number)}: {reason}")

    def _to_task(self, record: Any, number: int) -> Task | None:
        """Return the task in a row, or the task that the environment creates from it."""
        if not isinstance(record, dict):
            raise ValueError(f"a task must be a JSON object, not {_kind(record)}")

        record = rename_columns(record, self._columns)
        # Data of others has no ids of tasks, so the number of the row is its id.
        if "messages" in self._columns and "task_id" not in self._columns:
            record["task_id"] = str(number)

        # A row with either key is meant to be a task, so report missing keys of tasks.
        if "messages" in record or "task_id" in record:
            task = checked_task(record, self._name)
            return replace(task, task_id=f"{self._prefix}{task.task_id}")

        made = self._environment.from_record(record, f"{self._prefix}{number}", self._options)
        if made is None:
            return None
        # As for generated tasks: a class does not know the name that the source gives it.
        # Environments of users get the checks of files, too.
        row = {key: getattr(made, key) for key in KEYS}
        return checked_task(row | {"environment": self._name}, self._name)

    def _where(self, number: int) -> str:
        return f"{self._place}, {self._unit()} {self._line(number)}"

    def _unit(self) -> str:
        return "line" if isinstance(self._rows, JsonLines) else "row"

    def _line(self, number: int) -> int:
        """Return the line or row number, from 1."""
        if isinstance(self._rows, JsonLines):
            return self._rows.lines[number]
        return number + 1


class JsonLines:
    """Values of a JSONL file. Empty lines are skipped."""

    def __init__(self, path: Path) -> None:
        # Kept open, so that replacing the file does not change the data of this run.
        self._file = path.open("rb")
        self.lines: list[int] = []
        """Line number of every value, from 1."""
        self._offsets: list[int] = []
        """Byte offset of every value's line."""

        offset = 0
        number = 1
        # Offsets instead of text stay in memory. ``read_line`` bounds the length of a line.
        while line := read_line(self._file, number):
            if line.strip():
                self.lines.append(number)
                self._offsets.append(offset)
            offset += len(line)
            number += 1

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: int) -> Any:
        # Not cached, because a file of tasks may be larger than memory.
        self._file.seek(self._offsets[index])
        return json.loads(self._file.readline().decode("utf-8"))


def checked_task(record: dict[str, Any], environment: str) -> Task:
    """Return the task in a record.

    Args:
        record: row of the data.
        environment: environment of rows that do not name one.

    Raises:
        ValueError: if a key is missing or wrong, or if a message cannot be rendered.
    """
    # Parquet has null for a missing key.
    present = {key: value for key, value in record.items() if value is not None or key in REQUIRED}
    missing = [key for key in REQUIRED if key not in present]
    # A mistyped key would otherwise be ignored, and the task would run without its value.
    unknown = [str(key) for key in present if key not in KEYS]
    if missing:
        raise ValueError(
            f"a task needs {', '.join(missing)}; the row has {', '.join(map(str, record))}"
        )
    if unknown:
        raise ValueError(
            f"{', '.join(unknown)}: unknown key of a task. Known keys: {', '.join(KEYS)}"
        )

    # A row may name another environment than its source.
    task = Task(**{"environment": environment} | present)
    # These texts reach files and processes that take UTF-8 only.
    for key in ("task_id", "ground_truth", "environment"):
        _check_text(key, getattr(task, key))
    if not task.task_id:
        raise ValueError("'task_id' is empty")
    if not isinstance(task.metadata, dict):
        raise ValueError(f"'metadata' must be an object, not {_kind(task.metadata)}")
    if not isinstance(task.messages, list) or not task.messages:
        raise ValueError(
            f"'messages' must be a list of at least one message, not {_kind(task.messages)}"
        )

    try:
        prompt_messages(task.messages)
    except ValueError as error:
        raise ValueError(f"'messages': {error}") from None
    # Raises ValueError for an unknown environment.
    environment_class(task.environment)
    return task


def _open_rows(place: str) -> Any:
    """Open data as a sequence of rows, memory-mapped except JSONL. Raises TaskFileError."""
    try:
        if is_hub_dataset(place):
            from datasets import load_dataset

            name, split = hub_name(place)
            return load_dataset(*name, split=split)

        if place.endswith(".parquet"):
            from datasets import Dataset
            from datasets.table import InMemoryTable
            from pyarrow.parquet import read_table

            # First, because a small file could decode to more than the memory of the machine.
            check_parquet(Path(place))
            # Dataset.from_parquet would write a copy in its own cache.
            return Dataset(InMemoryTable(read_table(place, memory_map=True)))

        return JsonLines(Path(place))
    except Exception as error:
        # pyarrow and the hub raise many types of exceptions.
        raise TaskFileError(f"{place}: cannot be read: {error}") from None


def _explain(error: Exception, record: Any, environment: str) -> str:
    """Return why a row is not a task, in one line. ``record`` is None if it could not be read."""
    # Most specific first: JSONDecodeError and UnicodeDecodeError are ValueErrors.
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON: {error.msg} at character {error.colno}"
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8: byte {error.start} is 0x{error.object[error.start]:02x}"
    if isinstance(error, RecursionError):
        return "the JSON has too many nested levels to be parsed"
    # Usual for data whose columns have other names.
    if isinstance(error, KeyError):
        keys = ", ".join(map(str, record or ())) or "no keys"
        return (
            f"environment {environment} needs the key {error}, but the row has {keys}. Rename columns "
            "with `columns`"
        )
    if isinstance(error, ValueError):
        return str(error)
    return f"{environment}.from_record cannot read it: {type(error).__name__}: {error}"


def _check_text(key: str, value: Any) -> None:
    """Raise ValueError if a value is not text that UTF-8 can encode."""
    if not isinstance(value, str):
        raise ValueError(f"{key!r} must be text, not {_kind(value)}")

    try:
        value.encode()
    except UnicodeEncodeError as error:
        place = f"half of a surrogate pair at index {error.start}"
        raise ValueError(
            f"{key!r} has {place}, which UTF-8 cannot encode (surrogates not allowed)"
        ) from None


def _kind(value: Any) -> str:
    """Return the JSON name of a value's type."""
    if value is None:
        return "null"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    names = {
        bool: "true or false",
        int: "a number",
        float: "a number",
        str: "text",
        dict: "an object",
    }
    return names.get(type(value), type(value).__name__)
