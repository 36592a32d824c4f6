"""What each data-parallel rank gets of a step's samples, and where its answers belong.

The driver decides once, from lengths, which rank takes which sequences in which micro-batches. It
sends every data-parallel rank its own sequences, which the rank's tensor-, pipeline- and
context-parallel neighbours share, and puts what comes back into the order of the samples."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import ray
import torch

from megatron_gptoss.packing import PackedBatch, Schedule, build_batch, schedule
from megatron_gptoss.planning.flops import forward_flops
from megatron_gptoss.samples import INPUT_COLUMNS, ColumnError, TrainingSamples
from rl_loop.data.stored_routes import StoredRoutes
from rl_loop.trainer.settings import TrainerSettings

SCORED_COLUMNS = (*INPUT_COLUMNS, "routed_experts")
"""What the policy's forward pass without a loss needs."""


@dataclass
class MiniBatch:
    """One rank's part of the sequences of one optimizer step."""

    micro_batches: list[PackedBatch]
    loss_tokens: torch.Tensor
    """int64 [sequences of the mini-batch, on all ranks]: labels of each that are in the loss.
    ``PackedBatch.sample_ids`` number these sequences."""

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
    """See ``MiniBatch``."""


@dataclass(frozen=True)
class Shipment:
    """The sequences of one data-parallel rank."""

    samples: TrainingSamples
    """In the order in which the rank takes them."""
    mini_batches: list[MiniBatchShare]

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
            mini_batches.append(MiniBatch(micro_batches, torch.from_numpy(share.loss_tokens)))
        return mini_batches

    def column_of(self, values: Sequence[torch.Tensor], dtype: np.dtype) -> np.ndarray:
        """Put what was computed for the labels of every micro-batch, [T] each in the order of
        ``rows``, behind one another: [tokens of ``samples``], 0 for the first of each sequence."""
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

    def shipments(
        self, samples: TrainingSamples, columns: Sequence[str] | None = None
    ) -> Iterator[Shipment]:
        """Cut out what each data-parallel rank gets, one after the other. ``columns``: names of
        those that are needed; None for all."""
        loss_tokens = samples.loss_tokens
        for rank in range(self.ranks):
            shares = []
            taken = 0
            for plan in self.mini_batches:
                sample_ids = plan.schedule.micro_batches[rank]
                rows = []
                for micro_batch in sample_ids:
                    rows.append(range(taken, taken + len(micro_batch)))
                    taken += len(micro_batch)
                shares.append(MiniBatchShare(rows, sample_ids, loss_tokens[list(plan.sequences)]))
            yield Shipment(samples.take(self.sequences_of(rank), columns), shares)

    def place_answers(
        self, samples: TrainingSamples, answers: Sequence[np.ndarray], name: str, dtype: np.dtype
    ) -> np.ndarray:
        """Bring per-token answers of the data-parallel ranks into the order of the samples.

        ``answers``: of each rank, ``dtype`` [tokens of its sequences]. Returns ``dtype``
        [tokens]. Raises ColumnError naming the column and the first sequence of a rank whose
        answer is not that."""
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


def load_routes(rows: Sequence[Any]) -> list[np.ndarray]:
    """Return the routes of sequences as arrays: views into Ray's store of those that are there."""
    references = [row.reference for row in rows if isinstance(row, StoredRoutes)]
    if not references:
        return list(rows)

    loaded = iter(ray.get(references))
    return [next(loaded) if isinstance(row, StoredRoutes) else row for row in rows]


def plan_step(
    samples: TrainingSamples, settings: TrainerSettings, mini_batches: int = 1
) -> StepPlan:
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
