"""GPU time of a decoding step by group of kernels, from a trace of torch's profiler.

``python -m benchmarks.sglang decode --profile`` takes the traces. This program groups them again:

    python -m benchmarks.sglang profile bf16=TRACE.json.gz mxfp4=TRACE.json.gz

Needs no GPU. Prints Markdown tables. A step lasts from the start of a CUDA graph to the start of
the next one. Every microsecond is counted once:

- If a kernel runs, for this kernel. If several kernels run, for the first started kernel.
- Otherwise for a copy, if one runs.
- Otherwise as idle.

Therefore, the sum of the rows is the step under the profiler, which makes kernels in graphs
slightly slower. If the client's time is much longer, the difference is streaming of tokens, which
the GPU does not wait for.

The group of a kernel follows from its name in SGLang 0.5.17, its triton_kernels, and torch 2.11.
Names of torch's elementwise kernels do not show their purpose, and the output layer is an ordinary
matrix product. The groups of these kernels follow from their position in the graph.
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
    # is a part of the name, so this group comes first. The plugin: gptoss_small_batch_moe.
    (EXPERTS, r"_matmul_ogs|^_multiply_kernel|\bfused_moe_kernel|Marlin<"),
    # triton_kernels: topk.py, tensor_details. SGLang: topk_softmax, moe_align_block_size. The
    # plugin: gptoss_routing_kernels.
    (
        ROUTING,
        r"^_route_kernel|_topk_forward|_sum_bitmatrix_rows|_bitmatrix_metadata_compute|_ragged_tensor_metadata"
        r"|topkGating|moeTopK|moeSoftmax|topk_softmax|moe_fused_gate|fused_moe_router"
        r"|moe_align|count_and_sort_expert",
    ),
    # triton_kernels: reduce.py. SGLang: moe_sum_reduce, activations that are not compiled. The
    # plugin: gptoss_routing_kernels.
    (COMBINE, r"^_reduce|^_sum_kernel|moe_sum|act_and_mul|swiglu"),
    # FlashAttention 3 and its scheduler; SGLang's triton attention. The plugin:
    # gptoss_window_attention.
    (ATTENTION, r"^_attend_to_window_kernel|flash::|FlashAttn|_fwd_(grouped_)?kernel|merge_state"),
    (NORMS, r"(?i)rms_?norm|layer_?norm|rotary|\brope|store_kv|store_cache|set_kv_buffer"),
    # cuBLAS (nvjet, xmma, gemv), FlashInfer's tinygemm for the router.
    (PROJECTIONS, r"(?i)nvjet|gemm|gemv|splitKreduce|\bmatmul"),
)
"""Group and regular expression for a kernel's name. The first match counts."""

PLAIN = re.compile(r"at::native|at_cuda_detail|\bcub::|^triton_(poi|red|per)_|^Mem(cpy|set) ")
"""Torch's own kernels and those of torch.compile."""
COPY = re.compile(r"direct_copy_kernel|CatArray|^Memcpy ")
"""Kernels of ``PLAIN`` that copy."""
BATCH = re.compile(
    r"alloc_decode|req_to_token|_kv_indices|_metadata_kernel|murmur_hash"
    r"|^_weigh_slices_kernel|^_choose_token_kernel"
)
"""Kernels between two graphs of SGLang, and of the plugin's sampling (gptoss_sampling)."""

MAX_KERNELS = 10
"""Number of listed kernels."""
SHOWN_CHARACTERS = 110
"""Maximum number of shown characters of a kernel's name."""


@dataclass(frozen=True)
class Activity:
    """One kernel, copy or fill on the GPU. Times are in microseconds."""

    name: str
    start: float
    end: float
    launch: int | None
    """Launch of the CUDA graph that contains the activity; None outside of graphs."""
    is_copy: bool
    """True for a copy or a fill outside of graphs."""


@dataclass(frozen=True)
class KernelTime:
    """All runs of the kernels with the same name and group."""

    name: str
    group: str
    microseconds: float
    """Microseconds per step."""
    count: float
    """Runs per step."""


