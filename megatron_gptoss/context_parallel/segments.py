"""Segments of a packed row: whole sequences, or the segments of prefix trees.

A segment may continue another one, its parent. Its tokens then see the tokens of the parent, of the
parent's parent, and so on. Tokens that sequences share are thus in the row once. This module does
not import torch, so that ``gptoss plan`` can use it.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

NO_PARENT = -1
"""Parent of a segment that begins at position 0."""


@dataclass(frozen=True)
class RowSegments:
    """Consecutive segments of a row, each after its parent."""

    offsets: tuple[int, ...]
    """Start of each segment in the row, then the number of tokens."""
    parents: tuple[int, ...] = ()
    """Index of the segment that each segment continues, or NO_PARENT. Empty if no segment continues
    another one."""

    def __len__(self) -> int:
        """Return the number of segments."""
        return len(self.offsets) - 1

    @property
    def tokens(self) -> int:
        """Number of tokens in the row."""
        return self.offsets[-1]

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Number of tokens in each segment."""
        return tuple(end - start for start, end in pairwise(self.offsets))

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Position of each segment's first token in its sequences."""
        if not self.parents:
            return (0,) * len(self)
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent == NO_PARENT else depths[parent] + self.lengths[parent])
        return tuple(depths)

    @cached_property
    def _relatives(self) -> frozenset[int]:
        """Segments that have a parent or a child."""
        children = {i for i, parent in enumerate(self.parents) if parent != NO_PARENT}
        return frozenset(children | set(self.parents) - {NO_PARENT})

    def is_alone(self, segment: int) -> bool:
        """Return True if a segment has neither a parent nor a child."""
        return segment not in self._relatives

    def row_ranges(self, segment: int, start: int, end: int) -> list[tuple[int, int]]:
        """Return the places in the row of the tokens at positions ``start`` to ``end`` - 1.

        Args:
            segment: segment that contains the last of these tokens. The others are in this segment
                and its ancestors.
            start: first position in the sequence.
            end: position after the last token.

        Returns:
            Ranges of the row in the order of the positions. There is one if no token is in another
            segment.
        """
        # From the last position to the first, because a segment knows its parent but not its
        # children.
        ranges = []
        while end > start:
            depth = self.depths[segment]
            first = max(start, depth)
            if end > first:
                to_row = self.offsets[segment] - depth
                ranges.append((first + to_row, end + to_row))
                end = first
            if end > start:
                segment = self.parents[segment]
        return ranges[::-1]
