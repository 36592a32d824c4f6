"""One run in the viewer. Each refresh reads only new data."""

import json
import os
import socket
import stat
import time
from contextlib import suppress
from io import BufferedReader
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from launch.viewer.health import HealthFinding, check_health, classify_run
from megatron_gptoss.untrusted_files import MAX_SETTINGS_BYTES
from rl_loop.config.errors import ConfigError
from rl_loop.config.load import read_yaml
from rl_loop.tracking.episode_files import list_files
from rl_loop.tracking.episode_reader import EpisodeReader
from rl_loop.tracking.metrics import MetricName
from rl_loop.tracking.run_directory import RunDirectory
from rl_loop.tracking.run_lock import LOCK_FILE

HEADLINES = (MetricName.REWARD, MetricName.ACCURACY, MetricName.HELD_OUT_ACCURACY, MetricName.LOSS)
"""Metrics whose newest values are shown next to the name of a run."""


def open_own_file(path: Path) -> BufferedReader:
    """Open a regular file for reading.

    Raises:
        OSError: for a link, which could point to any file of this user, or for a pipe or a device,
            which could block.
    """
    if path.is_symlink():
        raise OSError(f"{path} is a link. Copy the file there")
    # O_NOFOLLOW: the path may have become a link since the check. O_NONBLOCK: a pipe without a
    # writer would block.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is not a regular file")
    return os.fdopen(descriptor, "rb")


def read_own_file(path: Path) -> bytes:
    """Return the content of a regular file. Raises OSError like ``open_own_file``."""
    with open_own_file(path) as file:
        return file.read()


class MetricsTail:
    """Follows metrics.jsonl and reads complete lines as they are added."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = -1
        self._position = 0
        self.records: list[dict[str, Any]] = []
        self.generation = 0
        """Number of times that the file was read from its start, such as after a resume."""

    def refresh(self) -> None:
        """Read new lines. Lines that are not JSON are left out."""
        try:
            with open_own_file(self._path) as file:
                status = os.fstat(file.fileno())
                # A resume replaces the file by a new or a shorter one.
                if status.st_ino != self._inode or status.st_size < self._position:
                    self._restart(status.st_ino)
                file.seek(self._position)
                data = file.read()
        except OSError:  # missing, or a link
            if self.records:
                self._restart(-1)
            return

        # The last line may be incomplete, because the run is writing it. Read it again next time.
        complete, newline, _ = data.rpartition(b"\n")
        self._position += len(complete) + len(newline)
        for line in complete.splitlines():
            # A damaged line must not hide the rest of the run.
            with suppress(ValueError, RecursionError):
                record = json.loads(line)
                if isinstance(record, dict) and isinstance(record.get("step"), int):
                    self.records.append(_select_numbers(record))

    def _restart(self, inode: int) -> None:
        self._inode = inode
        self._position = 0
        self.records = []
        # Clients then replace all records that they have.
        self.generation += 1


def _select_numbers(record: dict[str, Any]) -> dict[str, Any]:
    """Keep numbers and null only. Another program or version may have written other values."""
    return {
        name: value
        for name, value in record.items()
        if value is None or (isinstance(value, int | float) and not isinstance(value, bool))
    }


class RunView:
    """Data of one run for the viewer."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self.directory = RunDirectory(path)
        self.metrics = MetricsTail(self.directory.metrics)
        self.episodes = EpisodeReader(self.directory.episodes, skips_damaged=True)
        self._config: dict[str, Any] = {}
        self._config_stamp = 0
        self._config_fault: str | None = None

    def overview(self) -> dict[str, Any]:
        """Return state, newest figures and findings of the run."""
        self.metrics.refresh()
        records = self.metrics.records
        config = self._read_config()
        steps = _planned_steps(config)
        summary = self.summary()
        state = classify_run(
            records,
            time.time(),
            steps=steps,
            is_finished=bool(summary),
            holder_is_alive=self._holder_is_alive(),
        )

        findings = check_health(records, _is_on_policy(config))
        if self._config_fault is not None:
            findings.insert(0, HealthFinding("warning", "the configuration", self._config_fault))
        # error.log of an earlier attempt remains while a later one runs.
        failure = self.failure() if state in ("stopped", "waiting") else None
        if failure is not None:
            findings.insert(0, HealthFinding("bad", "the run", failure))

        return {
            "name": self.name,
            "path": str(self.directory.path),
            "state": state,
            "generation": self.metrics.generation,
            "records": len(records),
            "has_episodes": bool(list_files(self.directory.episodes)),
            "step": int(records[-1]["step"]) if records else None,
            "steps": steps,
            "time": records[-1].get("time") if records else None,
            "headlines": _headlines(records),
            "findings": [finding.to_json() for finding in findings],
            "summary": summary,
        }

    def curves(self, generation: int, after: int) -> dict[str, Any]:
        """Return records as columns.

        Args:
            generation: generation that the caller knows. If it is another one, all records are
                returned.
            after: number of records that the caller has.
        """
        self.metrics.refresh()
        if generation != self.metrics.generation:
            after = 0
        records = self.metrics.records[after:]
        names = sorted({name for record in records for name in record} - {"step", "time"})
        return {
            "generation": self.metrics.generation,
            "after": after,
            "steps": [record["step"] for record in records],
            "times": [record.get("time") for record in records],
            # Columns name each metric once. Records would repeat the names.
            "metrics": {name: [record.get(name) for record in records] for name in names},
            "descriptions": self._json_if_present(self.directory.metric_descriptions),
        }

    def summary(self) -> dict[str, Any]:
        return self._json_if_present(self.directory.summary)

    def config_text(self) -> str:
        with suppress(OSError):
            return read_own_file(self.directory.config).decode(errors="replace")
        return ""

    def failure(self) -> str | None:
        """Return the last line of error.log, which is the error that ended the run."""
        with suppress(OSError):
            text = read_own_file(self.directory.path / "error.log").decode(errors="replace")
            lines = text.strip().splitlines()
            return lines[-1][:500] if lines else None
        return None

    def _json_if_present(self, path: Path) -> dict[str, Any]:
        with suppress(OSError, ValueError, RecursionError):
            value = json.loads(read_own_file(path))
            return value if isinstance(value, dict) else {}
        return {}

    def _read_config(self) -> dict[str, Any]:
        """Return config.yaml, parsed again if it has changed.

        An unreadable file gives {} and a warning in ``overview``.
        """
        file = self.directory.config
        try:
            stamp = file.lstat().st_mtime_ns
            # Parse only after a change, because every refresh needs the configuration.
            if stamp != self._config_stamp:
                # Before reading, so that a file that cannot be read is not parsed at every
                # refresh.
                self._config_stamp = stamp
                self._config = {}

                # Rejects links and pipes, which read_yaml would follow or wait for.
                with open_own_file(file) as opened:
                    size = os.fstat(opened.fileno()).st_size
                if size > MAX_SETTINGS_BYTES:
                    raise OSError(f"it has {size:,} bytes (at most {MAX_SETTINGS_BYTES:,})")

                tree = OmegaConf.to_container(read_yaml(file))
                assert isinstance(tree, dict)
                self._config = {str(key): value for key, value in tree.items()}
                self._config_fault = None
        except (OSError, OmegaConfBaseException, ConfigError) as error:
            # Not raised, because the metrics of a damaged run are still useful.
            reason = " ".join(str(error).split()).removeprefix(f"{file}: ")
            self._config_fault = f"{file} cannot be read: {reason}"
        return self._config

    def _holder_is_alive(self) -> bool | None:
        """Return True if the process named in the run's lock exists; None if that is unknown."""
        # The lock itself is not acquired, because a run that starts at that moment would fail.
        try:
            text = read_own_file(self.directory.path / LOCK_FILE).decode(errors="replace")
        except OSError:
            return None
        words = text.split()
        # The process id means nothing on another host.
        if len(words) < 4 or not words[1].isdigit() or words[3] != socket.gethostname():
            return None
        return Path(f"/proc/{words[1]}").exists()


