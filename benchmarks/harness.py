"""Shared code of the benchmarks: command line, device times, memory and bandwidth."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from statistics import median

import torch
import torch.distributed as dist

WARM_UP_ROUNDS = 2


def run_program(package: str, programs: dict[str, str], default: str | None = None) -> None:
    """Run the program named by the first argument of the command line.

    Args:
        package: name of the package, such as ``benchmarks.sglang``.
        programs: module of each program, by the first argument. The module has a ``main`` that
            reads the remaining arguments.
        default: module that reads all arguments if the first one names no program.
    """
    command, name = f"python -m {package}", next(iter(sys.argv[1:]), "")
    if name in programs:
        sys.argv = [f"{command} {name}", *sys.argv[2:]]
        module = programs[name]
    elif default is None:
        known = f"{command} {{{','.join(programs)}}}"
        print(f"usage: {known} [OPTIONS]; the options: {command} NAME --help")
        sys.exit(0 if name in ("-h", "--help") else 2)
    else:
        if name in ("-h", "--help") and programs:
            print(f"further programs: {command} {{{','.join(programs)}}}\n")
        sys.argv[0] = command
        module = default
    import_module(f"{package}.{module}").main()


def time_interleaved(
    variants: dict[str, Callable[[], object]],
    rounds: int = 15,
    calls: int = 3,
) -> dict[str, float]:
    """Return the milliseconds per call of every variant, measured interleaved on one GPU.

    Every round replays the CUDA graph of each variant once. Therefore, changes of the GPU's clocks
    affect all variants.

    Args:
        variants: names and calls to measure.
        rounds: measured rounds. The result is their median.
        calls: calls per graph.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graphs = {name: capture(call, stream, calls) for name, call in variants.items()}

    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(WARM_UP_ROUNDS + rounds):
        for name, graph in graphs.items():
            times[name].append(time_call(graph.replay) / calls)
    return {name: median(values[WARM_UP_ROUNDS:]) for name, values in times.items()}


def capture(
    call: Callable[[], object],
    stream: torch.cuda.Stream,
    calls: int,
) -> torch.cuda.CUDAGraph:
    """Capture ``calls`` calls in one CUDA graph."""
    # Two calls come first, because nothing may be compiled or allocated during the capture.
    with torch.cuda.stream(stream):
        call()
        call()
    torch.cuda.synchronize()

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(calls):
            call()
    return graph


def time_call(call: Callable[[], object]) -> float:
    """Return the milliseconds of device time between the beginning and the end of a call."""
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def median_milliseconds(call: Callable[[], object], rounds: int = 5) -> float:
    """Return the median device time of a call in milliseconds, after two warm-up calls."""
    times = [time_call(call) for _ in range(WARM_UP_ROUNDS + rounds)]
    return median(times[WARM_UP_ROUNDS:])


def read_bandwidth() -> float:
    """Measure the read bandwidth of this GPU in bytes per second, by summing 4 GB."""
    data = torch.ones(1 << 30, device="cuda", dtype=torch.float32)
    data.sum()
    times = [time_call(data.sum) for _ in range(5)]
    return data.nbytes / (median(times) / 1000)


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def reset_peak() -> None:
    """Start to measure peak memory, if there is a GPU."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def allocated() -> int:
    """Return the bytes of this process's tensors on the GPU; 0 without a GPU."""
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def peak() -> int:
    """Return the peak bytes of tensors on the GPU since ``reset_peak``; 0 without a GPU."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


def largest_of_ranks(value: float) -> float:
    """Return the largest value of all ranks. Collective."""
    values: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return max(values)
