"""Sequences to train on or to score, end to end.

A step of 16.8 million tokens is a dozen arrays, not millions of Python numbers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np

from megatron_gptoss.routes import ROUTE_DTYPES
from megatron_gptoss.token_columns import (
    INPUT_COLUMNS,
    TOKEN_COLUMNS,
    ColumnError,
    TokenColumns,
    as_column,
    check_column,
)

ROUTES = "routed_experts"
"""Name under which ``join`` and ``take`` accept routes.

Routes are not a per-token column: they have a different shape and are loaded late.
"""

NO_TEACHER = -1
"""Number in ``TrainingSamples.teachers`` of sequences that no teacher scores."""


@dataclass(eq=False)
class TrainingSamples(TokenColumns[np.ndarray]):
    """n sequences end to end: ``column[offsets[i] : offsets[i + 1]]`` belongs to sequence i.

    Every column has the shape [tokens] and the declared dtype. ``with_columns`` replaces columns.
    Do not assign to attributes, because only the constructor checks them.

    Raises:
        ColumnError: a column has another length or dtype. The message names column and sequence.
    """

    offsets: np.ndarray
    """int64 [n + 1]: start of each sequence, and the number of tokens."""
    routed_experts: Sequence[Any] | None = None
    """Per sequence uint8 or int16 [its tokens - 1, layers, top_k] (``megatron_gptoss.routes``), or
    a reference with shape and dtype.

    Not joined, because routes need ten times the memory of all columns. Packing copies them once.
    """
    episodes: np.ndarray | None = None
    """int64 [n]: each sequence's episode index. None if each sequence is an episode."""
    groups: np.ndarray | None = None
    """int64 [n]: index of the task that each sequence is a sample of. None if each has its own."""
    teachers: np.ndarray | None = None
    """int64 [n]: index of the teacher that scores each sequence, or NO_TEACHER.

    None if the only teacher scores all.
    """
    teacher_views: "TrainingSamples | None" = None
    """The sequences as their teachers see them, with INPUT_COLUMNS.

    A prompt may differ. All later tokens, and the loss mask of these, are equal. None if teachers
    see the sequences themselves.
    """
    names: Sequence[str] = field(default=())
    """Names of the sequences in messages. Empty: "sample" and the index."""

    def __post_init__(self) -> None:
        self._check_offsets_and_names()
        for name in TOKEN_COLUMNS:
            column = getattr(self, name)
            if column is not None or name in INPUT_COLUMNS:
                check_column(name, column, self.tokens, self._owner)
        if self.routed_experts is not None:
            self._check_routes(self.routed_experts)

    # -- properties -------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Return n."""
        return len(self.offsets) - 1

    @property
    def tokens(self) -> int:
        """Tokens in all sequences."""
        return int(self.offsets[-1])

    @property
    def lengths(self) -> np.ndarray:
        """int64 [n]: tokens per sequence."""
        return np.diff(self.offsets)

    @property
    def loss_tokens(self) -> np.ndarray:
        """int64 [n]: number of labels in the loss of each sequence.

        The first token of a sequence is not a label.
        """
        # Row by row, because the first entry of the mask is unused and may have any value.
        labels = [np.count_nonzero(row[1:]) for row in self.rows("loss_mask")]
        return np.array(labels, dtype=np.int64)

    @property
    def bytes(self) -> int:
        """Size of all per-token columns, without routes."""
        return sum(column.nbytes for column in self.columns.values())

    def sequence_name(self, sequence: int) -> str:
        """Return the name of a sequence in messages."""
        return self.names[sequence] if self.names else f"sample {sequence}"

    def rows(self, name: str) -> list[np.ndarray]:
        """Cut a column into views, [tokens of the sequence] each, of the column's dtype."""
        # Without sequences, np.split would return one empty piece.
        return np.split(getattr(self, name), self.offsets[1:-1]) if len(self) else []

    # -- construction and selection ---------------------------------------------------------------

    @classmethod
    def join(cls, sequences: Sequence[Mapping[str, Any]], names: Sequence[str] = ()) -> Self:
        """Lay sequences end to end.

        Args:
            sequences: {name: column} of each sequence, as lists or arrays of numbers. An optional
                column may be missing in all sequences. If it is missing in some, they get its
                default. The name ROUTES stands for routes, which all sequences need, or none.
            names: names of the sequences in messages.

        Raises:
            ColumnError: a column is unknown, missing or cannot hold its values. The message names
                column and sequence.
        """
        names = names or [f"sample {i}" for i in range(len(sequences))]
        for sequence, owner in zip(sequences, names, strict=True):
            unknown = sequence.keys() - TOKEN_COLUMNS.keys() - {ROUTES}
            if unknown:
                raise ColumnError(
                    f"column {min(unknown)} of {owner} is not declared. Declare it in TokenColumns"
                )
        lengths = [len(sequence.get("token_ids", ())) for sequence in sequences]
        columns: dict[str, Any] = {
            name: _join_column(name, sequences, names, lengths) for name in TOKEN_COLUMNS
        }

        # Routes have no default, because 0 is an expert.
        routes = [sequence.get(ROUTES) for sequence in sequences]
        has_routes = [row is not None for row in routes]
        if any(has_routes) and not all(has_routes):
            without = names[has_routes.index(False)]
            raise ColumnError(
                f"column routed_experts of {without} is missing, but other sequences have it. Give it for "
                "all sequences of a batch, or for none"
            )

        return cls(
            offsets=np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64),
            routed_experts=routes if any(has_routes) else None,
            names=names,
            **columns,
        )

    def take(self, sequences: Sequence[int], columns: Sequence[str] | None = None) -> Self:
        """Return some sequences: copies of the per-token columns, and the same routes.

        The result has no ``teacher_views``. ``plan_teachers`` takes them separately.

        Args:
            sequences: indices of the sequences, in the order of the result.
            columns: names of the columns to take, ROUTES among them; all by default.

        Raises:
            ColumnError: a name is not declared.
        """
        for name in columns or ():
            if name not in TOKEN_COLUMNS and name != ROUTES:
                raise ColumnError(f"column {name} is not declared. Declare it in TokenColumns")

        present = self.columns
        names = [name for name in present if columns is None or name in columns]
        taken_columns: dict[str, Any] = {name: self.gather(name, sequences) for name in names}

        routes = None
        if self.routed_experts is not None and (columns is None or ROUTES in columns):
            routes = [self.routed_experts[i] for i in sequences]
        lengths = self.lengths[list(sequences)]
        return type(self)(
            offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            routed_experts=routes,
            episodes=None if self.episodes is None else self.episodes[list(sequences)],
            groups=None if self.groups is None else self.groups[list(sequences)],
            teachers=None if self.teachers is None else self.teachers[list(sequences)],
            names=[self.sequence_name(i) for i in sequences],
            **taken_columns,
        )

    def gather(self, name: str, sequences: Sequence[int]) -> np.ndarray:
        """Copy a column of some sequences, end to end: [tokens], of the column's dtype."""
        column: np.ndarray = getattr(self, name)
        if len(sequences) == 0:
            return column[:0].copy()
        return np.concatenate([column[self.offsets[i] : self.offsets[i + 1]] for i in sequences])

    def with_columns(self, **columns: np.ndarray | None) -> Self:
        """Return the sequences with the given columns replaced. Other columns are shared."""
        changed: dict[str, Any] = dict(columns)
        return replace(self, **changed)

    def with_routes(self, routes: Sequence[Any]) -> Self:
        """Return the sequences with other routes."""
        return replace(self, routed_experts=routes)

    def without_routes(self) -> Self:
        """Return the sequences without routes, so the trainer's routers choose experts."""
        return replace(self, routed_experts=None)

    # -- checks -----------------------------------------------------------------------------------

    def _check_offsets_and_names(self) -> None:
        """Raise ColumnError if offsets or names do not fit the columns."""
        offsets = self.offsets
        if offsets.dtype != np.int64 or offsets.ndim != 1 or len(offsets) == 0 or offsets[0] != 0:
            raise ColumnError(
                f"offsets must be int64 [sequences + 1] and begin with 0, got {offsets.dtype} {offsets}"
            )
        if self.names and len(self.names) != len(self):
            raise ColumnError(f"names has {len(self.names)} entries for {len(self)} sequences")
        for name in ("episodes", "groups", "teachers"):
            numbers = getattr(self, name)
            if numbers is not None and numbers.shape != (len(self),):
                raise ColumnError(f"{name} has shape {list(numbers.shape)}, expected [{len(self)}]")

        # Also detects decreasing offsets.
        empty = np.diff(offsets) < 1
        if empty.any():
            raise ColumnError(f"{self.sequence_name(int(empty.argmax()))} has no tokens")

    def _check_routes(self, routes: Sequence[Any]) -> None:
        """Raise ColumnError if the routes do not fit the tokens."""
        if len(routes) != len(self):
            raise ColumnError(
                f"column routed_experts has {len(routes)} entries for {len(self)} sequences"
            )
        for i, (row, length) in enumerate(zip(routes, self.lengths, strict=True)):
            check_route_array(row, int(length), self.sequence_name(i))
            # Rows of one batch are joined, so they agree in all but their length.
            first = routes[0]
            if row.dtype != first.dtype or row.shape[1:] != first.shape[1:]:
                raise ColumnError(
                    f"column routed_experts of {self.sequence_name(i)} is {row.dtype} {list(row.shape)}, but "
                    f"{first.dtype} {list(first.shape)} for {self.sequence_name(0)}. Layers, top_k and dtype "
                    "must be equal in a batch"
                )

    @property
    def _owner(self) -> str:
        if len(self) == 0:
            return "no sequences"
        if len(self) == 1:
            return self.sequence_name(0)
        return f"{self.sequence_name(0)} to {self.sequence_name(len(self) - 1)}"


