"""Sequences as columns, against lists per sequence, and rejection of every invalid column."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_gptoss.samples import TrainingSamples
from megatron_gptoss.token_columns import TOKEN_COLUMNS, ColumnError

EPSILON = np.float32(1e-7)
ENTRIES: dict[str, st.SearchStrategy[Any]] = {
    "i": st.integers(-(2**31), 2**31 - 1),
    "b": st.booleans(),
    "f": st.floats(width=32, allow_nan=False),
}


@st.composite
def sequences(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Draw sequences of different lengths, each with some of the columns."""
    samples = []
    for length in draw(st.lists(st.integers(1, 6), min_size=1, max_size=6)):
        columns = {}
        for name, declared in TOKEN_COLUMNS.items():
            if name in ("token_ids", "loss_mask") or draw(st.booleans()):
                entries = st.lists(ENTRIES[declared.dtype.kind], min_size=length, max_size=length)
                columns[name] = draw(entries)
        samples.append(columns)
    return samples


def select_column(samples: list[dict[str, Any]], name: str) -> list[list[Any]]:
    """Return one column of every sequence, with 0 where a sequence has none."""
    rows = []
    for sample in samples:
        values = sample.get(name)
        rows.append([0] * len(sample["token_ids"]) if values is None else values)
    return rows


def assert_holds(columns: TrainingSamples, samples: list[dict[str, Any]]) -> None:
    """Check that ``columns`` hold the values of the sequences, with correct dtypes."""
    assert len(columns) == len(samples)
    assert columns.lengths.tolist() == [len(sample["token_ids"]) for sample in samples]
    assert columns.tokens == sum(len(sample["token_ids"]) for sample in samples)
    for name, declared in TOKEN_COLUMNS.items():
        column = getattr(columns, name)
        if column is not None:
            assert column.dtype == declared.dtype
            assert [row.tolist() for row in columns.rows(name)] == select_column(samples, name)


# -- columns from sequences ------------------------------------------------------------------------


@given(sequences())
def test_columns_concatenate_sequences_and_fill_gaps_with_0(
    samples: list[dict[str, Any]],
) -> None:
    joined = TrainingSamples.join(samples)

    assert_holds(joined, samples)
    for name in TOKEN_COLUMNS:
        nobody_has_it = all(name not in sample for sample in samples)
        assert (getattr(joined, name) is None) == nobody_has_it
    assert joined.bytes == sum(
        joined.tokens * TOKEN_COLUMNS[name].dtype.itemsize for name in joined.columns
    )


@given(sequences())
def test_loss_covers_masked_tokens_except_the_first(
    samples: list[dict[str, Any]],
) -> None:
    counts = TrainingSamples.join(samples).loss_tokens
    assert counts.dtype == np.int64
    assert counts.tolist() == [sum(sample["loss_mask"][1:]) for sample in samples]


@given(sequences(), st.data())
def test_take_returns_sequences_in_requested_order(
    samples: list[dict[str, Any]], data: st.DataObject
) -> None:
    wanted = data.draw(st.lists(st.integers(0, len(samples) - 1)))
    joined = TrainingSamples.join(samples)
    taken = joined.take(wanted)

    assert_holds(taken, [samples[i] for i in wanted])
    assert taken.columns.keys() == joined.columns.keys()
    assert list(taken.names) == [f"sample {i}" for i in wanted]


def with_routes(lengths: list[int], dtype: type = np.uint8) -> TrainingSamples:
    return TrainingSamples.join(
        [
            {
                "token_ids": range(10 * i, 10 * i + length),
                "loss_mask": [True] * length,
                "advantages": [float(i)] * length,
                "routed_experts": np.full((length - 1, 2, 3), i, dtype),
            }
            for i, length in enumerate(lengths)
        ],
        names=[f"task {i}" for i in range(len(lengths))],
    )


def test_take_copies_columns_and_passes_routes() -> None:
    samples = with_routes([3, 4, 2])
    taken = samples.take([2, 0])
    assert list(taken.names) == ["task 2", "task 0"]
    assert taken.routed_experts[0] is samples.routed_experts[2]
    assert taken.routed_experts[1] is samples.routed_experts[0]

    taken.advantages[:] = 7
    assert samples.advantages.tolist() == [0] * 3 + [1] * 4 + [2] * 2


