"""Reads the recorded episodes of a run, including a running one."""

import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rl_loop.tracking.episode_files import (
    TEXT_COLUMN,
    VOCABULARY_FILE,
    EpisodeFile,
    list_files,
    open_episode_file,
    read_row_groups,
    read_vocabulary,
)
from rl_loop.tracking.episode_table import NO_EPISODES, SCHEMA, SUMMARY_COLUMNS
from rl_loop.tracking.run_directory import RunDirectoryError

CACHED_SEARCHES = 8
"""Number of searches to cache, for their next pages."""

_Stamp = tuple[int, int]
"""Modification time (ns) and size of a file. They change with the content."""

_RowGroup = tuple[Path, _Stamp, int]
"""File, its stamp, and the index of one of its row groups."""


@dataclass(frozen=True)
class TextSearch:
    """Results of a search so far."""

    ids: np.ndarray
    """int64: ids of episodes with the text, in any order."""
    searched: int
    """Number of episodes searched."""
    of: int
    """Total number of episodes."""


@dataclass(frozen=True, eq=False)
class _LoadedFile:
    file: EpisodeFile
    stamp: _Stamp
    summary_table: pa.Table
    """SUMMARY_COLUMNS columns of all rows."""
    row_ends: np.ndarray
    """int64 [row groups]: number of rows up to the end of each row group."""


class EpisodeReader:
    """Episodes of one run. Threads may share it.

    Columns of SUMMARY_COLUMNS stay in memory, about 200 bytes per episode. Tokens and text are read
    on request.
    """

    def __init__(self, directory: Path, *, skips_damaged: bool = False) -> None:
        """Create a reader.

        Args:
            directory: ``RunDirectory.episodes``. It may be missing.
            skips_damaged: list damaged files in ``damages`` instead of raising an error.
        """
        self._directory = directory
        self._skips_damaged = skips_damaged
        self._damages: dict[tuple[Path, _Stamp | None], str] = {}
        self._lock = threading.RLock()
        self._files: list[_LoadedFile] = []
        self._vocabulary: list[str] = []
        self._searches: OrderedDict[str, dict[_RowGroup, np.ndarray]] = OrderedDict()
        self.summary_table = NO_EPISODES
        """Columns of SUMMARY_COLUMNS at the last ``refresh``, oldest episode first."""

    @property
    def damages(self) -> list[str]:
        """Descriptions of the damaged files that were left out."""
        return sorted(set(self._damages.values()))

    def refresh(self) -> None:
        """Read the summary columns of new files.

        Raises:
            RunDirectoryError: if a file is damaged, unless damaged files are left out.
        """
        with self._lock:
            known = {(loaded.file.path, loaded.stamp): loaded for loaded in self._files}
            files: list[_LoadedFile] = []
            present: set[tuple[Path, _Stamp | None]] = {(self._directory / VOCABULARY_FILE, None)}
            for file in list_files(self._directory):
                try:
                    status = file.path.stat()
                    stamp = (status.st_mtime_ns, status.st_size)
                    present.add((file.path, stamp))
                    # Only new files are read. A rewritten file has another stamp.
                    loaded = known.get((file.path, stamp)) or self._load(file, stamp)
                except FileNotFoundError:
                    # The file was merged or dropped. The next refresh sees the result.
                    continue
                if loaded is not None:
                    files.append(loaded)

            # Files that were moved away or rewritten are no longer damaged.
            self._damages = {key: why for key, why in self._damages.items() if key in present}

            if files != self._files:
                self._files = files
                tables = [loaded.summary_table for loaded in files]
                self.summary_table = pa.concat_tables(tables) if tables else NO_EPISODES

    def _load(self, file: EpisodeFile, stamp: _Stamp) -> _LoadedFile | None:
        """Read the summary columns of a file. Returns None if it is damaged and left out."""
        if (file.path, stamp) in self._damages:
            return None
        try:
            return _load(file, stamp)
        except RunDirectoryError as error:
            self._note_damage(file.path, stamp, error)
            return None

    def _note_damage(self, path: Path, stamp: _Stamp | None, error: RunDirectoryError) -> None:
        if not self._skips_damaged:
            raise error
        self._damages[path, stamp] = str(error)

    def read(self, episode_id: int) -> dict[str, Any] | None:
        """Read one episode: all columns of ``episode_table``, and ``texts``, the text of each
        token.

        Args:
            episode_id: id of the episode.

        Returns:
            The columns as Python objects. None if there is no such episode.

        Raises:
            RunDirectoryError: if the episode's row group is damaged.
        """
        with self._lock:
            for loaded in self._files:
                ids = loaded.summary_table.column("id").to_numpy()
                # Ids increase within a file.
                row = int(np.searchsorted(ids, episode_id))
                if row < len(ids) and ids[row] == episode_id:
                    return self._read_row(loaded, row)
        return None

    def _read_row(self, loaded: _LoadedFile, row: int) -> dict[str, Any] | None:
        group = int(np.searchsorted(loaded.row_ends, row, side="right"))
        first = int(loaded.row_ends[group - 1]) if group > 0 else 0
        try:
            with open_episode_file(loaded.file.path) as file:
                table = file.read_row_group(group).slice(row - first, 1)
        except FileNotFoundError:
            return None
        # pyarrow's default for a map, such as reward_parts, is a list of pairs.
        (episode,) = table.to_pylist(maps_as_pydicts="strict")
        episode["texts"] = self._texts(episode["token_ids"])
        return dict(episode)

    def _texts(self, token_ids: list[int]) -> list[str]:
        # A new run writes the file with its first episodes, so try again until it is there.
        if not self._vocabulary:
            path = self._directory / VOCABULARY_FILE
            try:
                self._vocabulary = read_vocabulary(self._directory)
                self._damages.pop((path, None), None)
            except RunDirectoryError as error:
                self._note_damage(path, None, error)
        known = len(self._vocabulary)
        return [self._vocabulary[i] if i < known else f"<{i}>" for i in token_ids]

    def search(self, text: str, seconds: float) -> TextSearch:
        """Search the text of prompts, policy and tools, ignoring case, newest episodes first.

        The same search can be called again to continue.

        Args:
            text: text to find.
            seconds: time after which the search stops.
        """
        with self._lock:
            return self._search(text, time.monotonic() + seconds)

    def _search(self, text: str, deadline: float) -> TextSearch:
        hits = self._searches.setdefault(text, {})
        self._searches.move_to_end(text)
        # Drop the least recently used search.
        while len(self._searches) > CACHED_SEARCHES:
            self._searches.popitem(last=False)

        keys = [
            (loaded.file.path, loaded.stamp, group)
            for loaded, group in self._row_groups_newest_first()
        ]
        self._scan([key for key in keys if key not in hits], text, hits, deadline)

        matches = [np.zeros(0, np.int64)]
        searched = 0
        for loaded, group in self._row_groups_newest_first():
            key = (loaded.file.path, loaded.stamp, group)
            if key in hits:
                matches.append(hits[key])
                first = int(loaded.row_ends[group - 1]) if group > 0 else 0
                searched += int(loaded.row_ends[group]) - first
        return TextSearch(np.concatenate(matches), searched, self.summary_table.num_rows)

    def _scan(
        self, keys: list[_RowGroup], text: str, hits: dict[_RowGroup, np.ndarray], deadline: float
    ) -> None:
        """Search row groups on all cores until ``deadline``, and add the results to ``hits``."""
        left = iter(keys)

        def scan_next(_: int) -> None:
            has_scanned = False
            # At least one row group for each core, so that repeated searches finish on a slow disk.
            while not has_scanned or time.monotonic() < deadline:
                # The iterator gives each key to only one thread.
                key = next(left, None)
                if key is None:
                    return
                path, stamp, group = key
                try:
                    hits[key] = _ids_with_text(path, group, text)
                except RunDirectoryError as error:
                    self._note_damage(path, stamp, error)
                    hits[key] = np.zeros(0, np.int64)
                has_scanned = True

        threads = len(os.sched_getaffinity(0))
        with ThreadPoolExecutor(threads, "episode-search") as pool:
            # The list raises the exceptions of the threads.
            list(pool.map(scan_next, range(threads)))

    def _row_groups_newest_first(self) -> Iterator[tuple[_LoadedFile, int]]:
        for loaded in reversed(self._files):
            for group in reversed(range(len(loaded.row_ends))):
                yield loaded, group


