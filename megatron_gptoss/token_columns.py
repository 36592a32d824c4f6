"""Declaration of the per-token columns, and the checks that follow from it.

Tokens pass through three containers, which share the columns and differ in layout:

- ``rl_loop.data.trajectory.Trajectory``: one sequence of an episode,
- ``megatron_gptoss.samples.TrainingSamples``: all sequences of a step, end to end, and
- ``megatron_gptoss.packing.PackedBatch``: one micro-batch on a rank, as tensors.

Each container inherits from ``TokenColumns``. Joining, slicing, sending to ranks, packing,
sharding over context-parallel ranks, counting bytes and storing loop over ``TOKEN_COLUMNS``. A new
column is therefore one attribute of ``TokenColumns``. See "Add a per-token column" in
docs/algorithms.md.
"""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Annotated, Any, Literal, get_type_hints

import numpy as np


class ColumnError(ValueError):
    """A column is wrong or missing. The message names the column and its sequence."""


@dataclass(frozen=True)
class Column:
    """Declaration of a per-token column."""

    dtype_name: str
    """Name of the dtype, the same in NumPy and torch."""
    filled_by: Literal["episode", "driver", "rank", "client"] = "episode"
    """First place that has the column: the episode, the driver for the samples of a step, a
    trainer rank for its micro-batches, or a client of ``gptoss tinker``. Columns of a rank are not
    sent."""
    belongs_to: Literal["token", "label"] = "label"
    """Meaning of entry t in a packed row: token t as an input, or token t as a label, which is
    predicted from the inputs before it. Entry 0 of a sequence is not a label and is unused."""
    default: float = 0
    """Value of sequences without the column if others have it, and of padding."""
    is_wide: bool = False
    """True if a token has k values, so that a packed column is [tokens, k]. Only ranks fill such
    columns, because samples and trajectories hold one value per token."""

    @property
    def dtype(self) -> np.dtype:
        """NumPy dtype."""
        return np.dtype(self.dtype_name)


@dataclass(kw_only=True, eq=False)
class TokenColumns[Array]:
    """The per-token columns. An attribute declares one: name, type, ``Column`` and meaning.

    A column without a default is required. An optional column is None if no sequence has it.
    """

    token_ids: Annotated[Array, Column("int32", belongs_to="token")]
    """Index of the token in the vocabulary."""
    loss_mask: Annotated[Array, Column("bool")]
    """True if the policy sampled the token (RL), or if the token is trained on (SFT)."""
    advantages: Annotated[Array | None, Column("float32", "driver")] = None
    """Advantage of the token."""
    rollout_log_probs: Annotated[Array | None, Column("float32")] = None
    """Log-prob by the engine that sampled the token, in nats, at the sampling temperature. 0 for
    tokens that were not sampled."""
    old_log_probs: Annotated[Array | None, Column("float32", "rank")] = None
    """Log-prob by the policy before the update, in nats. None if the importance ratio is 1."""
    reference_log_probs: Annotated[Array | None, Column("float32", "driver")] = None
    """Log-prob by the reference policy of a KL penalty, in nats."""
    values: Annotated[Array | None, Column("float32", "driver")] = None
    """Value that the critic predicted before the update."""
    returns: Annotated[Array | None, Column("float32", "driver")] = None
    """Value that the critic learns to predict."""
    staleness: Annotated[Array | None, Column("int32", "driver")] = None
    """Policy lag: weight versions between sampling and training. None if all tokens are
    current."""
    is_off_policy: Annotated[Array | None, Column("bool", "driver")] = None
    """True if the token was sampled in another context, or under a constraint. None if no token
    was."""
    teacher_log_probs: Annotated[Array | None, Column("float32", "driver")] = None
    """Log-prob by the teacher of on-policy distillation, in nats. NaN for tokens that no teacher has
    scored."""
    has_teacher: Annotated[Array | None, Column("bool", "driver")] = None
    """True if a teacher scores the token's sequence. None if teachers score all sequences."""
    teacher_top_ids: Annotated[Array | None, Column("int32", "rank", is_wide=True)] = None
    """The k tokens that a teacher of distillation finds most likely at the place of this token."""
    teacher_top_log_probs: Annotated[Array | None, Column("float32", "rank", is_wide=True)] = None
    """Log-probs of ``teacher_top_ids`` by the teacher, in nats."""
    target_ids: Annotated[Array | None, Column("int32", "client")] = None
    """Token to predict at this place. None if it is the token itself. A packed batch has it as
    ``labels``."""
    loss_weights: Annotated[Array | None, Column("float32", "client")] = None
    """Weight of the token's log-prob in a sum of log-probs. May be negative."""

    @property
    def columns(self) -> dict[str, Array]:
        """The present columns as {name: column}."""
        present = {name: getattr(self, name) for name in TOKEN_COLUMNS}
        return {name: column for name, column in present.items() if column is not None}

    def column(self, name: str) -> Array:
        """Return a column that has to be present.

        Raises:
            ColumnError: the column is missing.
        """
        return require_column(self.columns, name)


