"""Metrics of a run as far as they are written."""

import json
import os
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from launch.viewer.own_files import open_own_file

END_BYTES = 2**14
"""Bytes at the end of the file that ``MetricsTail.newest`` reads."""


class MetricsTail:
    """Follows metrics.jsonl and reads complete lines as they are added. Threads may share it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._status: tuple[int, int, int] | None = None
        self._inode = -1
        self._position = 0
        self._newest: list[dict[str, Any]] = []
        self.records: list[dict[str, Any]] = []
        self.generation = 0
        """Number of times that the file was read from its start, such as after a resume."""
        self.is_read = False
        """True if the file was read once. Then a further refresh reads only new lines."""

    def refresh(self) -> None:
        """Read new lines. Lines that are not JSON are left out."""
        # Two requests at a time would append the same lines twice.
        with self._lock:
            if not self.is_read:
                # ``newest`` has set it, but has read only the end.
                self._status = None
                self._newest = []
            self.is_read = True
            self._refresh()

    def newest(self) -> list[dict[str, Any]]:
        """Return the last records without reading the whole file, which may take long.

        After ``refresh``, return all records that it has read.
        """
        with self._lock:
            if self.is_read:
                return self.records
            try:
                if not self._is_unchanged():
                    with open_own_file(self._path) as file:
                        size = os.fstat(file.fileno()).st_size
                        file.seek(max(0, size - END_BYTES))
                        lines = file.read().split(b"\n")
                    # The first line may be cut, and the last one may be incomplete.
                    self._newest = _parse(lines[1:-1] if size > END_BYTES else lines[:-1])
            except OSError:
                self._newest = []
            return self._newest

    def _refresh(self) -> None:
        try:
            if self._is_unchanged():
                return
            with open_own_file(self._path) as file:
                status = os.fstat(file.fileno())
                # A resume replaces the file by a new or a shorter one.
                if status.st_ino != self._inode or status.st_size < self._position:
                    self._restart(status.st_ino)
                file.seek(self._position)
                data = file.read()
        except OSError:  # missing, or a link
            self._status = None
            if self.records:
                self._restart(-1)
            return

        # The last line may be incomplete, because the run is writing it. Read it again next time.
        complete, newline, _ = data.rpartition(b"\n")
        self._position += len(complete) + len(newline)
        # A new list, because another thread may be reading the old one.
        self.records = self.records + _parse(complete.split(b"\n"))

    def _is_unchanged(self) -> bool:
        """Return True if the file has the status of the last call."""
        # Opening the files of hundreds of runs at every refresh takes longer.
        status = self._path.lstat()
        before = self._status
        self._status = (status.st_ino, status.st_size, status.st_mtime_ns)
        return self._status == before

    def _restart(self, inode: int) -> None:
        self._inode = inode
        self._position = 0
        self.records = []
        # Clients then replace all records that they have.
        self.generation += 1


def _parse(lines: list[bytes]) -> list[dict[str, Any]]:
    records = []
    for line in lines:
        # A damaged line must not hide the rest of the run.
        with suppress(ValueError, RecursionError):
            record = json.loads(line)
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                records.append(_select_numbers(record))
    return records


def _select_numbers(record: dict[str, Any]) -> dict[str, Any]:
    """Keep numbers and null only. Another program or version may have written other values."""
    return {
        # Lines repeat the names, which would need more memory than the numbers.
        sys.intern(name): value
        for name, value in record.items()
        if value is None or (isinstance(value, int | float) and not isinstance(value, bool))
    }
