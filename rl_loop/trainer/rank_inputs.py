"""Samples and schedule of each data-parallel rank in a step.

The driver stores the sequences of every data-parallel rank, whose tensor-, pipeline- and
context-parallel ranks share them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import ray
import torch

from megatron_gptoss.packing import PackedBatch
from megatron_gptoss.prefix_tree import PrefixSharing
from megatron_gptoss.samples import ROUTES, TrainingSamples
from megatron_gptoss.token_columns import INPUT_COLUMNS, TOKEN_COLUMNS
from rl_loop.trainer.step_plan import RankMiniBatch, StepPlan, load_routes
from rl_loop.trainer.teacher_plan import RankTeachers

SCORED_COLUMNS = (*INPUT_COLUMNS, ROUTES)
"""Columns that a forward pass of the policy without a loss needs."""

MAX_CHUNK_BYTES = 8 << 20
"""Maximum bytes of columns that are copied together into Ray's store. The driver therefore needs
little memory in addition to its columns, however few ranks share them."""


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
    sharing: PrefixSharing | None = None
    """Tokens that the sequences of a micro-batch share. None if they share none."""
    teachers: RankTeachers | None = None
    """Passes of the teachers. None if the only teacher scores the micro-batches of the pass."""

    @cached_property
    def input_samples(self) -> TrainingSamples:
        """All samples of the rank, with INPUT_COLUMNS only."""
        samples: TrainingSamples = _load([self.inputs])[0]
        return samples

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
        """Return the micro-batches of each mini-batch, with rows of a multiple of ``align`` tokens."""
        samples = self.samples
        # Routes are loaded only while batches are built, because they are larger than all other
        # columns.
        if samples.routed_experts is not None:
            samples = samples.with_routes(load_routes(samples.routed_experts))
        return [mini_batch.pack(samples, align, self.sharing) for mini_batch in self.mini_batches]

    def to_column(self, values: Sequence[torch.Tensor], dtype: np.dtype) -> np.ndarray:
        """Join the label values of all micro-batches.

        Args:
            values: [L] for each micro-batch, in the order of ``rows``.
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
        self,
        samples: TrainingSamples,
        plan: StepPlan,
        columns: Sequence[str] | None = None,
        teachers: Sequence[RankTeachers] | None = None,
    ) -> list[Any]:
        """Store RankInputs for each data-parallel rank, and return their references.

        Args:
            samples: all samples.
            plan: distribution of the samples.
            columns: names of the columns that the pass needs. All by default.
            teachers: passes of the teachers on each rank. None for one teacher or none.
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
            sequences = plan.list_sequences(rank)
            # ``map`` frees each chunk before the next is made.
            chunks = list(map(self._store, _chunks(samples, sequences, others)))
            rank_inputs = RankInputs(
                inputs=inputs[rank],
                chunks=chunks,
                routed_experts=None if routes is None else [routes[i] for i in sequences],
                mini_batches=plan.build_mini_batches(rank, loss_tokens, samples.episodes),
                sharing=None if plan.prefixes is None else plan.prefixes.sharing,
                teachers=None if teachers is None else teachers[rank],
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
                samples.take(plan.list_sequences(rank), INPUT_COLUMNS) for rank in range(plan.ranks)
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
