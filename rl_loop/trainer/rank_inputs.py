"""Samples and schedule of each data-parallel rank in a step, and the order of its results.

The driver decides once, from lengths, which rank takes which sequences in which micro-batches. It
stores the sequences of every data-parallel rank, whose tensor-, pipeline- and context-parallel
ranks share them. Results of the ranks come back into the order of the samples.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import ray
import torch

from megatron_gptoss.packing import MicroBatchSchedule, PackedBatch, build_batch, schedule
from megatron_gptoss.planning.flops import forward_flops
from megatron_gptoss.samples import ROUTES, TrainingSamples
from megatron_gptoss.token_columns import INPUT_COLUMNS, TOKEN_COLUMNS, ColumnError
from rl_loop.config.parts import TrainerConfig
from rl_loop.data.stored_routes import StoredRoutes

SCORED_COLUMNS = (*INPUT_COLUMNS, ROUTES)
"""Columns that a forward pass of the policy without a loss needs."""

MAX_CHUNK_BYTES = 8 << 20
"""Maximum bytes of columns that are copied together into Ray's store. The driver therefore needs
little memory in addition to its columns, however few ranks share them."""


@dataclass(frozen=True)
class RankMiniBatch:
    """Schedule of one rank in an optimizer step."""

    micro_batches: list[range]
    """Rows of ``RankInputs.samples`` in each micro-batch. Empty if the rank has nothing to do."""
    sample_ids: list[list[int]]
    """Indices of these sequences in the mini-batch."""
    loss_tokens: np.ndarray
    """int64 [sequences of the mini-batch on all ranks]: number of labels in the loss of each.
    ``PackedBatch.sample_ids`` index it."""
    episodes: np.ndarray | None
    """int64, the same shape: episode index of each. None if each sequence is an episode."""

    @property
    def is_empty(self) -> bool:
        """True if no rank has a token in the loss. There is no mean over no tokens."""
        return not self.loss_tokens.any()

    def pack(self, samples: TrainingSamples, align: int) -> list[PackedBatch]:
        """Build the micro-batches, with rows padded to a multiple of ``align`` tokens."""
        return [
            build_batch(samples, rows, align, sample_ids)
            for rows, sample_ids in zip(self.micro_batches, self.sample_ids, strict=True)
        ]


@dataclass(frozen=True)
class RankInputs:
    """Schedule of one data-parallel rank for a pass, and references to its samples.

    The columns are separate objects in Ray's store. The next pass refers to the same objects for
    columns that do not change.
    """

    inputs: Any
    """TrainingSamples with INPUT_COLUMNS, in the order in which the rank takes the sequences, or
    their ``ray.ObjectRef``."""
    chunks: list[Any]
    """Other columns of the sequences as {name: array} each, or their references."""
    routed_experts: list[Any] | None
    """See ``TrainingSamples``."""
    mini_batches: list[RankMiniBatch]

    @cached_property
    def samples(self) -> TrainingSamples:
        """All samples of the rank, as views into the store. Routes are not loaded.

        Raises:
            ColumnError: a column does not belong to these sequences.
        """
        # One ``get`` for all columns. They stay in the store, and the arrays are views of it.
        inputs, *chunks = _load([self.inputs, *self.chunks])
        columns = {name: column for chunk in chunks for name, column in chunk.items()}
        samples: TrainingSamples = inputs.with_columns(**columns)
        if self.routed_experts is None:
            return samples
        return samples.with_routes(self.routed_experts)

    @property
    def rows(self) -> Iterator[range]:
        """Rows of ``samples`` in each micro-batch of all mini-batches."""
        for mini_batch in self.mini_batches:
            yield from mini_batch.micro_batches

    def pack(self, align: int) -> list[list[PackedBatch]]:
        """Return the micro-batches of each mini-batch, see ``RankMiniBatch.pack``."""
        samples = self.samples
        # Routes are loaded only while batches are built, because they are larger than all other
        # columns.
        if samples.routed_experts is not None:
            samples = samples.with_routes(load_routes(samples.routed_experts))
        return [mini_batch.pack(samples, align) for mini_batch in self.mini_batches]

    def to_column(self, values: Sequence[torch.Tensor], dtype: np.dtype) -> np.ndarray:
        """Join the label values of all micro-batches.

        Args:
            values: [T] for each micro-batch, in the order of ``rows``.
            dtype: dtype of the result.

        Returns:
            [tokens of ``samples``], 0 for the first token of each sequence.
        """
        # A sequence of m tokens has m - 1 labels, which begin with its second token. The padding of
        # a row follows its sequences and is left out.
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
    """Sequences of an optimizer step, and their distribution over the ranks."""

    sequences: range
    """Indices in the samples of the step."""
    schedule: MicroBatchSchedule
    """Distribution of the indices in the mini-batch."""


@dataclass(frozen=True)
class StepPlan:
    """Distribution of sequences over data-parallel ranks, mini-batches and micro-batches."""

    offsets: np.ndarray
    """Offsets of the samples to distribute."""
    ranks: int
    """Number of data-parallel ranks."""
    wanted_mini_batches: int
    """Requested number of mini-batches. ``mini_batches`` has fewer if there are fewer sequences."""
    mini_batches: list[MiniBatchPlan]

    def is_for(self, samples: TrainingSamples, mini_batches: int) -> bool:
        """Return True if samples of these lengths would get the same plan."""
        is_same_number = self.wanted_mini_batches == mini_batches
        return is_same_number and np.array_equal(self.offsets, samples.offsets)

    def sequences_of(self, rank: int) -> list[int]:
        """Return the indices of a rank's sequences, in the order in which it takes them."""
        return [
            plan.sequences[i]
            for plan in self.mini_batches
            for i in plan.schedule.sequences_of(rank)
        ]

    def mini_batches_of(
        self, rank: int, loss_tokens: np.ndarray, episodes: np.ndarray | None = None
    ) -> list[RankMiniBatch]:
        """Return the schedule of a rank in each mini-batch.

        Args:
            rank: a data-parallel rank.
            loss_tokens: int64 [samples], loss tokens of all samples.
            episodes: int64 [samples], episodes of all samples. None if they are not known.
        """
        mini_batches = []
        # Rows count over all mini-batches, because ``RankInputs.samples`` has their sequences in
        # order.
        taken = 0
        for plan in self.mini_batches:
            sample_ids = plan.schedule.micro_batches[rank]
            rows = []
            for micro_batch in sample_ids:
                rows.append(range(taken, taken + len(micro_batch)))
                taken += len(micro_batch)
            chosen = list(plan.sequences)
            own_episodes = None if episodes is None else episodes[chosen]
            mini_batches.append(RankMiniBatch(rows, sample_ids, loss_tokens[chosen], own_episodes))
        return mini_batches

    def gather_results(
        self, samples: TrainingSamples, results: Sequence[np.ndarray], name: str, dtype: np.dtype
    ) -> np.ndarray:
        """Bring per-token results of the data-parallel ranks into the order of the samples.

        Args:
            samples: all samples.
            results: ``dtype`` [tokens of its sequences] of each rank.
            name: name of the column in messages.
            dtype: expected dtype.

        Returns:
            ``dtype`` [tokens].

        Raises:
            ColumnError: a result has another dtype or shape. The message names the column and the
                first sequence of the rank.
        """
        # Not zeros, because a rank writes every entry.
        column = np.empty(samples.tokens, dtype)
        for rank, result in enumerate(results):
            sequences = self.sequences_of(rank)
            lengths = samples.lengths[sequences]
            if result.dtype != dtype or result.shape != (lengths.sum(),):
                whose = samples.name_of(sequences[0]) if sequences else "no sequences"
                raise ColumnError(
                    f"column {name} of {whose} and later sequences of data-parallel rank {rank} "
                    f"has {result.dtype} {list(result.shape)}, expected {dtype} [{lengths.sum()}]"
                )
            at = 0
            for i, length in zip(sequences, lengths, strict=True):
                start = samples.offsets[i]
                column[start : start + length] = result[at : at + length]
                at += length
        return column