def _load(file: EpisodeFile, stamp: _Stamp) -> _LoadedFile:
    """Read the summary columns of a file.

    Raises RunDirectoryError if it is damaged or lacks columns.
    """
    with open_episode_file(file.path) as parquet:
        missing = sorted(set(SCHEMA.names) - set(parquet.schema_arrow.names))
    if missing:
        raise RunDirectoryError(
            f"{file.path}: columns are missing ({', '.join(missing)}). "
            "Move it away to continue without it"
        )
    tables = list(read_row_groups(file.path, SUMMARY_COLUMNS.names))
    rows = np.cumsum([table.num_rows for table in tables], dtype=np.int64)
    summary_table = pa.concat_tables(tables) if tables else NO_EPISODES
    return _LoadedFile(file, stamp, summary_table.combine_chunks(), rows)


def _ids_with_text(path: Path, row_group: int, text: str) -> np.ndarray:
    """Return the ids of a row group's episodes with the text in one of their turns."""
    try:
        # No threads of Arrow, because the row groups are already searched in parallel.
        with open_episode_file(path, pre_buffer=False) as file:
            columns = ["id", TEXT_COLUMN]
            table = file.read_row_group(row_group, columns, use_threads=False)
    except FileNotFoundError:
        # The file was merged, and the new file is searched, too.
        return np.zeros(0, np.int64)

    matches = []
    for batch in table.to_batches():
        turns = batch.column("turns")
        is_hit = _contains(turns.flatten().field("text"), text)
        rows = pc.list_parent_indices(turns).filter(is_hit).to_numpy()
        # Several turns of one episode may contain the text.
        matches.append(batch.column("id").to_numpy()[np.unique(rows)])
    return np.concatenate(matches)


def _contains(texts: pa.StringArray, text: str) -> pa.BooleanArray:
    """Return a boolean per text: True if it contains ``text``, ignoring case."""
    if not text.isascii():
        return pc.match_substring(texts, text, ignore_case=True)

    # Twice as fast: without case folding, RE2 skips to where the text begins. ``ascii_lower`` keeps
    # letters outside ASCII, which an ASCII text does not have.
    return pc.match_substring_regex(pc.ascii_lower(texts), re.escape(text.lower()))
