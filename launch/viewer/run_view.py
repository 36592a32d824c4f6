"""One run in the viewer. Each refresh reads only new data."""

import json
import os
import socket
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from launch.config_view import leaf_values, value_text
from launch.viewer.config_facts import describe_config, is_on_policy, planned_steps
from launch.viewer.health import HealthFinding, check_health, classify_run
from launch.viewer.metrics_tail import MetricsTail
from launch.viewer.own_files import open_own_file, read_own_file
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
        self._checked: tuple[int, int, int] | None = None
        self._findings: list[HealthFinding] = []
        self._has_episodes: tuple[int, bool] = (0, False)

    def overview(self, *, reads_all: bool = True) -> dict[str, Any]:
        """Return state, newest figures and findings of the run.

        Args:
            reads_all: whether to read metrics and configuration if they were not read before, which
                takes about 50 ms of a long run. Otherwise the run gets only its newest figures, no
                findings and ``is_checked`` False.
        """
        is_checked = reads_all or self.metrics.is_read
        if is_checked:
            self.metrics.refresh()
        records = self.metrics.records if is_checked else self.metrics.newest()
        config = self._read_config() if is_checked else {}
        steps = planned_steps(config)
        state = classify_run(
            records,
            time.time(),
            steps=steps,
            is_finished=_has_content(self.directory.summary),
            holder_is_alive=self._holder_is_alive(),
        )
        return {
            "name": self.name,
            "path": str(self.directory.path),
            "state": state,
            "is_checked": is_checked,
            "generation": self.metrics.generation,
            "records": len(records) if is_checked else None,
            "has_episodes": self._records_episodes(),
            "step": int(records[-1]["step"]) if records else None,
            "steps": steps,
            "time": records[-1].get("time") if records else None,
            "headlines": _headlines(records),
            "findings": [one.to_json() for one in self._all_findings(records, state)],
            **describe_config(config),
        }

    def modified(self) -> float:
        """Return the time of the newest metrics in Unix seconds. 0 without metrics."""
        with suppress(OSError):
            return self.directory.metrics.lstat().st_mtime
        return 0.0

    def _all_findings(self, records: list[dict[str, Any]], state: str) -> list[HealthFinding]:
        """Return the findings of the health checks, of the configuration, and of error.log."""
        # The checks read all records, so they run only after a change.
        checked = (self.metrics.generation, len(records), self._config_stamp)
        if self.metrics.is_read and checked != self._checked:
            self._findings = check_health(records, is_on_policy(self._config))
            self._checked = checked

        findings = list(self._findings)
        if self._config_fault is not None:
            findings.insert(0, HealthFinding("warning", "the configuration", self._config_fault))
        # error.log of an earlier attempt remains while a later one runs.
        failure = self.failure() if state in ("stopped", "waiting") else None
        if failure is not None:
            findings.insert(0, HealthFinding("bad", "the run", failure))
        return findings

    def _records_episodes(self) -> bool:
        with suppress(OSError):
            stamp = self.directory.episodes.lstat().st_mtime_ns
            # Listing the files of hundreds of runs at every refresh takes long.
            if stamp != self._has_episodes[0]:
                self._has_episodes = (stamp, bool(list_files(self.directory.episodes)))
            return self._has_episodes[1]
        return False

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

    def config_values(self) -> dict[str, str]:
        """Return the configuration as {dotted key: value as text}. Empty if it is unreadable."""
        return {key: value_text(value) for key, value in leaf_values(self._read_config())}

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


def _headlines(records: list[dict[str, Any]]) -> dict[str, float]:
    newest: dict[str, float] = {}
    # Evaluations are rare, so their newest values may be in an older record.
    for record in reversed(records[-100:]):
        for name in HEADLINES:
            if record.get(name) is not None:
                newest.setdefault(name, record[name])
    return newest


def _has_content(path: Path) -> bool:
    """Return True if a regular file exists and is not empty."""
    with suppress(OSError):
        status = path.lstat()
        return stat.S_ISREG(status.st_mode) and status.st_size > 0
    return False


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
