"""Recorded episodes as rows of a table: its columns, and the conversion from trajectories."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from megatron_gptoss.samples import TrainingSamples
from rl_loop.data.response_check import TrainedTokens
from rl_loop.data.trajectory import Trajectory, TrajectoryGroup

SPAN = pa.struct([("start", pa.int32()), ("end", pa.int32())])
VERSION_SPAN = pa.struct([*SPAN, pa.field("version", pa.int32())])
TURN = pa.struct(
    [
        pa.field("role", pa.string()),
        *SPAN,
        pa.field("text", pa.string()),
        # Null if they were not measured.
        pa.field("seconds", pa.float32()),
        pa.field("waited", pa.float32()),
    ]
)

SUMMARY_COLUMNS = pa.schema(
    [
        # Unique in a run, and increasing. See ``episode_files.first_episode_id``.
        pa.field("id", pa.int64(), nullable=False),
        pa.field("step", pa.int32(), nullable=False),
        # One of "train", "held_out" and "replaced".
        pa.field("split", pa.string(), nullable=False),
        # Number of the task in its step and split.
        pa.field("group", pa.int32(), nullable=False),
        # Number of the episode in its group.
        pa.field("sample", pa.int32(), nullable=False),
        pa.field("task_id", pa.string(), nullable=False),
        # Null for an invalid episode, and for a conversation of supervised fine-tuning.
        pa.field("reward", pa.float64()),
        pa.field("reward_parts", pa.map_(pa.string(), pa.float64())),
        # Mean over the tokens in the loss. Null if there are none.
        pa.field("advantage", pa.float32()),
        pa.field("finish_reason", pa.string(), nullable=False),
        pa.field("format_error", pa.string()),
        # True if a limit truncated the episode and it is masked.
        pa.field("excluded", pa.bool_(), nullable=False),
        # Component that failed. Null if none did.
        pa.field("invalid", pa.string()),
        pa.field("invalid_reason", pa.string()),
        pa.field("answer", pa.string()),
        pa.field("expected_answer", pa.string()),
        pa.field("assistant_turns", pa.int32(), nullable=False),
        pa.field("tool_calls", pa.int32(), nullable=False),
        pa.field("tool_errors", pa.int32(), nullable=False),
        pa.field("tokens", pa.int32(), nullable=False),
        pa.field("sampled_tokens", pa.int32(), nullable=False),
        # Versions of the weights that sampled the episode. Null if the engine did not report them.
        pa.field("oldest_version", pa.int32()),
        pa.field("newest_version", pa.int32()),
        # Mean |trainer - engine| of the log-probs of sampled tokens, in nats. Null if unknown.
        pa.field("log_prob_gap", pa.float32()),
    ]
)
"""Columns with one value per episode, for tables and filters."""

# Schema.empty_table would import pandas, which takes longer than the first page of the viewer.
NO_EPISODES = pa.Table.from_batches([], SUMMARY_COLUMNS)
"""Table of SUMMARY_COLUMNS without rows."""

CONTENTS = pa.schema(
    [
        # Token ranges [start, end).
        pa.field("turns", pa.list_(TURN), nullable=False),
        pa.field("weight_versions", pa.list_(VERSION_SPAN), nullable=False),
        pa.field("spliced", pa.list_(SPAN), nullable=False),
        pa.field("constrained", pa.list_(SPAN), nullable=False),
        pa.field("token_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("loss_mask", pa.list_(pa.bool_()), nullable=False),
        pa.field("rollout_log_probs", pa.list_(pa.float32()), nullable=False),
        # Null if the episode was not trained on, or if they were not computed. In nats.
        pa.field("trainer_log_probs", pa.list_(pa.float32())),
        pa.field("reference_log_probs", pa.list_(pa.float32())),
        pa.field("entropy", pa.list_(pa.float32())),
        pa.field("advantages", pa.list_(pa.float32())),
        pa.field("values", pa.list_(pa.float32())),
        pa.field("returns", pa.list_(pa.float32())),
    ]
)
"""Columns with one list per episode.

