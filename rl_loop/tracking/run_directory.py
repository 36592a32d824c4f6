"""Layout of a run's directory, and writes that leave no partial files."""

import difflib
import errno
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import Any, BinaryIO

from gptoss_kernels import cache
from megatron_gptoss.new_directory import OLD, PARTIAL
from megatron_gptoss.user_error import UserError

MAX_RUNS_SHOWN = 10
"""Maximum number of runs that an error about a missing run lists."""


class RunDirectoryError(UserError):
    """Run directory that does not fit the command. The message has a remedy."""


class RunWriteError(UserError, OSError):
    """File of a run that could not be written. The message names it.

    The file's previous content is still valid.
    """

    def __str__(self) -> str:
        # OSError's own text would begin with "[Errno 28]".
        return str(self.strerror)


class StartMode(StrEnum):
    """Mode of starting a run. An existing run is changed only if the user requested it."""

    NEW = "new"

    RESUME = "resume"
    """Continue the existing run. An error if there is none."""

    RESUME_OR_NEW = "resume or new"
    """Continue the existing run, or start one. For ``gptoss launch``, which may restart a run."""

    OVERWRITE = "overwrite"
    """Delete the files of the existing run first."""

    @classmethod
    def chosen(cls, *, resume: bool, overwrite: bool, resume_or_new: bool = False) -> "StartMode":
        """Return the mode for a command's options. Raises RunDirectoryError for more than one."""
        if resume + overwrite + resume_or_new > 1:
            raise RunDirectoryError(
                "--resume, --resume-or-new and --overwrite exclude each other. Use one of them"
            )

        if resume:
            return cls.RESUME
        if resume_or_new:
            return cls.RESUME_OR_NEW
        if overwrite:
            return cls.OVERWRITE
        return cls.NEW

    @property
    def may_resume(self) -> bool:
        return self in (StartMode.RESUME, StartMode.RESUME_OR_NEW)


