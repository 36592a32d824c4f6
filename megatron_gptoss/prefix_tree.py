"""Prefix trees: sequences that begin with equal tokens as segments that the sequences share.

A tree contains the inputs of its sequences, which are all tokens but the last. An input depends
only on the inputs before it, so equal prefixes have equal hidden states and are computed once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import numpy as np

from megatron_gptoss.context_parallel.segments import NO_PARENT, RowSegments
from megatron_gptoss.samples import TrainingSamples


@dataclass(frozen=True)
class PrefixSharing:
    """Choice of the tokens that sequences share."""

    min_shared: int = 64
    """Smallest number of tokens in a segment that sequences share. Each segment costs a range of keys
    and a halo, so short ones do not pay."""
    prompts_only: bool = False
    """True to share only the tokens before the first label in the loss of each sequence."""

    def __post_init__(self) -> None:
        if self.min_shared < 1:
            raise ValueError(f"min_shared must be at least 1, got {self.min_shared}")


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


class PrefixKeys:
    """Keys of the inputs of some sequences. Inputs with equal keys may be one token of a tree."""

    def __init__(self, keys: Sequence[np.ndarray], lengths: Sequence[int] | None = None) -> None:
        """Store the keys.

        Args:
            keys: uint8 [inputs that may be shared, bytes of a key] of each sequence.
            lengths: number of inputs of each sequence, at least 1. By default all may be shared.
        """
        self.keys = keys
        self.lengths = [len(key) for key in keys] if lengths is None else list(lengths)

    @classmethod
    def of(
        cls,
        samples: TrainingSamples,
        sequences: Sequence[int],
        prompts_only: bool = False,
        digests: Sequence[np.ndarray] | None = None,
    ) -> Self:
        """Make the keys of samples.

        A key contains the id. If there are digests of routes, it also contains the digest.

        Args:
            samples: source of the sequences.
            sequences: indices of the sequences.
            prompts_only: see ``PrefixSharing``.
            digests: uint64 [inputs] of each of ``sequences``, see ``route_digests``.
        """
        keys = []
        lengths = []
        for number, i in enumerate(sequences):
            start, end = int(samples.offsets[i]), int(samples.offsets[i + 1]) - 1
            lengths.append(end - start)
            # The mask has one more entry than the inputs: that of the last token, which is only a
            # label.
            if prompts_only:
                end = start + _prompt_inputs(samples.loss_mask[start : end + 1])
            parts = [_as_bytes(samples.token_ids[start:end])]
            # Under routing replay, hidden states depend on the routes, too.
            if digests is not None:
                parts.append(_as_bytes(digests[number][: end - start]))
            keys.append(np.concatenate(parts, axis=1))
        return cls(keys, lengths)


class SortedPrefixes:
    """Sequences in an order in which those with equal prefixes are neighbors.

    Each range of this order is the leaves of a prefix tree in depth-first order.
    """

    def __init__(self, keys: PrefixKeys) -> None:
        # Bytes sort sequences by their first differing input.
        self.order = sorted(range(len(keys.keys)), key=lambda i: keys.keys[i].tobytes())
        """Index of the sequence at each place."""
        self.lengths = [keys.lengths[i] for i in self.order]
        """Number of inputs at each place."""
        self.common = np.array(
            [_common_length(keys.keys[a], keys.keys[b]) for a, b in pairwise(self.order)], np.int64
        )
        """int64 [n - 1]: inputs that the sequence at a place has in common with the next one."""

    def segments(self, first: int, end: int, min_shared: int) -> tuple[RowSegments, list[int]]:
        """Merge the equal prefixes of the sequences at places ``first`` to ``end`` - 1.

        Returns:
            Segments in depth-first order, and the segment in which each of the sequences ends.
        """
        return _merge(self.lengths[first:end], self.common[first : end - 1], min_shared)

    def count_tokens(self, sequences: Sequence[int], min_shared: int) -> int:
        """Return the number of inputs of a row with some of the sequences."""
        chosen = set(sequences)
        places = [place for place, i in enumerate(self.order) if i in chosen]
        # In sorted order, two sequences have as many inputs in common as the fewest of all
        # neighbors between them.
        common = [int(self.common[a:b].min()) for a, b in pairwise(places)]
        lengths = [self.lengths[place] for place in places]
        return _merge(lengths, np.array(common, np.int64), min_shared)[0].tokens


def _merge(
    lengths: Sequence[int], common: np.ndarray, min_shared: int
) -> tuple[RowSegments, list[int]]:
    """Merge the equal prefixes of sorted sequences.

    Args:
        lengths: number of inputs of each sequence.
        common: int64 [n - 1]: inputs that each sequence has in common with the next one.
        min_shared: see ``PrefixSharing``.

    Returns:
        See ``SortedPrefixes.segments``.
    """
    offsets = [0]
    parents: list[int] = []
    ends = [NO_PARENT] * len(lengths)

    def add(parent: int, tokens: int) -> int:
        """Add a segment, and return its index. Without tokens, return the parent."""
        if tokens == 0:
            return parent
        parents.append(parent)
        offsets.append(offsets[-1] + tokens)
        return len(parents) - 1

    # A range of sequences that have the segments down to ``parent`` in common, which end before
    # position ``depth``. A stack instead of recursion, because branches may be deep.
    pending = [(0, len(lengths), NO_PARENT, 0)] if lengths else []
    while pending:
        start, stop, parent, depth = pending.pop()
        if stop - start == 1:
            ends[start] = add(parent, lengths[start] - depth)
            continue

        branch = int(common[start : stop - 1].min())
        # Otherwise every branch below keeps its own copy of these inputs.
        if branch - depth >= min_shared:
            parent = add(parent, branch - depth)
            depth = branch
        # The last range is taken first from the stack, so the order is reversed.
        cuts = np.flatnonzero(common[start : stop - 1] == branch) + start + 1
        ranges = list(pairwise([start, *cuts.tolist(), stop]))
        pending += [(*places, parent, depth) for places in reversed(ranges)]
    return RowSegments(tuple(offsets), tuple(parents)), ends


def build_prefix_tree(keys: PrefixKeys, min_shared: int = 1) -> PrefixTree:
    """Merge equal prefixes of sequences.

    Args:
        keys: keys of the sequences.
        min_shared: see ``PrefixSharing``.

    Example:
        >>> words = [b"trees", b"treat", b"x"]
        >>> keys = PrefixKeys([np.frombuffer(word, np.uint8)[:, None] for word in words])
        >>> tree = build_prefix_tree(keys)
        >>> tree.segments.lengths, tree.segments.parents, tree.ends
        ((3, 2, 2, 1), (-1, 0, 0, -1), (2, 1, 3))
    """
    prefixes = SortedPrefixes(keys)
    segments, ends_by_place = prefixes.segments(0, len(prefixes.order), min_shared)
    ends = dict(zip(prefixes.order, ends_by_place, strict=True))
    return PrefixTree(segments, tuple(ends[i] for i in range(len(ends))))


def _prompt_inputs(loss_mask: np.ndarray) -> int:
    """Return the number of inputs before the first label in the loss.

    Args:
        loss_mask: bool [tokens of the sequence]. The first entry is unused.
    """
    labels = loss_mask[1:]
    # Label t is predicted from inputs 0 to t.
    return int(labels.argmax()) + 1 if labels.any() else len(labels)


def _common_length(first: np.ndarray, second: np.ndarray) -> int:
    """Return the number of equal leading rows of two arrays [n, bytes] and [m, bytes]."""
    length = min(len(first), len(second))
    differs = (first[:length] != second[:length]).any(axis=1)
    return int(differs.argmax()) if differs.any() else length


def _as_bytes(values: np.ndarray) -> np.ndarray:
    """Return values [tokens] as uint8 [tokens, bytes of a value]."""
    return np.ascontiguousarray(values)[:, None].view(np.uint8)
