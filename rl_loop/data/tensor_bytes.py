"""Tensors on their way through Ray's store.

Ray pickles an array beside its bytes, which are written to shared memory once and read there. A
tensor it pickles as torch does, with a file in memory for each: a hundred small ones take longer
than the forward pass that they are for."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class TensorBytes:
    """What a tensor is made of."""

    content: np.ndarray
    """uint8 [bytes], in C order; of no dtype, for numpy has no bfloat16."""
    dtype: torch.dtype
    shape: torch.Size

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "TensorBytes":
        """Take the bytes of a tensor, which are shared with it where it is contiguous and on the
        CPU."""
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        return cls(flat.view(torch.uint8).numpy(), tensor.dtype, tensor.shape)

    def tensor(self) -> torch.Tensor:
        """Make a tensor of a copy of the bytes: those in the store may not be written."""
        restored = torch.empty(self.shape.numel(), dtype=self.dtype)
        restored.view(torch.uint8).numpy()[:] = self.content
        return restored.reshape(self.shape)


def to_bytes(named: Mapping[str, torch.Tensor]) -> dict[str, TensorBytes]:
    """Take the bytes of tensors by name."""
    return {name: TensorBytes.of(tensor) for name, tensor in named.items()}


def to_tensors(named: Mapping[str, TensorBytes]) -> dict[str, torch.Tensor]:
    """Make tensors on the CPU, by name, of bytes."""
    return {name: content.tensor() for name, content in named.items()}
