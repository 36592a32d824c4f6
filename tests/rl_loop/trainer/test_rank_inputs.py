"""Data sent to each data-parallel rank, and the order of the results."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from converters.model_extras import ModelExtras
from megatron_gptoss.samples import TrainingSamples
from megatron_gptoss.token_columns import ColumnError
from rl_loop.data.rollout_batch import RlUpdates
from rl_loop.data.stored_routes import StoredRoutes
from rl_loop.trainer import rank_inputs as rank_inputs_module
from rl_loop.trainer.group import TrainerGroup
from rl_loop.trainer.rank_inputs import SCORED_COLUMNS, RankInputs, RankInputStore
from rl_loop.trainer.rank_state import RankPosition
from rl_loop.trainer.step_plan import StepPlan, plan_step
from rl_loop.trainer.weight_export import WeightExport
from tests.support.forked_workers import local_ray
from tests.support.megatron_gptoss.branching import branching_samples
from tests.support.rl_loop.trainer.settings import MODEL, build_settings

LAYERS = 2
TOP_K = 3

lengths = st.lists(st.integers(2, 40), min_size=1, max_size=14)


def build_samples(sizes: list[int], *, routes: bool = False) -> TrainingSamples:
    """Return samples with unique token ids. Every other column follows from the ids."""
    starts = np.cumsum([0, *sizes])
    samples = []
    for number, (start, size) in enumerate(zip(starts, sizes, strict=False)):
        ids = np.arange(start, start + size)
        rows = np.full((size - 1, LAYERS, TOP_K), number, dtype=np.uint8)
        samples.append(
            {
                "token_ids": ids,
                "loss_mask": ids % 3 > 0,
                "advantages": ids + 0.5,
                "rollout_log_probs": -ids,
                "routed_experts": rows if routes else None,
            }
        )
    return TrainingSamples.join(samples, names=[f"task {i}" for i in range(len(sizes))])


def store(
    samples: TrainingSamples, plan: StepPlan, columns: Sequence[str] | None = None
) -> list[RankInputs]:
    """Return each rank's inputs, without a store."""
    return RankInputStore(lambda value: value).store(samples, plan, columns)


@given(lengths, st.integers(1, 4), st.integers(1, 3))
def test_every_sequence_reaches_one_rank_with_its_columns(
    sizes: list[int], ranks: int, mini_batches: int
) -> None:
    samples = build_samples(sizes, routes=True)
    plan = plan_step(samples, build_settings(ranks), mini_batches)
    stored = store(samples, plan)

    everyone = [i for rank in range(ranks) for i in plan.list_sequences(rank)]
    assert sorted(everyone) == list(range(len(sizes)))
    assert sum(inputs.samples.bytes for inputs in stored) == samples.bytes

    packed = [inputs.pack(align=4) for inputs in stored]
    for number, of_ranks in enumerate(zip(*packed, strict=True)):
        in_mini_batch = samples.take(range(number, len(samples), mini_batches))
        # Every rank needs the counts of the whole mini-batch for its token weights.
        for inputs in stored:
            loss_tokens = inputs.mini_batches[number].loss_tokens
            assert loss_tokens.tolist() == in_mini_batch.loss_tokens.tolist()

        batches = [batch for of_rank in of_ranks for batch in of_rank]
        assert len({len(of_rank) for of_rank in of_ranks}) == 1
        seen = []
        for batch in batches:
            real = batch.sample_ids >= 0
            first = torch.from_numpy(in_mini_batch.offsets)[batch.sample_ids[real]]
            label = torch.from_numpy(in_mini_batch.token_ids)[first + batch.position_ids[real] + 1]
            assert torch.equal(batch.labels[real], label.long())
            assert torch.equal(batch.advantages[real], label + 0.5)
            assert torch.equal(batch.rollout_log_probs[real], -label.float())
            if real.any():
                own = batch.sample_ids[real] * mini_batches + number
                assert torch.equal(batch.routed_experts[real, 1, 2].long(), own)
            seen += batch.labels[real].tolist()
        wanted = np.delete(in_mini_batch.token_ids, in_mini_batch.offsets[:-1])
        assert sorted(seen) == sorted(wanted.tolist())


@given(lengths, st.integers(1, 4), st.integers(1, 3))
def test_results_are_gathered_in_the_order_of_the_samples(
    sizes: list[int], ranks: int, mini_batches: int
) -> None:
    samples = build_samples(sizes)
    plan = plan_step(samples, build_settings(ranks), mini_batches)
    results = []
    for inputs in store(samples, plan, SCORED_COLUMNS):
        batches = [batch for of_mini_batch in inputs.pack(4) for batch in of_mini_batch]
        values = [batch.labels.float() for batch in batches]
        results.append(inputs.to_column(values, np.dtype(np.float32)))

    column = plan.gather_results(samples, results, "values", np.dtype(np.float32))
    expected = samples.token_ids.astype(np.float32)
    expected[samples.offsets[:-1]] = 0
    assert np.array_equal(column, expected)


