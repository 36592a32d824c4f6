"""One run, one directory: what lies where, and writes that leave no half-written file behind."""

import difflib
import errno
import fcntl
import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Any

from gptoss_kernels.cache import write_atomically
from megatron_gptoss.user_error import UserError
from rl_loop.data.trajectory import Trajectory


class RunDirectoryError(UserError):
    """A run directory is not what the command needs; the message says which and what to do."""


class RunWriteError(UserError, OSError):
    """A file of a run could not be written; the message names it. The file's previous content is still valid."""

    def __str__(self) -> str:
        return str(self.strerror)  # without OSError's "[Errno 28]" in front


LEASE_SECONDS = 150.0
"""How long an NFS server may keep the lock of a node that has died: Linux's lease of 90 s, and time to notice."""


class RunLocked(RunDirectoryError):
    """Another process works on the run; the message says which."""


class Start(StrEnum):
    """How a run begins. A directory that already holds one is only touched if that was asked for."""

    NEW = "new"
    RESUME = "resume"
    """Go on with the run that is there; refused where there is none."""
    RESUME_OR_NEW = "resume or new"
    """What ``gptoss launch`` does, whose first attempt does not know that it is the first."""
    OVERWRITE = "overwrite"
    """Delete the run's own files first."""

    @classmethod
    def chosen(cls, *, resume: bool, overwrite: bool, resume_or_new: bool = False) -> "Start":
        """Of the options of a command. Raises RunDirectoryError for more than one."""
        if resume + overwrite + resume_or_new > 1:
            raise RunDirectoryError("--resume, --resume-or-new and --overwrite exclude each other; give one of them")
        if resume:
            return cls.RESUME
        if resume_or_new:
            return cls.RESUME_OR_NEW
        return cls.OVERWRITE if overwrite else cls.NEW

    @property
    def may_resume(self) -> bool:
        return self in (Start.RESUME, Start.RESUME_OR_NEW)


