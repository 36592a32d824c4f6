"""Packed batches: the one layout of training, scoring and supervised fine-tuning.

Sequences of different lengths lie end to end in one row of tokens ("THD"). ``cu_seqlens`` holds
the start of each sequence. The only padding makes the row divisible among ranks. It is a separate
sequence and never enters loss or metrics.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import batched
from typing import Any, Self

import numpy as np
import torch

from gptoss_kernels.device_copies import copy_to_device
from megatron_gptoss.context_parallel import ContextLayout, balanced_layout
from megatron_gptoss.context_parallel.segments import NO_PARENT, RowSegments
from megatron_gptoss.context_parallel.token_order import (
    inverse_order,
    keeps_row_order,
    rank_tokens,
)
from megatron_gptoss.packed_row import PackedRow
from megatron_gptoss.prefix_tree import PrefixSharing, PrefixTree, SortedPrefixes
from megatron_gptoss.samples import TrainingSamples
from megatron_gptoss.shared_prefixes import SharedPrefixes
from megatron_gptoss.token_columns import TOKEN_COLUMNS, TokenColumns
from megatron_gptoss.tree_pieces import TreePiece, cut_trees, micro_batch_count

_INPUT_FIELDS = frozenset(
    {"position_ids", "routed_experts"}
    | {name for name, column in TOKEN_COLUMNS.items() if column.belongs_to == "token"}
)
"""Fields of ``PackedBatch`` with one entry per token. Other columns have one per label."""


@dataclass(frozen=True)
class RecordedRoutes:
    """Experts that the routers of one rank chose for its tokens of one micro-batch. They never
    leave the rank."""

    layers: list[torch.Tensor]
    """int16 [tokens of this rank, top_k] for each layer of the rank."""


@dataclass(kw_only=True, eq=False)
class PackedBatch(TokenColumns[torch.Tensor]):
    """One micro-batch of T input tokens and L labels.

    Its n sequences include the padding tail if there is one. A sequence of m tokens contributes
    m - 1 inputs (all but its last) and m - 1 labels (all but its first). Each column has the shape
    [T] and the declared dtype, except ``token_ids``, which are int64 for the embedding. Entry i
    describes input i or label i (``Column.belongs_to``).

    L is T unless sequences share prefixes. Then a shared token is one input, and it predicts a label
    of every sequence that contains it. Columns of labels have the shape [L], and their entries are
    those of whole sequences.
    """

    labels: torch.Tensor
    """int64 [L]: the next token of the same sequence, or its ``target_ids`` if samples have them."""
    position_ids: torch.Tensor
    """int64 [T]: position in the sequence, from 0."""
    sample_ids: torch.Tensor
    """int64 [L]: index of the label's sequence in its mini-batch, -1 in the padding tail."""
    cu_seqlens: torch.Tensor
    """int32 [n + 1]: start of each sequence, and T. With ``prefixes``: start of each segment."""
    max_seqlen: int
    """Tokens in the longest sequence or segment."""
    routed_experts: torch.Tensor | None = None
    """uint8 or int16 [T, layers, top_k], see ``megatron_gptoss.routes``."""
    recorded_routes: RecordedRoutes | None = None
    """Routes that this rank recorded. They replace ``routed_experts``."""
    context_layout: ContextLayout | None = None
    """Layout of the row if this is the shard of a context-parallel rank. None for a whole row."""
    prefixes: SharedPrefixes | None = None
    """Segments and labels of a row whose sequences share prefixes. None if each token belongs to one
    sequence."""

    @property
    def tokens(self) -> int:
        """T."""
        return len(self.token_ids)

    @property
    def has_routes(self) -> bool:
        """True if the experts of tokens are prescribed."""
        return self.routed_experts is not None or self.recorded_routes is not None

    @property
    def segments(self) -> RowSegments:
        """Sequences of the whole row, or its segments if sequences share prefixes."""
        parents = () if self.prefixes is None else self.prefixes.parents
        return RowSegments(tuple(self.cu_seqlens.tolist()), parents)

    @property
    def is_padding(self) -> torch.Tensor:
        """bool [T]: True for tokens of the padding tail."""
        if self.prefixes is None:
            return self.sample_ids < 0
        # All labels of a token agree. A mask as an index would wait for the GPU.
        is_padding = torch.zeros_like(self.token_ids, dtype=torch.bool)
        is_padding[self.prefixes.label_rows] = self.sample_ids < 0
        return is_padding

    def at_labels(self, values: torch.Tensor) -> torch.Tensor:
        """Return the value of the token that predicts each label: [T, ...] -> [L, ...]."""
        return values if self.prefixes is None else values[self.prefixes.label_rows]

    def context_layout_over(self, size: int) -> ContextLayout:
        """Return the layout of this row over ``size`` context-parallel ranks."""
        segments = self.segments
        return balanced_layout(segments.offsets, size, segments.parents)

    def rank_labels(self, rank: int, size: int) -> torch.Tensor:
        """Return which labels the tokens of a context-parallel rank predict.

        Returns:
            int64 [labels of the rank], indices in the columns of the whole row.
        """
        layout = self.context_layout_over(size)
        if self.prefixes is None:
            return rank_tokens(layout, rank)
        owners = inverse_order(layout)[self.prefixes.label_rows.cpu()] // layout.tokens_per_rank
        return (owners == rank).nonzero()[:, 0]

    def context_parallel_shard(self, rank: int, size: int) -> Self:
        """Return the tokens for one of ``size`` context-parallel ranks.

        ``inverse_order`` of ``context_layout`` restores the order of the row in values that are
        concatenated over the ranks.
        """
        if size == 1 and self.prefixes is None:
            return self

        # cu_seqlens is the only tensor that is per sequence. It stays whole, because the keys of a
        # query may be on other ranks, and attention derives the exchange from the whole row.
        layout = self.context_layout_over(size)
        # Attention needs the layout for the parents of the segments, but no token moves.
        if size == 1 and keeps_row_order(layout):
            return replace(self, context_layout=layout)
        device = self.token_ids.device
        tokens = rank_tokens(layout, rank).to(device)
        labels = self.rank_labels(rank, size).to(device)
        columns = self._tensors()
        del columns["cu_seqlens"]
        shard = {
            name: column[tokens if name in _INPUT_FIELDS else labels]
            for name, column in columns.items()
        }
        prefixes = self.prefixes
        if prefixes is not None:
            places = inverse_order(layout).to(device)
            prefixes = prefixes.shard(places, labels, rank, layout.tokens_per_rank)
        return replace(self, context_layout=layout, prefixes=prefixes, **shard)

    def to(self, device: torch.device | str) -> Self:
        """Copy all tensors to a device."""
        tensors = self._tensors()
        moved: dict[str, Any] = {
            name: copy_to_device(tensor, device) for name, tensor in tensors.items()
        }
        prefixes = None if self.prefixes is None else self.prefixes.to(device)
        return replace(self, prefixes=prefixes, **moved)

    def _tensors(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}