def test_take_returns_only_requested_columns() -> None:
    samples = with_routes([3, 4])
    needed = ("token_ids", "loss_mask")
    assert samples.take([1], needed).columns.keys() == set(needed)
    assert samples.take([1], needed).routed_experts is None
    assert samples.take([1], (*needed, "routed_experts")).routed_experts is not None
    assert samples.take([1], (*needed, "advantages")).advantages.tolist() == [1] * 4
    # This column is optional and missing here.
    assert samples.take([1], (*needed, "values")).columns.keys() == set(needed)
    with pytest.raises(ColumnError, match="column advantage is not declared"):
        samples.take([1], (*needed, "advantage"))


def test_no_sequences_have_no_tokens_and_every_column() -> None:
    nothing = with_routes([3, 4]).take([])
    assert (len(nothing), nothing.tokens, nothing.bytes) == (0, 0, 0)
    assert nothing.columns.keys() == {"token_ids", "loss_mask", "advantages"}
    assert nothing.rows("token_ids") == []
    assert nothing.loss_tokens.tolist() == []
    assert len(TrainingSamples.join([])) == 0


def test_columns_are_replaced_and_the_others_shared() -> None:
    samples = with_routes([3, 4])
    others = samples.with_columns(advantages=None, values=np.arange(7, dtype=np.float32))
    assert others.advantages is None
    assert others.values.tolist() == list(range(7))
    assert others.token_ids is samples.token_ids
    assert others.without_routes().routed_experts is None
    with pytest.raises(ColumnError, match=r"column values of task 0 to task 1 has the shape \[6\]"):
        samples.with_columns(values=np.zeros(6, np.float32))


# -- rejected columns ------------------------------------------------------------------------------


def columns_of_one() -> dict[str, Any]:
    return {
        "offsets": np.array([0, 3]),
        "token_ids": np.array([5, 6, 7], np.int32),
        "loss_mask": np.array([False, True, True]),
        "names": ["fib/3"],
    }