class RunDirectory:
    """Paths of one run. Create it with ``start_run`` to write, or directly to read.

    Further files are ``run.lock``, ``error.log`` and ``output.log``, and ``engine/`` of SGLang's
    servers. A new run does not need them.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

        self.config = path / "config.yaml"
        """Resolved configuration, including overrides, with the changes of a resume at the top."""

        self.inputs = path / "inputs.json"
        """Paths and digests of the run's initial input files (``rl_loop.lifecycle.inputs``)."""

        self.metrics = path / "metrics.jsonl"
        """Lines of {"step", "time", NAME: value, ...}, one per training step and per evaluation.

        Training steps count from 1. An evaluation has the number of training steps before it.
        """

        self.metric_descriptions = path / "metrics.describe.json"
        """{NAME: "mean over tokens", ...}."""

        self.episodes = path / "episodes"
        """Complete episodes as Parquet files (``episode_files``)."""

        self.rejected = path / "rejected.jsonl"
        """Rejected conversations of ``data``, one per line.

        Keys are "source", "file", "line" or "row", and "reason".
        """

        self.mlflow_run = path / "mlflow_run_id"
        """Id of the MLflow run that a resumed run continues. Only if MLflow is used."""

        self.tensorboard = path / "tensorboard"
        """Metrics as event files."""

        self.checkpoints = path / "checkpoints"
        """Checkpoints for resuming."""

        self.critic_checkpoints = path / "critic_checkpoints"
        """Checkpoints of PPO's critic."""

        self.async_episodes = path / "async_episodes"
        """Episodes that a resume does not repeat (``rl_loop.rollout.group_store``)."""

        self.export = path / "export"
        """Hugging Face checkpoint. Adapters are merged."""

        self.adapter = path / "adapter"
        """Adapters in PEFT's format."""

        self.adapters = path / "adapters"
        """Adapters of all checkpoints, also of deleted ones. Needs ``training.keep_adapters``."""

        self.curve = path / "curve.png"
        """Plot of reward and accuracy."""

        self.report = path / "report.html"
        """Report with all of the above on one page."""

        self.summary = path / "summary.json"
        """Final values for scripts."""

    def existing(self) -> list[Path]:
        """Return the existing paths of the run, including leftovers of a killed export."""
        # Every attribute is a path of the run. A broken link would be in the way of a new file,
        # too.
        listed = [path for path in vars(self).values() if path != self.path]
        return [path for path in listed + self._leftover_export_paths() if os.path.lexists(path)]

    def _leftover_export_paths(self) -> list[Path]:
        return [
            final.with_name(final.name + suffix)
            for final in (self.export, self.adapter)
            for suffix in (PARTIAL, OLD)
        ]

    def unfinished(self) -> list[Path]:
        """Return unfinished checkpoints, adapters and exports.

        A process that holds the run's lock, and is not writing any, may delete them.
        """
        partial_paths: list[Path] = []
        for root in (self.checkpoints, self.critic_checkpoints, self.adapters):
            partial_paths += root.glob(f"*{PARTIAL}")
        # The old export stays, because the new one may never be completed.
        exports = [path for path in self._leftover_export_paths() if path.name.endswith(PARTIAL)]
        return partial_paths + [path for path in exports if path.exists()]

    @property
    def has_begun(self) -> bool:
        """True if the run has files that are worth keeping.

        A start that fails before the first step writes only files that are not.
        """
        start_files = {
            self.config,
            self.inputs,
            self.metric_descriptions,
            self.tensorboard,
            self.rejected,
        }
        return not start_files.issuperset(self.existing())

    def append_rejections(self, records: Sequence[dict[str, Any]]) -> None:
        """Append rejected conversations."""
        append_lines(self.rejected, [json.dumps(record) for record in records])

    def delete_steps_after(self, step: int) -> None:
        """Drop metrics of later steps, and a last line that a crash truncated.

        A resume after ``step`` steps calls it first. An evaluation after that step is dropped, too.
        """
        if self.metrics.exists():
            # The resumed run repeats the evaluation after ``step``.
            kept = [
                record
                for record in read_json_lines(self.metrics)
                if record["step"] < step or (record["step"] == step and is_training_step(record))
            ]
            text = "".join(json.dumps(record) + "\n" for record in kept)
            atomic_write_text(self.metrics, text)

    def delete_adapters_after(self, step: int) -> None:
        """Delete adapters of later steps, because a resume after ``step`` repeats those steps."""
        for directory in self.adapters.glob("step_*"):
            # Unfinished directories have a suffix after a dot.
            number = directory.name.removeprefix("step_").partition(".")[0]
            if number.isdecimal() and int(number) > step:
                shutil.rmtree(directory, ignore_errors=True)

    def write_summary(self, **values: Any) -> None:
        """Set values in summary.json and keep the others. Values must be JSON."""
        known = read_json(self.summary) if self.summary.exists() else {}
        write_json(self.summary, known | values, indent=2)


def check_start(path: Path | str, how: StartMode) -> RunDirectory:
    """Check that a run may start at ``path``, without changes.

    Args:
        path: directory of the run.
        how: mode of starting.

    Returns:
        The run.

    Raises:
        RunDirectoryError: if the mode does not fit the directory.
    """
    run = RunDirectory(Path(path))
    if run.path.exists() and not run.path.is_dir():
        raise RunDirectoryError(f"{run.path} is a file. Name a directory")

    # A start that failed before its first step left only files that may be replaced.
    if how is StartMode.NEW and run.has_begun:
        steps = len(read_training_steps(run.metrics))
        raise RunDirectoryError(
            f"{run.path} already has a run ({steps} steps). Add --resume to continue it, or "
            "--overwrite to delete it"
        )
    if how is StartMode.RESUME and not run.existing():
        raise RunDirectoryError(
            f"{run.path}: there is no run to resume{_other_runs(run.path)}. Leave --resume out "
            "to start one"
        )
    return run


def start_run(path: Path | str, config_yaml: str, how: StartMode = StartMode.NEW) -> RunDirectory:
    """Create or reopen the directory of a run and write its resolved configuration.

    Args:
        path: directory of the run.
        config_yaml: resolved configuration.
        how: mode of starting.

    Raises:
        RunDirectoryError: if the mode does not fit the directory.
    """
    run = check_start(path, how)
    if how in (StartMode.NEW, StartMode.OVERWRITE):
        for old in run.existing():
            # Only the link is deleted, because its target may not belong to the run.
            if old.is_dir() and not old.is_symlink():
                shutil.rmtree(old)
            else:
                old.unlink()
    make_run_directory(run.path)
    atomic_write_text(run.config, config_yaml)
    return run


