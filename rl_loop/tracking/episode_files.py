"""Recorded episodes of a run: numbered Parquet files, written atomically.

    episodes/000000-000031.parquet    the writes 0 to 31, merged
    episodes/000032-000032.parquet    one write: the episodes of a step
    episodes/vocabulary.parquet       the text of every token id

Every step is a separate write, so a killed run has complete steps. To keep the number of files low,
small files are merged. A merged file appears before the files that it replaces are deleted. Readers
therefore skip files whose numbers lie within another file's range.
"""

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rl_loop.tracking.episode_table import SCHEMA
from rl_loop.tracking.run_directory import RunDirectoryError, atomic_write_bytes

VOCABULARY_FILE = "vocabulary.parquet"

FILES_PER_MERGE = 32
"""Consecutive files of one level to merge.

Therefore each episode is rewritten once for every power of this number, up to the number of steps:
after 2,000 steps, the oldest episodes have been rewritten 2 times.
"""

MAX_MERGED_BYTES = 128 * 2**20
"""Maximum size of a merged file in bytes. One step of a large run is larger and is not merged."""

ROW_GROUP_TOKENS = 2**20
"""Tokens per row group (about 10 MB). Showing one episode reads one row group."""

ROW_GROUP_EPISODES = 4096

IDS_PER_WRITE = 2**24
"""Ids per write. Write n has the ids from n x IDS_PER_WRITE."""

TEXT_COLUMN = "turns.list.element.text"
"""Column with the text of turns, written without a dictionary.

Texts hardly repeat, so reading is faster without a dictionary. zstd still compresses repeated
prompts.
"""

FLOAT_COLUMNS = (
    "rollout_log_probs",
    "trainer_log_probs",
    "reference_log_probs",
    "entropy",
    "values",
    "returns",
)
"""Columns of numbers that hardly repeat.

They compress better with byte-stream splitting than with a dictionary. Advantages are not among
them, because they repeat.
"""


@dataclass(frozen=True, order=True)
class EpisodeFile:
    """One file of episodes."""

    first: int
    """Number of its first write."""
    last: int
    """Number of its last write."""
    path: Path

    @property
    def merge_level(self) -> int:
        """Level of merging, derived from the number of writes."""
        writes = self.last - self.first + 1
        level = 0
        while writes >= FILES_PER_MERGE:
            writes //= FILES_PER_MERGE
            level += 1
        return level


def list_files(directory: Path) -> list[EpisodeFile]:
    """Return the files with the run's episodes, oldest first. They do not overlap."""
    found = []
    for path in directory.glob("*-*.parquet"):
        first, _, last = path.stem.partition("-")
        # A link could lead to another run's episodes, and a pipe would block the reader.
        if first.isdigit() and last.isdigit() and path.is_file() and not path.is_symlink():
            found.append(EpisodeFile(int(first), int(last), path))

    # The longest of files with the same start comes first and hides leftovers of a merge.
    files: list[EpisodeFile] = []
    for file in sorted(found, key=lambda file: (file.first, -file.last)):
        if not files or file.first > files[-1].last:
            files.append(file)
    return files


def next_number(directory: Path) -> int:
    """Return the number of the next write."""
    files = list_files(directory)
    return files[-1].last + 1 if files else 0


def first_episode_id(number: int) -> int:
    """Return the id of a write's first episode."""
    return number * IDS_PER_WRITE


def write_episodes(directory: Path, number: int, table: pa.Table) -> Path:
    """Write the rows of ``episode_table`` as one write.

    Args:
        directory: ``RunDirectory.episodes``.
        number: number of the write.
        table: rows.

    Returns:
        The path of the file.

    Raises:
        ValueError: if the table has more rows than one write may have.
        RunWriteError: if it cannot be written. No partial file remains.
    """
    # Further ids would belong to the next write.
    if table.num_rows >= IDS_PER_WRITE:
        raise ValueError(
            f"one write has {table.num_rows:,} episodes, but must have fewer than {IDS_PER_WRITE:,}"
        )
    directory.mkdir(exist_ok=True)
    path = _file_path(directory, number, number)
    atomic_write_bytes(path, _to_parquet([table]))
    return path


