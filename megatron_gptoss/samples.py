"""Sequences to train on or to score, as columns.

``TrainingSamples`` holds all tokens of all sequences end to end, one array per property, and where
each sequence begins: a step of 16.8 million tokens is a dozen arrays and not as many Python
numbers. ``Sample`` is one sequence by itself, for whoever writes some down.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

import numpy as np

from megatron_gptoss.routes import ROUTE_DTYPES

TOKEN_COLUMNS: dict[str, np.dtype] = {
    "token_ids": np.dtype(np.int32),
    "loss_mask": np.dtype(np.bool_),
    "advantages": np.dtype(np.float32),
    "rollout_log_probs": np.dtype(np.float32),
    "old_log_probs": np.dtype(np.float32),
    "reference_log_probs": np.dtype(np.float32),
    "values": np.dtype(np.float32),
    "returns": np.dtype(np.float32),
    "staleness": np.dtype(np.int32),
    "is_grafted": np.dtype(np.bool_),
}
"""Columns with one entry per token, and their dtypes. All but the first two may be missing.

This is the one declaration of a column. Classes that hold columns have a field for each, which is
checked when they are defined; everything else loops over this dict. See "Adding a per-token
column" in CONTRIBUTING.md.
"""


INPUT_COLUMNS = ("token_ids", "loss_mask")
"""What every pass needs; a pass without a loss needs no other but the routes that it replays."""


class ColumnError(ValueError):
    """A column is wrong or missing. The message names the column and its owner."""


def columns_of(record: type) -> tuple[str, ...]:
    """Return the token columns that a dataclass has a field for."""
    names = {field.name for field in fields(record)}
    return tuple(name for name in TOKEN_COLUMNS if name in names)


def with_fields_for[T](columns: Iterable[str]) -> Callable[[type[T]], type[T]]:
    """Return a class decorator that checks that a dataclass has a field for each of ``columns``.

    The decorator raises ColumnError naming class and column. Without a field the column would get
    lost on its way, and a loss would find None.
    """

    def check(record: type[T]) -> type[T]:
        missing = set(columns) - set(columns_of(record))
        if missing:
            raise ColumnError(
                f"{record.__qualname__} has no field for column {', '.join(sorted(missing))} of "
                "megatron_gptoss.samples.TOKEN_COLUMNS. Add it"
            )
        return record

    return check


@with_fields_for(TOKEN_COLUMNS)
@dataclass
class Sample:
    """One sequence. Per-token columns have the length of ``token_ids``; entry i is about token i
    as a *label*, and entry 0 is unused, as nothing predicts it.

    Lists and arrays of any number type will do: ``TrainingSamples.join`` makes columns of them.
    """

    token_ids: Any
    loss_mask: Any
    advantages: Any = None
    rollout_log_probs: Any = None
    old_log_probs: Any = None
    reference_log_probs: Any = None
    values: Any = None
    returns: Any = None
    staleness: Any = None
    is_grafted: Any = None
    routed_experts: Any = None
    name: str = ""
    """What messages call it: the task, say. Empty: "sample" and its number."""


@with_fields_for(TOKEN_COLUMNS)
@dataclass(frozen=True)
class TrainingSamples:
    """n sequences end to end: ``column[offsets[i] : offsets[i + 1]]`` is that of sequence i.

    Per-token columns have an entry for every token of every sequence. Entry t is about token t as
    a label, so the first of a sequence is unused. A column is there for all sequences or, None,
    for none. Raises ColumnError naming the column and the sequence if one has another length or
    dtype than it should.
    """

    offsets: np.ndarray
    """int64 [n + 1], from 0 to the number of tokens."""
    token_ids: np.ndarray
    """int32 [tokens], as are the columns below."""
    loss_mask: np.ndarray
    """bool: whether the policy sampled the token (RL) or is to learn it (SFT)."""
    advantages: np.ndarray | None = None
    """float32."""
    rollout_log_probs: np.ndarray | None = None
    """float32, nats, of the engine that sampled the tokens."""
    old_log_probs: np.ndarray | None = None
    """float32, nats, of the trainer's policy when the batch was sampled; None when the batch is
    used for one update only."""
    reference_log_probs: np.ndarray | None = None
    """float32, nats, of the frozen policy that a KL penalty refers to."""
    values: np.ndarray | None = None
    """float32, the critic's before the update."""
    returns: np.ndarray | None = None
    """float32: what the critic learns to predict."""
    staleness: np.ndarray | None = None
    """int32: how many weight versions before the current one a token was sampled with. None: all
    are current."""
    is_grafted: np.ndarray | None = None
    """bool: whether the token was put here from another context. None: none was."""
    routed_experts: Sequence[Any] | None = None
    """Per sequence uint8 or int16 [its tokens - 1, layers, top_k] (``megatron_gptoss.routes``), or
    what stands for such an array, with its shape and dtype, until it is loaded. Not joined: they
    weigh ten times what the other columns do, and whoever packs them copies them once."""
    episodes: np.ndarray | None = None
    """int64 [n]: number of the episode that each sequence belongs to. None: every sequence is one."""
    names: Sequence[str] = field(default=())
    """What messages call the sequences; empty: "sample" and its number."""

    def __post_init__(self) -> None:
        self._check_offsets_and_names()
        for name, dtype in TOKEN_COLUMNS.items():
            column = getattr(self, name)
            if column is not None:
                self._check_column(name, column, dtype)

        if self.routed_experts is not None:
            self._check_routes(self.routed_experts)

    # -- what is there ----------------------------------------------------------------------------

    def __len__(self) -> int:
        """Return n."""
        return len(self.offsets) - 1

    @property
    def tokens(self) -> int:
        """Of all sequences together."""
        return int(self.offsets[-1])

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of every sequence, int64 [n]."""
        return np.diff(self.offsets)

    @property
    def loss_tokens(self) -> np.ndarray:
        """Labels of every sequence that are in the loss, int64 [n]: those of the mask but for the
        first token, which is nobody's label."""
        # Row by row, because the mask's first entry is unused and may say anything.
        labels = [np.count_nonzero(row[1:]) for row in self.rows("loss_mask")]
        return np.array(labels, dtype=np.int64)

    @property
    def columns(self) -> dict[str, np.ndarray]:
        """The per-token columns that are there, by name."""
        present = {name: getattr(self, name) for name in TOKEN_COLUMNS}
        return {name: column for name, column in present.items() if column is not None}

    @property
    def bytes(self) -> int:
        """Of all per-token columns, without routes."""
        return sum(column.nbytes for column in self.columns.values())

    def name_of(self, sequence: int) -> str:
        """Return what a message calls one of the sequences."""
        return self.names[sequence] if self.names else f"sample {sequence}"

    def rows(self, name: str) -> list[np.ndarray]:
        """Cut a per-token column into views, one per sequence."""
        # np.split makes one piece of what is cut nowhere, also of nothing.
        return np.split(getattr(self, name), self.offsets[1:-1]) if len(self) else []

    # -- others made of them ----------------------------------------------------------------------

    @classmethod
    def join(cls, samples: Sequence[Sample]) -> Self:
        """Lay sequences end to end.

        A column that some have and others do not counts as 0 in the others; routes have all or
        none. Raises ColumnError naming the column and the sequence.
        """
        names = [sample.name or f"sample {i}" for i, sample in enumerate(samples)]
        lengths = [len(sample.token_ids) for sample in samples]
        columns: dict[str, Any] = {
            name: _join_column(name, dtype, samples, names, lengths)
            for name, dtype in TOKEN_COLUMNS.items()
        }

        # 0 would be an expert: routes that are missing cannot be filled up as other columns are.
        routes = [sample.routed_experts for sample in samples]
        has_routes = [row is not None for row in routes]
        if any(has_routes) and not all(has_routes):
            without = names[has_routes.index(False)]
            raise ColumnError(
                f"{without} has no routed_experts and others have; a batch needs all or none"
            )

        return cls(
            offsets=np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64),
            routed_experts=routes if any(has_routes) else None,
            names=names,
            **columns,
        )

    def take(self, sequences: Sequence[int], columns: Sequence[str] | None = None) -> Self:
        """Return some of the sequences, in the order given: copies of the per-token columns, the
        routes as they are.

        ``columns``: names of those to take, "routed_experts" among them; None takes all. Raises
        ColumnError for a name that no column has.
        """
        for name in columns or ():
            if name not in TOKEN_COLUMNS and name != "routed_experts":
                raise ColumnError(f"there is no column {name!r}")

        present = self.columns
        wanted = [name for name in present if columns is None or name in columns]
        taken = {name: self.gather(name, sequences) for name in wanted}

        routes = None
        if self.routed_experts is not None and (columns is None or "routed_experts" in columns):
            routes = [self.routed_experts[i] for i in sequences]
        lengths = self.lengths[list(sequences)]
        return type(self)(
            offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            routed_experts=routes,
            episodes=None if self.episodes is None else self.episodes[list(sequences)],
            names=[self.name_of(i) for i in sequences],
            **taken,
        )

    def gather(self, name: str, sequences: Sequence[int]) -> np.ndarray:
        """Copy what some of the sequences have of a per-token column behind one another."""
        column: np.ndarray = getattr(self, name)
        if len(sequences) == 0:
            return column[:0].copy()
        return np.concatenate([column[self.offsets[i] : self.offsets[i + 1]] for i in sequences])

    def with_columns(self, **columns: np.ndarray | None) -> Self:
        """Return the same sequences with other or more columns; the others are shared."""
        changed: dict[str, Any] = dict(columns)
        return replace(self, **changed)

    def with_routes(self, routes: Sequence[Any]) -> Self:
        """Return the same sequences with other routes."""
        return replace(self, routed_experts=routes)

    def without_routes(self) -> Self:
        """Return the same sequences, whose experts the trainer chooses."""
        return replace(self, routed_experts=None)

    # -- checks -----------------------------------------------------------------------------------

    def _check_offsets_and_names(self) -> None:
        offsets = self.offsets
        if offsets.dtype != np.int64 or offsets.ndim != 1 or len(offsets) == 0 or offsets[0] != 0:
            raise ColumnError(
                f"offsets must be int64 [n + 1] from 0, got {offsets.dtype} {offsets}"
            )
        if self.names and len(self.names) != len(self):
            raise ColumnError(f"{len(self.names)} names for {len(self)} sequences")
        if self.episodes is not None and self.episodes.shape != (len(self),):
            raise ColumnError(f"episodes has {list(self.episodes.shape)}, expected [{len(self)}]")

        empty = np.diff(offsets) < 1
        if empty.any():
            raise ColumnError(f"{self.name_of(int(empty.argmax()))} has no tokens")

    def _check_column(self, name: str, column: np.ndarray, dtype: np.dtype) -> None:
        # Byte order is part of a dtype: big-endian numbers are not float32 here.
        if not isinstance(column, np.ndarray) or column.dtype != dtype:
            found = getattr(column, "dtype", type(column).__name__)
            raise ColumnError(f"column {name} of {self._whose} holds {found}, expected {dtype}")
        if column.shape != (self.tokens,):
            raise ColumnError(
                f"column {name} of {self._whose} has the shape {list(column.shape)}, "
                f"expected [{self.tokens}]"
            )
        if not column.flags.c_contiguous:
            raise ColumnError(f"column {name} of {self._whose} is not contiguous")

    def _check_routes(self, routes: Sequence[Any]) -> None:
        if len(routes) != len(self):
            raise ColumnError(f"routed_experts of {len(routes)} sequences, expected {len(self)}")
        for i, (row, length) in enumerate(zip(routes, self.lengths, strict=True)):
            check_route_array(row, int(length), self.name_of(i))
            # Rows of one batch are joined, so they agree in all but their length.
            first = routes[0]
            if row.dtype != first.dtype or row.shape[1:] != first.shape[1:]:
                raise ColumnError(
                    f"column routed_experts of {self.name_of(i)} is {row.dtype} {list(row.shape)}, "
                    f"that of {self.name_of(0)} {first.dtype} {list(first.shape)}"
                )

    @property
    def _whose(self) -> str:
        if len(self) == 0:
            return "no sequences"
        if len(self) == 1:
            return self.name_of(0)
        return f"{self.name_of(0)} to {self.name_of(len(self) - 1)}"