class RunDirectory:
    """The paths of one run. Make one with ``start_run`` to write, directly to read.

    Beside what ``__init__`` lists there may be ``run.lock``, ``error.log`` and ``output.log``, and of SGLang's servers
    ``engine/``: none of them is worth keeping when a run begins anew."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"  # as resolved, overrides included; what a resume changed stands on top
        self.metrics = path / "metrics.jsonl"  # one line per step: {"step", "time", NAME: value, ...}
        self.metric_descriptions = path / "metrics.describe.json"  # {NAME: "mean over tokens", ...}
        self.episodes = path / "episodes.jsonl"  # a few whole episodes per step, see ``episode_record``
        self.tensorboard = path / "tensorboard"  # the same numbers as event files
        self.checkpoints = path / "checkpoints"  # what a run resumes from
        self.critic_checkpoints = path / "critic_checkpoints"  # the same of PPO's critic
        self.export = path / "export"  # the Hugging Face checkpoint
        self.curve = path / "curve.png"  # reward and accuracy
        self.report = path / "report.html"  # everything above on one page
        self.summary = path / "summary.json"  # the figures that a script compares

    def existing(self) -> list[Path]:
        return [path for path in vars(self).values() if path != self.path and os.path.lexists(path)]

    def append_episodes(self, records: Sequence[dict[str, Any]]) -> None:
        """Add lines made by ``episode_record``."""
        # ASCII escapes: sampled text may hold lone surrogates, which UTF-8 cannot write.
        append_lines(self.episodes, [json.dumps(record) for record in records])

    def keep_steps_up_to(self, step: int) -> None:
        """Drop metrics and episodes of later steps, and a last line that a crash cut short; a resume does it first."""
        for path in (self.metrics, self.episodes):
            if path.exists():
                kept = [record for record in read_json_lines(path) if record["step"] <= step]
                atomic_write_text(path, "".join(json.dumps(record) + "\n" for record in kept))

    def write_summary(self, **figures: Any) -> None:
        """Set these figures in summary.json and keep the others. Values must be JSON."""
        known = read_json(self.summary) if self.summary.exists() else {}
        write_json(self.summary, known | figures, indent=2)


def check_start(path: Path | str, how: Start) -> RunDirectory:
    """The run at ``path``, if it may begin so. Changes nothing. Raises RunDirectoryError."""
    run = RunDirectory(Path(path))
    if run.path.exists() and not run.path.is_dir():
        raise RunDirectoryError(f"{run.path} is a file; a run needs a directory")
    existing = run.existing()
    if how is Start.NEW and existing:
        steps, advice = len(read_json_lines(run.metrics)), "add --resume to continue it or --overwrite to delete it"
        raise RunDirectoryError(f"{run.path} already holds a run ({steps} steps); {advice}")
    if how is Start.RESUME and not existing:
        raise RunDirectoryError(f"{run.path}: there is no run to resume{_runs_beside(run.path)}")
    return run


def start_run(path: Path | str, config_yaml: str, how: Start = Start.NEW) -> RunDirectory:
    """Make or reopen the directory of a run and write its resolved config. Raises RunDirectoryError."""
    run = check_start(path, how)
    if how is Start.OVERWRITE:
        for old in run.existing():
            shutil.rmtree(old) if old.is_dir() and not old.is_symlink() else old.unlink()
    _make_directory(run.path)
    atomic_write_text(run.config, config_yaml)
    return run


@contextmanager
def locked_run(path: Path, wait_seconds: float = 0.0) -> Iterator[None]:
    """Hold the lock of the run at ``path``, whose directory is made if it is missing. Raises RunLocked if another
    process has it, and still has it after ``wait_seconds``; RunDirectoryError if the directory cannot be made.

    The kernel frees the lock when this process ends, however it does. A directory that was made here and in which
    nothing was put is removed again.

    The lock is flock(2) on ``run.lock``. On NFS the server keeps it (Linux does so since 2.6.12) and frees that of a
    dead node when its lease ends, after a minute or two; a mount with ``local_lock=flock``, or a file system without
    locks, protects against a second run on the same node only, or not at all."""
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        _make_directory(path)
        file = _lock(path / "run.lock", wait_seconds)
        try:
            yield
        finally:
            if made and os.listdir(path) == ["run.lock"]:
                (path / "run.lock").unlink()  # while it is held: nobody else can begin in between
            os.close(file)
    finally:
        for folder in made:
            with suppress(OSError):  # it was not made, or something is in it
                folder.rmdir()


def _lock(path: Path, wait_seconds: float) -> int:
    """File descriptor of the lock; closing it frees the lock."""
    deadline = time.monotonic() + wait_seconds
    while True:
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise RunDirectoryError(f"cannot write in {path.parent}: {error.strerror}") from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                return file  # a file system without locks
            holder = os.read(file, 1000).decode(errors="replace").strip()
            os.close(file)
            if time.monotonic() < deadline:
                time.sleep(1)
                continue
            raise RunLocked(
                f"{path.parent} is in use by {holder or 'another process'}; wait for it, or give this run another name"
            ) from None
        with suppress(FileNotFoundError):
            if os.stat(path).st_ino == os.fstat(file).st_ino:
                break
        os.close(file)  # its last holder has removed it since it was opened
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    os.ftruncate(file, 0)
    os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()} since {since}\n".encode(), 0)
    return file


def _make_directory(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunDirectoryError(f"cannot create the run directory {path}: {error.strerror}") from error


def _runs_beside(path: Path) -> str:
    """What to say of the runs that a mistyped name may have meant."""
    try:
        names = sorted(folder.name for folder in path.parent.iterdir() if (folder / "config.yaml").exists())
    except OSError:
        names = []
    if not names:
        return f", and no other run in {path.parent}"
    if close := difflib.get_close_matches(path.name, names):
        return f"; did you mean name={close[0]}?"
    shown = ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
    return f"; runs in {path.parent}: {shown}"


def episode_record(
    trajectory: Trajectory, decode_token: Callable[[int], str], *, step: int, split: str = "train"
) -> dict[str, Any]:
    """One line of episodes.jsonl: a whole episode for people to read.

    step, task_id, split ("train" or "held_out"), reward, reward_parts, finish_reason, tool_calls, tool_errors
    turns   [{role: "prompt" | "assistant" | "tool", start, end, text}], token ranges [start, end)
    tokens  [{text, mask, logprob?}]; the log-prob (nats) only where mask is 1"""
    columns = zip(trajectory.token_ids, trajectory.loss_mask, trajectory.rollout_log_probs, strict=True)
    tokens = [
        {"text": decode_token(token_id), "mask": mask} | ({"logprob": round(float(log_prob), 6)} if mask else {})
        for token_id, mask, log_prob in columns
    ]
    names = ("task_id", "reward", "reward_parts", "finish_reason", "tool_calls", "tool_errors")
    figures = {name: getattr(trajectory, name) for name in names}
    turns = [asdict(turn) for turn in trajectory.turns]
    return {"step": step, "split": split, **figures, "turns": turns, "tokens": tokens}


def atomic_write_text(path: Path, text: str) -> None:
    atomic_write_bytes(path, text.encode())


def write_json(path: Path, value: Any, indent: int | None = None) -> None:
    atomic_write_text(path, json.dumps(value, indent=indent) + "\n")


def atomic_write_bytes(path: Path, data: bytes) -> None:
    """Replace ``path`` whole or not at all: readers and crashes see the old or the new. Raises RunWriteError."""
    try:
        write_atomically(path, data)
    except OSError as error:
        raise _write_error(path, error) from error


def append_lines(path: Path, lines: Sequence[str]) -> None:
    """Add whole lines and flush. If not all of them fit, none is kept. Raises RunWriteError."""
    data = "".join(line + "\n" for line in lines).encode()
    try:
        # Unbuffered: a buffered file would try its leftover bytes again when closed, after the repair below.
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
    """All records; none if there is no file. A last line cut short by a crash is skipped, any other is an error."""
    if not path.exists():
        return []
    lines = path.read_bytes().splitlines()
    records: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(json.loads(line))
        except ValueError as error:
            if number < len(lines):
                raise RunDirectoryError(f"{path}, line {number} is not JSON ({error}); delete that line") from error
    return records


def read_json(path: Path) -> dict[str, Any]:
    """One JSON object. Raises RunDirectoryError naming the file."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise RunDirectoryError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise RunDirectoryError(f"{path} holds a {type(value).__name__}, expected an object")
    return value


def metric_curve(records: Iterable[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """The curve of one metric: its steps and values, where it has a finite value."""
    points = [(record["step"], record[name]) for record in records if record.get(name) is not None]
    return [step for step, _ in points], [float(value) for _, value in points]


def _write_error(path: Path, error: OSError) -> RunWriteError:
    hint = "Fix that"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        hint = f"Only {shutil.disk_usage(path.parent).free / 2**20:.0f} MiB are free there; make room"
    message = f"could not write {path}: {error.strerror}; its previous content is kept. {hint}, then add --resume"
    return RunWriteError(error.errno, message)
