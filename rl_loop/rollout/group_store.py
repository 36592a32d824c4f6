"""Files of groups that ended before they were trained on, kept with checkpoints for a resume.

There is one file for every checkpoint, written before the checkpoint: NumPy arrays, and everything
else as JSON. The files only save time. A resume samples a group again if

- no file has it,
- the file was written with other settings that decide how episodes are sampled,
- one of its episodes cannot be trained on, or
- an earlier attempt that restored the file ended neither with a new checkpoint nor on request.

Therefore no file can make every later resume fail.
"""

import json
import logging
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, BinaryIO
from zipfile import BadZipFile

import numpy as np

from rl_loop.data.stored_routes import StoredRoutes
from rl_loop.data.trajectory import (
    FinishReason,
    InvalidReason,
    Trajectory,
    TrajectoryGroup,
    Turn,
    WeightVersionSpan,
)
from rl_loop.data.untrusted_data import check_archive
from rl_loop.tracking.run_directory import atomic_file

type FinishedGroups = Mapping[int, tuple[int, TrajectoryGroup]]
"""Number -> version of the weights with which the group began, and its episodes."""

type WriteArray = Callable[[str, np.ndarray], None]

COLUMNS = tuple(field.name for field in fields(Trajectory))
"""Fields of a Trajectory that may be arrays: every field, because the file stores each array that
it finds."""

DESCRIPTION = "description"
"""Name of the JSON among the arrays of a file."""

IN_USE = ".in_use"
"""Suffix of a file that an attempt has restored."""

logger = logging.getLogger(__name__)


class GroupStore:
    """The files of one run."""

    def __init__(self, directory: Path, keep_checkpoints: int, sampled_with: str) -> None:
        """Open the files in a directory that need not exist.

        Args:
            directory: directory of the files.
            keep_checkpoints: number of checkpoints that the run keeps.
            sampled_with: digest of all settings that decide how episodes are sampled.
        """
        self._directory = directory
        self._sampled_with = sampled_with
        # A run that ends while it writes a checkpoint continues from the checkpoint before.
        self._keep = keep_checkpoints + 1

    def save(self, step: int, groups: FinishedGroups) -> None:
        """Write the groups that a resume after ``step`` steps may use. Raises RunWriteError."""
        kept = {number: known for number, known in groups.items() if is_trainable(known[1])}
        # A file that an earlier attempt at this step left must not be restored.
        if not kept:
            self._path(step).unlink(missing_ok=True)
            return

        self._directory.mkdir(exist_ok=True)
        with atomic_file(self._path(step)) as file:
            self._write(file, kept)
        for old in sorted(self._directory.glob("step_*.npz"))[: -self._keep]:
            old.unlink()
        # This checkpoint shows that the attempts that restored earlier files did not fail.
        for used in self._directory.glob(f"step_*{IN_USE}"):
            if used.with_suffix("") < self._path(step):
                used.unlink()

    def load(self, step: int) -> FinishedGroups:
        """Return the groups that were saved for a resume after ``step`` steps.

        Their file is marked as in use. Files of later steps are deleted.
        """
        path = self._path(step)
        for unfinished in self._directory.glob(".step_*.tmp"):
            unfinished.unlink()
        # Later steps are taken again.
        for other in self._directory.glob("step_*"):
            if other.name.removesuffix(IN_USE) > path.name:
                other.unlink()

        # The mark is still there, so the attempt that restored the file neither saved a checkpoint
        # nor gave it back. The groups may be the cause.
        in_use = path.with_name(path.name + IN_USE)
        if in_use.exists():
            logger.warning(
                "%s: an attempt that restored these episodes failed; sampling them again", path
            )
            in_use.unlink()
        if not path.exists():
            return {}

        try:
            groups = self._read(path, step)
        except (OSError, ValueError, LookupError, TypeError, BadZipFile) as error:
            logger.warning("%s cannot be read; sampling its episodes again: %s", path, error)
            groups = {}
        # If a power cut loses the new name, these groups are only tried once more.
        path.rename(in_use)
        return groups

    def release(self, step: int) -> None:
        """Let the next resume after ``step`` steps use the groups that ``load`` returned.

        For an attempt that ended before it trained on them, and not because of them.
        """
        path = self._path(step)
        in_use = path.with_name(path.name + IN_USE)
        if in_use.exists() and not path.exists():
            in_use.rename(path)

    def _write(self, file: BinaryIO, groups: FinishedGroups) -> None:
        """Write one array at a time, because all of them may have gigabytes."""
        # The layout of np.savez, which np.load reads. np.savez itself needs all arrays at once.
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:

            def write(name: str, array: np.ndarray) -> None:
                # Without zip64 a member is limited to 2 GiB, and its size is unknown when it is
                # opened.
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, array, allow_pickle=False)

            described = []
            for number, (version, group) in groups.items():
                described.append(
                    {
                        "number": number,
                        "version": version,
                        "task_id": group.task_id,
                        "source": group.source,
                        "trajectories": _write(group.trajectories, str(number), write),
                    }
                )
            content = {"sampled_with": self._sampled_with, "groups": described}
            text = json.dumps(content, default=_plain).encode()
            write(DESCRIPTION, np.frombuffer(text, np.uint8))

    def _read(self, path: Path, step: int) -> FinishedGroups:
        # A small file from elsewhere could decompress to more than the machine's memory.
        check_archive(path)
        with np.load(path, allow_pickle=False) as arrays:
            # np.load reads a member when it is asked for, so other settings cost only this one.
            content = json.loads(arrays[DESCRIPTION].tobytes())
            if content["sampled_with"] != self._sampled_with:
                logger.info("%s: settings have changed; sampling its episodes again", path)
                return {}
            groups = {
                described["number"]: (described["version"], _read_group(described, arrays))
                for described in content["groups"]
            }
        return {
            number: (version, group)
            for number, (version, group) in groups.items()
            # Weights that are newer than the checkpoint do not exist in a resumed run.
            if version <= step and is_trainable(group)
        }

    def _path(self, step: int) -> Path:
        return self._directory / f"step_{step:06}.npz"


