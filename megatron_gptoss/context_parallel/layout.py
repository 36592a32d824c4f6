"""Assignment of a packed row's tokens to context-parallel ranks (docs/architecture.md).

Long sequences are cut into chunks. A rank gets a chunk from the front and its mirror image from the
back, which is equal work with causal attention (arXiv 2411.01783). Short sequences stay whole. Each
token keeps its position, so the order of tokens does not matter. This module does not import torch,
so that ``gptoss plan`` can use it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

from megatron_gptoss.context_parallel.segments import RowSegments

CUT_DIVISORS = (2, 4, 8, 16)
"""Divisors n to try, in order.

Sequences longer than (tokens per rank) / n are cut. The first n that balances the work is used.
"""
MAX_IMBALANCE = 1.02
"""Accepted work of the busiest rank relative to the mean."""


class TokenSpan(NamedTuple):
    """Consecutive tokens of one sequence on one rank.

    If sequences share prefixes, the row consists of segments. The span is then in one segment, and
    its positions are those in the sequences that contain the segment.
    """

    sequence: int
    """Index of the sequence or segment in the row."""
    start: int
    """First position in the sequence."""
    end: int
    """Position after the last token."""

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return self.end - self.start

    @property
    def pairs(self) -> int:
        """Number of (query, key) pairs in causal attention."""
        # The query at position p sees p + 1 keys. Sum over p from start to end - 1.
        return (self.end * (self.end + 1) - self.start * (self.start + 1)) // 2


@dataclass(frozen=True)
class ContextLayout:
    """Split of one row over ranks.

    All ranks compute the same layout, because it depends only on ``segments`` and ``size``.
    """

    segments: RowSegments
    """Sequences of the row, or segments if sequences share prefixes."""
    spans: tuple[tuple[TokenSpan, ...], ...]
    """Spans of each rank, in order. Spans that are not whole come first (``is_whole``)."""
    shared: tuple[int, ...]
    """Number of tokens in spans that are not whole, for each rank."""
    plans: dict[Any, Any] = field(default_factory=dict, compare=False)
    """Cache for results that schemes derive from the layout, shared by all layers."""

    @property
    def offsets(self) -> tuple[int, ...]:
        """Start of each sequence or segment in the row, then the number of tokens."""
        return self.segments.offsets

    @property
    def shares_prefixes(self) -> bool:
        """True if segments continue other segments."""
        return bool(self.segments.parents)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.spans)

    @property
    def tokens_per_rank(self) -> int:
        """Number of tokens on each rank."""
        return self.offsets[-1] // self.size

    @property
    def longest(self) -> int:
        """Length of the longest sequence or segment in tokens."""
        return max(self.segments.lengths)

    def cached[T](self, key: Any, make: Callable[[], T]) -> T:
        """Return the cached result for a key; compute it by ``make()`` at the first call."""
        if key not in self.plans:
            self.plans[key] = make()
        return self.plans[key]

    def is_whole(self, span: TokenSpan) -> bool:
        """Return True if the tokens of the span see each other and no other token.

        No other rank then holds tokens of the span's sequence, and no segment continues another.
        """
        return _is_whole(span, self.segments)

    def pairs(self, rank: int, window: int | None = None) -> int:
        """Return the number of (query, key) pairs that a rank computes in one layer.

        Args:
            rank: context-parallel rank.
            window: number of keys that a query sees, including its own; None for all earlier keys.
        """
        total = sum(span.pairs for span in self.spans[rank])
        if window is None:
            return total

        # Subtract the keys before the window. They are as many as the keys which the queries
        # would see without a window if they were `window` positions earlier.
        invisible = 0
        for span in self.spans[rank]:
            earlier = span._replace(
                start=max(0, span.start - window), end=max(0, span.end - window)
            )
            invisible += earlier.pairs
        return total - invisible


@lru_cache(maxsize=16)
def balanced_layout(
    offsets: tuple[int, ...], size: int, parents: tuple[int, ...] = ()
) -> ContextLayout:
    """Split a row over ranks with equal numbers of tokens and about equal work.

    Args:
        offsets: start of each sequence in the row, then the number of tokens.
        size: number of context-parallel ranks.
        parents: see ``RowSegments``. By default each sequence is one segment.

    Raises:
        ValueError: the number of tokens is not a multiple of ``size``.

    Example:
        Sequences of 8, 2 and 2 tokens on two ranks. Only the first is longer than 6 / 2 tokens, so
        it is cut into four chunks. Rank 0 gets its first and last chunk.

        >>> layout = balanced_layout((0, 8, 10, 12), size=2)
        >>> for rank, spans in enumerate(layout.spans):
        ...     print([tuple(span) for span in spans], layout.pairs(rank))
        [(0, 0, 2), (0, 6, 8), (1, 0, 2)] 21
        [(0, 2, 6), (2, 0, 2)] 21
    """
    tokens = offsets[-1]
    if tokens % size:
        raise ValueError(
            f"{tokens} packed tokens cannot be split evenly over {size} context-parallel "
            f"ranks. Pad the row to {-(-tokens // size) * size} tokens (align={size}) or use a "
            f"context-parallel size that divides {tokens}"
        )

    # Use the coarsest cut that balances, because whole sequences need no messages. If none
    # balances, use the finest.
    segments = RowSegments(offsets, parents)
    for divisor in CUT_DIVISORS:
        layout = _assign_sequences(segments, size, divisor)
        work = [layout.pairs(rank) for rank in range(size)]
        if max(work) * size <= MAX_IMBALANCE * sum(work):
            break
    return layout


class _Ranks:
    """Spans assigned to each rank so far."""

    def __init__(self, size: int) -> None:
        self.spans: list[list[TokenSpan]] = [[] for _ in range(size)]
        """Spans by rank."""
        self.tokens = [0] * size
        """Number of tokens by rank."""
        self.pairs = [0] * size
        """Number of (query, key) pairs by rank."""

    def assign(self, rank: int, *spans: TokenSpan) -> None:
        """Assign spans to a rank."""
        self.spans[rank] += spans
        self.tokens[rank] += sum(span.tokens for span in spans)
        self.pairs[rank] += sum(span.pairs for span in spans)

    def by_tokens(self) -> list[int]:
        """Return the ranks sorted by number of tokens, fewest first."""
        return sorted(range(len(self.spans)), key=lambda rank: self.tokens[rank])

    def by_tokens_then_work(self) -> list[int]:
        """Return the ranks sorted by number of tokens, then by work, least first."""
        return sorted(
            range(len(self.spans)), key=lambda rank: (self.tokens[rank], self.pairs[rank])
        )

    def least_busy_with_space(self, tokens: int, capacity: int) -> int | None:
        """Return the rank with the least work among those with space; None if there is none.

        Args:
            tokens: number of tokens to add.
            capacity: maximum number of tokens per rank.
        """
        fitting = [
            rank for rank, assigned in enumerate(self.tokens) if assigned + tokens <= capacity
        ]
        if not fitting:
            return None
        return min(fitting, key=lambda rank: (self.pairs[rank], self.tokens[rank]))


def _assign_sequences(segments: RowSegments, size: int, divisor: int) -> ContextLayout:
    """Assign the sequences to ranks; cut those longer than (tokens per rank) / ``divisor``."""
    # Longest first: short sequences then fill the gaps.
    capacity = segments.tokens // size
    lengths = segments.lengths
    longest_first = sorted(range(len(lengths)), key=lambda sequence: -lengths[sequence])

    ranks = _Ranks(size)
    for sequence in longest_first:
        length = lengths[sequence]
        start = segments.depths[sequence]
        end = start + length
        if length * divisor > capacity and size > 1:
            _assign_mirrored_chunks(ranks, TokenSpan(sequence, start, end))
            continue

        # Keep the sequence whole: assign it to the rank with the least work that has space.
        rank = ranks.least_busy_with_space(length, capacity)
        if rank is not None:
            ranks.assign(rank, TokenSpan(sequence, start, end))
            continue

        # It does not fit on any rank as a whole, so fill the ranks one after another.
        for rank in ranks.by_tokens():
            part_end = min(end, start + capacity - ranks.tokens[rank])
            ranks.assign(rank, TokenSpan(sequence, start, part_end))
            start = part_end

    # Put shared spans first. The tokens that a rank sends in an all-gather are then one slice.
    ordered = [_in_order(spans, segments) for spans in ranks.spans]
    return ContextLayout(
        segments=segments,
        spans=tuple(spans for spans, _ in ordered),
        shared=tuple(shared for _, shared in ordered),
    )


def _assign_mirrored_chunks(ranks: _Ranks, sequence: TokenSpan) -> None:
    """Assign each rank a chunk from the front of a sequence and its mirror image from the back."""
    size = len(ranks.spans)
    chunks = list(_chunks(sequence, 2 * size))
    pairs = [(chunks[i], chunks[-1 - i]) for i in range(size)]

    # Pairs differ by at most one token. Ranks with fewer tokens get the longer pairs, so that ranks
    # never differ by more than one token.
    pairs.sort(key=lambda pair: -sum(span.tokens for span in pair))
    for rank, pair in zip(ranks.by_tokens_then_work(), pairs, strict=True):
        ranks.assign(rank, *pair)


def _chunks(span: TokenSpan, count: int) -> Iterator[TokenSpan]:
    """Cut a span into ``count`` spans. The first spans are one token longer if necessary."""
    base, longer = divmod(span.tokens, count)
    start = span.start
    for i in range(count):
        end = start + base + (i < longer)
        yield TokenSpan(span.sequence, start, end)
        start = end


def _is_whole(span: TokenSpan, segments: RowSegments) -> bool:
    """Return True if a span is a whole segment that neither has nor is a parent."""
    is_cut = span.tokens != segments.lengths[span.sequence]
    return not is_cut and segments.is_alone(span.sequence)


def _in_order(spans: list[TokenSpan], segments: RowSegments) -> tuple[tuple[TokenSpan, ...], int]:
    """Sort the spans of a rank: whole spans last, then by sequence and position.

    Adjacent spans are merged, and empty spans are dropped.

    Args:
        spans: spans of the rank.
        segments: segments of the row.

    Returns:
        The spans, and the number of tokens in spans that are not whole.
    """

    def is_whole(span: TokenSpan) -> bool:
        return _is_whole(span, segments)

    merged: list[TokenSpan] = []
    for span in sorted(spans, key=lambda span: (is_whole(span), span.sequence, span.start)):
        if span.tokens == 0:
            continue

        previous = merged[-1] if merged else None
        if previous and previous.sequence == span.sequence and previous.end == span.start:
            merged[-1] = previous._replace(end=span.end)
        else:
            merged.append(span)

    shared = sum(span.tokens for span in merged if not is_whole(span))
    return tuple(merged), shared
