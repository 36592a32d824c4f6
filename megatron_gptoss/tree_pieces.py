"""Pieces of prefix trees that fit into micro-batches.

A tree that is too large is cut between two sequences. Both pieces have a copy of the tokens that the
two sequences share, so each cut costs these tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from megatron_gptoss.prefix_tree import SortedPrefixes

MAX_CUT_COST = 1.15
"""Largest cost of two pieces relative to the piece before the cut, if the cut is for balance only."""


@dataclass(frozen=True)
class TreePiece:
    """Sequences of one micro-batch."""

    sequences: list[int]
    """Indices of the sequences."""
    tokens: int
    """Number of inputs. Shared inputs count once."""
    cost: float
    """Cost of the inputs."""


def micro_batch_count(pieces: Sequence[TreePiece], max_tokens: int, step: int) -> int:
    """Return the smallest number of micro-batches that may hold all tokens, a multiple of ``step``."""
    tokens = sum(piece.tokens for piece in pieces)
    return max(1, -(-tokens // (max_tokens * step))) * step


def cut_trees(
    prefixes: SortedPrefixes,
    max_tokens: int,
    step: int,
    work: Callable[[int], float],
    min_shared: int,
) -> list[TreePiece]:
    """Return the trees of sequences, and cut those that are too large.

    A tree is too large if it has more than ``max_tokens``, or costs more than the mean micro-batch.

    Args:
        prefixes: the sequences, none of which has more than ``max_tokens`` inputs.
        max_tokens: limit of tokens in one micro-batch.
        step: divisor of the number of micro-batches.
        work: cost of a sequence as a function of its inputs.
        min_shared: see ``PrefixSharing``.
    """
    ranges = _Ranges(prefixes, work, min_shared)
    # Trees are the ranges whose neighbors have enough inputs in common.
    cuts = np.flatnonzero(prefixes.common < min_shared) + 1
    bounds = [0, *cuts.tolist(), len(prefixes.order)]
    pieces = {(first, end): ranges.piece(first, end) for first, end in pairwise(bounds)}

    is_changed = True
    while is_changed:
        is_changed = False
        # Every cut copies inputs, which may add micro-batches and lower their mean cost. Therefore
        # all pieces are compared again until none is cut.
        count = micro_batch_count(list(pieces.values()), max_tokens, step)
        mean_cost = sum(piece.cost for piece in pieces.values()) / count
        for (first, end), piece in list(pieces.items()):
            is_too_long = piece.tokens > max_tokens
            if end - first == 1 or not (is_too_long or piece.cost > mean_cost):
                continue
            cut = ranges.cut(first, end, piece.tokens, max_tokens)
            parts = {(first, cut): ranges.piece(first, cut), (cut, end): ranges.piece(cut, end)}
            cost = sum(part.cost for part in parts.values())
            if is_too_long or cost <= MAX_CUT_COST * piece.cost:
                del pieces[first, end]
                pieces |= parts
                is_changed = True
    return [pieces[places] for places in sorted(pieces)]


class _Ranges:
    """Pieces of consecutive places in the order of prefixes."""

    def __init__(
        self, prefixes: SortedPrefixes, work: Callable[[int], float], min_shared: int
    ) -> None:
        self.prefixes = prefixes
        self.work = work
        self.min_shared = min_shared

    def piece(self, first: int, end: int) -> TreePiece:
        """Return the piece of the sequences at places ``first`` to ``end`` - 1."""
        segments, _ = self.prefixes.segments(first, end, self.min_shared)
        # The tokens of a segment cost as much as a sequence that ends with the segment, minus the
        # tokens before the segment.
        cost = 0.0
        for depth, length in zip(segments.depths, segments.lengths, strict=True):
            cost += self.work(depth + length) - (self.work(depth) if depth else 0.0)
        return TreePiece(self.prefixes.order[first:end], segments.tokens, cost)

    def cut(self, first: int, end: int, tokens: int, max_tokens: int) -> int:
        """Return the place at which to cut a piece of several sequences.

        The cut copies few tokens, and fills micro-batches evenly.

        Args:
            first: first place of the piece.
            end: place after the last one.
            tokens: inputs of the piece.
            max_tokens: limit of tokens in one micro-batch.
        """
        common = self.prefixes.common[first : end - 1]
        # Every piece has the inputs that all sequences share.
        shared = int(common.min())
        pieces = max(2, -(-(tokens - shared) // max(1, max_tokens - shared)))
        # A cut in the middle of the pieces that are needed. Both sides can then be cut further
        # without an almost empty piece.
        target_share = (pieces // 2) / pieces

        # Inputs that a sequence adds to the sequences before it.
        unshared_tokens = np.array(self.prefixes.lengths[first:end]) - np.array([shared, *common])
        before = unshared_tokens.cumsum()[:-1] / max(1, unshared_tokens.sum())
        # Both terms are shares of the piece: of its inputs that the cut copies, and the distance
        # from the wanted place.
        return first + 1 + int((common / tokens + abs(before - target_share)).argmin())
