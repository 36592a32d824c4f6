"""Distribution of a step's sequences over data-parallel ranks, mini-batches and micro-batches.

The driver decides once, from lengths and shared prefixes, which rank takes which sequences in which
micro-batches.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import ray

from megatron_gptoss.packing import MicroBatchSchedule, PackedBatch, build_batch, schedule
from megatron_gptoss.planning.flops import forward_flops
from megatron_gptoss.prefix_tree import PrefixKeys, PrefixSharing, SortedPrefixes
from megatron_gptoss.routes import route_digests
from megatron_gptoss.samples import TrainingSamples
from megatron_gptoss.step_results import SharedTokens
from megatron_gptoss.token_columns import ColumnError
from rl_loop.config.partial_configs import TrainerConfig
from rl_loop.data.stored_routes import StoredRoutes

ROUTES_AT_A_TIME = 64
"""Number of sequences whose routes the driver loads together."""


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

    def pack(
        self, samples: TrainingSamples, align: int, sharing: PrefixSharing | None
    ) -> list[PackedBatch]:
        """Build the micro-batches, see ``build_batch``."""
        return [
            build_batch(samples, rows, align, sample_ids, sharing)
            for rows, sample_ids in zip(self.micro_batches, self.sample_ids, strict=True)
        ]


@dataclass(frozen=True)
class MiniBatchPlan:
    """Sequences of an optimizer step, and their distribution over the ranks."""

    sequences: Sequence[int]
    """Indices in the samples of the step."""
    schedule: MicroBatchSchedule
    """Distribution of the indices in the mini-batch."""


@dataclass(frozen=True)
class PlannedPrefixes:
    """Prefixes by which a plan was made."""

    sharing: PrefixSharing
    """Tokens that sequences share."""
    token_ids: np.ndarray
    """Ids of the samples."""
    with_routes: bool
    """True if tokens with unequal routes are not shared."""
    route_conflicts: int
    """See ``SharedTokens``."""

    def belong_to(self, samples: TrainingSamples) -> bool:
        """Return True if the samples share at least these prefixes."""
        # Passes over the same samples have the same array. Without routes, more tokens are shared.
        has_routes = samples.routed_experts is not None
        return self.token_ids is samples.token_ids and (self.with_routes or not has_routes)


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
    prefixes: PlannedPrefixes | None = None
    """Prefixes that the sequences share. None if they share none."""

    @property
    def shared_tokens(self) -> SharedTokens | None:
        """Tokens that are saved. None if the sequences share no prefixes."""
        if self.prefixes is None:
            return None
        return SharedTokens(
            tokens=int(self.offsets[-1]) - (len(self.offsets) - 1),
            computed=sum(plan.schedule.tokens for plan in self.mini_batches),
            route_conflicts=self.prefixes.route_conflicts,
        )

    def is_for(self, samples: TrainingSamples, mini_batches: int) -> bool:
        """Return True if these samples would get the same plan, or fit into its micro-batches."""
        is_same_number = self.wanted_mini_batches == mini_batches
        if not is_same_number or not np.array_equal(self.offsets, samples.offsets):
            return False
        # Without prefixes, only lengths decide about a plan.
        return self.prefixes is None or self.prefixes.belong_to(samples)

    def list_sequences(self, rank: int) -> list[int]:
        """Return the indices of a rank's sequences, in the order in which it takes them."""
        return [
            plan.sequences[i]
            for plan in self.mini_batches
            for i in plan.schedule.list_sequences(rank)
        ]

    def build_mini_batches(
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
        start = 0
        for plan in self.mini_batches:
            sample_ids = plan.schedule.micro_batches[rank]
            rows = []
            for micro_batch in sample_ids:
                rows.append(range(start, start + len(micro_batch)))
                start += len(micro_batch)
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
            ColumnError: a result has a different dtype or shape. The message names the column and the
                first sequence of the rank.
        """
        # Uninitialized, because the ranks together write every entry.
        column = np.empty(samples.tokens, dtype)
        for rank, result in enumerate(results):
            sequences = self.list_sequences(rank)
            lengths = samples.lengths[sequences]
            if result.dtype != dtype or result.shape != (lengths.sum(),):
                whose = samples.sequence_name(sequences[0]) if sequences else "no sequences"
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


def load_routes(rows: Sequence[Any]) -> list[np.ndarray]:
    """Return the routes of sequences, uint8 or int16 [tokens, layers, top_k] each.

    Stored routes are views into Ray's store.
    """
    # One ``get`` for all sequences, which may be thousands.
    references = [row.reference for row in rows if isinstance(row, StoredRoutes)]
    if not references:
        return list(rows)

    loaded = iter(ray.get(references))
    return [row.select_rows(next(loaded)) if isinstance(row, StoredRoutes) else row for row in rows]


def plan_step(samples: TrainingSamples, settings: TrainerConfig, mini_batches: int = 1) -> StepPlan:
    """Distribute the sequences over the ranks.

    Args:
        samples: all samples of a step.
        settings: settings of the trainer.
        mini_batches: number of optimizer steps.

    Raises:
        ValueError: a sequence is longer than a micro-batch may be. The message names it.
    """
    sharing = settings.training.prefix_sharing
    digests = None if sharing is None else _route_digests(samples)
    plans = []
    route_conflicts = 0
    for sequences in _assign_to_mini_batches(
        samples, mini_batches, keep_groups=sharing is not None
    ):
        plan, conflicts = schedule_sequences(
            samples, sequences, settings, settings.parallel.data, digests
        )
        route_conflicts += conflicts
        plans.append(MiniBatchPlan(sequences, plan))

    planned = None
    if sharing is not None:
        planned = PlannedPrefixes(sharing, samples.token_ids, digests is not None, route_conflicts)
    return StepPlan(samples.offsets, settings.parallel.data, mini_batches, plans, planned)


def schedule_sequences(
    samples: TrainingSamples,
    sequences: Sequence[int],
    settings: TrainerConfig,
    ranks: int,
    digests: Sequence[np.ndarray] | None = None,
) -> tuple[MicroBatchSchedule, int]:
    """Distribute some sequences over ranks and micro-batches.

    Args:
        samples: all samples.
        sequences: indices of the sequences. The schedule has indices in this list.
        settings: settings of the trainer.
        ranks: number of data-parallel ranks.
        digests: digests of the routes of all samples. None to ignore routes.

    Returns:
        The schedule, and the number of inputs with unequal routes only.

    Raises:
        ValueError: a sequence is longer than a micro-batch may be. The message names it.
    """
    # Cached, because many sequences have the same length and counting visits all layers.
    work = cache(lambda length: forward_flops(settings.model, [length]))
    sharing = settings.training.prefix_sharing
    prefixes, conflicts = None, 0
    if sharing is not None:
        prefixes, conflicts = _sorted_prefixes(samples, sequences, sharing, digests)
    plan = schedule(
        samples.lengths[sequences],
        settings.training.max_tokens_per_micro_batch,
        ranks,
        work,
        settings.parallel.micro_batch_multiple,
        names=[samples.sequence_name(i) for i in sequences],
        prefixes=prefixes,
        min_shared=1 if sharing is None else sharing.min_shared,
    )
    return plan, conflicts


def _assign_to_mini_batches(
    samples: TrainingSamples, mini_batches: int, keep_groups: bool
) -> Iterator[Sequence[int]]:
    """Yield the indices of the sequences of each mini-batch.

    Args:
        samples: all samples of a step.
        mini_batches: requested number of mini-batches.
        keep_groups: whether the samples of a task are in one mini-batch, so that they can share
            prefixes. Otherwise they are spread over the mini-batches.
    """
    # Every n-th sample, or task. Without the bound, the last mini-batches of few samples would be
    # empty.
    if not keep_groups or samples.groups is None:
        for number in range(min(mini_batches, len(samples))):
            yield range(number, len(samples), mini_batches)
        return
    tasks, group_of = np.unique(samples.groups, return_inverse=True)
    for number in range(min(mini_batches, len(tasks))):
        yield np.flatnonzero(group_of % mini_batches == number).tolist()


def _route_digests(samples: TrainingSamples) -> list[np.ndarray] | None:
    """Return the digests of all routes, uint64 [inputs] per sequence. None without routes."""
    routes = samples.routed_experts
    if routes is None:
        return None
    # A few at a time, because the driver has no memory for all routes.
    return [
        route_digests(row)
        for first in range(0, len(routes), ROUTES_AT_A_TIME)
        for row in load_routes(routes[first : first + ROUTES_AT_A_TIME])
    ]


def _sorted_prefixes(
    samples: TrainingSamples,
    sequences: Sequence[int],
    sharing: PrefixSharing,
    digests: Sequence[np.ndarray] | None,
) -> tuple[SortedPrefixes, int]:
    """Return the prefixes of a mini-batch, and the number of inputs with unequal routes only."""
    if digests is not None:
        digests = [digests[i] for i in sequences]
    # Compare by token ids alone, too. The difference are inputs with equal ids and unequal routes.
    prefixes, by_ids = (
        SortedPrefixes(PrefixKeys.of(samples, sequences, sharing.prompts_only, input_digests))
        for input_digests in (digests, None)
    )
    return prefixes, int(by_ids.common.sum() - prefixes.common.sum())
