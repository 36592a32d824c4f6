"""Tensors on their way through Ray's store.

Ray pickles an array beside its bytes, which are written to shared memory once and read there. A
tensor it pickles as torch does, with a file in memory for each, and every array costs a fraction of
a millisecond. So all tensors of a model are one array: a hundred small ones would otherwise take
longer than the forward pass that they are for."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import ray
import torch

ALIGNMENT = 16
"""Bytes. Where a tensor begins, one of any dtype may."""


@dataclass(frozen=True)
class Place:
    """Where the bytes of a tensor are, and what they are."""

    first: int
    """Index of the first one."""
    dtype: torch.dtype
    shape: torch.Size

    @property
    def end(self) -> int:
        """The index behind the last one."""
        return self.first + self.shape.numel() * self.dtype.itemsize


@dataclass(frozen=True)
class TensorBytes:
    """What tensors are made of."""

    content: np.ndarray
    """uint8 [bytes], one tensor behind the other in C order; of no dtype, for numpy has no
    bfloat16."""
    places: dict[str, Place]
    """By name."""

    @classmethod
    def of(cls, named: Mapping[str, torch.Tensor]) -> "TensorBytes":
        """Copy the bytes of tensors on any device."""
        places = {}
        size = 0
        for name, tensor in named.items():
            places[name] = Place(size, tensor.dtype, tensor.shape)
            size = -(-places[name].end // ALIGNMENT) * ALIGNMENT

        # At least one byte: torch views no array of none as another dtype.
        content = np.zeros(max(size, 1), np.uint8)
        parts = _parts(torch.from_numpy(content), places)
        for name, tensor in named.items():
            parts[name].copy_(tensor.detach())
        return cls(content, places)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Make tensors on the CPU of a copy of the bytes: those in the store may not be written."""
        return _parts(torch.from_numpy(self.content.copy()), self.places)


def _parts(content: torch.Tensor, places: Mapping[str, Place]) -> dict[str, torch.Tensor]:
    """Return the tensors that lie in uint8 [bytes]; they share its memory."""
    parts = {}
    for name, place in places.items():
        part = content[place.first : place.end]
        parts[name] = part.view(place.dtype).reshape(place.shape)
    return parts


class StoredTensors(Mapping[str, torch.Tensor]):
    """Tensors by name that stay where other processes read them. They come into this one when it
    looks at the first."""

    def __init__(self, store: Callable[[], Any]) -> None:
        """``store`` returns TensorBytes, or the ``ray.ObjectRef`` of such, as soon as they are
        there. It is called once, and raises what has kept them from it."""
        self._store = store

    @cached_property
    def stored(self) -> Any:
        """What stands for the tensors where other processes read them."""
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
