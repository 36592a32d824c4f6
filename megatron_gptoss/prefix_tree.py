"""Prefix trees: sequences that begin with equal tokens as segments that the sequences share.

A tree contains the inputs of its sequences, which are all tokens but the last. An input depends
only on the inputs before it, so equal prefixes have equal hidden states and are computed once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from megatron_gptoss.context_parallel.segments import NO_PARENT, RowSegments
from megatron_gptoss.samples import TrainingSamples


@dataclass(frozen=True)
class PrefixTree:
    """Segments of some sequences."""

    segments: RowSegments
    """Segments in depth-first order, without padding."""
    ends: tuple[int, ...]
    """Segment in which each sequence ends."""

    @property
    def tokens(self) -> int:
        """Number of tokens of the tree."""
        return self.segments.tokens

    def rows(self, sequence: int) -> np.ndarray:
        """Return the place of each input of a sequence among the tokens of the tree, int64."""
        last = self.ends[sequence]
        end = self.segments.depths[last] + self.segments.lengths[last]
        ranges = self.segments.row_ranges(last, 0, end)
        return np.concatenate([np.arange(start, stop) for start, stop in ranges])


def prefix_keys(samples: TrainingSamples, sequences: Sequence[int]) -> list[np.ndarray]:
    """Return a key of each input, which is equal for inputs that may be one token of a tree.

    A key contains the id. If the samples have routes, it also contains the set of experts of each
    layer, because hidden states depend on them under routing replay.

    Returns:
        uint8 [inputs, bytes of a key] for each sequence.
    """
    keys = []
    for i in sequences:
        ids = samples.token_ids[samples.offsets[i] : samples.offsets[i + 1] - 1]
        parts = [_as_bytes(ids)]
        if samples.routed_experts is not None:
            # Sorted, because the order of the experts does not change the output.
            parts.append(_as_bytes(np.sort(samples.routed_experts[i], axis=-1)))
        keys.append(np.concatenate(parts, axis=1))
    return keys


def build_prefix_tree(keys: Sequence[np.ndarray], min_shared: int = 1) -> PrefixTree:
    """Merge equal prefixes of sequences.

    Args:
        keys: uint8 [inputs, bytes of a key] of each sequence, see ``prefix_keys``. At least one
            input each.
        min_shared: smallest number of tokens in a segment that sequences share. Each segment costs
            a range of keys and a halo, so short ones do not pay.

    Raises:
        ValueError: ``min_shared`` is not positive.

    Example:
        >>> words = [b"trees", b"treat", b"x"]
        >>> tree = build_prefix_tree([np.frombuffer(word, np.uint8)[:, None] for word in words])
        >>> tree.segments.lengths, tree.segments.parents, tree.ends
        ((3, 2, 2, 1), (-1, 0, 0, -1), (2, 1, 3))
    """
    if min_shared < 1:
        raise ValueError(f"min_shared must be at least 1, got {min_shared}")

    # Sequences with equal prefixes are neighbors in the order of their bytes.
    order = sorted(range(len(keys)), key=lambda i: keys[i].tobytes())
    common = np.array(
        [_common_length(keys[first], keys[second]) for first, second in pairwise(order)], np.int64
    )
    offsets = [0]
    parents: list[int] = []
    ends = [NO_PARENT] * len(keys)

    def add(parent: int, tokens: int) -> int:
        """Add a segment, and return its index. Without tokens, return the parent."""
        if tokens == 0:
            return parent
        parents.append(parent)
        offsets.append(offsets[-1] + tokens)
        return len(parents) - 1

    # A range of ``order`` whose sequences have the segments down to ``parent`` in common, which end
    # before position ``depth``. A stack instead of recursion, because branches may be deep.
    pending = [(0, len(order), NO_PARENT, 0)] if keys else []
    while pending:
        first, end, parent, depth = pending.pop()
        if end - first == 1:
            sequence = order[first]
            ends[sequence] = add(parent, len(keys[sequence]) - depth)
            continue

        branch = int(common[first : end - 1].min())
        if branch - depth >= min_shared:
            parent = add(parent, branch - depth)
            depth = branch
        # The last range is taken first from the stack, so the order is reversed.
        ranges = list(_split(common, first, end, branch))
        pending += [(start, stop, parent, depth) for start, stop in reversed(ranges)]
    return PrefixTree(RowSegments(tuple(offsets), tuple(parents)), tuple(ends))


def _split(common: np.ndarray, first: int, end: int, branch: int) -> Iterator[tuple[int, int]]:
    """Yield the parts of a range of sequences that have more than ``branch`` tokens in common."""
    cuts = np.flatnonzero(common[first : end - 1] == branch) + first + 1
    yield from pairwise([first, *cuts.tolist(), end])


def _common_length(first: np.ndarray, second: np.ndarray) -> int:
    """Return the number of equal leading rows of two arrays [n, bytes] and [m, bytes]."""
    length = min(len(first), len(second))
    differs = (first[:length] != second[:length]).any(axis=1)
    return int(differs.argmax()) if differs.any() else length


def _as_bytes(values: np.ndarray) -> np.ndarray:
    """Return values [tokens, ...] as uint8 [tokens, bytes of a token]."""
    return np.ascontiguousarray(values).reshape(len(values), -1).view(np.uint8)
