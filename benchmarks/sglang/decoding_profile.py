"""Where the GPU's time of one decoding step goes, from a trace of torch's profiler.

``python -m benchmarks.sglang decode --profile`` takes the traces. To group those that it kept again:

    python -m benchmarks.sglang profile bf16=TRACE.json.gz mxfp4=TRACE.json.gz

A step lasts from the start of one CUDA graph to the start of the next. In it every microsecond is
counted once: for the kernel that runs, if several do for the one that began first (the others wait
for it, or share the GPU with it), for a copy only where no kernel runs, and otherwise as idle. So the
rows of a table add up to the step under the profiler, which makes kernels of a graph a little slower.
Where the client times much more than that, streaming the tokens takes it: the GPU does not wait for it.

A kernel belongs to a group by its name, as SGLang 0.5.17, its triton_kernels and torch 2.11 call it.
Torch's elementwise kernels have names that say nothing of their purpose, and the output layer is a
matrix product like others: these belong where they stand in the graph.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EXPERTS = "experts' matrix products"
COMBINE = "experts' activation and weighted sum"
ROUTING = "routing: top-k, sorting of tokens"
RECORDING = "recording of routes"
ATTENTION = "attention"
PROJECTIONS = "projections of attention and router"
NORMS = "norms, rotary embedding, elementwise"
OUTPUT = "output layer"
SAMPLING = "sampling, log-probs, next batch"
COPIES = "copies to and from the host"
OTHER = "other"
IDLE_INSIDE = "idle inside the CUDA graph"
IDLE_OUTSIDE = "idle outside of it"
GROUPS = (
    EXPERTS,
    COMBINE,
    ROUTING,
    RECORDING,
    ATTENTION,
    PROJECTIONS,
    NORMS,
    OUTPUT,
    SAMPLING,
    COPIES,
    OTHER,
    IDLE_INSIDE,
    IDLE_OUTSIDE,
)

PATTERNS = (
    # triton_kernels: matmul_ogs.py; SGLang: fused_moe_triton_kernels.py, marlin. A fused activation
    # is a part of the name, so these come first. Ours: gptoss_expert_matmul.
    (EXPERTS, r"_matmul_ogs|^_multiply_kernel|\bfused_moe_kernel|Marlin<"),
    # triton_kernels: topk.py, tensor_details. SGLang: topk_softmax, moe_align_block_size. Ours:
    # gptoss_expert_routing.
    (
        ROUTING,
        r"^_route_kernel|_topk_forward|_sum_bitmatrix_rows|_bitmatrix_metadata_compute|_ragged_tensor_metadata"
        r"|topkGating|moeTopK|moeSoftmax|topk_softmax|moe_fused_gate|fused_moe_router"
        r"|moe_align|count_and_sort_expert",
    ),
    # triton_kernels: reduce.py. SGLang: moe_sum_reduce, activations that are not compiled. Ours:
    # gptoss_expert_routing.
    (COMBINE, r"^_reduce|^_sum_kernel|moe_sum|act_and_mul|swiglu"),
    # FlashAttention 3 and its plan of the work; SGLang's triton attention. Ours:
    # gptoss_window_attention.
    (ATTENTION, r"^_attend_to_window_kernel|flash::|FlashAttn|_fwd_(grouped_)?kernel|merge_state"),
    (NORMS, r"(?i)rms_?norm|layer_?norm|rotary|\brope|store_kv|store_cache|set_kv_buffer"),
    # cuBLAS (nvjet, xmma, gemv), FlashInfer's tinygemm for the router.
    (PROJECTIONS, r"(?i)nvjet|gemm|gemv|splitKreduce|\bmatmul"),
)
"""Group and what is searched for in a kernel's name; the first that is found counts."""

PLAIN = re.compile(r"at::native|at_cuda_detail|\bcub::|^triton_(poi|red|per)_|^Mem(cpy|set) ")
"""Torch's own kernels and those that torch.compile makes."""
COPY = re.compile(r"direct_copy_kernel|CatArray|^Memcpy ")
"""Those of ``PLAIN`` that copy."""
BATCH = re.compile(
    r"alloc_decode|req_to_token|_kv_indices|_metadata_kernel|murmur_hash"
    r"|^_weigh_slices_kernel|^_choose_token_kernel"
)
"""Kernels between two graphs that are not torch's: SGLang's, and ours that sample (gptoss_sampling)."""

LONGEST = 10
"""Kernels that are listed."""
SHOWN_CHARACTERS = 110
"""Of a kernel's name."""


@dataclass(frozen=True)
class Activity:
    """One kernel, copy or fill on the GPU; times in microseconds."""

    name: str
    start: float
    end: float
    launch: int | None
    """The launch of a CUDA graph that it belongs to; None outside of graphs."""
    is_copy: bool
    """Whether it is a copy or a fill outside of graphs."""


@dataclass(frozen=True)
class KernelTime:
    """All runs of the kernels of one name and group."""

    name: str
    group: str
    microseconds: float
    """Per step."""
    count: float
    """Per step."""


