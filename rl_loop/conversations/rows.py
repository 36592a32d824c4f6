"""Files of records, read a block at a time: JSONL, Parquet, and data sets of the Hugging Face hub.

A block is what is read, rendered and shuffled together. A file is looked through once, for where
its blocks begin; nothing of it stays in memory.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from rl_loop.conversations.errors import ConversationError, DataError
from rl_loop.data.columns import with_known_names
from rl_loop.data.hub import hub_name, is_of_hub
from rl_loop.data.untrusted_data import check_parquet, read_line

BLOCK_BYTES = 1 << 18
"""Of a block. A job of a process that renders: tens of milliseconds."""


@dataclass(frozen=True)
class Block:
    """Some rows of a file that follow one another."""

    start: int
    """Of JSONL the byte, of other files the row at which it begins."""
    stop: int
    """The byte or row behind its last one."""
    first_row: int
    """Number of its first row as editors count lines, from 1."""
    size: int
    """Bytes, of other files than JSONL roughly."""


@dataclass(frozen=True)
class Row:
    """One record, not yet parsed."""

    number: int
    """Of the line or row, from 1."""
    content: bytes | dict[str, Any]
    """A line of JSON, or what Arrow made of a row."""

    def record(self, columns: Mapping[str, str]) -> Any:
        """Return the record, with ``columns`` under the names that its format knows.

        Raises ConversationError if the line is no JSON, or has no such column."""
        if isinstance(self.content, bytes):
            content = self._parse(self.content)
        else:
            content = self.content
        try:
            named = with_known_names(content, columns)
        except ValueError as error:
            raise ConversationError(str(error)) from None

        # Only Arrow gives rows keys that they do not have.
        return named if isinstance(self.content, bytes) else _without_nulls(named)

    @staticmethod
    def _parse(line: bytes) -> Any:
        try:
            return json.loads(line.decode("utf-8"))
        except json.JSONDecodeError as error:
            reason = f"not JSON: {error.msg} at character {error.colno}"
        except UnicodeDecodeError as error:
            reason = f"not UTF-8: byte {error.start} is 0x{error.object[error.start]:02x}"
        except RecursionError:
            reason = "not JSON that can be read: it is nested too deeply"
        raise ConversationError(reason)

    def fingerprint(self) -> bytes:
        """Return what copies of the record have in common."""
        if isinstance(self.content, bytes):
            return self.content
        return json.dumps(self.content, sort_keys=True, default=str).encode()


class JsonLines:
    """A file with a JSON value per line; empty lines are skipped."""

    unit: Literal["line", "row"] = "line"

    def __init__(self, path: Path) -> None:
        """Look for the beginnings of blocks. Raises DataError."""
        self.place = str(path)
        self._path = path
        try:
            self.blocks: list[Block] = list(self._index())
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise DataError(f"{path}: {error}") from None
        if not self.blocks:
            raise DataError(f"{path}: the file is empty")

    def __getstate__(self) -> dict[str, Any]:
        # A process that renders is told its blocks one by one.
        return {key: value for key, value in vars(self).items() if key != "blocks"}

    def _index(self) -> Iterator[Block]:
        start = 0
        line = 1
        with self._path.open("rb") as file:
            while content := file.read(BLOCK_BYTES):
                # A line is never cut.
                content += read_line(file, line + content.count(b"\n"))
                yield Block(start, start + len(content), line, len(content))
                start += len(content)
                line += content.count(b"\n")

    def read(self, block: Block) -> Iterator[Row]:
        """Read the rows of a block. Raises DataError if the file has changed."""
        with self._path.open("rb") as file:
            file.seek(block.start)
            content = file.read(block.stop - block.start)
        if len(content) < block.stop - block.start:
            raise DataError(f"{self.place} has changed while it was in use")

        for number, line in enumerate(content.split(b"\n"), start=block.first_row):
            if stripped := line.strip():
                yield Row(number, stripped)


class ArrowRows:
    """Rows of Arrow files, mapped into memory: what the ``datasets`` package makes of Parquet files
    and of the hub's data sets, once, in its own cache."""

    unit: Literal["line", "row"] = "row"

    def __init__(self, place: str, files: Sequence[str]) -> None:
        """``files``: in Arrow's stream format."""
        self.place = place
        self._files = list(files)
        rows = self._table.num_rows
        if rows == 0:
            raise DataError(f"{place}: it has no rows")

        row_bytes = max(1, self._table.nbytes // rows)
        per_block = max(1, BLOCK_BYTES // row_bytes)
        self.blocks: list[Block] = []
        for start in range(0, rows, per_block):
            stop = min(rows, start + per_block)
            self.blocks.append(Block(start, stop, start + 1, (stop - start) * row_bytes))

    @cached_property
    def _table(self) -> Any:
        import pyarrow

        tables = []
        for file in self._files:
            tables.append(pyarrow.ipc.open_stream(pyarrow.memory_map(file)).read_all())
        return pyarrow.concat_tables(tables)

    def __getstate__(self) -> dict[str, Any]:
        # A process that renders is told its blocks, and maps the files by itself.
        return {key: value for key, value in vars(self).items() if key not in ("_table", "blocks")}

    def read(self, block: Block) -> Iterator[Row]:
        """Read the rows of a block."""
        rows = self._table.slice(block.start, block.stop - block.start).to_pylist()
        for number, row in enumerate(rows, start=block.first_row):
            yield Row(number, row)


Rows = JsonLines | ArrowRows


def open_rows(place: str) -> Rows:
    """Open a .jsonl or .parquet file, or "hub:NAME:SPLIT" or "hub:NAME:CONFIGURATION:SPLIT".

    Raises DataError."""
    if is_of_hub(place):
        return ArrowRows(place, hub_files(place))

    path = Path(place)
    if not path.is_file():
        raise DataError(f"{place}: there is no such file")
    if place.endswith(".parquet"):
        return ArrowRows(place, _parquet_files(place))
    return JsonLines(path)


def hub_files(place: str) -> list[str]:
    """Return the Arrow files of a data set of the hub. Raises DataError."""
    from datasets import load_dataset

    name, split = hub_name(place)
    try:
        return _cache_files(load_dataset(*name, split=split))
    except Exception as error:
        # The hub and its readers raise all sorts of things.
        raise DataError(f"{place}: cannot be read: {error}") from None


def _parquet_files(place: str) -> list[str]:
    from datasets import Dataset
    from datasets.utils.logging import disable_progress_bar

    disable_progress_bar()
    try:
        check_parquet(Path(place))
        return _cache_files(Dataset.from_parquet(place))
    except Exception as error:
        raise DataError(f"{place}: cannot be read: {error}") from None


def _cache_files(dataset: Any) -> list[str]:
    return [file["filename"] for file in dataset.cache_files]


def _without_nulls(value: Any) -> Any:
    """Leave out keys that are null: Arrow gives every object of a column the keys of all others."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value]
    return value
