"""What each data-parallel rank gets of a step's samples, and where its answers belong.

The driver decides once, from lengths, which rank takes which sequences in which micro-batches. It
sends every data-parallel rank its own sequences, which the rank's tensor-, pipeline- and
context-parallel neighbours share, and puts what comes back into the order of the samples."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import ray
import torch

from megatron_gptoss.packing import PackedBatch, Schedule, build_batch, schedule
from megatron_gptoss.planning.flops import forward_flops
from megatron_gptoss.samples import ROUTES, TrainingSamples
from megatron_gptoss.token_columns import INPUT_COLUMNS, TOKEN_COLUMNS, ColumnError
from rl_loop.config.parts import TrainerConfig
from rl_loop.data.stored_routes import StoredRoutes

SCORED_COLUMNS = (*INPUT_COLUMNS, ROUTES)
"""What the policy's forward pass without a loss needs."""

PARCEL_BYTES = 8 << 20
"""Columns of a rank are copied together, on their way into Ray's store, up to this size. So the
driver needs little memory besides its own columns, however few ranks share them."""


@dataclass
class MiniBatch:
    """One rank's part of the sequences of one optimizer step."""

    micro_batches: list[PackedBatch]
    loss_tokens: torch.Tensor
    """int64 [sequences of the mini-batch, on all ranks]: labels of each that are in the loss.
    ``PackedBatch.sample_ids`` number these sequences."""
    episodes: torch.Tensor | None = None
    """int64 [sequences of the mini-batch]: number of the episode of each; None: each is one."""

    @property
    def is_empty(self) -> bool:
        """Whether no rank has a token to learn from; there is no mean over no tokens."""
        return int(self.loss_tokens.sum()) == 0


@dataclass(frozen=True)
class MiniBatchShare:
    """Which of its sequences a rank takes in the micro-batches of a mini-batch."""

    micro_batches: list[range]
    """Rows of ``Shipment.samples``; none where the rank has nothing to do."""
    sample_ids: list[list[int]]
    """The numbers of these sequences in the mini-batch."""
    loss_tokens: np.ndarray
    episodes: np.ndarray | None
    """See ``MiniBatch`` for both."""


@dataclass(frozen=True)
class Shipment:
    """The sequences of one data-parallel rank, for one pass. Their columns are in Ray's store by
    themselves: the next pass is sent where those are that do not change."""

    inputs: Any
    """TrainingSamples with INPUT_COLUMNS, in the order in which the rank takes them, or the
    ``ray.ObjectRef`` of such."""
    parcels: list[Any]
    """Other columns of the same sequences by name, dict[str, np.ndarray] each, or references."""
    routed_experts: list[Any] | None
    """See ``TrainingSamples``."""
    mini_batches: list[MiniBatchShare]

    @cached_property
    def samples(self) -> TrainingSamples:
        """All of it, as views into the store; routes where they are. Raises ColumnError naming a
        column that does not belong to these sequences."""
        inputs, *parcels = _load([self.inputs, *self.parcels])
        columns = {name: column for parcel in parcels for name, column in parcel.items()}
        samples: TrainingSamples = inputs.with_columns(**columns)
        if self.routed_experts is None:
            return samples
        return samples.with_routes(self.routed_experts)

    @property
    def rows(self) -> Iterator[range]:
        """The rows of ``samples`` in each micro-batch, one mini-batch after the other."""
        for share in self.mini_batches:
            yield from share.micro_batches

    def unpack(self, align: int) -> list[MiniBatch]:
        """Build the rank's micro-batches, their rows padded to a multiple of ``align`` tokens."""
        samples = self.samples
        if samples.routed_experts is not None:
            samples = samples.with_routes(load_routes(samples.routed_experts))

        mini_batches = []
        for share in self.mini_batches:
            micro_batches = [
                build_batch(samples, rows, align, sample_ids)
                for rows, sample_ids in zip(share.micro_batches, share.sample_ids, strict=True)
            ]
            episodes = None if share.episodes is None else torch.from_numpy(share.episodes)
            loss_tokens = torch.from_numpy(share.loss_tokens)
            mini_batches.append(MiniBatch(micro_batches, loss_tokens, episodes))
        return mini_batches

    def column_of(self, values: Sequence[torch.Tensor], dtype: np.dtype) -> np.ndarray:
        """Put what was computed for the labels of every micro-batch, [T] each in the order of
        ``rows``, behind one another: [tokens of ``samples``], 0 for the first of each sequence."""
        # A row of m tokens has m - 1 labels, so each sequence's answers go one place to the right
        # of its start. What follows the sequences in a row is padding, and is left out.
        column = np.zeros(self.samples.tokens, dtype)
        offsets = self.samples.offsets
        for rows, row_values in zip(self.rows, values, strict=True):
            array = row_values.cpu().numpy()
            at = 0
            for i in rows:
                labels = int(offsets[i + 1] - offsets[i]) - 1
                column[offsets[i] + 1 : offsets[i + 1]] = array[at : at + labels]
                at += labels
        return column


