"""What the driver sends to each data-parallel rank, and how answers come back into order."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_gptoss.config import ModelConfig
from megatron_gptoss.samples import ColumnError, Sample, TrainingSamples
from rl_loop.data.stored_routes import StoredRoutes
from rl_loop.trainer.group import TrainerGroup
from rl_loop.trainer.shipment import SCORED_COLUMNS, Shipment, plan_step
from rl_loop.trainer.worker import RankPlace

MODEL = ModelConfig(num_layers=2, num_experts=8)
LAYERS = 2
TOP_K = 3
LIMIT = 64

lengths = st.lists(st.integers(2, 40), min_size=1, max_size=14)


def settings_of(ranks: int, mini_batches: int = 1) -> Any:
    """As much of TrainerSettings as shipping looks at."""
    return SimpleNamespace(
        model=MODEL,
        training=SimpleNamespace(max_tokens_per_micro_batch=LIMIT),
        parallel=SimpleNamespace(data=ranks, micro_batch_multiple=1),
        algorithm=SimpleNamespace(mini_batches=mini_batches),
    )


def samples_of(sizes: list[int], *, routes: bool = False) -> TrainingSamples:
    """Token ids are unique over all samples, and every other column follows from them."""
    starts = np.cumsum([0, *sizes])
    samples = []
    for number, (start, size) in enumerate(zip(starts, sizes, strict=False)):
        ids = np.arange(start, start + size)
        rows = np.full((size - 1, LAYERS, TOP_K), number, dtype=np.uint8)
        samples.append(
            Sample(
                ids,
                ids % 3 > 0,
                advantages=ids + 0.5,
                rollout_log_probs=-ids,
                routed_experts=rows if routes else None,
                name=f"task {number}",
            )
        )
    return TrainingSamples.join(samples)


@given(lengths, st.integers(1, 4), st.integers(1, 3))
def test_every_sequence_reaches_one_rank_with_what_belongs_to_it(
    sizes: list[int], ranks: int, mini_batches: int
) -> None:
    samples = samples_of(sizes, routes=True)
    plan = plan_step(samples, settings_of(ranks), mini_batches)
    shipments = list(plan.shipments(samples))

    everyone = [i for rank in range(ranks) for i in plan.sequences_of(rank)]
    assert sorted(everyone) == list(range(len(sizes)))
    assert sum(shipment.samples.bytes for shipment in shipments) == samples.bytes

    unpacked = [shipment.unpack(align=4) for shipment in shipments]
    for number, of_ranks in enumerate(zip(*unpacked, strict=True)):
        in_mini_batch = samples.take(range(number, len(samples), mini_batches))
        # Weights of tokens follow from counts of the whole mini-batch, on every rank.
        for mini_batch in of_ranks:
            assert mini_batch.loss_tokens.tolist() == in_mini_batch.loss_tokens.tolist()

        batches = [batch for mini_batch in of_ranks for batch in mini_batch.micro_batches]
        assert len({len(mini_batch.micro_batches) for mini_batch in of_ranks}) == 1
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
def test_answers_come_back_into_the_order_of_the_samples(
    sizes: list[int], ranks: int, mini_batches: int
) -> None:
    samples = samples_of(sizes)
    plan = plan_step(samples, settings_of(ranks), mini_batches)
    answers = []
    for shipment in plan.shipments(samples, SCORED_COLUMNS):
        batches = [b for mini_batch in shipment.unpack(4) for b in mini_batch.micro_batches]
        values = [batch.labels.float() for batch in batches]
        answers.append(shipment.column_of(values, np.dtype(np.float32)))

    column = plan.place_answers(samples, answers, "values", np.dtype(np.float32))
    expected = samples.token_ids.astype(np.float32)
    expected[samples.offsets[:-1]] = 0
    assert np.array_equal(column, expected)


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (np.zeros(5, np.float32), r"float32 \[5\]"),
        (np.zeros(6, np.float64), r"float64 \[6\]"),
        (np.zeros(6, ">f4"), r">f4 \[6\]|float32"),
    ],
)
def test_an_answer_of_the_wrong_form_is_refused_by_column_and_task(
    answer: np.ndarray, found: str
) -> None:
    samples = samples_of([6, 4])
    plan = plan_step(samples, settings_of(2))
    good = np.zeros(4, np.float32)
    with pytest.raises(ColumnError, match=f"column values of task 0 .*{found}, expected float32"):
        plan.place_answers(samples, [answer, good], "values", np.dtype(np.float32))


def test_a_sequence_that_is_too_long_is_named() -> None:
    with pytest.raises(ValueError, match="task 1 has 70 tokens, more than max_tokens_per"):
        plan_step(samples_of([5, 70]), settings_of(1))


def test_a_pass_without_a_loss_ships_no_column_of_the_loss() -> None:
    samples = samples_of([6, 4], routes=True)
    (shipment,) = plan_step(samples, settings_of(1)).shipments(samples, SCORED_COLUMNS)
    assert set(shipment.samples.columns) == {"token_ids", "loss_mask"}
    assert shipment.samples.routed_experts is not None
    assert shipment.samples.bytes == 5 * samples.tokens


class RecordingRanks:
    """Ranks that keep what they get and answer with their labels."""

    def __init__(self, places: list[RankPlace]) -> None:
        self.places = places
        self.stored: list[Shipment] = []
        self.calls: list[tuple[str, list[Any], list[int]]] = []

    def ready(self) -> list[RankPlace]:
        return self.places

    def store(self, value: Any) -> Any:
        self.stored.append(value)
        return value

    def call(self, method: str, arguments: Any, asked: Any) -> list[Any]:
        self.calls.append((method, list(arguments), list(asked)))
        if method == "rl_step":
            return [f"what rank {rank} said" for rank in asked]
        answers = []
        for rank in asked:
            shipment = arguments[rank][0]
            answers.append(shipment.samples.token_ids.astype(np.float32))
        return answers

    def close(self) -> None: ...


def test_neighbours_share_a_shipment_and_only_owners_answer() -> None:
    # Two data-parallel ranks of two neighbours each, in Megatron's order.
    places = [RankPlace(data=rank // 2, answers=rank % 2 == 1) for rank in range(4)]
    ranks = RecordingRanks(places)
    trainer = TrainerGroup(settings_of(2), ranks)
    trainer.ready()

    samples = samples_of([6, 4, 9, 3])
    assert np.array_equal(trainer.score(samples), samples.token_ids.astype(np.float32))
    assert trainer.rl_step(samples, 3) == "what rank 0 said"

    scored, updated = ranks.calls
    assert len(ranks.stored) == 4, "one for each data-parallel rank and pass"
    assert scored[2] == [1, 3]
    assert updated[2] == [0]
    for _, arguments, _ in ranks.calls:
        assert arguments[0][0] is arguments[1][0]
        assert arguments[2][0] is arguments[3][0]
        assert arguments[0][0] is not arguments[2][0]
    for first, second in zip(ranks.stored[:2], ranks.stored[2:], strict=True):
        assert first.samples.names == second.samples.names, "packing decides once"


def test_only_updates_are_cut_into_mini_batches() -> None:
    ranks = RecordingRanks([RankPlace(data=0, answers=True)])
    trainer = TrainerGroup(settings_of(1, mini_batches=2), ranks)
    trainer.ready()

    samples = samples_of([6, 4, 9, 3])
    trainer.score(samples)
    trainer.rl_step(samples, 3)
    scored, updated = ranks.stored
    assert [len(share.loss_tokens) for share in scored.mini_batches] == [4]
    assert [len(share.loss_tokens) for share in updated.mini_batches] == [2, 2]


def test_a_group_that_was_not_waited_for_says_so() -> None:
    trainer = TrainerGroup(settings_of(1), RecordingRanks([RankPlace(data=0, answers=True)]))
    with pytest.raises(RuntimeError, match=r"score: TrainerGroup.ready has not been called"):
        trainer.score(samples_of([6]))


@settings(deadline=None, max_examples=5)
@given(lengths)
def test_what_is_sent_is_arrays_and_no_number_by_itself(sizes: list[int]) -> None:
    samples = samples_of([size * 50 for size in sizes])
    big = settings_of(1)
    big.training.max_tokens_per_micro_batch = 4000
    (shipment,) = plan_step(samples, big).shipments(samples)
    buffers: list[pickle.PickleBuffer] = []
    in_band = pickle.dumps(shipment, protocol=5, buffer_callback=buffers.append)
    assert sum(len(buffer.raw()) for buffer in buffers) >= samples.bytes
    # What is left grows with the sequences and not with their tokens.
    assert len(in_band) < 3000 + 200 * len(sizes)


@pytest.fixture(scope="module")
def local_ray() -> Any:
    from rl_loop.cluster.ray_session import start_local_ray

    start_local_ray(num_cpus=1)
    yield
    ray.shutdown()


def test_ranks_read_routes_out_of_the_store(local_ray: Any, tmp_path: Path) -> None:
    samples = samples_of([6, 4, 9], routes=True)
    assert samples.routed_experts is not None
    stored = [
        StoredRoutes(ray.put(rows), rows.shape, rows.dtype) for rows in samples.routed_experts
    ]
    shipped = samples.with_routes(stored)
    plan = plan_step(shipped, settings_of(1))
    (got,) = next(plan.shipments(shipped)).unpack(align=1)
    (want,) = next(plan.shipments(samples)).unpack(align=1)
    for got_batch, want_batch in zip(got.micro_batches, want.micro_batches, strict=True):
        assert torch.equal(got_batch.routed_experts, want_batch.routed_experts)

    wrong = replace(stored[1], shape=(2, LAYERS, TOP_K))
    with pytest.raises(ColumnError, match="column routed_experts of task 1 has 2 rows, expected 3"):
        samples.with_routes([stored[0], wrong, stored[2]])
