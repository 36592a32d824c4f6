"""Which context-parallel rank holds which tokens of a packed row (docs/architecture.md).

Mirrored chunks of long sequences are equal work (arXiv 2411.01783). Positions travel with the tokens, so nothing
depends on the order."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch

WHOLE = (2, 4, 8, 16)
"""Sequences longer than the n-th part of a rank's tokens are cut; the first n that balances the work is taken."""
IMBALANCE = 1.02
"""Work of the busiest rank over the mean that is good enough."""


class Run(NamedTuple):
    """Consecutive tokens of one sequence on one rank: positions start to end of sequence number ``sequence``."""

    sequence: int
    start: int
    end: int

    @property
    def work(self) -> int:
        """Pairs of a query and a key in causal attention."""
        return (self.end * (self.end + 1) - self.start * (self.start + 1)) // 2


@dataclass(frozen=True)
class ContextLayout:
    """The split of one row. The same on every rank: all of it follows from ``offsets`` and ``size``."""

    offsets: tuple[int, ...]
    """Where each sequence starts in the row, and the row's tokens."""
    runs: tuple[tuple[Run, ...], ...]
    """Per rank, in the order in which it holds them; runs of sequences that others also hold come first."""
    shared: tuple[int, ...]
    """Per rank how many of its tokens belong to sequences that several ranks hold."""
    plans: dict[Any, Any] = field(default_factory=dict, compare=False)
    """What the schemes derive from the layout, once per row and not once per layer."""

    @property
    def size(self) -> int:
        return len(self.runs)

    @property
    def tokens_per_rank(self) -> int:
        return self.offsets[-1] // self.size

    @cached_property
    def order(self) -> torch.Tensor:
        """int64 [tokens]: for rank 0's tokens, then rank 1's and so on, where each stands in the row."""
        return torch.cat([self.row_indices(run) for runs in self.runs for run in runs])

    @cached_property
    def inverse(self) -> torch.Tensor:
        """int64 [tokens]: for each token of the row, where it stands in ``order``."""
        return torch.empty_like(self.order).index_copy_(0, self.order, torch.arange(len(self.order)))

    @property
    def longest(self) -> int:
        return max(end - start for start, end in pairwise(self.offsets))

    def cached[T](self, key: Any, make: Callable[[], T]) -> T:
        """``make()`` of the first call with this key."""
        if key not in self.plans:
            self.plans[key] = make()
        return self.plans[key]

    def row_indices(self, run: Run) -> torch.Tensor:
        return torch.arange(run.start, run.end) + self.offsets[run.sequence]

    def is_whole(self, run: Run) -> bool:
        """Whether no other rank holds tokens of the run's sequence."""
        return run.end - run.start == self.offsets[run.sequence + 1] - self.offsets[run.sequence]

    def part(self, rank: int) -> torch.Tensor:
        """int64 [tokens / size]: which tokens of the row a rank holds."""
        return self.order[rank * self.tokens_per_rank : (rank + 1) * self.tokens_per_rank]

    def pairs(self, rank: int, window: int | None = None) -> int:
        """Pairs of a query and a key that a rank computes in one layer."""
        total = sum(run.work for run in self.runs[rank])
        if window is None:
            return total
        # beyond the window a query sees `window` keys: take off what lies further back
        return total - sum(Run(0, max(0, r.start - window), max(0, r.end - window)).work for r in self.runs[rank])


@lru_cache(maxsize=16)
def balanced_layout(offsets: tuple[int, ...], size: int) -> ContextLayout:
    """Share out a row over ``size`` ranks. Raises ValueError when its tokens are no multiple of ``size``."""
    tokens = offsets[-1]
    if tokens % size:
        raise ValueError(
            f"{tokens} packed tokens cannot be shared out equally over {size} context-parallel ranks; pad the row to "
            f"{-(-tokens // size) * size} tokens (align={size}) or use a context-parallel size that divides {tokens}"
        )
    for whole in WHOLE:
        layout = _share_out(offsets, size, whole)
        work = [layout.pairs(rank) for rank in range(size)]
        if max(work) * size <= IMBALANCE * sum(work):
            break
    return layout


def _share_out(offsets: tuple[int, ...], size: int, whole: int) -> ContextLayout:
    share = offsets[-1] // size
    lengths = [end - start for start, end in pairwise(offsets)]
    held: list[list[Run]] = [[] for _ in range(size)]
    load, work = [0] * size, [0] * size

    def give(rank: int, *runs: Run) -> None:
        held[rank] += runs
        load[rank] += sum(run.end - run.start for run in runs)
        work[rank] += sum(run.work for run in runs)

    for sequence in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[sequence]
        if length * whole > share and size > 1:
            chunks = list(_chunks(sequence, length, 2 * size))
            pairs = [(chunks[i], chunks[-1 - i]) for i in range(size)]
            # pairs differ by a token at most: the longer ones go where fewer tokens are, so ranks never do by more
            pairs.sort(key=lambda pair: -sum(run.end - run.start for run in pair))
            for rank, pair in zip(sorted(range(size), key=lambda r: (load[r], work[r])), pairs, strict=True):
                give(rank, *pair)
            continue
        fitting = [rank for rank in range(size) if load[rank] + length <= share]
        if fitting:
            give(min(fitting, key=lambda r: (work[r], load[r])), Run(sequence, 0, length))
            continue
        start = 0
        for rank in sorted(range(size), key=lambda r: load[r]):
            end = min(length, start + share - load[rank])
            give(rank, Run(sequence, start, end))
            start = end
    runs, shared = zip(*(_in_order(part, lengths) for part in held), strict=True)
    return ContextLayout(offsets, runs, shared)


def _chunks(sequence: int, length: int, count: int) -> Iterator[Run]:
    base, longer = divmod(length, count)
    start = 0
    for i in range(count):
        end = start + base + (i < longer)
        yield Run(sequence, start, end)
        start = end


def _in_order(held: list[Run], lengths: list[int]) -> tuple[tuple[Run, ...], int]:
    """Sequences that others hold too first, in order of position; adjacent runs become one, empty ones go."""
    runs: list[Run] = []
    for run in sorted(held, key=lambda r: (r.end - r.start == lengths[r.sequence], r.sequence, r.start)):
        if run.start == run.end:
            continue
        if runs and runs[-1].sequence == run.sequence and runs[-1].end == run.start:
            run = runs.pop()._replace(end=run.end)
        runs.append(run)
    shared = [run.end - run.start for run in runs if run.end - run.start < lengths[run.sequence]]
    return tuple(runs), sum(shared)