class RankInputStore:
    """Stores the inputs of the ranks.

    The first pass of a step stores INPUT_COLUMNS. Later passes refer to them.
    """

    def __init__(self, store: Callable[[Any], Any]) -> None:
        """Store values with ``store``, which returns a reference for the ranks."""
        self._store = store
        self._last_samples: TrainingSamples | None = None
        self._last_plan: StepPlan | None = None
        self._last_inputs: list[Any] = []

    def store(
        self, samples: TrainingSamples, plan: StepPlan, columns: Sequence[str] | None = None
    ) -> list[Any]:
        """Store RankInputs for each data-parallel rank, and return their references.

        Args:
            samples: all samples.
            plan: distribution of the samples.
            columns: names of the columns that the pass needs. All by default.
        """
        inputs = self._store_inputs(samples, plan)
        others = [
            name
            for name in samples.columns
            if name not in INPUT_COLUMNS and (columns is None or name in columns)
        ]
        routes = samples.routed_experts
        if columns is not None and ROUTES not in columns:
            routes = None

        stored = []
        # All samples count, because every rank normalizes by the whole mini-batch.
        loss_tokens = samples.loss_tokens
        for rank in range(plan.ranks):
            sequences = plan.sequences_of(rank)
            # ``map`` frees each chunk before the next is made.
            chunks = list(map(self._store, _chunks(samples, sequences, others)))
            rank_inputs = RankInputs(
                inputs=inputs[rank],
                chunks=chunks,
                routed_experts=None if routes is None else [routes[i] for i in sequences],
                mini_batches=plan.mini_batches_of(rank, loss_tokens, samples.episodes),
            )
            stored.append(self._store(rank_inputs))
        return stored

    def release(self) -> None:
        """Release the stored columns, because the next pass is over other samples."""
        self._last_samples = None
        self._last_plan = None
        self._last_inputs = []

    def _store_inputs(self, samples: TrainingSamples, plan: StepPlan) -> list[Any]:
        """Store INPUT_COLUMNS of each rank's sequences, unless the last pass stored them."""
        last = self._last_samples
        # Compare identity, because comparing values would take as long as sending them.
        is_stored = (
            last is not None
            and self._last_plan is plan
            and all(getattr(last, name) is getattr(samples, name) for name in INPUT_COLUMNS)
        )
        # Released first, so that the store does not hold the columns of two steps.
        if not is_stored:
            self.release()
            inputs = (
                samples.take(plan.sequences_of(rank), INPUT_COLUMNS) for rank in range(plan.ranks)
            )
            self._last_inputs = list(map(self._store, inputs))
            self._last_samples = samples
            self._last_plan = plan
        return self._last_inputs


