"""What a GPU holds in each phase of a step, measured by the process that trains on it.

``PhaseMemory`` is told when a phase begins. It reads counters then and nothing in between, so it
costs next to nothing; without a GPU it measures nothing. What is asked of CUDA is in ``CudaMemory``
and ``give_back_cache``.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from megatron_gptoss.layers.shared_memory import release_shared_memory


@dataclass(frozen=True)
class MemoryReading:
    """Counters of one moment, in bytes."""

    allocated: int
    """Of this process's tensors."""
    peak_allocated: int
    """The most of it since the peaks were reset."""
    reserved: int
    """What torch's allocator holds: tensors, and what it keeps for the next ones."""
    peak_reserved: int
    """The most of it since the peaks were reset."""
    gpu_used: int
    """Of the whole GPU, by all processes: servers and contexts count, too."""
    gpu_total: int
    """What the GPU has."""


@dataclass(frozen=True)
class PhasePeak:
    """The most that a GPU held in one phase, in bytes."""

    allocated: int
    """Of this process's tensors."""
    reserved: int
    """By torch's allocator."""
    gpu: int
    """Of the whole GPU, by all processes. Others are looked at when the phase begins, ends and is
    observed, so what they hold in between only is missed."""

    def merged(self, other: "PhasePeak") -> "PhasePeak":
        """Return the larger of each figure."""
        return PhasePeak(
            allocated=max(self.allocated, other.allocated),
            reserved=max(self.reserved, other.reserved),
            gpu=max(self.gpu, other.gpu),
        )


@dataclass(frozen=True)
class PhasePeaks:
    """What ``PhaseMemory.take`` returns."""

    peaks: dict[str, PhasePeak]
    """By phase."""
    gpu_total: int
    """Bytes that the GPU has."""


class MemoryCounters(Protocol):
    """Where ``PhaseMemory`` reads: a CudaMemory, or what a test puts in its place."""

    def read(self) -> MemoryReading:
        """Return all counters as they are now."""
        ...

    def reset_peaks(self) -> None:
        """Let peaks begin at what is held now."""
        ...


class CudaMemory:
    """The counters of torch's allocator and of this process's GPU."""

    def read(self) -> MemoryReading:
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
        torch.cuda.reset_peak_memory_stats()


class PhaseMemory:
    """Keeps the peak of every phase since the last ``take``. Phases follow one another without
    gaps; one that comes again adds to its peak."""

    def __init__(self, counters: MemoryCounters | None) -> None:
        """``counters``: None measures nothing."""
        self._counters = counters
        self._phase: str | None = None
        self._others_at_begin = 0
        """Bytes that are not of torch's allocator in this process."""
        self._peaks: dict[str, PhasePeak] = {}

    def enter(self, phase: str) -> None:
        """End the present phase and begin ``phase``."""
        if self._counters is None:
            return

        reading = self._counters.read()
        self._add_to_present_phase(reading)
        self._counters.reset_peaks()
        self._phase = phase
        self._others_at_begin = reading.gpu_used - reading.reserved

    def observe(self) -> None:
        """Count what the whole GPU holds now towards the present phase, for what others hold in
        the middle of it only."""
        if self._counters is not None:
            self._add_to_present_phase(self._counters.read())

    def split(self) -> None:
        """Measure the rest of the present phase apart from what was until now.

        For the moment in which this process has given memory back: others may take it before the
        phase ends, and it would be counted twice."""
        if self._phase is not None:
            self.enter(self._phase)

    def take(self) -> PhasePeaks | None:
        """Return the peaks by phase, the present one until now, and begin anew with it; None where
        nothing is measured."""
        if self._counters is None or self._phase is None:
            return None

        self.enter(self._phase)
        peaks = self._peaks
        self._peaks = {}
        return PhasePeaks(peaks, self._counters.read().gpu_total)

    def _add_to_present_phase(self, reading: MemoryReading) -> None:
        if self._phase is None:
            return

        # What others hold is read at both ends: a server that went to sleep in between counts with
        # what it held before.
        others = max(self._others_at_begin, reading.gpu_used - reading.reserved)
        peak = PhasePeak(
            allocated=reading.peak_allocated,
            reserved=reading.peak_reserved,
            gpu=others + reading.peak_reserved,
        )
        before = self._peaks.get(self._phase)
        self._peaks[self._phase] = before.merged(peak) if before else peak


def phase_memory() -> PhaseMemory:
    """Return what measures this process's GPU; on a CPU, what measures nothing."""
    return PhaseMemory(CudaMemory() if torch.cuda.is_available() else None)


def give_back_cache() -> None:
    """Return to the GPU what torch's allocator keeps for its next tensors.

    Other processes on the GPU cannot use it otherwise. Memory that layers share for what they make
    anew is given back, too. Blocks that were lent to another process by CUDA IPC, and that it has
    closed, are collected first.
    """
    release_shared_memory()
    if torch.cuda.is_available():
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()
