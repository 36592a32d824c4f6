"""A GPU whose memory is controlled by a test."""

from __future__ import annotations

from megatron_gptoss.gpu_memory import MemoryReading


class ScriptedGpu:
    """A GPU with memory allocated by the test, and counters that behave like torch's."""

    def __init__(self) -> None:
        self.allocated = self.peak_allocated = 0
        self.reserved = self.peak_reserved = 0
        self.others = 500
        """Bytes used by other processes, and by this one outside of torch's allocator."""

    def allocate(self, size: int) -> None:
        self.allocated += size
        self.reserved = max(self.reserved, self.allocated)
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def release_cached_memory(self) -> None:
        self.reserved = self.allocated

    def read(self) -> MemoryReading:
        return MemoryReading(
            allocated=self.allocated,
            peak_allocated=self.peak_allocated,
            reserved=self.reserved,
            peak_reserved=self.peak_reserved,
            gpu_used=self.others + self.reserved,
            gpu_total=10_000,
        )

    def reset_peaks(self) -> None:
        self.peak_allocated = self.allocated
        self.peak_reserved = self.reserved