@pytest.mark.parametrize(
    ("result", "found"),
    [
        (np.zeros(5, np.float32), r"float32 \[5\]"),
        (np.zeros(6, np.float64), r"float64 \[6\]"),
        (np.zeros(6, ">f4"), r">f4 \[6\]|float32"),
    ],
)
def test_result_of_wrong_shape_or_dtype_names_column_and_task(
    result: np.ndarray, found: str
) -> None:
    samples = build_samples([6, 4])
    plan = plan_step(samples, build_settings(2))
    good = np.zeros(4, np.float32)
    with pytest.raises(ColumnError, match=f"column values of task 0 .*{found}, expected float32"):
        plan.gather_results(samples, [result, good], "values", np.dtype(np.float32))


def test_too_long_sequence_is_named() -> None:
    with pytest.raises(ValueError, match="task 1 has 70 tokens, more than max_tokens_per"):
        plan_step(build_samples([5, 70]), build_settings(1))


def test_pass_without_loss_sends_no_column_of_the_loss() -> None:
    samples = build_samples([6, 4], routes=True)
    (inputs,) = store(samples, plan_step(samples, build_settings(1)), SCORED_COLUMNS)
    assert set(inputs.samples.columns) == {"token_ids", "loss_mask"}
    assert inputs.samples.routed_experts is not None
    assert inputs.samples.bytes == 5 * samples.tokens


class RecordingRanks:
    """Ranks that record their inputs and return their token ids."""

    def __init__(self, positions: list[RankPosition]) -> None:
        self.positions = positions
        self.stored: list[Any] = []
        self.calls: list[tuple[str, list[Any], list[int]]] = []

    @property
    def inputs(self) -> list[RankInputs]:
        return [value for value in self.stored if isinstance(value, RankInputs)]

    def ready(self) -> list[RankPosition]:
        return self.positions

    def store(self, value: Any) -> Any:
        self.stored.append(value)
        return value

    def call(self, method: str, arguments: Any, result_ranks: Any) -> list[Any]:
        self.calls.append((method, list(arguments), list(result_ranks)))
        if method == "rl_step":
            return [RlUpdates(skipped=rank) for rank in result_ranks]
        return [arguments[rank][0].samples.token_ids.astype(np.float32) for rank in result_ranks]

    def close(self) -> None: ...