def merge_small_files(directory: Path) -> bool:
    """Merge the newest files into one if FILES_PER_MERGE of them have the same level.

    Files that are too large together are not merged.

    Returns:
        True if files were merged.
    """
    # Only the newest files can complete a level, as in a counter with carries.
    newest = list_files(directory)[-FILES_PER_MERGE:]
    have_equal_level = len({file.merge_level for file in newest}) == 1
    if len(newest) < FILES_PER_MERGE or not have_equal_level:
        return False
    # Merging keeps the number of files low. Large files need no merging, because they are few and
    # rewriting them takes long.
    if sum(file.path.stat().st_size for file in newest) > MAX_MERGED_BYTES:
        return False

    # A generator, so that only one row group at a time is in memory without compression.
    tables = (table for file in newest for table in read_row_groups(file.path))
    merged = _file_path(directory, newest[0].first, newest[-1].last)
    # From here on, the merged file hides the others, so a crash while they are deleted loses
    # nothing.
    atomic_write_bytes(merged, _to_parquet(tables))
    for file in newest:
        file.path.unlink()
    return True


def delete_steps_after(directory: Path, step: int) -> None:
    """Drop the episodes of later steps, and leftovers of a crash.

    Held-out episodes of ``step`` are dropped, too.
    """
    if not directory.exists():
        return
    for temporary in directory.glob(".*.tmp"):
        temporary.unlink()

    files = list_files(directory)
    for path in directory.glob("*-*.parquet"):
        if path not in {file.path for file in files}:
            # A crash came between the merge and the deletion of its sources.
            path.unlink()
    for file in files:
        # Held-out episodes of ``step`` are sampled again by a resume. Read only the two columns
        # that decide which rows to keep. Whole files are read only if they lose some of their rows.
        kept = _is_kept(_read(file.path, ["step", "split"]), step)
        if not pc.any(kept).as_py():
            file.path.unlink()
        elif not pc.all(kept).as_py():
            tables = (table.filter(_is_kept(table, step)) for table in read_row_groups(file.path))
            atomic_write_bytes(file.path, _to_parquet(tables))


def _is_kept(table: pa.Table, step: int) -> pa.ChunkedArray:
    """Return a boolean per episode: True if a resume after ``step`` steps keeps it."""
    steps = table.column("step")
    was_trained_on = pc.not_equal(table.column("split"), "held_out")
    return pc.or_(pc.less(steps, step), pc.and_(pc.equal(steps, step), was_trained_on))


@contextmanager
def open_episode_file(path: Path, *, pre_buffer: bool = True) -> Iterator[pq.ParquetFile]:
    """Open a file with checksum verification.

    Args:
        path: Parquet file.
        pre_buffer: let Arrow read ahead in background threads.

    Raises:
        RunDirectoryError: if the file is damaged.
        FileNotFoundError: if there is no such file.
    """
    try:
        with pq.ParquetFile(path, page_checksum_verification=True, pre_buffer=pre_buffer) as file:
            yield file
    # Another process may have merged the file. Callers look for the new one.
    except FileNotFoundError:
        raise
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise _damage_error(path, error) from error