@dataclass(frozen=True)
class StepProfile:
    """A decoding step, averaged over ``steps``."""

    steps: int
    microseconds: dict[str, float]
    """Microseconds per step by group. Their sum is the step."""
    counts: dict[str, float]
    """Kernels, copies and fills per step, by group."""
    kernels: list[KernelTime]
    """Kernels, sorted by decreasing time."""

    @property
    def total(self) -> float:
        """Microseconds of a step under the profiler."""
        return sum(self.microseconds.values())


# -- reading --------------------------------------------------------------------------------------


def read_trace(path: Path) -> list[Activity]:
    """Return the GPU's activities in a Chrome trace, plain or gzipped, sorted by start.

    All activities of one launch of a CUDA graph have the launch's correlation id.

    Raises:
        ValueError: if the file is not a trace of a GPU.
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
    """Return the mean of the whole steps of a trace.

    Raises:
        ValueError: if the trace has no whole step, or if its graphs differ, because a graph is not
            a step then.
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
    """Return the indices of the activities of every launch of a graph, in order."""
    graphs: dict[int, list[int]] = defaultdict(list)
    for number, activity in enumerate(activities):
        if activity.launch is not None:
            graphs[activity.launch].append(number)
    return sorted(graphs.values())


def _share_out(
    activities: list[Activity], began: float, ended: float
) -> tuple[list[float], list[tuple[float, float]]]:
    """Assign every microsecond from ``began`` to ``ended`` once.

    Args:
        activities: activities, sorted by start.
        began: start of the first step.
        ended: end of the last step.

    Returns:
        Microseconds of each activity, and the gaps in which none runs.
    """
    exclusive = [0.0] * len(activities)
    gaps = [(began, ended)]
    # Copies run concurrently with kernels, on a separate engine. They get the remaining time.
    for are_copies in (False, True):
        left = []
        pending = [
            (number, activity)
            for number, activity in enumerate(activities)
            if activity.is_copy == are_copies and activity.end > began and activity.start < ended
        ]
        for start, end in gaps:
            free_from = start
            # An activity that started before the gap may reach into it.
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
    """Return the length of ``intervals`` within ``spans``. Neither list overlaps itself."""
    total = 0.0
    for start, end in intervals:
        for first, last in spans:
            total += max(0.0, min(end, last) - max(start, first))
    return total


# -- groups ---------------------------------------------------------------------------------------


def _named_group(name: str) -> str | None:
    """Return the group of a kernel's name; None for plain and unknown kernels."""
    if PLAIN.search(name):
        return None
    for group, pattern in PATTERNS:
        if re.search(pattern, name):
            return group
    return None


def _groups(activities: list[Activity], graphs: list[list[int]]) -> list[str]:
    """Return the group of every activity.

    Args:
        activities: activities, sorted by start.
        graphs: indices of the activities in each graph.
    """
    groups = [_group_outside(activity) for activity in activities]
    for graph in graphs:
        names = [activities[number].name for number in graph]
        for number, group in zip(graph, _groups_inside(names), strict=True):
            groups[number] = group
    return groups


def _groups_inside(names: list[str]) -> list[str]:
    """Return the groups of the activities of one graph, whose names are sorted by start.

    A layer has attention, routing and experts, in this order. A plain kernel belongs to the part
    before it. The output layer follows the experts of the last layer.
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
    """Return the group of an activity outside of graphs."""
    if activity.is_copy:
        return COPIES
    if PLAIN.search(activity.name) or BATCH.search(activity.name):
        return SAMPLING
    return _named_group(activity.name) or OTHER


# -- output ---------------------------------------------------------------------------------------


def profile_table(title: str, profiles: dict[str, StepProfile], timed_ms: dict[str, float]) -> str:
    """Return Markdown tables of the groups and of each server's longest kernels.

    Args:
        title: title of the first table.
        profiles: profile by server.
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
        lines += [_kernel_row(kernel) for kernel in profile.kernels[:MAX_KERNELS]]
        unknown = [kernel for kernel in profile.kernels if kernel.group == OTHER]
        if unknown:
            lines += ["", f"{name}, kernels of no known name", ""]
            lines += ["| us per step | runs | group | kernel |", "|---" * 4 + "|"]
            lines += [_kernel_row(kernel) for kernel in unknown]
    return "\n".join(lines) + "\n"


def _kernel_row(kernel: KernelTime) -> str:
    name = kernel.name.replace("|", "\\|")
    for scope in ("(anonymous namespace)::", "at::native::"):  # frequent and long
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