def _planned_steps(config: dict[str, Any]) -> int | None:
    training = config.get("training")
    steps = training.get("steps") if isinstance(training, dict) else None
    return steps if isinstance(steps, int) else None


def _headlines(records: list[dict[str, Any]]) -> dict[str, float]:
    newest: dict[str, float] = {}
    # Evaluations are rare, so their newest values may be in an older record.
    for record in reversed(records[-100:]):
        for name in HEADLINES:
            if record.get(name) is not None:
                newest.setdefault(name, record[name])
    return newest


def _is_on_policy(config: dict[str, Any]) -> bool:
    algorithm = config.get("algorithm")
    if not isinstance(algorithm, dict):
        algorithm = {}
    return (
        algorithm.get("mini_batches", 1) == 1
        and algorithm.get("max_staleness", 0) == 0
        and algorithm.get("old_log_probs", "auto") in ("auto", "detach")
    )


def find_runs(paths: list[Path]) -> dict[str, Path]:
    """Return the run directories among ``paths`` and their direct children, by run name.

    If several runs have the same name, their paths are used instead.
    """
    directories: list[Path] = []
    for path in paths:
        # A run directory itself, or a folder of runs.
        if is_run(path):
            directories.append(path)
        elif path.is_dir():
            directories += sorted(child for child in path.iterdir() if is_run(child))

    # Two arguments may name the same directory.
    unique = list(dict.fromkeys(directory.resolve() for directory in directories))
    names = [directory.name for directory in unique]
    found = {}
    for directory in unique:
        is_ambiguous = names.count(directory.name) > 1
        # The name is part of a URL, so it must not contain a slash.
        name = str(directory).strip("/").replace("/", "-") if is_ambiguous else directory.name
        found[name] = directory
    return found


def is_run(path: Path) -> bool:
    """Return True if a directory holds a run in any state."""
    return (path / "config.yaml").is_file() or (path / "metrics.jsonl").is_file()