def read_row_groups(path: Path, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
    """Read a file one row group at a time. Raises RunDirectoryError if it is damaged."""
    with open_episode_file(path) as file:
        for i in range(file.num_row_groups):
            yield file.read_row_group(i, columns=columns)


def _read(path: Path, columns: Sequence[str]) -> pa.Table:
    with open_episode_file(path) as file:
        return file.read(columns=list(columns))


def _damage_error(path: Path, error: Exception) -> RunDirectoryError:
    return RunDirectoryError(
        f"{path} is damaged ({' '.join(str(error).split())}); move it away to continue without it"
    )


# -- the text of tokens ---------------------------------------------------------------------------


def write_vocabulary(directory: Path, size: int, decode_token: Callable[[int], str]) -> None:
    """Write the text of every token id below ``size``, unless the file exists."""
    path = directory / VOCABULARY_FILE
    # A resume cannot change the vocabulary, so a run needs one file.
    if path.exists():
        return
    directory.mkdir(exist_ok=True)
    # Parquet stores UTF-8, and a token may be a part of a character.
    texts = [decode_token(token).encode(errors="replace").decode() for token in range(size)]
    table = pa.table({"text": pa.array(texts, pa.string())})
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd", write_page_checksum=True)
    atomic_write_bytes(path, sink.getvalue())


def read_vocabulary(directory: Path) -> list[str]:
    """Read the text of every token id. Returns an empty list if there is no file."""
    path = directory / VOCABULARY_FILE
    with suppress(FileNotFoundError):
        texts: list[str] = _read(path, ["text"]).column("text").to_pylist()
        return texts
    return []


# -- Parquet --------------------------------------------------------------------------------------


def _file_path(directory: Path, first: int, last: int) -> Path:
    return directory / f"{first:06d}-{last:06d}.parquet"


def _to_parquet(tables: Iterable[pa.Table]) -> bytes:
    """Return tables as a Parquet file with row groups of about ROW_GROUP_TOKENS."""
    floats = {f"{name}.list.element": "BYTE_STREAM_SPLIT" for name in FLOAT_COLUMNS}
    # pyarrow refuses a column that has both a dictionary and an encoding.
    in_dictionary = [path for path in _leaf_paths() if path not in {TEXT_COLUMN, *floats}]

    sink = io.BytesIO()
    with pq.ParquetWriter(
        sink,
        SCHEMA,
        compression="zstd",
        use_dictionary=in_dictionary,
        column_encoding=floats,
        # Without checksums, damaged bytes may decode to other tokens.
        write_page_checksum=True,
    ) as writer:
        for row_group in _row_groups(tables):
            writer.write_table(row_group, row_group_size=row_group.num_rows)
    return sink.getvalue()


def _leaf_paths() -> list[str]:
    """Return Parquet's names of the columns."""
    # The writer wants names such as token_ids.list.element, which Arrow's schema does not have.
    schema = pq.ParquetFile(_empty_file()).schema
    return [schema.column(i).path for i in range(len(schema))]


def _empty_file() -> io.BytesIO:
    sink = io.BytesIO()
    pq.write_table(SCHEMA.empty_table(), sink)
    return io.BytesIO(sink.getvalue())


def _row_groups(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Split and join tables so that each has at most ROW_GROUP_TOKENS, or one episode."""
    pending: list[pa.Table] = []
    tokens = 0
    rows = 0
    for table in tables:
        for piece in _pieces(table):
            piece_tokens = pc.sum(piece.column("tokens")).as_py()
            has_too_many_tokens = tokens + piece_tokens > ROW_GROUP_TOKENS
            has_too_many_rows = rows + piece.num_rows > ROW_GROUP_EPISODES
            if pending and (has_too_many_tokens or has_too_many_rows):
                yield pa.concat_tables(pending)
                pending, tokens, rows = [], 0, 0

            pending.append(piece)
            tokens += piece_tokens
            rows += piece.num_rows
    if pending:
        yield pa.concat_tables(pending)


def _pieces(table: pa.Table) -> Iterator[pa.Table]:
    """Split a table after every ROW_GROUP_TOKENS tokens and every ROW_GROUP_EPISODES episodes."""
    tokens = np.cumsum(table.column("tokens").to_numpy(), dtype=np.int64)
    # An episode belongs to the block of its last token, so no cut divides an episode.
    has_enough_tokens = np.diff((tokens - 1) // ROW_GROUP_TOKENS) > 0
    has_enough_rows = np.diff(np.arange(table.num_rows) // ROW_GROUP_EPISODES) > 0
    cuts = np.flatnonzero(has_enough_tokens | has_enough_rows) + 1
    for begin, end in pairwise([0, *cuts.tolist(), table.num_rows]):
        if end > begin:
            yield table.slice(begin, end - begin)