def build_batch(
    samples: TrainingSamples,
    sequences: Sequence[int] | None = None,
    align: int = 1,
    sample_ids: Sequence[int] | None = None,
    sharing: PrefixSharing | None = None,
) -> PackedBatch:
    """Lay sequences end to end and pad the row to a multiple of ``align`` tokens.

    Args:
        samples: source of the sequences. The batch has the same columns.
        sequences: indices of the sequences to pack; all by default. An empty list gives a row of
            padding, which passes through the model because the other ranks wait for this rank.
        align: the row's number of tokens is a multiple of it.
        sample_ids: values of ``PackedBatch.sample_ids`` for the sequences; by default their
            indices in ``samples``.
        sharing: which tokens sequences share. None to compute each sequence separately.

    Raises:
        ColumnError: a sequence is too short, or its routes do not fit. The message names it.

    Example:
        >>> # Sequences of 4 and 3 tokens. The last token of each is only a label.
        >>> samples = TrainingSamples(
        ...     token_ids=np.arange(7, dtype=np.int32),
        ...     loss_mask=np.ones(7, dtype=bool),
        ...     offsets=np.array([0, 4, 7]),
        ... )
        >>> batch = build_batch(samples)
        >>> batch.token_ids.tolist(), batch.labels.tolist()
        ([0, 1, 2, 4, 5], [1, 2, 3, 5, 6])
        >>> batch.cu_seqlens.tolist()
        [0, 3, 5]
    """
    if sequences is None:
        sequences = range(len(samples))
    if sample_ids is None:
        sample_ids = sequences
    row = PackedRow(samples, sequences, align, sharing)

    # Token ids are taken twice: as inputs, and shifted by one as labels. Labels may differ from
    # the next token.
    label_column = "token_ids" if samples.target_ids is None else "target_ids"
    others = [name for name in samples.columns if name not in ("token_ids", "target_ids")]
    columns: dict[str, Any] = {name: row.column(name) for name in others}
    batch = PackedBatch(
        token_ids=row.entries("token_ids", torch.int64, first=0),
        labels=row.entries(label_column, torch.int64, first=1),
        position_ids=torch.from_numpy(np.concatenate([np.arange(n) for n in row.segments])),
        sample_ids=row.token_sample_ids(sample_ids),
        cu_seqlens=torch.tensor([0, *np.cumsum(row.segments)], dtype=torch.int32),
        max_seqlen=max(row.segments),
        routed_experts=row.routes(),
        **columns,
    )
    return batch if row.tree is None else _with_shared_prefixes(batch, row.tree, row.padding)


