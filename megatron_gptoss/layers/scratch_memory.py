"""Memory that all layers share for temporary weights.

Dequantized, merged or rounded weights exist only while a layer multiplies. All layers write them to
the same memory, one layer after another.
"""

import torch
from torch import Tensor


class BufferLease:
    """Lease of scratch memory, valid until the next lease."""

    def __init__(self, memory: "ScratchMemory", number: int, tensor: Tensor) -> None:
        """Create a lease. Called by ``ScratchMemory.lease``.

        Args:
            memory: memory that the lease belongs to.
            number: number of the lease.
            tensor: the leased memory, of any shape [...].
        """
        self._memory = memory
        self._number = number
        self.tensor = tensor
        """Leased memory. The caller must write it before the next lease."""

    def read(self) -> Tensor | None:
        """Return the tensor [*shape], or None if another lease may have overwritten it.

        The tensor has the dtype of the memory.
        """
        return self.tensor if self._memory.last_lease == self._number else None


class ScratchMemory:
    """Memory for one tensor at a time, as large as the largest tensor so far."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        """Create empty memory.

        Args:
            device: device of the tensors.
            dtype: data type of the tensors.
        """
        # Store the number of the last lease instead of the lease. A reference cycle would keep
        # released gigabytes until Python's garbage collector runs.
        self.last_lease = 0
        """Number of the valid lease, from 1; 0 before the first."""
        self._buffer = torch.empty(0, device=device, dtype=dtype)

    def lease(self, shape: torch.Size) -> BufferLease:
        """Return a lease of an uninitialized tensor [*shape]. The previous lease ends."""
        self.last_lease += 1
        if self._buffer.numel() < shape.numel():
            # Release the old memory first, because there may not be enough for both.
            self._buffer = self._buffer.new_empty(0)
            self._buffer = self._buffer.new_empty(shape.numel())
        return BufferLease(self, self.last_lease, self._buffer[: shape.numel()].view(shape))


_memories: dict[tuple[str, torch.device, torch.dtype], ScratchMemory] = {}


def scratch_memory(name: str, device: torch.device, dtype: torch.dtype) -> ScratchMemory:
    """Return the memory for a purpose, created at its first use.

    Args:
        name: purpose, for example "merged gate_up".
        device: device of the tensors.
        dtype: data type of the tensors.
    """
    key = (name, device, dtype)
    if key not in _memories:
        _memories[key] = ScratchMemory(device, dtype)
    return _memories[key]


def release_scratch_memory() -> None:
    """Release all scratch memory to torch's allocator. It is allocated again when needed."""
    _memories.clear()