Lists of tokens are as long as ``token_ids``, with 0.0 for tokens that were not sampled.
"""

SCHEMA = pa.schema([*SUMMARY_COLUMNS, *CONTENTS])

ESTIMATES = ("advantages", "reference_log_probs", "values", "returns")
"""Columns copied from TrainingSamples under the same name."""

UPDATED = ("trainer_log_probs", "entropy")
"""Columns of the update's results (TrainedTokens)."""


@dataclass(frozen=True)
class SplitEpisodes:
    """Finished episodes of one step, with the trainer's values of their tokens."""

    split: str
    """train, held_out or replaced. Dynamic sampling replaces groups with equal rewards."""
    groups: Sequence[TrajectoryGroup]
    samples: TrainingSamples | None = None
    """Samples of the valid episodes in ``groups``, in order. None if they are not trained on."""
    trained: TrainedTokens | None = None
    """Update results for ``samples``. None if the policy was not trained on them."""
    step: int | None = None
    """Number of completed steps for these episodes. None for the number of the recorded step."""


@dataclass(frozen=True)
class SampleRow:
    """One episode in readable form."""

    step: int
    split: str
    task_id: str
    reward: float | None
    """Reward. None for an invalid episode, and for a conversation of supervised fine-tuning."""
    finish_reason: str
    answer: str | None
    text: str
    """Text of the whole episode, with the role in front of each turn."""


@dataclass(frozen=True)
class _EpisodeRow:
    """One episode with its position in the step."""

    step: int
    split: str
    group: int
    sample: int
    trajectory: Trajectory
    tokens: slice | None
    """Range of its tokens in the columns of TrainingSamples. None if it was not trained on."""
    estimates: dict[str, np.ndarray]
    """Columns of all tokens in the split, by name in CONTENTS."""

    def estimate(self, name: str) -> np.ndarray | None:
        """Return a column of ``estimates`` for this episode's tokens. None if there is none."""
        if self.tokens is None or name not in self.estimates:
            return None
        column = self.estimates[name][self.tokens]
        if name not in UPDATED:
            return column

        # Episodes that no update used have only NaN. Values outside the loss mask are not used.
        if np.isnan(column[1:]).all():
            return None
        return np.where(self.trajectory.loss_mask, column, np.float32(0))


def episode_table(
    step: int,
    splits: Sequence[SplitEpisodes],
    first_id: int = 0,
    at_most: int | None = None,
) -> pa.Table:
    """Build the table of a step's episodes, including invalid ones.

    Each token sequence of an episode has a row.

    Args:
        step: number of the step; the first training step has 1.
        splits: episodes to record.
        first_id: id of the first row. Ids are consecutive.
        at_most: maximum rows per split, evenly spread over its tasks; None for all.
    """
    rows: list[_EpisodeRow] = []
    for split in splits:
        rows += spread_evenly(_build_rows(step, split), at_most)

    columns: dict[str, pa.Array] = {
        "id": pa.array(range(first_id, first_id + len(rows)), pa.int64()),
        "step": pa.array([row.step for row in rows], pa.int32()),
    }
    for field in SUMMARY_COLUMNS:
        if field.name not in columns:
            compute = COLUMN_FUNCTIONS[field.name]
            columns[field.name] = pa.array([compute(row) for row in rows], field.type)

    for name in ("turns", "weight_versions", "spliced", "constrained"):
        spans = SPANS_OF[name]
        columns[name] = pa.array([spans(row) for row in rows], CONTENTS.field(name).type)
    for field in CONTENTS:
        if field.name not in columns:
            columns[field.name] = _token_column(field, rows)
    return pa.table([columns[name] for name in SCHEMA.names], schema=SCHEMA)