TOKEN_COLUMNS: dict[str, Column] = {
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(TokenColumns, include_extras=True).items()
}
"""All columns as {name: declaration}."""

INPUT_COLUMNS = tuple(field.name for field in fields(TokenColumns) if field.default is MISSING)
"""Required columns, which every pass needs. A pass without a loss needs no other column."""


def require_column[Array](columns: Mapping[str, Array], name: str) -> Array:
    """Return one of the columns that are present.

    Args:
        columns: {name: column}.
        name: name of the column.

    Raises:
        ColumnError: the column is missing or not declared.
    """
    if name in columns:
        return columns[name]
    if name not in TOKEN_COLUMNS:
        raise ColumnError(f"column {name} is not declared. Declare it in TokenColumns")
    place = TOKEN_COLUMNS[name].filled_by
    raise ColumnError(f"column {name} is missing. The {place} must fill it")


def column_bytes(*filled_by: str) -> int:
    """Return the bytes per token of all columns that one of the places fills."""
    columns = TOKEN_COLUMNS.values()
    return sum(column.dtype.itemsize for column in columns if column.filled_by in filled_by)


def check_column(name: str, values: Any, tokens: int, owner: str) -> None:
    """Check that an array can be a column without conversion.

    Args:
        name: name of the column.
        values: array to check.
        tokens: expected number of entries.
        owner: name of the sequences in messages.

    Raises:
        ColumnError: the dtype, the byte order, the shape or the memory layout differs.
    """
    dtype = TOKEN_COLUMNS[name].dtype
    if not isinstance(values, np.ndarray) or values.dtype != dtype:
        actual = getattr(values, "dtype", type(values).__name__)
        raise ColumnError(f"column {name} of {owner} holds {actual}, expected {dtype}")
    if values.shape != (tokens,):
        raise ColumnError(
            f"column {name} of {owner} has the shape {list(values.shape)}, expected [{tokens}]"
        )
    if not values.flags.c_contiguous:
        raise ColumnError(f"column {name} of {owner} is not contiguous")


def as_column(name: str, values: Any, tokens: int, owner: str) -> np.ndarray:
    """Convert the values of one sequence to a column.

    Args:
        name: name of the column.
        values: list or array of numbers.
        tokens: expected number of entries.
        owner: name of the sequence in messages.

    Returns:
        [tokens], of the dtype of the column in TOKEN_COLUMNS.

    Raises:
        ColumnError: the number of values differs, or the column cannot hold them without loss:
            integer columns take integers in range, and masks take 0 and 1.
    """
    dtype = TOKEN_COLUMNS[name].dtype
    array = np.asarray(values)
    if array.ndim != 1:
        raise ColumnError(
            f"column {name} of {owner} has the shape {list(array.shape)}, expected [{tokens}]"
        )
    if len(array) != tokens:
        raise ColumnError(f"column {name} of {owner} has {len(array)} entries for {tokens} tokens")
    if array.dtype == dtype:
        return np.ascontiguousarray(array)

    # Kinds of NumPy: "i" and "u" are integers, "b" is bool, "f" is float. An empty list becomes a
    # float array, so the kind is not checked without tokens.
    is_whole = array.dtype.kind in "iub"
    if tokens > 0 and dtype.kind != "f" and not is_whole:
        raise ColumnError(f"column {name} of {owner} holds {array.dtype}, expected whole numbers")
    if tokens > 0 and dtype.kind == "f" and not (is_whole or array.dtype.kind == "f"):
        raise ColumnError(f"column {name} of {owner} holds {array.dtype}, expected numbers")
    if dtype.kind == "b" and not np.isin(array, (0, 1)).all():
        raise ColumnError(f"column {name} of {owner} holds values other than 0 and 1")
    # astype would wrap around: id 2^32 would become token 0.
    if dtype.kind == "i" and tokens > 0:
        limits = np.iinfo(dtype)
        if array.min() < limits.min or array.max() > limits.max:
            raise ColumnError(
                f"column {name} of {owner} holds numbers from {array.min()} to {array.max()}, which "
                f"{dtype} cannot represent"
            )
    return array.astype(dtype)