def _with_shared_prefixes(batch: PackedBatch, tree: PrefixTree, padding: int) -> PackedBatch:
    """Return a row that contains each token of a tree once.

    Args:
        batch: row of whole sequences, with the padding of the result.
        tree: tree of its sequences.
        padding: number of tokens in the padding tail.
    """
    offsets = tree.segments.offsets
    parents = tree.segments.parents
    rows = [tree.rows(sequence) for sequence in range(len(tree.ends))]
    if padding:
        rows.append(np.arange(tree.tokens, tree.tokens + padding))
        offsets = (*offsets, tree.tokens + padding)
        parents = (*parents, NO_PARENT)
    label_rows = np.concatenate(rows)

    # Copies of a token have equal entries in these columns, so the first copy gives its entry.
    sources = torch.from_numpy(np.unique(label_rows, return_index=True)[1])
    inputs = {name: getattr(batch, name) for name in _INPUT_FIELDS}
    columns = {name: column[sources] for name, column in inputs.items() if column is not None}
    return replace(
        batch,
        cu_seqlens=torch.tensor(offsets, dtype=torch.int32),
        max_seqlen=int(np.diff(offsets).max()),
        prefixes=SharedPrefixes.of(parents, torch.from_numpy(label_rows), batch.labels),
        **columns,
    )


@dataclass(frozen=True)
class MicroBatchSchedule:
    """Which sequences each data-parallel rank takes in which of its micro-batches."""

    micro_batches: list[list[list[int]]]
    """[rank][micro-batch] -> numbers of sequences. All ranks have equally many micro-batches: a
    mixture of experts communicates in every one. Those that ranks take at the same time cost about
    the same."""
    tokens: int
    """Inputs in all micro-batches. Inputs that sequences share count once per micro-batch."""

    def list_sequences(self, rank: int) -> list[int]:
        """Return all sequences of a rank, in the order in which it takes them."""
        return [i for micro_batch in self.micro_batches[rank] for i in micro_batch]


def schedule(
    lengths: np.ndarray,
    max_tokens: int,
    data_parallel_size: int = 1,
    work: Callable[[int], float] = float,
    multiple: int = 1,
    names: Sequence[str] = (),
    prefixes: SortedPrefixes | None = None,
    min_shared: int = 1,
) -> MicroBatchSchedule:
    """Distribute sequences over data-parallel ranks and micro-batches by their lengths.

    Sequences are assigned in the order of decreasing cost, each to the cheapest micro-batch with
    enough space. If there are too few sequences, some micro-batches are empty. With ``prefixes``,
    sequences that share inputs are assigned together (``cut_trees``).

    Args:
        lengths: int64 [n]: tokens of each sequence.
        max_tokens: limit of tokens in one micro-batch.
        data_parallel_size: number of ranks.
        work: cost of a sequence as a function of its tokens.
        multiple: divisor of each rank's number of micro-batches.
        names: names of the sequences in messages; by default their indices.
        prefixes: the sequences in the order of their prefixes. None to share no inputs.
        min_shared: see ``PrefixSharing``.

    Raises:
        ValueError: if there are no sequences, or one is longer than ``max_tokens``. The message
            names it.
    """
    # The last token of a sequence is not an input, because it has no successor to predict.
    inputs = lengths - 1
    _check_lengths(inputs, max_tokens, names)
    step = data_parallel_size * multiple
    if prefixes is None:
        pieces = [TreePiece([i], int(n), work(int(n))) for i, n in enumerate(inputs)]
    else:
        pieces = cut_trees(prefixes, max_tokens, step, work, min_shared)

    def count_tokens(batch: list[TreePiece]) -> int:
        if prefixes is None:
            return sum(piece.tokens for piece in batch)
        # Pieces of one tree have other segments together. These may be too short to be shared.
        return prefixes.count_tokens(_list_sequences(batch), min_shared)

    micro_batches = _distribute(pieces, max_tokens, step, count_tokens)
    # Micro-batches are sorted by cost and assigned round-robin. The micro-batches of a round, which
    # ranks process at the same time, are neighbors in this order and have about equal costs. Ranks
    # wait for each other in every micro-batch (expert communication), so equal costs per round
    # matter more than equal sums per rank.
    rounds = list(batched(micro_batches, data_parallel_size))

    # The round with most tokens comes first, so that later tensors fit into its memory. If tensors
    # grew from one micro-batch to the next, torch's allocator would request new memory and also
    # keep the memory of smaller tensors.
    rounds.sort(key=lambda taken: max(map(count_tokens, taken)), reverse=True)
    return MicroBatchSchedule(
        [[_list_sequences(taken[rank]) for taken in rounds] for rank in range(data_parallel_size)],
        sum(map(count_tokens, micro_batches)),
    )