@dataclass(frozen=True)
class MiniBatchPlan:
    """The sequences of an optimizer step, and who takes which."""

    sequences: range
    """Their numbers in the step's samples."""
    schedule: Schedule
    """Of their numbers in the mini-batch."""


@dataclass(frozen=True)
class StepPlan:
    """Which data-parallel rank takes which sequences, in which mini-batch and micro-batch."""

    offsets: np.ndarray
    """Of the samples that it is a plan for."""
    ranks: int
    """Data-parallel ranks."""
    wanted_mini_batches: int
    """More than there are in ``mini_batches`` if sequences are fewer."""
    mini_batches: list[MiniBatchPlan]

    def is_for(self, samples: TrainingSamples, mini_batches: int) -> bool:
        """Say whether samples of these lengths would get the same plan."""
        is_same_number = self.wanted_mini_batches == mini_batches
        return is_same_number and np.array_equal(self.offsets, samples.offsets)

    def sequences_of(self, rank: int) -> list[int]:
        """Return the numbers of a rank's sequences, in the order in which it takes them."""
        return [
            plan.sequences[i]
            for plan in self.mini_batches
            for i in plan.schedule.sequences_of(rank)
        ]

    def shares_of(
        self, rank: int, loss_tokens: np.ndarray, episodes: np.ndarray | None = None
    ) -> list[MiniBatchShare]:
        """Return the part of a rank in each mini-batch.

        Args:
            rank: a data-parallel rank.
            loss_tokens: loss tokens of all samples.
            episodes: episodes of all samples, if they are known.
        """
        shares = []
        taken = 0
        for plan in self.mini_batches:
            sample_ids = plan.schedule.micro_batches[rank]
            rows = []
            for micro_batch in sample_ids:
                rows.append(range(taken, taken + len(micro_batch)))
                taken += len(micro_batch)
            chosen = list(plan.sequences)
            own_episodes = None if episodes is None else episodes[chosen]
            shares.append(MiniBatchShare(rows, sample_ids, loss_tokens[chosen], own_episodes))
        return shares

    def place_answers(
        self, samples: TrainingSamples, answers: Sequence[np.ndarray], name: str, dtype: np.dtype
    ) -> np.ndarray:
        """Bring per-token answers of the data-parallel ranks into the order of the samples.

        ``answers``: of each rank, ``dtype`` [tokens of its sequences]. Returns ``dtype``
        [tokens]. Raises ColumnError naming the column and the first sequence of a rank whose
        answer is not that."""
        # Not zeros: every sequence is some rank's, so every entry is written.
        column = np.empty(samples.tokens, dtype)
        for rank, answer in enumerate(answers):
            sequences = self.sequences_of(rank)
            lengths = samples.lengths[sequences]
            if answer.dtype != dtype or answer.shape != (lengths.sum(),):
                whose = samples.name_of(sequences[0]) if sequences else "no sequences"
                raise ColumnError(
                    f"column {name} of {whose} and what follows it on data-parallel rank {rank} "
                    f"came back as {answer.dtype} {list(answer.shape)}, "
                    f"expected {dtype} [{lengths.sum()}]"
                )
            at = 0
            for i, length in zip(sequences, lengths, strict=True):
                start = samples.offsets[i]
                column[start : start + length] = answer[at : at + length]
                at += length
        return column


