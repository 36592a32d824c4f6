"""Measurement of GPU memory in each phase of a step, by the trainer process.

``PhaseMemory`` reads counters only when a phase starts, which costs almost no time. Without a GPU
it does not measure. ``CudaMemory`` and ``release_cached_memory`` contain all calls of CUDA.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from megatron_gptoss.layers.scratch_memory import release_scratch_memory


@dataclass(frozen=True)
class MemoryReading:
    """Memory counters at one time, in bytes."""

    allocated: int
    """Memory of this process's tensors."""
    peak_allocated: int
    """Maximum of ``allocated`` since the last reset."""
    reserved: int
    """Memory of torch's allocator: tensors and cached blocks."""
    peak_reserved: int
    """Maximum of ``reserved`` since the last reset."""
    gpu_used: int
    """Used memory of the whole GPU, including other processes and CUDA contexts."""
    gpu_total: int
    """Total memory of the GPU."""


@dataclass(frozen=True)
class PhasePeak:
    """Peak memory in one phase, in bytes."""

    allocated: int
    """Peak of this process's tensors."""
    reserved: int
    """Peak of torch's allocator."""
    gpu: int
    """Peak of the whole GPU.

    Other processes are measured at the start, at the end and at observations of the phase. Peaks of
    other processes between these times are missed.
    """

    def merge(self, other: "PhasePeak") -> "PhasePeak":
        """Return the maximum of each value."""
        return PhasePeak(
            allocated=max(self.allocated, other.allocated),
            reserved=max(self.reserved, other.reserved),
            gpu=max(self.gpu, other.gpu),
        )


@dataclass(frozen=True)
class PhasePeaks:
    """Peaks of all phases."""

    peaks: dict[str, PhasePeak]
    """Peak by phase."""
    gpu_total: int
    """Total memory of the GPU in bytes."""


class MemoryCounters(Protocol):
    """Source of memory counters. ``CudaMemory`` is the implementation; tests have others."""

    def read(self) -> MemoryReading:
        """Return the current counters."""
        ...

    def reset_peaks(self) -> None:
        """Reset the peaks to the current values."""
        ...


class CudaMemory:
    """Counters of torch's allocator and of this process's GPU."""

    def read(self) -> MemoryReading:
        """Return the current counters."""
        free, total = torch.cuda.mem_get_info()
        return MemoryReading(
            allocated=torch.cuda.memory_allocated(),
            peak_allocated=torch.cuda.max_memory_allocated(),
            reserved=torch.cuda.memory_reserved(),
            peak_reserved=torch.cuda.max_memory_reserved(),
            gpu_used=total - free,
            gpu_total=total,
        )

    def reset_peaks(self) -> None:
        """Reset the peaks to the current values."""
        torch.cuda.reset_peak_memory_stats()


class PhaseMemory:
    """Meter of every phase's peak memory since the last ``take``.

    Phases follow each other without gaps. A phase that occurs again keeps the larger peak.
    """

    def __init__(self, counters: MemoryCounters | None) -> None:
        """Create a meter. ``counters`` is None for a meter that does not measure."""
        self._counters = counters
        self._phase: str | None = None
        """Current phase; None before the first."""
        self._others_at_begin = 0
        """Bytes outside of this process's torch allocator at the start of the phase."""
        self._peaks: dict[str, PhasePeak] = {}
        """Peaks by phase."""

    def enter(self, phase: str) -> None:
        """End the current phase and start ``phase``."""
        if self._counters is None:
            return

        reading = self._counters.read()
        self._add_to_current_phase(reading)
        self._counters.reset_peaks()
        self._phase = phase
        self._others_at_begin = reading.gpu_used - reading.reserved

    def observe(self) -> None:
        """Add the current memory to the current phase, to detect peaks of other processes."""
        if self._counters is not None:
            self._add_to_current_phase(self._counters.read())

    def split(self) -> None:
        """Measure the rest of the current phase separately.

        Call it after this process has released memory.
        """
        # Another process may allocate the released memory before the phase ends. It would be
        # counted twice.
        if self._phase is not None:
            self.enter(self._phase)

    def take(self) -> PhasePeaks | None:
        """Return the peaks and reset them. The current phase continues.

        Returns:
            Peaks by phase; None if nothing is measured.
        """
        if self._counters is None or self._phase is None:
            return None

        self.enter(self._phase)
        peaks = self._peaks
        self._peaks = {}
        return PhasePeaks(peaks, self._counters.read().gpu_total)

    def _add_to_current_phase(self, reading: MemoryReading) -> None:
        """Update the peak of the current phase with a reading."""
        if self._phase is None:
            return

        # Use the larger value of start and end for other processes, because a server may have
        # released its memory during the phase.
        others = max(self._others_at_begin, reading.gpu_used - reading.reserved)
        peak = PhasePeak(
            allocated=reading.peak_allocated,
            reserved=reading.peak_reserved,
            gpu=others + reading.peak_reserved,
        )
        before = self._peaks.get(self._phase)
        self._peaks[self._phase] = before.merge(peak) if before else peak


def phase_memory() -> PhaseMemory:
    """Return a meter for this process's GPU. On a CPU it does not measure."""
    return PhaseMemory(CudaMemory() if torch.cuda.is_available() else None)


def release_cached_memory() -> None:
    """Release the cached memory of torch's allocator, so that other processes can use it.

    The memory that layers share for temporary weights is released, too.
    """
    release_scratch_memory()
    # ipc_collect first: it frees blocks that another process has opened by CUDA IPC and closed.
    if torch.cuda.is_available():
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()
