"""Transport of tensors through Ray's store.

Ray pickles arrays out of band: their bytes are written to shared memory once and read there.
Tensors are pickled by torch, each with an in-memory file, and every array costs a fraction of 1 ms.
Therefore all tensors of a model are stored as one array. A hundred small ones would take longer
than the forward pass that needs them.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import ray
import torch

ALIGNMENT = 16
"""Alignment of tensors in bytes, sufficient for any dtype."""


@dataclass(frozen=True)
class TensorSlot:
    """Position, dtype and shape of a tensor in ``TensorBytes.content``."""

    first: int
    """Index of the first byte."""
    dtype: torch.dtype
    shape: torch.Size

    @property
    def end(self) -> int:
        """Index after the last byte."""
        return self.first + self.shape.numel() * self.dtype.itemsize


@dataclass(frozen=True)
class TensorBytes:
    """Bytes of tensors in one array."""

    content: np.ndarray
    """uint8 [bytes], the tensors in sequence in C order. uint8 because numpy has no bfloat16."""
    slots: dict[str, TensorSlot]
    """Name -> position of the tensor."""

    @classmethod
    def of(cls, named_tensors: Mapping[str, torch.Tensor]) -> "TensorBytes":
        """Copy the bytes of tensors on any device."""
        slots = {}
        size = 0
        for name, tensor in named_tensors.items():
            slots[name] = TensorSlot(size, tensor.dtype, tensor.shape)
            # Round up, because torch can view only aligned bytes as another dtype.
            size = -(-slots[name].end // ALIGNMENT) * ALIGNMENT

        # At least one byte, because torch cannot view an empty array as another dtype.
        content = np.zeros(max(size, 1), np.uint8)
        parts = _parts(torch.from_numpy(content), slots)
        for name, tensor in named_tensors.items():
            parts[name].copy_(tensor.detach())
        return cls(content, slots)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return CPU tensors over a copy of the bytes, because bytes in the store are read-only."""
        return _parts(torch.from_numpy(self.content.copy()), self.slots)


def _parts(content: torch.Tensor, slots: Mapping[str, TensorSlot]) -> dict[str, torch.Tensor]:
    """Return the tensors in uint8 [bytes]. They share its memory."""
    parts = {}
    for name, slot in slots.items():
        part = content[slot.first : slot.end]
        parts[name] = part.view(slot.dtype).reshape(slot.shape)
    return parts


class StoredTensors(Mapping[str, torch.Tensor]):
    """Tensors by name in a place that other processes read.

    This process loads them on the first access.
    """

    def __init__(self, store: Callable[[], Any]) -> None:
        """Store a function that returns the tensors.

        Args:
            store: waits for the tensors and returns TensorBytes or their ``ray.ObjectRef``. It is
                called once, and raises an exception if the tensors are not available.
        """
        self._store = store

    @cached_property
    def stored(self) -> Any:
        """Reference to the tensors for other processes."""
        return self._store()

    @cached_property
    def _tensors(self) -> dict[str, torch.Tensor]:
        content = self.stored
        if isinstance(content, ray.ObjectRef):
            content = ray.get(content)
        return content.tensors()

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)