def sample_rows(step: int, splits: Sequence[SplitEpisodes], at_most: int) -> list[SampleRow]:
    """Return up to ``at_most`` episodes per split of a step, evenly spread over its tasks."""
    rows: list[_EpisodeRow] = []
    for split in splits:
        rows += spread_evenly(_build_rows(step, split), at_most)

    samples = []
    for row in rows:
        turns = [f"[{turn.role}] {_utf8(turn.text)}" for turn in row.trajectory.turns]
        samples.append(
            SampleRow(
                step=row.step,
                split=row.split,
                task_id=_utf8(row.trajectory.task_id),
                reward=_reward(row),
                finish_reason=str(row.trajectory.finish_reason),
                answer=_answer(row),
                text="\n".join(turns),
            )
        )
    return samples


def _build_rows(step: int, split: SplitEpisodes) -> list[_EpisodeRow]:
    """Return a row for every sequence of a split. ``step``: used if the split names no step."""
    estimates = _estimates(split)
    if split.step is not None:
        step = split.step

    rows = []
    sequence = 0
    for number, group in enumerate(split.groups):
        # Each sequence of an episode has a row, with the same sample number.
        numbered = [
            (i, trajectory)
            for i, episode in enumerate([*group.trajectories, *group.invalid])
            for trajectory in episode.sequences
        ]

        for i, trajectory in numbered:
            # Samples have only the sequences of valid episodes, in this order.
            tokens = None
            if split.samples is not None and trajectory.invalid is None:
                first, last = split.samples.offsets[sequence : sequence + 2].tolist()
                tokens = slice(first, last)
                sequence += 1
            rows.append(_EpisodeRow(step, split.split, number, i, trajectory, tokens, estimates))
    return rows


def _estimates(split: SplitEpisodes) -> dict[str, np.ndarray]:
    columns: dict[str, np.ndarray | None] = {}
    if split.trained is not None:
        columns = {"trainer_log_probs": split.trained.log_probs, "entropy": split.trained.entropy}
    if split.samples is not None:
        columns |= {name: getattr(split.samples, name) for name in ESTIMATES}
    return {name: column for name, column in columns.items() if column is not None}


def spread_evenly[T](rows: Sequence[T], at_most: int | None) -> Sequence[T]:
    """Return at most ``at_most`` rows, evenly spread, or all rows for None."""
    if at_most is None or len(rows) <= at_most:
        return rows
    if at_most == 0:
        return []
    # Rows are ordered by task, so the first ones would show few tasks.
    stride = len(rows) // at_most
    return rows[::stride][:at_most]


# -- one value per episode ------------------------------------------------------------------------


def _advantage(row: _EpisodeRow) -> float | None:
    column = row.estimate("advantages")
    if column is None or row.trajectory.excluded:
        return None
    learned = column[row.trajectory.loss_mask]
    return float(learned.mean(dtype=np.float64)) if len(learned) else None


def _log_prob_gap(row: _EpisodeRow) -> float | None:
    column = row.estimate("trainer_log_probs")
    if column is None:
        return None
    is_sampled = row.trajectory.loss_mask
    gaps = np.abs(column - row.trajectory.rollout_log_probs)[is_sampled]
    return float(gaps.mean(dtype=np.float64)) if len(gaps) else None


def _versions(row: _EpisodeRow) -> list[int]:
    return [span.version for span in row.trajectory.weight_versions]


def _reward(row: _EpisodeRow) -> float | None:
    reward = float(row.trajectory.reward)
    return None if math.isnan(reward) else reward


def _reward_parts(row: _EpisodeRow) -> list[tuple[str, float]]:
    parts = row.trajectory.reward_parts
    return [(_utf8(name), float(value)) for name, value in parts.items()]


def _invalid_component(row: _EpisodeRow) -> str | None:
    return row.trajectory.invalid.component if row.trajectory.invalid else None


def _invalid_reason(row: _EpisodeRow) -> str | None:
    return _utf8(row.trajectory.invalid.reason) if row.trajectory.invalid else None