def _chunks(
    samples: TrainingSamples, sequences: Sequence[int], names: Sequence[str]
) -> Iterator[dict[str, np.ndarray]]:
    """Copy columns of some sequences, in chunks of at most MAX_CHUNK_BYTES."""
    tokens = int(samples.lengths[list(sequences)].sum())
    together: list[str] = []
    size = 0
    for name in names:
        column_bytes = tokens * TOKEN_COLUMNS[name].dtype.itemsize
        # A chunk has at least one column, even if that column alone exceeds the limit.
        if together and size + column_bytes > MAX_CHUNK_BYTES:
            yield {other: samples.gather(other, sequences) for other in together}
            together = []
            size = 0
        together.append(name)
        size += column_bytes
    if together:
        yield {name: samples.gather(name, sequences) for name in together}


def _load(values: list[Any]) -> list[Any]:
    """Load references from Ray's store. If the rank is the driver's process, they are values."""
    if isinstance(values[0], ray.ObjectRef):
        return list(ray.get(values))
    return values


def load_routes(rows: Sequence[Any]) -> list[np.ndarray]:
    """Return the routes of sequences, uint8 or int16 [tokens, layers, top_k] each.

    Stored routes are views into Ray's store.
    """
    # One ``get`` for all sequences, which may be thousands.
    references = [row.reference for row in rows if isinstance(row, StoredRoutes)]
    if not references:
        return list(rows)

    loaded = iter(ray.get(references))
    return [row.rows_of(next(loaded)) if isinstance(row, StoredRoutes) else row for row in rows]


def plan_step(samples: TrainingSamples, settings: TrainerConfig, mini_batches: int = 1) -> StepPlan:
    """Distribute the sequences over the ranks.

    Args:
        samples: all samples of a step.
        settings: settings of the trainer.
        mini_batches: number of optimizer steps.

    Raises:
        ValueError: a sequence is longer than a micro-batch may be. The message names it.
    """
    # Cached, because many sequences have the same length and counting visits all layers.
    work = cache(lambda length: forward_flops(settings.model, [length]))
    plans = []
    # Without the bound, the last mini-batches of few sequences would be empty.
    for number in range(min(mini_batches, len(samples))):
        # Every n-th sample, which spreads the samples of a task over the mini-batches.
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