def misaligned(dtype: type) -> np.ndarray:
    return np.zeros(6, dtype)[::2]


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("token_ids", np.zeros(3, np.int64), "holds int64, expected int32"),
        ("token_ids", np.zeros(3, np.float32), "holds float32, expected int32"),
        ("token_ids", np.zeros(3, ">i4"), "holds >i4, expected int32"),
        ("token_ids", [5, 6, 7], "holds list, expected int32"),
        ("token_ids", np.zeros(4, np.int32), "has the shape [4], expected [3]"),
        ("token_ids", np.zeros((3, 1), np.int32), "has the shape [3, 1], expected [3]"),
        ("token_ids", misaligned(np.int32), "is not contiguous"),
        ("loss_mask", np.ones(3, np.uint8), "holds uint8, expected bool"),
        ("loss_mask", np.ones(2, np.bool_), "has the shape [2], expected [3]"),
        ("rollout_log_probs", np.zeros(3), "holds float64, expected float32"),
        ("rollout_log_probs", np.zeros(3, ">f4"), "holds >f4, expected float32"),
        ("rollout_log_probs", np.zeros(2, np.float32), "has the shape [2], expected [3]"),
        ("rollout_log_probs", misaligned(np.float32), "is not contiguous"),
        ("advantages", np.zeros(3, np.float16), "holds float16, expected float32"),
        ("old_log_probs", np.zeros(3), "holds float64, expected float32"),
        ("reference_log_probs", np.zeros(3), "holds float64, expected float32"),
        ("values", np.zeros(3), "holds float64, expected float32"),
        ("returns", np.zeros(3), "holds float64, expected float32"),
        ("staleness", np.zeros(3, np.int64), "holds int64, expected int32"),
        ("is_off_policy", np.zeros(3, np.int32), "holds int32, expected bool"),
    ],
    ids=str,
)
def test_invalid_column_is_named_with_its_task(column: str, values: Any, message: str) -> None:
    TrainingSamples(**columns_of_one())
    with pytest.raises(ColumnError, match=re.escape(f"column {column} of fib/3 {message}")):
        TrainingSamples(**columns_of_one() | {column: values})


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("token_ids", [5.0, 6.0, 7.0], "holds float64, expected whole numbers"),
        ("token_ids", [5, 6, 2**31], "holds numbers from 5 to 2147483648, which int32 cannot"),
        (
            "token_ids",
            [5, 6, -(2**31) - 1],
            "holds numbers from -2147483649 to 6, which int32 cannot",
        ),
        ("token_ids", [5, 6, 2**70], "holds object, expected whole numbers"),
        ("token_ids", ["5", "6", "7"], "holds <U1, expected whole numbers"),
        ("loss_mask", [0, 1, 2], "holds values other than 0 and 1"),
        ("loss_mask", [0, 1, -1], "holds values other than 0 and 1"),
        ("loss_mask", [0.0, 1.0, 0.5], "holds float64, expected whole numbers"),
        ("loss_mask", [0, 1], "has 2 entries for 3 tokens"),
        ("loss_mask", None, "has the shape [], expected [3]"),
        ("advantages", 1.0, "has the shape [], expected [3]"),
        ("advantages", np.zeros((3, 1), np.float32), "has the shape [3, 1], expected [3]"),
        ("advantages", [1.0, 2.0], "has 2 entries for 3 tokens"),
        ("rollout_log_probs", [0.0, None, 1.0], "holds object, expected numbers"),
        ("rollout_log_probs", [1j, 1, 1], "holds complex128, expected numbers"),
        ("staleness", [0, 0.5, 1], "holds float64, expected whole numbers"),
        ("is_off_policy", [0, -1, 0], "holds values other than 0 and 1"),
    ],
    ids=str,
)
def test_invalid_entries_are_named_with_their_task(column: str, values: Any, message: str) -> None:
    good = {"token_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}
    others = [{"token_ids": [1, 2], "loss_mask": [0, 1]}, good]
    names = ["fib/2", "fib/4", "fib/3"]
    TrainingSamples.join([*others, good], names)

    sample = good | {column: values}
    with pytest.raises(ColumnError, match=re.escape(f"column {column} of fib/3 {message}")):
        TrainingSamples.join([*others, sample], names)


def test_numbers_of_any_kind_become_a_column_if_it_can_hold_them() -> None:
    sample = {
        "token_ids": np.array([5, 6, 2**31 - 1], np.uint64),
        "loss_mask": np.array([0, 1, 1], np.int64),
        "advantages": [1, 2, 3],
        "rollout_log_probs": np.arange(6, dtype=">f8")[::2] + EPSILON,
        "staleness": np.array([0, 1, 2], np.uint8),
        "is_off_policy": [0, 1, 0],
    }
    joined = TrainingSamples.join([sample])
    assert joined.token_ids.tolist() == [5, 6, 2**31 - 1]
    assert joined.loss_mask.tolist() == [False, True, True]
    assert joined.rollout_log_probs.tolist() == [EPSILON, np.float32(2 + EPSILON), 4]
    assert joined.staleness.tolist() == [0, 1, 2]


@pytest.mark.parametrize("token_ids", [[], np.zeros(0, np.int32)], ids=["list", "array"])
def test_a_sequence_without_tokens_is_named(token_ids: Any) -> None:
    samples = [
        {"token_ids": [1], "loss_mask": [1]},
        {"token_ids": token_ids, "loss_mask": token_ids},
    ]
    with pytest.raises(ColumnError, match="fib/3 has no tokens"):
        TrainingSamples.join(samples, ["fib/2", "fib/3"])


@pytest.mark.parametrize(
    "offsets",
    [
        np.array([0, 3], np.int32),
        np.array([0, 3], ">i8"),
        np.array([1, 3]),
        np.array([[0, 3]]),
        np.zeros(0, np.int64),
    ],
    ids=["int32", "big-endian", "not from 0", "two dimensions", "empty"],
)
def test_invalid_offsets_are_rejected(offsets: np.ndarray) -> None:
    with pytest.raises(ColumnError, match="offsets must be int64"):
        TrainingSamples(**columns_of_one() | {"offsets": offsets})


def test_decreasing_offsets_and_wrong_name_counts_are_rejected() -> None:
    columns = columns_of_one() | {"names": []}
    with pytest.raises(ColumnError, match="sample 1 has no tokens"):
        TrainingSamples(**columns | {"offsets": np.array([0, 4, 3])})
    for offsets in ([0, 1, 3], [0, 3, 3]):
        with pytest.raises(ColumnError, match="names has 1 entries for 2 sequences"):
            TrainingSamples(**columns | {"offsets": np.array(offsets), "names": ["fib/3"]})


def routes(rows: int, layers: int = 2, top_k: int = 3, dtype: Any = np.uint8) -> np.ndarray:
    return np.zeros((rows, layers, top_k), dtype)


ROUTES_THAT_DO_NOT_FIT: dict[str, tuple[Callable[[], np.ndarray], str]] = {
    "too many rows": (lambda: routes(3), "has 3 rows, expected 2"),
    "too few rows": (lambda: routes(1), "has 1 rows, expected 2"),
    "two dimensions": (lambda: routes(2)[:, 0], "holds uint8 [2, 3], expected uint8 or int16"),
    "int32": (lambda: routes(2, dtype=np.int32), "holds int32 [2, 2, 3], expected uint8 or int16"),
    "big-endian": (lambda: routes(2, dtype=">i2"), "holds >i2 [2, 2, 3], expected uint8 or int16"),
    "float": (lambda: routes(2, dtype=np.float32), "holds float32 [2, 2, 3], expected uint8"),
    "not contiguous": (lambda: routes(2, top_k=6)[..., ::2], "is not contiguous"),
    "another dtype": (
        lambda: routes(2, dtype=np.int16),
        "is int16 [2, 2, 3], but uint8 [1, 2, 3] for fib/2",
    ),
    "other layers": (
        lambda: routes(2, layers=4),
        "is uint8 [2, 4, 3], but uint8 [1, 2, 3] for fib/2",
    ),
    "another top_k": (
        lambda: routes(2, top_k=4),
        "is uint8 [2, 2, 4], but uint8 [1, 2, 3] for fib/2",
    ),
}


@pytest.mark.parametrize("case", ROUTES_THAT_DO_NOT_FIT)
def test_invalid_routes_are_named_with_their_task(case: str) -> None:
    def join(routed_experts: np.ndarray) -> TrainingSamples:
        first = {
            "token_ids": [1, 2],
            "loss_mask": [0, 1],
            "routed_experts": routes(1),
        }
        second = {
            "token_ids": [5, 6, 7],
            "loss_mask": [0, 1, 1],
            "routed_experts": routed_experts,
        }
        return TrainingSamples.join([first, second], ["fib/2", "fib/3"])

    make, message = ROUTES_THAT_DO_NOT_FIT[case]
    join(routes(2))
    with pytest.raises(ColumnError, match=re.escape(f"column routed_experts of fib/3 {message}")):
        join(make())


def test_all_sequences_have_routes_or_none_has() -> None:
    first = {"token_ids": [1, 2], "loss_mask": [0, 1], "routed_experts": routes(1)}
    second = {"token_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}
    with pytest.raises(ColumnError, match="column routed_experts of fib/3 is missing, but other"):
        TrainingSamples.join([first, second], ["fib/2", "fib/3"])

    columns = columns_of_one() | {"routed_experts": [routes(2), routes(2)]}
    with pytest.raises(ColumnError, match="routed_experts has 2 entries for 1 sequences"):
        TrainingSamples(**columns)


class RoutesElsewhere:
    """Placeholder for routes of three tokens that have not been loaded."""

    shape = (2, 2, 3)
    dtype = np.dtype(np.uint8)


def test_placeholder_routes_and_loaded_routes_are_both_checked() -> None:
    samples = TrainingSamples.join([{"token_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}], ["fib/3"])
    elsewhere: list[Any] = [RoutesElsewhere()]
    unloaded = samples.with_routes(elsewhere)
    assert unloaded.take([0]).routed_experts == elsewhere

    assert unloaded.with_routes([routes(2)]).routed_experts is not None
    with pytest.raises(ColumnError, match="routed_experts of fib/3 has 3 rows, expected 2"):
        unloaded.with_routes([routes(3)])
    longer = TrainingSamples.join(
        [{"token_ids": [1, 2, 3, 4], "loss_mask": [0, 1, 1, 1]}], ["fib/4"]
    )
    with pytest.raises(ColumnError, match="routed_experts of fib/4 has 2 rows, expected 3"):
        longer.with_routes(elsewhere)
