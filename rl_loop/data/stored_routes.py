"""Routes that stay in Ray's store until a trainer rank packs them.

A rollout worker stores the routes of an episode, and the ranks that train on the episode read them
from the store. The driver passes only references. Otherwise it would hold and copy more bytes than
all other columns have together.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class StoredRoutes:
    """Reference to an array in the store, or to some of its rows."""

    reference: Any
    """``ray.ObjectRef`` of the array. None until the caller of the worker sets Ray's reference."""
    shape: tuple[int, ...]
    """[tokens - 1, layers, top_k]."""
    dtype: np.dtype
    """uint8 or int16."""
    start: int = 0
    """First row in the stored array. The sequences of an episode share one array."""

    def select_rows(self, stored: np.ndarray) -> np.ndarray:
        """Return this object's rows of the stored array, as a view."""
        return stored[self.start : self.start + self.shape[0]]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * self.dtype.itemsize