def make_run_directory(path: Path) -> None:
    """Create the directory of a run if it is missing, without access for other users.

    Raises:
        RunDirectoryError: if it cannot be created.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise RunDirectoryError(
            f"cannot create the run directory {path}: {error.strerror}"
        ) from error


def _other_runs(path: Path) -> str:
    """Return a text that lists other runs, in case of a mistyped name."""
    try:
        # A directory with a configuration is a run.
        names = sorted(
            folder.name for folder in path.parent.iterdir() if (folder / "config.yaml").exists()
        )
    except OSError:
        names = []
    if not names:
        return f", and no other run in {path.parent}"
    close = difflib.get_close_matches(path.name, names)
    if close:
        return f"; did you mean name={close[0]}?"
    shown = ", ".join(names[:MAX_RUNS_SHOWN])
    if len(names) > MAX_RUNS_SHOWN:
        shown += ", ..."
    return f"; runs in {path.parent}: {shown}"


def atomic_write_text(path: Path, text: str) -> None:
    atomic_write_bytes(path, text.encode())


def write_json(path: Path, value: Any, indent: int | None = None) -> None:
    atomic_write_text(path, json.dumps(value, indent=indent) + "\n")


def atomic_write_bytes(path: Path, data: bytes) -> None:
    """Replace ``path`` by a file with this content, as ``atomic_file`` does."""
    with atomic_file(path) as file:
        file.write(data)


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file that replaces ``path`` when the block ends without an exception.

    Raises:
        RunWriteError: if it cannot be written.
    """
    try:
        with cache.atomic_file(path) as file:
            yield file
    except OSError as error:
        raise _write_error(path, error) from error


def append_lines(path: Path, lines: Sequence[str]) -> None:
    """Append lines and flush: all of them or none. Raises RunWriteError if that fails."""
    data = "".join(line + "\n" for line in lines).encode()
    try:
        # Unbuffered, because closing a buffered file would write leftover bytes after the repair
        # below.
        with open(path, "ab", buffering=0) as file:
            before = file.seek(0, os.SEEK_END)
            try:
                # An unbuffered write may write only a part.
                written = 0
                while written < len(data):
                    written += file.write(data[written:])
            except OSError:
                # The first error is the one to report.
                with suppress(OSError):
                    file.truncate(before)
                raise
    except OSError as error:
        raise _write_error(path, error) from error


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Read all records. Returns none if the file is missing.

    A last line that a crash truncated is skipped.

    Raises:
        RunDirectoryError: if another line is not JSON.
    """
    if not path.exists():
        return []

    # As bytes, because splitlines of text also splits at characters such as U+2028.
    lines = path.read_bytes().splitlines()
    records: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(json.loads(line))
        except ValueError as error:
            if number < len(lines):
                raise RunDirectoryError(
                    f"{path}, line {number} is not JSON ({error}). Delete that line"
                ) from error
    return records


def read_json(path: Path) -> dict[str, Any]:
    """Read one JSON object. Raises RunDirectoryError naming the file."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise RunDirectoryError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise RunDirectoryError(f"{path} contains a {type(value).__name__}, expected an object")
    return value


def is_training_step(record: dict[str, Any]) -> bool:
    """Return True for a training step's line of metrics.jsonl, False for an evaluation's."""
    return "seconds/step" in record


def read_training_steps(path: Path) -> list[dict[str, Any]]:
    """Read the training steps of a metrics.jsonl, without evaluations."""
    return list(filter(is_training_step, read_json_lines(path)))


def metric_curve(records: Iterable[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Return the steps and finite values of one metric.

    Args:
        records: lines of ``metrics.jsonl``.
        name: name of the metric.

    Example:
        >>> metric_curve([{"step": 1, "loss": 2.0}, {"step": 2, "loss": None}], "loss")
        ([1], [2.0])
    """
    points = [(record["step"], record[name]) for record in records if record.get(name) is not None]
    return [step for step, _ in points], [float(value) for _, value in points]


def _write_error(path: Path, error: OSError) -> RunWriteError:
    hint = "Fix that"
    # The disk, the user's quota or the limit of a file's size (`ulimit -f`) is exhausted.
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        free_mib = shutil.disk_usage(path.parent).free / 2**20
        hint = f"Only {free_mib:.0f} MiB are free there. Delete some files"
    message = (
        f"{path} could not be written: {error.strerror}. Its earlier content is unchanged. "
        f"{hint}, then continue with --resume"
    )
    return RunWriteError(error.errno, message)
