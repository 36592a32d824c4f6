"""Device times of several variants, interleaved: one CUDA graph each, replayed in turn, the median of the replays."""

from collections.abc import Callable
from statistics import median

import torch


def interleaved(variants: dict[str, Callable[[], object]], rounds: int = 15, calls: int = 3) -> dict[str, float]:
    """Milliseconds per call of every variant, measured in the same minute on the same machine.

    Each variant is captured once (after two calls that compile and allocate) with ``calls`` calls per graph; in every
    round each graph is replayed once, so a change of the clocks meets all of them.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graphs = {}
    for name, call in variants.items():
        with torch.cuda.stream(stream):
            call()
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(calls):
                call()
        graphs[name] = graph
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(rounds + 2):
        for name, graph in graphs.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times[name].append(start.elapsed_time(end) / calls)
    return {name: median(values[2:]) for name, values in times.items()}