def _check_lengths(inputs: np.ndarray, max_tokens: int, names: Sequence[str]) -> None:
    """Raise ValueError if there are no sequences, or one has more inputs than ``max_tokens``."""
    if len(inputs) == 0:
        raise ValueError("there are no samples to pack")

    if inputs.max() > max_tokens:
        too_long = int((inputs > max_tokens).argmax())
        name = names[too_long] if names else f"sample {too_long}"
        raise ValueError(
            f"{name} has {inputs[too_long] + 1} tokens, more than "
            f"max_tokens_per_micro_batch ({max_tokens}) allows; "
            f"raise it to {inputs[too_long]} or more and share the row over more "
            f"ranks (parallel.context: each holds 1 / context of it)"
        )


def pack(
    samples: TrainingSamples,
    max_tokens: int,
    data_parallel_size: int = 1,
    align: int = 1,
    work: Callable[[int], float] = float,
    multiple: int = 1,
) -> list[list[PackedBatch]]:
    """Return the micro-batches of every data-parallel rank.

    See ``schedule`` and ``build_batch`` for the arguments.
    """
    plan = schedule(samples.lengths, max_tokens, data_parallel_size, work, multiple, samples.names)
    return [
        [build_batch(samples, sequences, align) for sequences in micro_batches]
        for micro_batches in plan.micro_batches
    ]


def _list_sequences(pieces: Sequence[TreePiece]) -> list[int]:
    """Return the sequences of some pieces, in order."""
    return [i for piece in pieces for i in piece.sequences]


def _distribute(
    pieces: Sequence[TreePiece],
    max_tokens: int,
    step: int,
    count_tokens: Callable[[list[TreePiece]], int],
) -> list[list[TreePiece]]:
    """Distribute pieces over as few micro-batches as possible, a multiple of ``step``."""
    # The smallest number of micro-batches that holds all tokens may not suffice, because pieces are
    # not cut.
    count = micro_batch_count(pieces, max_tokens, step)
    micro_batches = _fill(pieces, count, max_tokens)
    while micro_batches is None or max(map(count_tokens, micro_batches)) > max_tokens:
        count += step
        micro_batches = _fill(pieces, count, max_tokens)
    return micro_batches


def _fill(pieces: Sequence[TreePiece], count: int, max_tokens: int) -> list[list[TreePiece]] | None:
    """Distribute pieces over ``count`` micro-batches, most expensive micro-batch first.

    Returns:
        Pieces in each micro-batch; None if ``count`` is too small.
    """
    micro_batches: list[list[TreePiece]] = [[] for _ in range(count)]
    tokens = np.zeros(count, dtype=np.int64)
    cost = np.zeros(count)
    # Most expensive first. Costs and not lengths, because attention makes one long sequence more
    # expensive than several short ones.
    for piece in sorted(pieces, key=lambda piece: -piece.cost):
        has_room = tokens + piece.tokens <= max_tokens
        if not has_room.any():
            return None
        # argmin takes the first of equal costs.
        chosen = int(np.where(has_room, cost, np.inf).argmin())
        micro_batches[chosen].append(piece)
        tokens[chosen] += piece.tokens
        cost[chosen] += piece.cost

    by_cost = np.argsort(-cost, kind="stable")
    return [micro_batches[i] for i in by_cost]