@dataclass(frozen=True)
class StepProfile:
    """A decoding step, the mean over ``steps``."""

    steps: int
    microseconds: dict[str, float]
    """Per step, by group; their sum is the step."""
    counts: dict[str, float]
    """Kernels, copies and fills per step, by group."""
    kernels: list[KernelTime]
    """Those with the most time first."""

    @property
    def total(self) -> float:
        """Return the microseconds of a step under the profiler."""
        return sum(self.microseconds.values())


# -- reading --------------------------------------------------------------------------------------


def read_trace(path: Path) -> list[Activity]:
    """Read what ran on the GPU from a Chrome trace, plain or gzipped; sorted by start.

    All activities of one launch of a CUDA graph have the launch's correlation id.

    Raises ValueError if the file holds no trace, with its name.
    """
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt") as file:
            events = json.load(file)["traceEvents"]
        return _activities(events)
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: no trace of a GPU: {type(error).__name__}: {error}") from error


def _activities(events: list[dict[str, Any]]) -> list[Activity]:
    launches = set()
    for event in events:
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "GraphLaunch" in event["name"]:
            launches.add(event["args"]["correlation"])

    activities = []
    for event in events:
        category = event.get("cat")
        if event.get("ph") != "X" or category not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        correlation = event["args"]["correlation"]
        launch = correlation if correlation in launches else None
        activity = Activity(
            name=event["name"].removeprefix("void "),
            start=event["ts"],
            end=event["ts"] + event["dur"],
            launch=launch,
            is_copy=category != "kernel" and launch is None,
        )
        activities.append(activity)
    return sorted(activities, key=lambda activity: activity.start)


# -- steps ----------------------------------------------------------------------------------------


def profile_steps(activities: list[Activity]) -> StepProfile:
    """Average the whole steps of a trace.

    Raises ValueError if it has no whole step, or if its graphs differ: then a graph is no step.
    """
    graphs = _graphs(activities)
    if len(graphs) < 2:
        raise ValueError(
            f"{len(graphs)} launches of CUDA graphs in the trace: a step is what lies between two"
        )
    sizes = {len(graph) for graph in graphs}
    if len(sizes) > 1:
        raise ValueError(f"CUDA graphs of {sorted(sizes)} kernels in the trace: no graph is a step")

    began = activities[graphs[0][0]].start
    ended = activities[graphs[-1][0]].start
    steps = len(graphs) - 1
    groups = _groups(activities, graphs)
    exclusive, gaps = _share_out(activities, began, ended)

    microseconds: dict[str, float] = defaultdict(float)
    counts: Counter[str] = Counter()
    times: dict[tuple[str, str], float] = defaultdict(float)
    runs: Counter[tuple[str, str]] = Counter()
    for activity, group, time in zip(activities, groups, exclusive, strict=True):
        microseconds[group] += time
        times[activity.name, group] += time
        if began <= activity.start < ended:
            counts[group] += 1
            runs[activity.name, group] += 1

    spans = []
    for graph in graphs:
        last_end = max(activities[number].end for number in graph)
        spans.append((activities[graph[0]].start, last_end))
    idle = sum(end - start for start, end in gaps)
    microseconds[IDLE_INSIDE] = _overlap(gaps, spans)
    microseconds[IDLE_OUTSIDE] = idle - microseconds[IDLE_INSIDE]

    kernels = [
        KernelTime(name, group, time / steps, runs[name, group] / steps)
        for (name, group), time in times.items()
        if runs[name, group]
    ]
    return StepProfile(
        steps=steps,
        microseconds={group: microseconds[group] / steps for group in GROUPS},
        counts={group: counts[group] / steps for group in GROUPS},
        kernels=sorted(kernels, key=lambda kernel: -kernel.microseconds),
    )


def _graphs(activities: list[Activity]) -> list[list[int]]:
    """Return the numbers of the activities of every launch of a graph, in order."""
    graphs: dict[int, list[int]] = defaultdict(list)
    for number, activity in enumerate(activities):
        if activity.launch is not None:
            graphs[activity.launch].append(number)
    return sorted(graphs.values())


def _share_out(
    activities: list[Activity], began: float, ended: float
) -> tuple[list[float], list[tuple[float, float]]]:
    """Count every microsecond from ``began`` to ``ended`` once.

    Returns the microseconds of each of ``activities`` (sorted by start), and the gaps in which none
    runs.
    """
    exclusive = [0.0] * len(activities)
    gaps = [(began, ended)]
    # Copies run beside kernels, on an engine and a stream of their own: they get what is left.
    for are_copies in (False, True):
        left = []
        pending = [
            (number, activity)
            for number, activity in enumerate(activities)
            if activity.is_copy == are_copies and activity.end > began and activity.start < ended
        ]
        for start, end in gaps:
            free_from = start
            # One that began before the gap may reach into it.
            for number, activity in pending:
                if activity.start >= end:
                    break
                if activity.end <= free_from:
                    continue
                if activity.start > free_from:
                    left.append((free_from, activity.start))
                until = min(activity.end, end)
                exclusive[number] += until - max(activity.start, free_from)
                free_from = until
            if free_from < end:
                left.append((free_from, end))
        gaps = left
    return exclusive, gaps