def is_trainable(group: TrajectoryGroup) -> bool:
    """Return True if each episode of a group is valid and can be trained on."""
    if group.invalid or not group.trajectories:
        return False
    try:
        for sequence in group.sequences:
            sequence.validate()
    except ValueError:
        return False
    return True


# -- writing --------------------------------------------------------------------------------------


def _write(trajectories: list[Trajectory], prefix: str, write: WriteArray) -> list[dict[str, Any]]:
    """Write the arrays of trajectories, and return all other values."""
    described = []
    for place, trajectory in enumerate(trajectories):
        name = f"{prefix}/{place}"
        values: dict[str, Any] = {}
        for field in fields(trajectory):
            value = getattr(trajectory, field.name)
            if isinstance(value, np.ndarray | StoredRoutes):
                write(f"{name}/{field.name}", _array(value))
            elif field.name != "branches":
                values[field.name] = value
        values["branches"] = _write(trajectory.branches, f"{name}/branches", write)
        described.append(values)
    return described


def _array(column: np.ndarray | StoredRoutes) -> np.ndarray:
    """Return a column as an array. Routes are fetched from Ray's store."""
    if isinstance(column, StoredRoutes):
        # Only this function needs Ray.
        import ray

        return column.select_rows(np.asarray(ray.get(column.reference)))
    return column


def _plain(value: Any) -> Any:
    """Return a value that JSON cannot represent as one that it can."""
    if isinstance(value, np.generic):
        return value.item()
    return asdict(value)


# -- reading --------------------------------------------------------------------------------------


def _read_group(described: dict[str, Any], arrays: Mapping[str, np.ndarray]) -> TrajectoryGroup:
    return TrajectoryGroup(
        task_id=described["task_id"],
        source=described["source"],
        trajectories=_read(described["trajectories"], str(described["number"]), arrays),
    )


def _read(
    described: list[dict[str, Any]], prefix: str, arrays: Mapping[str, np.ndarray]
) -> list[Trajectory]:
    return [
        _read_trajectory(values, f"{prefix}/{place}", arrays)
        for place, values in enumerate(described)
    ]


def _read_trajectory(
    values: dict[str, Any], prefix: str, arrays: Mapping[str, np.ndarray]
) -> Trajectory:
    """Return a stored trajectory."""
    columns = {name: arrays[f"{prefix}/{name}"] for name in COLUMNS if f"{prefix}/{name}" in arrays}
    typed: dict[str, Any] = (
        values
        | columns
        | {
            "weight_versions": [WeightVersionSpan(**span) for span in values["weight_versions"]],
            "turns": [Turn(**turn) for turn in values["turns"]],
            "finish_reason": FinishReason(values["finish_reason"]),
            "spliced": [(start, end) for start, end in values["spliced"]],
            "constrained": [(start, end) for start, end in values["constrained"]],
            "branches": _read(values["branches"], f"{prefix}/branches", arrays),
        }
    )
    if values["invalid"] is not None:
        typed["invalid"] = InvalidReason(**values["invalid"])
    return Trajectory(**typed)
