"""The directory of a run: what lies where, and writes that leave no half-written file behind."""

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

MOST_RUNS_SHOWN = 10
"""In the error of a run that is not there."""


class RunDirectoryError(UserError):
    """A run directory is not what the command needs; the message says which and what to do."""


class RunWriteError(UserError, OSError):
    """A file of a run could not be written; the message names it. The file's previous content is
    still valid."""

    def __str__(self) -> str:
        return str(self.strerror)  # without OSError's "[Errno 28]" in front


class Start(StrEnum):
    """How a run begins. A directory that already holds one is only touched if that was asked
    for."""

    NEW = "new"

    RESUME = "resume"
    """Go on with the run that is there; refused where there is none."""

    RESUME_OR_NEW = "resume or new"
    """What ``gptoss launch`` does, whose first attempt does not know that it is the first."""

    OVERWRITE = "overwrite"
    """Delete the run's own files first."""

    @classmethod
    def chosen(cls, *, resume: bool, overwrite: bool, resume_or_new: bool = False) -> "Start":
        """Translate the options of a command. Raises RunDirectoryError for more than one."""
        if resume + overwrite + resume_or_new > 1:
            raise RunDirectoryError(
                "--resume, --resume-or-new and --overwrite exclude each other; give one of them"
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
        return self in (Start.RESUME, Start.RESUME_OR_NEW)


class RunDirectory:
    """The paths of one run. Make one with ``start_run`` to write, directly to read.

    Beside what ``__init__`` lists there may be ``run.lock``, ``error.log`` and ``output.log``, and
    of SGLang's servers ``engine/``: none of them is worth keeping when a run begins anew."""

    def __init__(self, path: Path) -> None:
        self.path = path

        self.config = path / "config.yaml"
        """As resolved, overrides included; what a resume changed stands on top."""

        self.inputs = path / "inputs.json"
        """Paths and digests of the files that the run began with (``rl_loop.lifecycle.inputs``)."""

        self.metrics = path / "metrics.jsonl"
        """Lines of {"step", "time", NAME: value, ...}: one per training step, numbered from 1, and
        one per evaluation, whose step is the number of training steps before it."""

        self.metric_descriptions = path / "metrics.describe.json"
        """{NAME: "mean over tokens", ...}."""

        self.episodes = path / "episodes"
        """Whole episodes as Parquet files, see ``episode_files``."""

        self.refused = path / "refused.jsonl"
        """Conversations of ``data`` that were left out, one a line: {"source", "file", "line" or
        "row", "reason"}."""

        self.mlflow_run = path / "mlflow_run_id"
        """The run of MLflow that a resumed run continues; only where MLflow is on."""

        self.tensorboard = path / "tensorboard"
        """The same numbers as event files."""

        self.checkpoints = path / "checkpoints"
        """What a run resumes from."""

        self.critic_checkpoints = path / "critic_checkpoints"
        """The same of PPO's critic."""

        self.episodes_ahead = path / "episodes_ahead"
        """Episodes that a resume need not run again (``rl_loop.rollout.group_store``)."""

        self.export = path / "export"
        """The Hugging Face checkpoint; of a run with adapters, merged."""

        self.adapter = path / "adapter"
        """Its adapters by themselves, in PEFT's format."""

        self.adapters = path / "adapters"
        """The same of every checkpoint, those that are deleted included; only with
        ``training.keep_adapters``."""

        self.curve = path / "curve.png"
        """Reward and accuracy."""

        self.report = path / "report.html"
        """Everything above on one page."""

        self.summary = path / "summary.json"
        """The figures that a script compares."""

    def existing(self) -> list[Path]:
        """List what there is of the paths above, and what a killed export has left beside them."""
        listed = [path for path in vars(self).values() if path != self.path]
        return [path for path in listed + self._beside_exports() if os.path.lexists(path)]

    def _beside_exports(self) -> list[Path]:
        return [
            final.with_name(final.name + suffix)
            for final in (self.export, self.adapter)
            for suffix in (PARTIAL, OLD)
        ]

    def unfinished(self) -> list[Path]:
        """List checkpoints, adapters and exports that nobody has finished. Whoever holds the run's lock, and
        writes none, may delete them."""
        found: list[Path] = []
        for root in (self.checkpoints, self.critic_checkpoints, self.adapters):
            found += root.glob(f"*{PARTIAL}")
        exports = [path for path in self._beside_exports() if path.name.endswith(PARTIAL)]
        return found + [path for path in exports if path.exists()]

    @property
    def has_begun(self) -> bool:
        """Whether there is more than what a start writes that fails before the first step, of
        which nothing is lost."""
        of_a_start = {
            self.config,
            self.inputs,
            self.metric_descriptions,
            self.tensorboard,
            self.refused,
        }
        return not of_a_start.issuperset(self.existing())

    def append_refusals(self, records: Sequence[dict[str, Any]]) -> None:
        """Add conversations that were left out."""
        append_lines(self.refused, [json.dumps(record) for record in records])

    def keep_steps_up_to(self, step: int) -> None:
        """Drop metrics of later steps, and a last line that a crash cut short.

        A resume after ``step`` steps begins with it. It evaluates again where an evaluation after
        that step is due, so such an evaluation is dropped too."""
        if self.metrics.exists():
            kept = [
                record
                for record in read_json_lines(self.metrics)
                if record["step"] < step or (record["step"] == step and is_training_step(record))
            ]
            text = "".join(json.dumps(record) + "\n" for record in kept)
            atomic_write_text(self.metrics, text)

    def delete_adapters_after(self, step: int) -> None:
        """Delete kept adapters of more than ``step`` finished steps. A resume goes on from there,
        and takes those steps again."""
        for directory in self.adapters.glob("step_*"):
            number = directory.name.removeprefix("step_").partition(".")[0]
            if number.isdecimal() and int(number) > step:
                shutil.rmtree(directory, ignore_errors=True)

    def write_summary(self, **figures: Any) -> None:
        """Set these figures in summary.json and keep the others. Values must be JSON."""
        known = read_json(self.summary) if self.summary.exists() else {}
        write_json(self.summary, known | figures, indent=2)


def check_start(path: Path | str, how: Start) -> RunDirectory:
    """Return the run at ``path``. Changes nothing. Raises RunDirectoryError if it may not begin as
    ``how`` says."""
    run = RunDirectory(Path(path))
    if run.path.exists() and not run.path.is_dir():
        raise RunDirectoryError(f"{run.path} is a file; a run needs a directory")

    if how is Start.NEW and run.has_begun:
        steps = len(read_training_steps(run.metrics))
        raise RunDirectoryError(
            f"{run.path} already holds a run ({steps} steps); add --resume to continue it or --overwrite to delete it"
        )
    if how is Start.RESUME and not run.existing():
        raise RunDirectoryError(
            f"{run.path}: there is no run to resume{_runs_beside(run.path)}. Without --resume the "
            "command begins it"
        )
    return run


def start_run(path: Path | str, config_yaml: str, how: Start = Start.NEW) -> RunDirectory:
    """Make or reopen the directory of a run and write its resolved config. Raises
    RunDirectoryError."""
    run = check_start(path, how)
    if how in (Start.NEW, Start.OVERWRITE):
        for old in run.existing():
            if old.is_dir() and not old.is_symlink():
                shutil.rmtree(old)
            else:
                old.unlink()
    make_run_directory(run.path)
    atomic_write_text(run.config, config_yaml)
    return run


def make_run_directory(path: Path) -> None:
    """Make the directory of a run if it is missing, closed to other users.

    Raises:
        RunDirectoryError: if it cannot be made.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise RunDirectoryError(
            f"cannot create the run directory {path}: {error.strerror}"
        ) from error


def _runs_beside(path: Path) -> str:
    """Name the runs that a mistyped name may have meant."""
    try:
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
    shown = ", ".join(names[:MOST_RUNS_SHOWN])
    if len(names) > MOST_RUNS_SHOWN:
        shown += ", ..."
    return f"; runs in {path.parent}: {shown}"


def atomic_write_text(path: Path, text: str) -> None:
    atomic_write_bytes(path, text.encode())


def write_json(path: Path, value: Any, indent: int | None = None) -> None:
    atomic_write_text(path, json.dumps(value, indent=indent) + "\n")


def atomic_write_bytes(path: Path, data: bytes) -> None:
    """Replace ``path`` by a file with this content. See ``atomic_file``."""
    with atomic_file(path) as file:
        file.write(data)


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file that replaces ``path`` as a whole when the block ends, or not at all.

    Raises RunWriteError.
    """
    try:
        with cache.atomic_file(path) as file:
            yield file
    except OSError as error:
        raise _write_error(path, error) from error


def append_lines(path: Path, lines: Sequence[str]) -> None:
    """Append lines and flush. If not all of them fit, none is kept. Raises RunWriteError."""
    data = "".join(line + "\n" for line in lines).encode()
    try:
        # Unbuffered: a buffered file would try its leftover bytes again when closed, after the
        # repair below.
        with open(path, "ab", buffering=0) as file:
            before = file.seek(0, os.SEEK_END)
            try:
                written = 0
                while written < len(data):
                    written += file.write(data[written:])
            except OSError:
                with suppress(OSError):  # the first error is the one to report
                    file.truncate(before)
                raise
    except OSError as error:
        raise _write_error(path, error) from error


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Read all records; none if there is no file.

    A last line that a crash cut short is skipped; of any other that is no JSON RunDirectoryError
    is raised."""
    if not path.exists():
        return []

    lines = path.read_bytes().splitlines()
    records: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(json.loads(line))
        except ValueError as error:
            if number < len(lines):
                raise RunDirectoryError(
                    f"{path}, line {number} is not JSON ({error}); delete that line"
                ) from error
    return records


def read_json(path: Path) -> dict[str, Any]:
    """Read one JSON object. Raises RunDirectoryError naming the file."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise RunDirectoryError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise RunDirectoryError(f"{path} holds a {type(value).__name__}, expected an object")
    return value


def is_training_step(record: dict[str, Any]) -> bool:
    """Return True if a line of metrics.jsonl is of a training step, and not of an evaluation."""
    return "seconds/step" in record


def read_training_steps(path: Path) -> list[dict[str, Any]]:
    """Read the records of training steps of a metrics.jsonl, without evaluations."""
    return list(filter(is_training_step, read_json_lines(path)))


def metric_curve(records: Iterable[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Return steps and values of one metric, where it has a finite value."""
    points = [(record["step"], record[name]) for record in records if record.get(name) is not None]
    return [step for step, _ in points], [float(value) for _, value in points]


def _write_error(path: Path, error: OSError) -> RunWriteError:
    hint = "Fix that"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        free_mib = shutil.disk_usage(path.parent).free / 2**20
        hint = f"Only {free_mib:.0f} MiB are free there; make room"
    message = f"could not write {path}: {error.strerror}; its previous content is kept. {hint}, then add --resume"
    return RunWriteError(error.errno, message)