def test_ranks_share_inputs_and_only_owners_return_results() -> None:
    # Two data-parallel ranks of two neighbors each, in Megatron's order.
    positions = [RankPosition(data=rank // 2, returns_results=rank % 2 == 1) for rank in range(4)]
    ranks = RecordingRanks(positions)
    trainer = TrainerGroup(build_settings(2), ranks)
    trainer.ready()

    samples = build_samples([6, 4, 9, 3])
    assert np.array_equal(trainer.score(samples), samples.token_ids.astype(np.float32))
    assert trainer.rl_step(samples, 3).skipped == 0, "must return the statistics of rank 0"

    scored, updated = ranks.calls
    assert len(ranks.inputs) == 4, "each of 2 passes must store one input per data-parallel rank"
    assert scored[2] == [1, 3]
    assert updated[2] == [0, 1, 3], "must ask rank 0 for statistics, and 1 and 3 for tokens"
    for _, arguments, _ in ranks.calls:
        assert arguments[0][0] is arguments[1][0]
        assert arguments[2][0] is arguments[3][0]
        assert arguments[0][0] is not arguments[2][0]
    for first, second in zip(ranks.inputs[:2], ranks.inputs[2:], strict=True):
        assert first.samples.names == second.samples.names, "both passes must pack equally"


def test_slow_attention_of_a_rank_is_a_warning_of_the_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    slow = "window 128 uses the slow reference"
    positions = [RankPosition(0, returns_results=True, slow_attention=(slow,)) for _ in range(2)]
    TrainerGroup(build_settings(1), RecordingRanks(positions)).ready()
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage() == f"trainer: {slow}"


def test_only_the_writing_rank_gets_the_files_of_an_export() -> None:
    ranks = RecordingRanks(
        [RankPosition(data=0, returns_results=True), RankPosition(data=1, returns_results=True)]
    )
    export = WeightExport(
        Path("export"), ModelExtras(files={"tokenizer.json": b"27 MB"}), mxfp4_experts=True
    )
    trainer_settings = build_settings(2)
    trainer_settings.parallel.world_size = 2
    with contextlib.suppress(AttributeError):  # RecordingRanks return no results of an export
        TrainerGroup(trainer_settings, ranks).export(export)
    [(method, [(first,), (second,)], _)] = ranks.calls
    assert method == "export"
    assert first == export
    assert second == WeightExport(Path("export"), mxfp4_experts=True)


def test_only_updates_are_split_into_mini_batches() -> None:
    ranks = RecordingRanks([RankPosition(data=0, returns_results=True)])
    trainer = TrainerGroup(build_settings(1, mini_batches=2), ranks)
    trainer.ready()

    samples = build_samples([6, 4, 9, 3])
    trainer.score(samples)
    trainer.rl_step(samples, 3)
    scored, updated = ranks.inputs
    assert [len(share.loss_tokens) for share in scored.mini_batches] == [4]
    assert [len(share.loss_tokens) for share in updated.mini_batches] == [2, 2]


def test_score_before_ready_is_an_error() -> None:
    trainer = TrainerGroup(
        build_settings(1), RecordingRanks([RankPosition(data=0, returns_results=True)])
    )
    with pytest.raises(RuntimeError, match=r"TrainerGroup.ready must be called before score"):
        trainer.score(build_samples([6]))


@pytest.mark.parametrize(
    ("mini_batches", "copies"),
    [(1, 1), pytest.param(2, 2, id="ranks then have other sequences than before")],
)
def test_ids_and_mask_are_sent_once_for_all_passes_of_a_step(
    mini_batches: int, copies: int
) -> None:
    ranks = RecordingRanks([RankPosition(data=rank, returns_results=True) for rank in range(2)])
    trainer = TrainerGroup(build_settings(2, mini_batches), ranks)
    trainer.ready()

    samples = build_samples([6, 4, 9, 3], routes=True)
    trainer.score(samples.without_routes())
    trainer.score(samples)
    values = np.arange(samples.tokens, dtype=np.float32)
    estimated = samples.with_columns(values=values)
    trainer.rl_step(estimated, 3)

    sent = [value for value in ranks.stored if isinstance(value, TrainingSamples)]
    assert len(sent) == 2 * copies
    assert sum(inputs.tokens for inputs in sent) == copies * samples.tokens
    last_pass = ranks.inputs[-2:]
    for inputs in last_pass:
        got = inputs.samples
        assert got.columns.keys() == estimated.columns.keys()
        assert np.array_equal(got.token_ids, got.advantages - 0.5)
        assert np.array_equal(got.values, values[got.token_ids])
        assert got.routed_experts is not None
    assert sum(inputs.samples.tokens for inputs in last_pass) == samples.tokens


def test_other_samples_and_those_of_a_later_step_are_sent_again() -> None:
    sent: list[Any] = []

    def store(value: Any) -> Any:
        sent.append(value)
        return value

    def stored_inputs() -> int:
        return sum(isinstance(value, TrainingSamples) for value in sent)

    input_store = RankInputStore(store)
    samples = build_samples([6, 4, 9])
    plan = plan_step(samples, build_settings(1))
    input_store.store(samples, plan)
    input_store.store(samples.with_columns(returns=samples.advantages), plan)
    assert stored_inputs() == 1

    # The new mask excludes more tokens of the same sequences.
    stricter = samples.with_columns(loss_mask=samples.loss_mask & (samples.token_ids > 9))
    (inputs,) = input_store.store(stricter, plan)
    assert stored_inputs() == 2
    assert inputs.samples.loss_mask.sum() == stricter.loss_mask.sum()

    input_store.release()
    input_store.store(stricter, plan)
    assert stored_inputs() == 3


def test_columns_are_sent_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = build_samples([6, 4, 9])
    numbers = np.zeros(samples.tokens, np.float32)
    samples = samples.with_columns(values=numbers, returns=numbers, reference_log_probs=numbers)
    plan = plan_step(samples, build_settings(1))
    monkeypatch.setattr(rank_inputs_module, "MAX_CHUNK_BYTES", 2 * numbers.nbytes)
    (inputs,) = store(samples, plan)
    assert [len(chunk) for chunk in inputs.chunks] == [2, 2, 1]

    monkeypatch.setattr(rank_inputs_module, "MAX_CHUNK_BYTES", 1)
    (by_one,) = store(samples, plan)
    assert [len(chunk) for chunk in by_one.chunks] == [1] * 5
    for name, column in inputs.samples.columns.items():
        assert np.array_equal(column, by_one.samples.columns[name])


@pytest.mark.parametrize(
    ("column", "found"),
    [
        (np.zeros(9, np.float32), r"has the shape \[9\], expected \[10\]"),
        (np.zeros(10, np.float64), "holds float64, expected float32"),
    ],
)
def test_chunk_of_other_sequences_is_rejected(column: np.ndarray, found: str) -> None:
    samples = build_samples([6, 4])
    (inputs,) = store(samples, plan_step(samples, build_settings(1)))
    wrong = replace(inputs, chunks=[{"values": column}])
    with pytest.raises(ColumnError, match=f"column values of task 0 to task 1 {found}"):
        wrong.pack(align=1)


@settings(deadline=None, max_examples=5)
@given(lengths)
def test_inputs_are_pickled_as_out_of_band_arrays(sizes: list[int]) -> None:
    samples = build_samples([size * 50 for size in sizes])
    big = build_settings(1)
    big.training.max_tokens_per_micro_batch = 4000
    (inputs,) = store(samples, plan_step(samples, big))
    buffers: list[pickle.PickleBuffer] = []
    in_band = pickle.dumps(inputs, protocol=5, buffer_callback=buffers.append)
    assert sum(len(buffer.raw()) for buffer in buffers) >= samples.bytes
    # The rest grows with the sequences and not with their tokens.
    assert len(in_band) < 3000 + 200 * len(sizes)


@pytest.fixture(scope="module")
def one_ray() -> Any:
    with local_ray(num_cpus=1, object_store_bytes=100 << 20):
        yield


def test_ranks_read_routes_from_the_store(one_ray: Any, tmp_path: Path) -> None:
    samples = build_samples([6, 4, 9], routes=True)
    assert samples.routed_experts is not None
    stored = [
        StoredRoutes(ray.put(rows), rows.shape, rows.dtype) for rows in samples.routed_experts
    ]
    elsewhere = samples.with_routes(stored)
    plan = plan_step(elsewhere, build_settings(1))
    (got,) = store(elsewhere, plan)[0].pack(align=1)
    (want,) = store(samples, plan)[0].pack(align=1)
    for got_batch, want_batch in zip(got, want, strict=True):
        assert torch.equal(got_batch.routed_experts, want_batch.routed_experts)

    wrong = replace(stored[1], shape=(2, LAYERS, TOP_K))
    with pytest.raises(ColumnError, match="column routed_experts of task 1 has 2 rows, expected 3"):
        samples.with_routes([stored[0], wrong, stored[2]])


def test_ranks_read_columns_from_the_store_without_a_copy(one_ray: Any) -> None:
    samples = build_samples([6, 4, 9])
    plan = plan_step(samples, build_settings(2))
    input_store = RankInputStore(ray.put)
    input_store.store(samples, plan, SCORED_COLUMNS)
    stored = ray.get(input_store.store(samples, plan))
    for got, want in zip(stored, store(samples, plan), strict=True):
        assert isinstance(got.inputs, ray.ObjectRef)
        for name, column in want.samples.columns.items():
            assert np.array_equal(got.samples.columns[name], column)
            assert not got.samples.columns[name].flags.owndata, f"{name} was copied"


@pytest.mark.parametrize("mini_batches", [1, 2])
def test_every_rank_gets_the_episodes_of_a_mini_batch(mini_batches: int) -> None:
    """An optimizer step weights by episode, on any rank with their sequences."""
    numbers = np.array([0, 0, 1, 2, 2, 2], dtype=np.int64)
    samples = replace(build_samples([5, 9, 3, 6, 4, 7]), episodes=numbers)
    plan = plan_step(samples, build_settings(2, mini_batches), mini_batches)
    for inputs in store(samples, plan):
        for number, mini_batch in enumerate(inputs.mini_batches):
            assert mini_batch.episodes is not None
            assert mini_batch.episodes.tolist() == numbers[number::mini_batches].tolist()
            assert len(mini_batch.episodes) == len(mini_batch.loss_tokens)


def test_shared_prefixes_are_planned_from_stored_routes(one_ray: Any) -> None:
    samples = branching_samples(1, longest=14, model=MODEL, with_routes=True, unequal_routes=0.1)
    assert samples.routed_experts is not None
    config = build_settings(2, share_prefixes="all", min_shared=1)
    stored = [StoredRoutes(ray.put(row), row.shape, row.dtype) for row in samples.routed_experts]
    plan = plan_step(samples.with_routes(stored), config)
    want = plan_step(samples, config)
    assert plan.mini_batches == want.mini_batches
    assert plan.shared_tokens == want.shared_tokens
    assert want.shared_tokens.route_conflicts > 0
