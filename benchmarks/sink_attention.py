"""Sink attention on one GPU: every available backend on the same inputs, forward and backward, in one run.

    python benchmarks/sink_attention.py [--out result.json] [--only window|full] [--equal]

GPT-OSS shapes in bf16 (64 query heads, 8 kv heads, head size 64), 32,768 tokens: one sequence, eight of 4,096, and a
mix of short ones. ``floor`` is the time to read every input and write every output once, at the copy bandwidth
measured here.
``flash4 folded`` is the FlashAttention-3 adapter (stock kernels, sink folded in) on flash-attn-4's kernels.
"""

import argparse
import json
import random
import time
from collections.abc import Callable

import torch
from plain_flash4 import flash4_kernels
from timing import interleaved

from gptoss_kernels.sink_attention import flash, sink_attention
from gptoss_kernels.sink_attention.autograd import SinkAttention
from gptoss_kernels.sink_attention.dispatch import SHORT_MEAN, ShapeClass, choose_backend, unsupported_reason
from gptoss_kernels.sink_attention.layout import Segments
from gptoss_kernels.sink_attention.validation import check_arguments

HEADS, KV_HEADS, HEAD_SIZE, TOKENS = 64, 8, 64, 32768


def short_mix(tokens: int, seed: int = 1) -> list[int]:
    """Lengths of agent episodes: exponential, 60 to 4,000, mean about 500."""
    draw, lengths = random.Random(seed), []
    while tokens:
        lengths.append(min(int(draw.expovariate(1 / 470)) + 60, 4000, tokens))
        tokens -= lengths[-1]
    return lengths


def inputs(lengths: list[int]) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator("cuda").manual_seed(0)
    tokens = sum(lengths)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=generator).bfloat16()

    q, k, v = normal(tokens, HEADS, HEAD_SIZE), normal(tokens, KV_HEADS, HEAD_SIZE), normal(tokens, KV_HEADS, HEAD_SIZE)
    sinks = torch.randn(HEADS, device="cuda", generator=generator) * 1.5 + 1
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int().cuda()
    return q, k, v, sinks, normal(tokens, HEADS, HEAD_SIZE), cu_seqlens


def copy_bandwidth() -> float:
    """Bytes read plus bytes written per second when a kernel (not the copy engine) moves a large tensor."""
    source = torch.randn(300_000_000, device="cuda")
    target = torch.empty_like(source)
    times = interleaved({"copy": lambda: torch.neg(source, out=target)}, rounds=30)
    return 2 * source.numel() * 4 / times["copy"] * 1e3


def floors(bandwidth: float) -> tuple[float, float]:
    """Milliseconds to move what forward and backward must move."""
    wide, narrow, row = TOKENS * HEADS * HEAD_SIZE * 2, TOKENS * KV_HEADS * HEAD_SIZE * 2, TOKENS * HEADS * 4
    forward = 2 * wide + 2 * narrow + row
    backward = 4 * wide + 4 * narrow + row
    return forward / bandwidth * 1e3, backward / bandwidth * 1e3


