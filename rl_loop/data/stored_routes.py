"""Routes that stay in Ray's store until a trainer rank packs them.

A rollout worker puts the routes of an episode into the store, and the ranks that train on the
episode read them there. The driver hands on where they are: it would otherwise hold, and copy,
more than all other columns together."""

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class StoredRoutes:
    """Stands for an array in the store, or for some of its rows."""

    reference: Any
    """A ``ray.ObjectRef``; None until the one who asked for the episode puts in what Ray gave it."""
    shape: tuple[int, ...]
    """[tokens - 1, layers, top_k]."""
    dtype: np.dtype
    """uint8 or int16."""
    start: int = 0
    """First row in the array that is stored: an episode's sequences share one."""

    def rows_of(self, stored: np.ndarray) -> np.ndarray:
        """Return the rows that are meant, of the array in the store: a view."""
        return stored[self.start : self.start + self.shape[0]]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * self.dtype.itemsize
