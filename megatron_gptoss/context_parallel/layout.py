"""Which context-parallel rank holds which tokens of a packed row (docs/architecture.md).

Long sequences are cut into chunks, and a rank gets a chunk from the front and its mirror image
from the back: with causal attention that is equal work (arXiv 2411.01783). Short ones stay whole.
Positions travel with the tokens, so nothing depends on the order. No torch here: a plan needs none.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

CUT_FRACTIONS = (2, 4, 8, 16)
"""Sequences longer than the n-th part of a rank's tokens are cut; the first n that balances the
work is taken."""
MAX_IMBALANCE = 1.02
"""Work of the busiest rank over the mean that is good enough."""


class Span(NamedTuple):
    """Consecutive tokens of one sequence on one rank: positions start to end of the sequence."""

    sequence: int
    """Its number in the row."""
    start: int
    end: int

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return self.end - self.start

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key in causal attention."""
        # The query at position p sees p + 1 keys: the sum over p from start to end - 1.
        return (self.end * (self.end + 1) - self.start * (self.start + 1)) // 2


@dataclass(frozen=True)
class ContextLayout:
    """The split of one row; the same on every rank, as it follows from ``offsets`` and
    ``size``."""

    offsets: tuple[int, ...]
    """Where each sequence starts in the row, and the row's tokens."""
    spans: tuple[tuple[Span, ...], ...]
    """Per rank, in the order in which it holds them; spans of sequences that others also hold come
    first."""
    shared: tuple[int, ...]
    """Per rank how many of its tokens belong to sequences that several ranks hold."""
    plans: dict[Any, Any] = field(default_factory=dict, compare=False)
    """What the schemes derive from the layout, once per row and not once per layer."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.spans)

    @property
    def tokens_per_rank(self) -> int:
        """Tokens that each rank holds."""
        return self.offsets[-1] // self.size

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(end - start for start, end in pairwise(self.offsets))

    def cached[T](self, key: Any, make: Callable[[], T]) -> T:
        """Return ``make()`` of the first call with this key."""
        if key not in self.plans:
            self.plans[key] = make()
        return self.plans[key]

    def is_whole(self, span: Span) -> bool:
        """Tell whether no other rank holds tokens of the span's sequence."""
        sequence_tokens = self.offsets[span.sequence + 1] - self.offsets[span.sequence]
        return span.tokens == sequence_tokens

    def pairs(self, rank: int, window: int | None = None) -> int:
        """Count the pairs of a query and a key that a rank computes in one layer."""
        total = sum(span.pairs for span in self.spans[rank])
        if window is None:
            return total

        # Beyond the window a query sees `window` keys: take off what lies further back. It is what
        # the queries would see if they stood `window` positions earlier.
        invisible = 0
        for span in self.spans[rank]:
            earlier = span._replace(
                start=max(0, span.start - window), end=max(0, span.end - window)
            )
            invisible += earlier.pairs
        return total - invisible


@lru_cache(maxsize=16)
def balanced_layout(offsets: tuple[int, ...], size: int) -> ContextLayout:
    """Share out a row over ``size`` ranks: equally many tokens each, about equal work.

    Args:
        offsets: where each sequence starts in the row, and the row's tokens.
        size: number of context-parallel ranks.

    Raises:
        ValueError: when the tokens are no multiple of ``size``.
    """
    tokens = offsets[-1]
    if tokens % size:
        raise ValueError(
            f"{tokens} packed tokens cannot be shared out equally over {size} context-parallel "
            f"ranks; pad the row to {-(-tokens // size) * size} tokens (align={size}) or use a "
            f"context-parallel size that divides {tokens}"
        )

    # The coarsest cut that balances: every sequence that stays whole needs no messages. Where none
    # balances, the finest is taken.
    for fraction in CUT_FRACTIONS:
        layout = _share_out(offsets, size, fraction)
        work = [layout.pairs(rank) for rank in range(size)]
        if max(work) * size <= MAX_IMBALANCE * sum(work):
            break
    return layout


