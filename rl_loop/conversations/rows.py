"""Files of records, read in blocks: JSONL, Parquet, and data sets of the Hugging Face hub.

The rows of a block are read, rendered and shuffled together. A JSONL file is first read once
to find the blocks. Only their offsets stay in memory.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from rl_loop.conversations.errors import ConversationError, DataError
from rl_loop.data.columns import rename_columns
from rl_loop.data.hub import hub_name, is_hub_dataset
from rl_loop.data.untrusted_data import check_parquet, read_line

BLOCK_BYTES = 1 << 18
"""Size of a block in bytes. A rendering process gets one block at a time."""


@dataclass(frozen=True)
class RowBlock:
    """Consecutive rows of a file."""

    start: int
    """First byte (JSONL) or first row (other files)."""
    stop: int
    """End of the range, exclusive: byte or row."""
    first_row: int
    """Number of the first row, counted from 1 as editors count lines."""
    size: int
    """Size in bytes. Approximate for files other than JSONL."""


@dataclass(frozen=True)
class UnparsedRecord:
    """Record that is not parsed yet."""

    number: int
    """Number of the line or row, from 1."""
    content: bytes | dict[str, Any]
    """JSON line, or row as converted by Arrow."""

    def parse(self, columns: Mapping[str, str]) -> Any:
        """Parse the record.

        Args:
            columns: column mapping of the source.

        Returns:
            The record, with the keys of its format.

        Raises:
            ConversationError: if the line is not JSON or a column is missing.
        """
        if isinstance(self.content, bytes):
            content = self._parse_line(self.content)
        else:
            content = self.content
        try:
            named = rename_columns(content, columns)
        except ValueError as error:
            raise ConversationError(str(error)) from None

        # Only Arrow adds null keys that a row does not have.
        return named if isinstance(self.content, bytes) else _without_nulls(named)

    @staticmethod
    def _parse_line(line: bytes) -> Any:
        try:
            return json.loads(line.decode("utf-8"))
        except json.JSONDecodeError as error:
            reason = f"not JSON: {error.msg} at character {error.colno}"
        except UnicodeDecodeError as error:
            reason = f"not UTF-8: byte {error.start} is 0x{error.object[error.start]:02x}"
        except RecursionError:
            reason = "the JSON has too many nested levels to be parsed"
        raise ConversationError(reason)

    def fingerprint(self) -> bytes:
        """Return bytes that are equal for identical JSON lines, and for other rows with equal values."""
        if isinstance(self.content, bytes):
            return self.content
        # Arrow rows can contain dates, which JSON lacks. Sorted keys make copies equal.
        return json.dumps(self.content, sort_keys=True, default=str).encode()


class JsonLinesRows:
    """File with one JSON value per line. Empty lines are skipped."""

    unit: Literal["line", "row"] = "line"

    def __init__(self, path: Path) -> None:
        """Find the blocks. Raises DataError if the file cannot be read."""
        self.location = str(path)
        self._path = path
        try:
            self.blocks: list[RowBlock] = list(self._index())
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise DataError(f"{path}: {error}") from None
        if not self.blocks:
            raise DataError(f"{path}: the file is empty")

    def __getstate__(self) -> dict[str, Any]:
        # Rendering processes get their blocks with each job.
        return {key: value for key, value in vars(self).items() if key != "blocks"}

    def _index(self) -> Iterator[RowBlock]:
        start = 0
        line = 1
        with self._path.open("rb") as file:
            while content := file.read(BLOCK_BYTES):
                # Blocks end at line breaks.
                content += read_line(file, line + content.count(b"\n"))
                yield RowBlock(start, start + len(content), line, len(content))
                start += len(content)
                line += content.count(b"\n")

    def read(self, block: RowBlock) -> Iterator[UnparsedRecord]:
        """Read the rows of a block. Raises DataError if the file has changed."""
        with self._path.open("rb") as file:
            file.seek(block.start)
            content = file.read(block.stop - block.start)
        # The blocks were found at the start of the run. A shorter file would lose rows silently.
        if len(content) < block.stop - block.start:
            raise DataError(f"{self.location} has changed while it was in use")

        for number, line in enumerate(content.split(b"\n"), start=block.first_row):
            if stripped := line.strip():
                yield UnparsedRecord(number, stripped)


class ArrowRows:
    """Rows of memory-mapped Arrow files.

    The ``datasets`` package converts Parquet files and data sets of the hub to Arrow once, and
    caches the result.
    """

    unit: Literal["line", "row"] = "row"

    def __init__(self, location: str, files: Sequence[str]) -> None:
        """Map the files. ``files`` are in Arrow's stream format."""
        self.location = location
        self._files = list(files)
        rows = self._table.num_rows
        if rows == 0:
            raise DataError(f"{location}: it has no rows")

        # Arrow knows only the total size, so assume that all rows are equally large.
        row_bytes = max(1, self._table.nbytes // rows)
        per_block = max(1, BLOCK_BYTES // row_bytes)
        self.blocks: list[RowBlock] = []
        for start in range(0, rows, per_block):
            stop = min(rows, start + per_block)
            self.blocks.append(RowBlock(start, stop, start + 1, (stop - start) * row_bytes))

    @cached_property
    def _table(self) -> Any:
        # Imported here, because files of JSON lines do not need it.
        import pyarrow

        tables = []
        for file in self._files:
            tables.append(pyarrow.ipc.open_stream(pyarrow.memory_map(file)).read_all())
        return pyarrow.concat_tables(tables)

    def __getstate__(self) -> dict[str, Any]:
        # Rendering processes get their blocks with each job and map the files themselves.
        return {key: value for key, value in vars(self).items() if key not in ("_table", "blocks")}

    def read(self, block: RowBlock) -> Iterator[UnparsedRecord]:
        """Read the rows of a block."""
        rows = self._table.slice(block.start, block.stop - block.start).to_pylist()
        for number, row in enumerate(rows, start=block.first_row):
            yield UnparsedRecord(number, row)


Rows = JsonLinesRows | ArrowRows


def open_rows(location: str) -> Rows:
    """Open a file or a data set of the hub.

    Args:
        location: .jsonl or .parquet file, "hub:NAME:SPLIT" or "hub:NAME:CONFIGURATION:SPLIT".

    Raises:
        DataError: if it cannot be read.
    """
    if is_hub_dataset(location):
        return ArrowRows(location, hub_files(location))

    path = Path(location)
    if not path.is_file():
        raise DataError(f"{location}: there is no such file")
    if location.endswith(".parquet"):
        return ArrowRows(location, _parquet_files(location))
    return JsonLinesRows(path)


def hub_files(location: str) -> list[str]:
    """Return the Arrow files of a hub data set. Raises DataError."""
    from datasets import load_dataset

    name, split = hub_name(location)
    try:
        return _cache_files(load_dataset(*name, split=split))
    except Exception as error:
        # The hub and its readers raise many types of exceptions.
        raise DataError(f"{location}: cannot be read: {error}") from None


def _parquet_files(location: str) -> list[str]:
    from datasets import Dataset
    from datasets.utils.logging import disable_progress_bar

    disable_progress_bar()
    try:
        # Before conversion, because a small Parquet file may decode to a very large one.
        check_parquet(Path(location))
        return _cache_files(Dataset.from_parquet(location))
    except Exception as error:
        raise DataError(f"{location}: cannot be read: {error}") from None


def _cache_files(dataset: Any) -> list[str]:
    return [file["filename"] for file in dataset.cache_files]


def _without_nulls(value: Any) -> Any:
    """Drop null keys, because Arrow gives every object of a column the keys of all others."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value]
    return value
