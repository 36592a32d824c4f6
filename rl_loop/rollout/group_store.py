"""Groups that have ended and were not trained on yet, kept beside a checkpoint for a resume.

One file for every checkpoint, written before it: arrays of numpy, and everything else as JSON. A
resume that finds no file, or one of another ``max_staleness``, runs those groups again; nothing is
lost by it but time."""

import io
import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any
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
from rl_loop.tracking.run_directory import atomic_write_bytes

type FinishedGroups = Mapping[int, tuple[int, TrajectoryGroup]]
"""Number -> version of the weights with which the group began, and its episodes."""

COLUMNS = ("token_ids", "loss_mask", "rollout_log_probs", "routed_experts")
"""Fields of a Trajectory that are arrays."""

DESCRIPTION = "description"
"""Name of the JSON among the arrays of a file."""

logger = logging.getLogger(__name__)


class GroupStore:
    """The files of one run."""

    def __init__(self, directory: Path, keep_checkpoints: int, max_staleness: int) -> None:
        self._directory = directory
        self._max_staleness = max_staleness
        # A run that is ended while it writes a checkpoint goes on from the one before.
        self._keep = keep_checkpoints + 1

    def save(self, step: int, groups: FinishedGroups) -> None:
        """Keep ``groups`` for a resume after ``step`` steps. Raises RunWriteError."""
        if not groups:
            self._path(step).unlink(missing_ok=True)
            return

        arrays: dict[str, Any] = {}
        described = []
        for number, (version, group) in groups.items():
            described.append(
                {
                    "number": number,
                    "version": version,
                    "task_id": group.task_id,
                    "skipped": group.skipped,
                    "trajectories": _describe(group.trajectories, f"{number}/valid", arrays),
                    "invalid": _describe(group.invalid, f"{number}/invalid", arrays),
                }
            )
        content = {"max_staleness": self._max_staleness, "groups": described}
        arrays[DESCRIPTION] = np.frombuffer(json.dumps(content, default=_plain).encode(), np.uint8)

        self._directory.mkdir(exist_ok=True)
        file = io.BytesIO()
        np.savez(file, **arrays)
        atomic_write_bytes(self._path(step), file.getvalue())
        for old in sorted(self._directory.glob("step_*.npz"))[: -self._keep]:
            old.unlink()

    def load(self, step: int) -> FinishedGroups:
        """Return what was kept for a resume after ``step`` steps, nothing if there is no such
        file, and delete what belongs to later steps: they are taken anew."""
        for later in self._directory.glob("step_*.npz"):
            if later > self._path(step):
                later.unlink()
        if not self._path(step).exists():
            return {}
        try:
            return self._read(self._path(step))
        except (OSError, ValueError, LookupError, TypeError, BadZipFile) as error:
            # Of another version of the code, say.
            logger.warning(
                "%s cannot be read; its episodes are run again: %s", self._path(step), error
            )
            return {}

    def _read(self, path: Path) -> FinishedGroups:
        check_archive(path)
        with np.load(path, allow_pickle=False) as arrays:
            content = json.loads(arrays[DESCRIPTION].tobytes())
            # Their limits would be other ones.
            if content["max_staleness"] != self._max_staleness:
                return {}
            return {
                described["number"]: (described["version"], _read_group(described, arrays))
                for described in content["groups"]
            }

    def _path(self, step: int) -> Path:
        return self._directory / f"step_{step:06}.npz"


# -- writing --------------------------------------------------------------------------------------


def _describe(
    trajectories: list[Trajectory], prefix: str, arrays: dict[str, np.ndarray]
) -> list[dict[str, Any]]:
    """Put the columns of trajectories into ``arrays``, and return all else about them."""
    described = []
    for place, trajectory in enumerate(trajectories):
        for name in COLUMNS:
            column = _array(getattr(trajectory, name))
            if column is not None:
                arrays[f"{prefix}/{place}/{name}"] = column
        values = {
            field.name: getattr(trajectory, field.name)
            for field in fields(trajectory)
            if field.name not in COLUMNS
        }
        values["branches"] = _describe(trajectory.branches, f"{prefix}/{place}/branches", arrays)
        described.append(values)
    return described


def _array(column: Any) -> np.ndarray | None:
    """Return a column as an array; routes are fetched from where they are stored."""
    if isinstance(column, StoredRoutes):
        import ray  # routes lie in its store, and nothing else here needs it

        return column.rows_of(np.asarray(ray.get(column.reference)))
    return column


def _plain(value: Any) -> Any:
    """Return what JSON does not know as what it knows."""
    if isinstance(value, np.generic):
        return value.item()
    return asdict(value)


# -- reading --------------------------------------------------------------------------------------


def _read_group(described: dict[str, Any], arrays: Mapping[str, np.ndarray]) -> TrajectoryGroup:
    number = described["number"]
    return TrajectoryGroup(
        task_id=described["task_id"],
        trajectories=_read(described["trajectories"], f"{number}/valid", arrays),
        invalid=_read(described["invalid"], f"{number}/invalid", arrays),
        skipped=described["skipped"],
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
    columns = {name: arrays[f"{prefix}/{name}"] for name in COLUMNS if f"{prefix}/{name}" in arrays}
    typed: dict[str, Any] = (
        values
        | columns
        | {
            "weight_versions": [WeightVersionSpan(**span) for span in values["weight_versions"]],
            "turns": [Turn(**turn) for turn in values["turns"]],
            "finish_reason": FinishReason(values["finish_reason"]),
            "grafted": [(start, end) for start, end in values["grafted"]],
            # Those of earlier versions have none.
            "branches": _read(values.get("branches", []), f"{prefix}/branches", arrays),
        }
    )
    if values["invalid"] is not None:
        typed["invalid"] = InvalidReason(**values["invalid"])
    return Trajectory(**typed)