class _Ranks:
    """What has been given to each rank so far."""

    def __init__(self, size: int) -> None:
        self.spans: list[list[Span]] = [[] for _ in range(size)]
        self.tokens = [0] * size
        self.pairs = [0] * size

    def give(self, rank: int, *spans: Span) -> None:
        """Give spans to a rank."""
        self.spans[rank] += spans
        self.tokens[rank] += sum(span.tokens for span in spans)
        self.pairs[rank] += sum(span.pairs for span in spans)

    def by_tokens(self) -> list[int]:
        """Order the ranks by tokens, the one with the fewest first."""
        return sorted(range(len(self.spans)), key=lambda rank: self.tokens[rank])

    def by_tokens_then_work(self) -> list[int]:
        """Order the ranks by tokens, and where these are equal by work."""
        return sorted(
            range(len(self.spans)), key=lambda rank: (self.tokens[rank], self.pairs[rank])
        )

    def least_busy_with_room(self, tokens: int, capacity: int) -> int | None:
        """Return the rank with the least work that has room for ``tokens`` more; else None."""
        fitting = [rank for rank, held in enumerate(self.tokens) if held + tokens <= capacity]
        if not fitting:
            return None
        return min(fitting, key=lambda rank: (self.pairs[rank], self.tokens[rank]))


def _share_out(offsets: tuple[int, ...], size: int, fraction: int) -> ContextLayout:
    """Share out the sequences, the longest first; cut those above a rank's tokens / fraction."""
    capacity = offsets[-1] // size
    lengths = [end - start for start, end in pairwise(offsets)]
    longest_first = sorted(range(len(lengths)), key=lambda sequence: -lengths[sequence])

    ranks = _Ranks(size)
    for sequence in longest_first:
        length = lengths[sequence]
        if length * fraction > capacity and size > 1:
            _give_mirrored_chunks(ranks, sequence, length)
            continue

        # Without a cut: to whoever has least attention to compute, tokens permitting.
        rank = ranks.least_busy_with_room(length, capacity)
        if rank is not None:
            ranks.give(rank, Span(sequence, 0, length))
            continue

        # It fits nowhere as a whole: fill up one rank after the other.
        start = 0
        for rank in ranks.by_tokens():
            end = min(length, start + capacity - ranks.tokens[rank])
            ranks.give(rank, Span(sequence, start, end))
            start = end

    # Shared spans first, so that what a rank contributes to an all-gather is a slice from its first
    # token.
    ordered = [_in_order(spans, lengths) for spans in ranks.spans]
    return ContextLayout(
        offsets=offsets,
        spans=tuple(spans for spans, _ in ordered),
        shared=tuple(shared for _, shared in ordered),
    )


def _give_mirrored_chunks(ranks: _Ranks, sequence: int, length: int) -> None:
    """Give every rank a chunk from the front of a sequence and its mirror image from the back."""
    size = len(ranks.spans)
    chunks = list(_chunks(sequence, length, 2 * size))
    pairs = [(chunks[i], chunks[-1 - i]) for i in range(size)]

    # Pairs differ by a token at most: the longer ones go where fewer tokens are, so that ranks
    # never differ by more.
    pairs.sort(key=lambda pair: -sum(span.tokens for span in pair))
    for rank, pair in zip(ranks.by_tokens_then_work(), pairs, strict=True):
        ranks.give(rank, *pair)


def _chunks(sequence: int, length: int, count: int) -> Iterator[Span]:
    """Cut a sequence into ``count`` spans, the first of which are a token longer if need be."""
    base, longer = divmod(length, count)
    start = 0
    for i in range(count):
        end = start + base + (i < longer)
        yield Span(sequence, start, end)
        start = end


def _in_order(spans: list[Span], lengths: list[int]) -> tuple[tuple[Span, ...], int]:
    """Order a rank's spans: of sequences that others hold too first, then by position.

    Adjacent spans become one, empty ones go. Returns the spans and the tokens of the shared ones.
    """

    def is_whole(span: Span) -> bool:
        return span.tokens == lengths[span.sequence]

    merged: list[Span] = []
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
