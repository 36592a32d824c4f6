"""Device times of several variants: a CUDA graph each, replayed in turn, and the median; and the
bandwidth that bounds them."""

from collections.abc import Callable
from statistics import median

import torch

WARM_UP_ROUNDS = 2


def time_interleaved(
    variants: dict[str, Callable[[], object]],
    rounds: int = 15,
    calls: int = 3,
) -> dict[str, float]:
    """Return milliseconds per call of every variant, measured in the same minute on the same
    machine.

    A graph holds ``calls`` calls of its variant. In every round each graph is replayed once, so
    that a change of the clocks meets all of them."""
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
    """Capture ``calls`` calls in one graph."""
    # Two calls before it, because nothing may be compiled or allocated during the capture.
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


def read_bandwidth() -> float:
    """Measure the bytes per second that this GPU reads, by summing 4 GB."""
    data = torch.ones(1 << 30, device="cuda", dtype=torch.float32)
    data.sum()
    times = [time_call(data.sum) for _ in range(5)]
    return data.nbytes / (median(times) / 1000)


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def reset_peak() -> None:
    """Begin to measure the peak of memory, if there is a GPU."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
