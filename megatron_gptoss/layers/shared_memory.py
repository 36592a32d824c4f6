"""Memory that layers share for what they make anew whenever they need it.

A frozen weight in four bits, or one with an adapter, is a matrix of full size only while it
multiplies. All layers write such matrices to the same place, one after the other.
"""

import torch
from torch import Tensor


class Loan:
    """What one call wrote to shared memory, for as long as no other overwrites it."""

    def __init__(self, memory: "SharedMemory", number: int, tensor: Tensor) -> None:
        self._memory = memory
        self._number = number
        self.tensor = tensor
        """To write into, at once."""

    def read(self) -> Tensor | None:
        """Return what was written; None if it was overwritten since."""
        return self.tensor if self._memory.last_loan == self._number else None


class SharedMemory:
    """Room for one tensor at a time, as large as the largest so far.

    It knows loans by their numbers. If it held the loans themselves, which know it, only Python's
    search for garbage would free memory that was given back: gigabytes, some steps later.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.last_loan = 0
        """Number of the loan whose content it has; loans count from 1."""
        self._buffer = torch.empty(0, device=device, dtype=dtype)

    def lend(self, shape: torch.Size) -> Loan:
        """Return room for a tensor [*shape], uninitialised; the loan before ends."""
        self.last_loan += 1
        if self._buffer.numel() < shape.numel():
            # The old room first: there may be none for both.
            self._buffer = self._buffer.new_empty(0)
            self._buffer = self._buffer.new_empty(shape.numel())
        return Loan(self, self.last_loan, self._buffer[: shape.numel()].view(shape))


_memories: dict[tuple[str, torch.device, torch.dtype], SharedMemory] = {}


def shared_memory(name: str, device: torch.device, dtype: torch.dtype) -> SharedMemory:
    """Return the memory of this name, device and dtype."""
    key = (name, device, dtype)
    if key not in _memories:
        _memories[key] = SharedMemory(device, dtype)
    return _memories[key]


def release_shared_memory() -> None:
    """Give all of it back to torch's allocator; the next call that needs it allocates it again."""
    _memories.clear()
