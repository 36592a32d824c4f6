"""Kernels of one call: where a GPU spends its time, and whether it waits for the host."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.harness import synchronize

TOP = 25
"""Kernels in a table."""
WAITS = ("StreamSynchronize", "EventSynchronize", "DeviceSynchronize", "Pageable")
"""Parts of the names of calls and copies for which the host waits."""


def profile_call(call: Callable[[], Any]) -> tuple[dict[str, Any], str]:
    """Run a call twice, the second time with a profiler.

    Returns:
        Figures of the call by name, and a table of its most expensive kernels. Without a GPU the
        kernels are the operations of the CPU.
    """
    has_gpu = torch.cuda.is_available()
    seconds = _timed(call)
    # Operations of the host are left out, because recording them slows the host down.
    activity = ProfilerActivity.CUDA if has_gpu else ProfilerActivity.CPU
    with profile(activities=[activity], acc_events=True) as profiler:
        profiled = _timed(call)

    events = profiler.key_averages()
    device = DeviceType.CUDA if has_gpu else DeviceType.CPU
    kernels = [
        (_device_time(event, has_gpu) / 1e6, event.count, event.key)
        for event in events
        if event.device_type == device
    ]
    kernels = sorted(kernels, reverse=True)
    busy = sum(kernel[0] for kernel in kernels)
    waits = sum(event.count for event in events if any(part in event.key for part in WAITS))
    figures = {
        "wall, s": seconds,
        "wall with profiler, s": profiled,
        "kernels, s": busy,
        "kernels / wall": busy / seconds,
        "launches": sum(kernel[1] for kernel in kernels),
        "host waits": waits,
    }
    lines = [f"{'seconds':>10} {'share':>6} {'calls':>7}  kernel"]
    for spent, count, name in kernels[:TOP]:
        lines.append(f"{spent:10.4f} {spent / max(busy, 1e-12):6.1%} {count:7,}  {name[:100]}")
    return figures, "\n".join(lines)


def _device_time(event: Any, has_gpu: bool) -> float:
    """Return the microseconds of all events of a name, without those that they contain."""
    return event.self_device_time_total if has_gpu else event.self_cpu_time_total


def _timed(call: Callable[[], Any]) -> float:
    """Return the seconds of a call."""
    synchronize()
    started = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - started