def check_route_array(routes: Any, tokens: int, whose: str) -> None:
    """Raise ColumnError unless ``routes``, an array or what stands for one, can be those of a
    sequence of so many tokens."""
    if routes.dtype not in ROUTE_DTYPES or len(routes.shape) != 3:
        raise ColumnError(
            f"column routed_experts of {whose} holds {routes.dtype} {list(routes.shape)}, "
            "expected uint8 or int16 [tokens - 1, layers, top_k]"
        )
    if routes.shape[0] != tokens - 1:
        raise ColumnError(
            f"column routed_experts of {whose} has {routes.shape[0]} rows, expected {tokens - 1}"
        )
    if isinstance(routes, np.ndarray) and not routes.flags.c_contiguous:
        raise ColumnError(f"column routed_experts of {whose} is not contiguous")


def as_column(name: str, values: Any, tokens: int, whose: str) -> np.ndarray:
    """Return ``values`` as the column ``name`` of one sequence of so many tokens.

    Raises ColumnError if they are not so many, or not of a kind that the column can hold: ids and
    ages are whole numbers, masks hold 0 and 1.
    """
    dtype = TOKEN_COLUMNS[name]
    array = np.asarray(values)
    if array.ndim != 1:
        raise ColumnError(
            f"column {name} of {whose} has the shape {list(array.shape)}, expected [{tokens}]"
        )
    if len(array) != tokens:
        raise ColumnError(f"column {name} of {whose} has {len(array)} entries for {tokens} tokens")
    if array.dtype == dtype:
        return np.ascontiguousarray(array)

    # numpy's kinds: i and u are whole numbers, b truth values, f floats. It takes an empty list for
    # floats, so the kind of no tokens says nothing.
    is_whole = array.dtype.kind in "iub"
    if tokens > 0 and dtype.kind != "f" and not is_whole:
        raise ColumnError(f"column {name} of {whose} holds {array.dtype}, expected whole numbers")
    if tokens > 0 and dtype.kind == "f" and not (is_whole or array.dtype.kind == "f"):
        raise ColumnError(f"column {name} of {whose} holds {array.dtype}, expected numbers")
    if dtype.kind == "b" and not np.isin(array, (0, 1)).all():
        raise ColumnError(f"column {name} of {whose} holds values other than 0 and 1")
    # astype would wrap around: id 2^32 would become token 0.
    if dtype.kind == "i" and tokens > 0:
        limits = np.iinfo(dtype)
        if array.min() < limits.min or array.max() > limits.max:
            raise ColumnError(f"column {name} of {whose} holds numbers that are no {dtype}")
    return array.astype(dtype)


def _join_column(
    name: str,
    dtype: np.dtype,
    samples: Sequence[Sample],
    names: Sequence[str],
    lengths: Sequence[int],
) -> np.ndarray | None:
    """Join what the sequences have of one column, with 0 where they have nothing; None if none
    has anything."""
    is_optional = name not in INPUT_COLUMNS
    if is_optional and all(getattr(sample, name) is None for sample in samples):
        return None

    # The empty row is for no sequences at all.
    rows = [np.zeros(0, dtype)]
    for sample, whose, length in zip(samples, names, lengths, strict=True):
        values = getattr(sample, name)
        if values is None and is_optional:
            rows.append(np.zeros(length, dtype))
        else:
            rows.append(as_column(name, values, length, whose))
    return np.concatenate(rows)