def measure(lengths: list[int], window: int | None) -> dict[str, dict[str, float]]:
    q, k, v, sinks, grad_o, cu_seqlens = inputs(lengths)
    leaves = [x.requires_grad_() for x in (q, k, v, sinks)]
    longest = max(lengths)

    def run(backend: str) -> torch.Tensor:
        arguments = {"cu_seqlens": cu_seqlens, "max_seqlen": longest, "window": window}
        return sink_attention(q, k, v, sinks, backend=backend, **arguments)

    def run_folded() -> torch.Tensor:
        segments = Segments(cu_seqlens, cu_seqlens, longest, longest)
        passes = flash.folded_passes(flash4_kernels(), segments, window, HEAD_SIZE**-0.5)
        return SinkAttention.apply(q, k, v, sinks, passes)[0]

    shape = ShapeClass(q.device, q.dtype, HEADS, KV_HEADS, HEAD_SIZE, window)
    calls: dict[str, Callable[[], torch.Tensor]] = {}
    for backend in ("short" if window is None else "window", "flash4", "flash3"):
        reason = unsupported_reason(backend, shape)
        if reason is None:
            calls[backend] = lambda backend=backend: run(backend)
        else:
            print(f"  {backend}: {reason}")
    if "flash4" in calls:
        calls["flash4 folded"] = run_folded

    forward = interleaved({name: torch.no_grad()(call) for name, call in calls.items()})
    stream = torch.cuda.Stream()
    outputs = {}
    for name, call in calls.items():
        with torch.cuda.stream(stream):
            outputs[name] = call()
    torch.cuda.synchronize()
    backward = interleaved(
        {
            name: (lambda out=out: torch.autograd.grad(out, leaves, grad_o, retain_graph=True))
            for name, out in outputs.items()
        }
    )
    return {"forward": forward, "backward": backward}


def host_overhead(calls: int = 2000) -> float:
    """Microseconds that argument checks and the choice of a backend take per call."""
    q, k, v, sinks, _, cu_seqlens = inputs([512] * 4)
    for _ in range(2):  # the first pass warms the caches
        start = time.perf_counter()
        for _ in range(calls):
            layout = check_arguments(q, k, v, sinks, cu_seqlens, 512, 128, None)
            shape = ShapeClass(q.device, q.dtype, HEADS, KV_HEADS, HEAD_SIZE, 128)
            choose_backend(shape, short=layout.mean_length <= SHORT_MEAN)
        elapsed = time.perf_counter() - start
    return elapsed / calls * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="write the figures as JSON")
    parser.add_argument("--only", choices=("window", "full"))
    parser.add_argument("--equal", action="store_true", help="full attention over packs of equal lengths, too")
    options = parser.parse_args()
    start = time.perf_counter()
    q, k, v, sinks, grad_o, cu_seqlens = inputs([256])
    leaves = [x.requires_grad_() for x in (q, k, v, sinks)]
    out = sink_attention(q, k, v, sinks, cu_seqlens=cu_seqlens, max_seqlen=256, window=128)
    torch.autograd.grad(out, leaves, grad_o)
    torch.cuda.synchronize()
    first_use = time.perf_counter() - start
    bandwidth = copy_bandwidth()
    floor = dict(zip(("forward", "backward"), floors(bandwidth), strict=True))
    result = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "copy_bytes_per_second": bandwidth,
        "floor_ms": floor,
        "first_use_seconds": first_use,
        "host_overhead_us": host_overhead(),
        "cells": [],
    }
    print(
        f"{result['device']}, copy {bandwidth / 1e12:.2f} TB/s, first use {first_use:.1f} s, "
        f"dispatcher {result['host_overhead_us']:.1f} us per call"
    )
    cases = {"1x32k": [TOKENS], "8x4k": [TOKENS // 8] * 8, "short": short_mix(TOKENS)}
    for window in (128, None):
        if options.only and (options.only == "window") != (window == 128):
            continue
        if options.equal and window is None:
            cases |= {f"{TOKENS // n}x{n}": [n] * (TOKENS // n) for n in (128, 256, 512, 1024, 2048)}
        for case, lengths in cases.items():
            times = measure(lengths, window)
            for direction, row in times.items():
                label = f"{'window 128' if window else 'full'} {direction} {case}"
                base = row.get("flash4")
                cells = [
                    f"{name} {value:.3f}" + (f" ({base / value:.2f}x)" if base and name != "flash4" else "")
                    for name, value in row.items()
                ]
                print(f"{label:28s} floor {floor[direction]:.3f}  " + "  ".join(cells), flush=True)
                result["cells"].append(
                    {"window": window, "direction": direction, "case": case, "sequences": len(lengths), "ms": row}
                )
    if options.out:
        with open(options.out, "w") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
