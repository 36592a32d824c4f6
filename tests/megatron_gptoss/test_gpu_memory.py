"""Peaks by phase, with scripted counters instead of CUDA."""

from __future__ import annotations

import pytest

from megatron_gptoss.gpu_memory import PhaseMemory, PhasePeak, phase_memory
from tests.support.megatron_gptoss.scripted_gpu import ScriptedGpu


def test_phase_peaks_include_memory_of_servers() -> None:
    gpu = ScriptedGpu()
    memory = PhaseMemory(gpu)
    memory.enter("start")
    gpu.allocate(3000)
    gpu.allocate(-1000)
    gpu.release_cached_memory()
    memory.enter("rollout")
    gpu.others = 4000  # servers resume and are paused again before the next observation
    memory.observe()
    gpu.others = 900
    memory.enter("update")
    gpu.allocate(2500)
    gpu.allocate(-2500)
    gpu.others = 950
    measured = memory.take()

    assert measured is not None and measured.gpu_total == 10_000
    assert measured.peaks == {
        "start": PhasePeak(allocated=3000, reserved=3000, gpu=3500),
        "rollout": PhasePeak(allocated=2000, reserved=2000, gpu=6000),
        "update": PhasePeak(allocated=4500, reserved=4500, gpu=5450),
    }


def test_repeated_phase_keeps_largest_peak_until_taken() -> None:
    gpu = ScriptedGpu()
    memory = PhaseMemory(gpu)
    for size in (700, 300):
        memory.enter("scoring")
        gpu.allocate(size)
        gpu.allocate(-size)
        gpu.release_cached_memory()
        memory.enter("between_phases")
    first = memory.take()
    assert first is not None and first.peaks["scoring"].allocated == 700

    # Earlier phases are dropped, and the current phase continues.
    gpu.allocate(50)
    second = memory.take()
    assert second is not None
    assert second.peaks == {"between_phases": PhasePeak(allocated=50, reserved=50, gpu=550)}


def test_released_memory_is_not_counted_with_later_server_memory() -> None:
    gpu = ScriptedGpu()
    memory = PhaseMemory(gpu)
    memory.enter("between_phases")
    gpu.allocate(6000)
    gpu.allocate(-5000)
    gpu.release_cached_memory()
    memory.split()
    gpu.others = 5500  # of 10,000; the sum of both peaks would be 11,500
    measured = memory.take()
    assert measured is not None
    assert measured.peaks == {"between_phases": PhasePeak(allocated=6000, reserved=6000, gpu=6500)}


def test_without_counters_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    memory = phase_memory()
    memory.enter("update")
    memory.observe()
    assert memory.take() is None