def check_route_array(routes: Any, tokens: int, owner: str) -> None:
    """Check the routes of a sequence.

    Args:
        routes: array, or a reference with shape and dtype.
        tokens: tokens in the sequence.
        owner: name of the sequence in messages.

    Raises:
        ColumnError: the dtype, the shape or the memory layout is wrong.
    """
    if routes.dtype not in ROUTE_DTYPES or len(routes.shape) != 3:
        raise ColumnError(
            f"column routed_experts of {owner} holds {routes.dtype} {list(routes.shape)}, "
            "expected uint8 or int16 [tokens - 1, layers, top_k]"
        )
    if routes.shape[0] != tokens - 1:
        raise ColumnError(
            f"column routed_experts of {owner} has {routes.shape[0]} rows, expected {tokens - 1}"
        )
    if isinstance(routes, np.ndarray) and not routes.flags.c_contiguous:
        raise ColumnError(f"column routed_experts of {owner} is not contiguous")


def _join_column(
    name: str,
    sequences: Sequence[Mapping[str, Any]],
    names: Sequence[str],
    lengths: Sequence[int],
) -> np.ndarray | None:
    """Join one column of all sequences.

    Returns None if the column is optional and no sequence has it.
    """
    is_required = name in INPUT_COLUMNS
    if not is_required and all(sequence.get(name) is None for sequence in sequences):
        return None

    declared = TOKEN_COLUMNS[name]
    # np.concatenate needs at least one array.
    rows = [np.zeros(0, declared.dtype)]
    for sequence, owner, length in zip(sequences, names, lengths, strict=True):
        values = sequence.get(name)
        if values is None and not is_required:
            rows.append(np.full(length, declared.default, declared.dtype))
        else:
            rows.append(as_column(name, values, length, owner))
    return np.concatenate(rows)