class Shipper:
    """Puts what ranks need of samples where they read it.

    Ids and mask, which every pass over a step needs, are put there by its first pass only."""

    def __init__(self, store: Callable[[Any], Any]) -> None:
        """``store`` puts a value where ranks read it, and returns what stands for it."""
        self._store = store
        self._last_samples: TrainingSamples | None = None
        self._last_plan: StepPlan | None = None
        self._last_inputs: list[Any] = []

    def ship(
        self, samples: TrainingSamples, plan: StepPlan, columns: Sequence[str] | None = None
    ) -> list[Any]:
        """Store a Shipment for each data-parallel rank; returns what stands for them.

        ``columns``: names of those that are needed; None for all."""
        inputs = self._ship_inputs(samples, plan)
        others = [
            name
            for name in samples.columns
            if name not in INPUT_COLUMNS and (columns is None or name in columns)
        ]
        routes = samples.routed_experts
        if columns is not None and ROUTES not in columns:
            routes = None

        shipments = []
        loss_tokens = samples.loss_tokens
        for rank in range(plan.ranks):
            sequences = plan.sequences_of(rank)
            # ``map`` lets go of each parcel before the next is made.
            parcels = list(map(self._store, _parcels(samples, sequences, others)))
            shipment = Shipment(
                inputs=inputs[rank],
                parcels=parcels,
                routed_experts=None if routes is None else [routes[i] for i in sequences],
                mini_batches=plan.shares_of(rank, loss_tokens, samples.episodes),
            )
            shipments.append(self._store(shipment))
        return shipments

    def forget(self) -> None:
        """Let go of what was stored, as the next pass is over other samples."""
        self._last_samples = None
        self._last_plan = None
        self._last_inputs = []

    def _ship_inputs(self, samples: TrainingSamples, plan: StepPlan) -> list[Any]:
        """Store INPUT_COLUMNS of each rank's sequences, unless the last pass did."""
        last = self._last_samples
        # The same arrays and not equal ones: comparing them would take as long as sending them.
        is_there = (
            last is not None
            and self._last_plan is plan
            and all(getattr(last, name) is getattr(samples, name) for name in INPUT_COLUMNS)
        )
        if not is_there:
            self.forget()
            inputs = (
                samples.take(plan.sequences_of(rank), INPUT_COLUMNS) for rank in range(plan.ranks)
            )
            self._last_inputs = list(map(self._store, inputs))
            self._last_samples = samples
            self._last_plan = plan
        return self._last_inputs


def _parcels(
    samples: TrainingSamples, sequences: Sequence[int], names: Sequence[str]
) -> Iterator[dict[str, np.ndarray]]:
    """Copy columns of some of the sequences, as many at a time as PARCEL_BYTES allow."""
    tokens = int(samples.lengths[list(sequences)].sum())
    together: list[str] = []
    size = 0
    for name in names:
        column_bytes = tokens * TOKEN_COLUMNS[name].dtype.itemsize
        if together and size + column_bytes > PARCEL_BYTES:
            yield {other: samples.gather(other, sequences) for other in together}
            together = []
            size = 0
        together.append(name)
        size += column_bytes
    if together:
        yield {name: samples.gather(name, sequences) for name in together}


def _load(values: list[Any]) -> list[Any]:
    """Return what is in Ray's store. Where the rank is the driver's process, nothing is."""
    if isinstance(values[0], ray.ObjectRef):
        return list(ray.get(values))
    return values


def load_routes(rows: Sequence[Any]) -> list[np.ndarray]:
    """Return the routes of sequences as arrays: views into Ray's store of those that are there."""
    # All in one ``get``: one for each sequence would ask Ray's store thousands of times.
    references = [row.reference for row in rows if isinstance(row, StoredRoutes)]
    if not references:
        return list(rows)

    loaded = iter(ray.get(references))
    return [row.rows_of(next(loaded)) if isinstance(row, StoredRoutes) else row for row in rows]


def plan_step(samples: TrainingSamples, settings: TrainerConfig, mini_batches: int = 1) -> StepPlan:
    """Decide which rank takes which sequences, in so many optimizer steps.

    Raises ValueError naming a sequence that is longer than a micro-batch may be."""
    # Many sequences have the same length, and counting goes through all layers.
    work = cache(lambda length: forward_flops(settings.model, [length]))
    plans = []
    for number in range(min(mini_batches, len(samples))):
        # Every n-th sample, so that the samples of one task are spread over the mini-batches.
        sequences = range(number, len(samples), mini_batches)
        plan = schedule(
            samples.lengths[number::mini_batches],
            settings.training.max_tokens_per_micro_batch,
            settings.parallel.data,
            work,
            settings.parallel.micro_batch_multiple,
            names=samples.names[number::mini_batches],
        )
        plans.append(MiniBatchPlan(sequences, plan))
    return StepPlan(samples.offsets, settings.parallel.data, mini_batches, plans)