def _answer(row: _EpisodeRow) -> str | None:
    return None if row.trajectory.answer is None else _utf8(row.trajectory.answer)


def _expected_answer(row: _EpisodeRow) -> str | None:
    expected = row.trajectory.expected_answer
    return None if expected is None else _utf8(expected)


COLUMN_FUNCTIONS: dict[str, Callable[[_EpisodeRow], Any]] = {
    "split": lambda row: row.split,
    "group": lambda row: row.group,
    "sample": lambda row: row.sample,
    "task_id": lambda row: _utf8(row.trajectory.task_id),
    "reward": _reward,
    "reward_parts": _reward_parts,
    "advantage": _advantage,
    "finish_reason": lambda row: str(row.trajectory.finish_reason),
    "format_error": lambda row: row.trajectory.format_error,
    "excluded": lambda row: row.trajectory.excluded,
    "invalid": _invalid_component,
    "invalid_reason": _invalid_reason,
    "answer": _answer,
    "expected_answer": _expected_answer,
    "assistant_turns": lambda row: row.trajectory.assistant_turns,
    "tool_calls": lambda row: row.trajectory.tool_calls,
    "tool_errors": lambda row: row.trajectory.tool_errors,
    "tokens": lambda row: len(row.trajectory),
    "sampled_tokens": lambda row: row.trajectory.sampled_tokens,
    "oldest_version": lambda row: min(_versions(row), default=None),
    "newest_version": lambda row: max(_versions(row), default=None),
    "log_prob_gap": _log_prob_gap,
}
"""Functions that compute the columns of SUMMARY_COLUMNS, except "id" and "step"."""


# -- lists ----------------------------------------------------------------------------------------


def _turns(row: _EpisodeRow) -> list[dict[str, Any]]:
    return [vars(turn) | {"text": _utf8(turn.text)} for turn in row.trajectory.turns]


def _weight_versions(row: _EpisodeRow) -> list[dict[str, int]]:
    return [vars(span) for span in row.trajectory.weight_versions]


def _spliced(row: _EpisodeRow) -> list[dict[str, int]]:
    return [{"start": start, "end": end} for start, end in row.trajectory.spliced]


def _constrained(row: _EpisodeRow) -> list[dict[str, int]]:
    return [{"start": start, "end": end} for start, end in row.trajectory.constrained]


SPANS_OF: dict[str, Callable[[_EpisodeRow], list[dict[str, Any]]]] = {
    "turns": _turns,
    "weight_versions": _weight_versions,
    "spliced": _spliced,
    "constrained": _constrained,
}
"""Functions that compute the columns of token ranges."""

TRAJECTORY_COLUMNS = ("token_ids", "loss_mask", "rollout_log_probs")


def _token_column(field: pa.Field, rows: Sequence[_EpisodeRow]) -> pa.Array:
    """Concatenate a column's values of all episodes. Episodes without values get null."""
    parts = []
    for row in rows:
        if field.name in TRAJECTORY_COLUMNS:
            parts.append(getattr(row.trajectory, field.name))
        else:
            parts.append(row.estimate(field.name))

    # np.concatenate needs at least one array.
    if all(part is None for part in parts):
        return pa.nulls(len(rows), field.type)
    present = [part for part in parts if part is not None]
    lengths = [0 if part is None else len(part) for part in parts]
    # Arrow's lists have offsets of 32 bits.
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int32)
    values = pa.array(np.concatenate(present), field.type.value_type)
    is_missing = pa.array([part is None for part in parts], pa.bool_())
    # One array for all values is faster than a list of Python numbers per episode.
    return pa.ListArray.from_arrays(pa.array(offsets), values, field.type, mask=is_missing)


def _utf8(text: str) -> str:
    """Replace characters that UTF-8 cannot encode. Sampled text may contain lone surrogates."""
    return text.encode(errors="replace").decode()