def _overlap(intervals: list[tuple[float, float]], spans: list[tuple[float, float]]) -> float:
    """Return how much of ``intervals`` lies in ``spans``; neither overlaps itself."""
    total = 0.0
    for start, end in intervals:
        for first, last in spans:
            total += max(0.0, min(end, last) - max(start, first))
    return total


# -- groups ---------------------------------------------------------------------------------------


def _named_group(name: str) -> str | None:
    """Return the group that a kernel's name tells, None for plain and unknown kernels."""
    if PLAIN.search(name):
        return None
    for group, pattern in PATTERNS:
        if re.search(pattern, name):
            return group
    return None


def _groups(activities: list[Activity], graphs: list[list[int]]) -> list[str]:
    """Return the group of every activity; ``graphs`` are the numbers of those in graphs."""
    groups = [_group_outside(activity) for activity in activities]
    for graph in graphs:
        names = [activities[number].name for number in graph]
        for number, group in zip(graph, _groups_inside(names), strict=True):
            groups[number] = group
    return groups


def _groups_inside(names: list[str]) -> list[str]:
    """Return the groups of the activities of one graph, whose names are in the order of their start.

    A layer is attention, routing, experts, in this order; a plain kernel belongs to what comes
    before it. After the experts of the last layer comes the output layer.
    """
    named = [_named_group(name) for name in names]
    last_experts = max((i for i, group in enumerate(named) if group == EXPERTS), default=len(names))

    groups = []
    stage = NORMS
    for number, (name, group) in enumerate(zip(names, named, strict=True)):
        if group is None and PLAIN.search(name):
            is_recording = stage == ROUTING and COPY.search(name)
            groups.append(RECORDING if is_recording else stage)
            continue

        if group == PROJECTIONS and number > last_experts:
            group = OUTPUT
        groups.append(group or OTHER)
        if group in (ROUTING, OUTPUT):
            stage = group
        elif group in (EXPERTS, COMBINE):
            stage = COMBINE
        elif group is not None:
            stage = NORMS
    return groups


def _group_outside(activity: Activity) -> str:
    """Return the group of an activity that belongs to no graph."""
    if activity.is_copy:
        return COPIES
    if PLAIN.search(activity.name) or BATCH.search(activity.name):
        return SAMPLING
    return _named_group(activity.name) or OTHER


# -- output ---------------------------------------------------------------------------------------


def profile_table(title: str, profiles: dict[str, StepProfile], timed_ms: dict[str, float]) -> str:
    """Return Markdown tables of the groups side by side, and of each server's longest kernels.

    Args:
        title: stands above.
        profiles: by server.
        timed_ms: milliseconds of a step without the profiler, by server; may be empty.
    """
    heads = [f"{name} us | kernels" for name in profiles]
    lines = [title, "", f"| group | {' | '.join(heads)} |", "|---" * (1 + 2 * len(heads)) + "|"]
    for group in GROUPS:
        cells = []
        for profile in profiles.values():
            count = profile.counts[group]
            cells += [f"{profile.microseconds[group]:,.1f}", f"{count:.1f}" if count else ""]
        lines.append(f"| {group} | {' | '.join(cells)} |")

    cells = []
    for profile in profiles.values():
        cells += [f"**{profile.total:,.1f}**", f"{sum(profile.counts.values()):.1f}"]
    lines.append(f"| the step under the profiler | {' | '.join(cells)} |")
    if timed_ms:
        cells = [f"{timed_ms[name] * 1e3:,.1f} | " for name in profiles]
        lines.append(f"| the step as timed without it | {' | '.join(cells)} |")

    for name, profile in profiles.items():
        lines += ["", f"{name}, longest kernels, mean of {profile.steps} steps", ""]
        lines += ["| us per step | runs | group | kernel |", "|---" * 4 + "|"]
        lines += [_kernel_row(kernel) for kernel in profile.kernels[:LONGEST]]
        unknown = [kernel for kernel in profile.kernels if kernel.group == OTHER]
        if unknown:
            lines += ["", f"{name}, kernels of no known name", ""]
            lines += ["| us per step | runs | group | kernel |", "|---" * 4 + "|"]
            lines += [_kernel_row(kernel) for kernel in unknown]
    return "\n".join(lines) + "\n"


def _kernel_row(kernel: KernelTime) -> str:
    name = kernel.name.replace("|", "\\|")
    for scope in ("(anonymous namespace)::", "at::native::"):  # in every second name, and long
        name = name.replace(scope, "")
    if len(name) > SHOWN_CHARACTERS:
        name = name[:SHOWN_CHARACTERS] + "..."
    return f"| {kernel.microseconds:,.1f} | {kernel.count:.1f} | {kernel.group} | `{name}` |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("traces", nargs="+", metavar="NAME=TRACE", help="one for each column")
    arguments = parser.parse_args()

    profiles = {}
    for named in arguments.traces:
        name, _, path = named.partition("=")
        if not path:
            parser.error(f"{named}: give NAME=TRACE")
        profiles[name] = profile_steps(read_trace(Path(path)))
    print(profile_table("GPU microseconds per decoding step", profiles, {}))
