"""Time of sink attention on one GPU with every available backend, forward and backward.

    python -m benchmarks.attention kernels [--out result.json] [--only window|full] [--equal]

Needs one GPU. Inputs have GPT-OSS's shapes in bf16: 64 query heads, 8 kv heads, head size 64. They
have 32,768 tokens: one sequence, eight sequences of 4,096, and a mix of short sequences.

Prints milliseconds per backend, measured interleaved on equal inputs, with the speed-up over
flash-attn-4 in parentheses:

- ``floor`` is the time to read every input and write every output once, at the copy bandwidth
  measured here.
- ``flash4 added sink`` uses the kernels of flash-attn-4 without their sink, and adds it afterwards,
  as ``flash3`` does.
"""

import argparse
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.harness import time_interleaved
from gptoss_kernels.sink_attention import flash, sink_attention
from gptoss_kernels.sink_attention.autograd import SinkAttentionFunction
from gptoss_kernels.sink_attention.dispatch import (
    SHORT_MEAN,
    ShapeClass,
    choose_backend,
    unsupported_reason,
)
from gptoss_kernels.sink_attention.layout import AttentionSegments
from gptoss_kernels.sink_attention.validation import check_arguments
from tests.support.kernels.plain_flash4 import flash4_kernels

HEADS, KV_HEADS, HEAD_SIZE, TOKENS = 64, 8, 64, 32768


@dataclass(frozen=True)
class Inputs:
    """One row of packed sequences. All tensors except the sinks are bf16."""

    q: torch.Tensor
    """[tokens, HEADS, HEAD_SIZE]"""
    k: torch.Tensor
    """[tokens, KV_HEADS, HEAD_SIZE]"""
    v: torch.Tensor
    """[tokens, KV_HEADS, HEAD_SIZE]"""
    sinks: torch.Tensor
    """[HEADS], fp32"""
    grad_o: torch.Tensor
    """Gradient of the output, [tokens, HEADS, HEAD_SIZE]"""
    cu_seqlens: torch.Tensor
    """Starts of the sequences and the end of the last one: int32 [sequences + 1]"""

    @property
    def leaves(self) -> list[torch.Tensor]:
        """Tensors that require a gradient."""
        return [self.q, self.k, self.v, self.sinks]


def short_mix(tokens: int, seed: int = 1) -> list[int]:
    """Return lengths of agent episodes: exponential, 60 to 4,000, mean about 500."""
    draw = random.Random(seed)
    lengths = []
    while tokens:
        length = min(int(draw.expovariate(1 / 470)) + 60, 4000, tokens)
        lengths.append(length)
        tokens -= length
    return lengths


def random_inputs(lengths: list[int]) -> Inputs:
    """Return normal queries, keys, values and gradients for sequences of these lengths."""
    generator = torch.Generator("cuda").manual_seed(0)
    tokens = sum(lengths)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=generator)

    q = normal(tokens, HEADS, HEAD_SIZE).bfloat16()
    k = normal(tokens, KV_HEADS, HEAD_SIZE).bfloat16()
    v = normal(tokens, KV_HEADS, HEAD_SIZE).bfloat16()
    sinks = normal(HEADS) * 1.5 + 1
    return Inputs(
        q=q.requires_grad_(),
        k=k.requires_grad_(),
        v=v.requires_grad_(),
        sinks=sinks.requires_grad_(),
        grad_o=normal(tokens, HEADS, HEAD_SIZE).bfloat16(),
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).int().cuda(),
    )


def copy_bandwidth() -> float:
    """Return bytes read plus written per second when a kernel moves a large tensor."""
    source = torch.randn(300_000_000, device="cuda")
    target = torch.empty_like(source)
    milliseconds = time_interleaved({"copy": lambda: torch.neg(source, out=target)}, rounds=30)
    return (source.nbytes + target.nbytes) / milliseconds["copy"] * 1e3


def floor_milliseconds(bandwidth: float) -> dict[str, float]:
    """Return the smallest memory time of each direction in milliseconds, at ``bandwidth`` B/s."""
    wide = TOKENS * HEADS * HEAD_SIZE * 2  # bytes of q, o, and their gradients, each
    narrow = TOKENS * KV_HEADS * HEAD_SIZE * 2  # bytes of k, v, and their gradients, each
    row = TOKENS * HEADS * 4  # bytes of the log-sum-exp
    return {
        "forward": (2 * wide + 2 * narrow + row) / bandwidth * 1e3,
        "backward": (4 * wide + 4 * narrow + row) / bandwidth * 1e3,
    }


def attention_calls(
    inputs: Inputs,
    longest: int,
    window: int | None,
) -> dict[str, Callable[[], torch.Tensor]]:
    """Return the forward pass of every backend that supports the inputs.

    Prints the reason for every other backend.

    Args:
        inputs: row of packed sequences.
        longest: tokens of the longest sequence.
        window: size of the attention window; None for full attention.
    """

    def run(backend: str) -> torch.Tensor:
        return sink_attention(
            *inputs.leaves,
            cu_seqlens=inputs.cu_seqlens,
            max_seqlen=longest,
            window=window,
            backend=backend,
        )

    def run_added_sink() -> torch.Tensor:
        segments = AttentionSegments(inputs.cu_seqlens, inputs.cu_seqlens, longest, longest)
        passes = flash.passes_with_added_sink(flash4_kernels(), segments, window, HEAD_SIZE**-0.5)
        return SinkAttentionFunction.apply(*inputs.leaves, passes)[0]

    shape = ShapeClass(inputs.q.device, inputs.q.dtype, HEADS, KV_HEADS, HEAD_SIZE, window)
    calls: dict[str, Callable[[], torch.Tensor]] = {}
    for backend in ("hopper", "flash4", "flash3"):
        reason = unsupported_reason(backend, shape)
        if reason is None:
            calls[backend] = partial(run, backend)
        else:
            print(f"  {backend}: {reason}")
    if "flash4" in calls:
        calls["flash4 added sink"] = run_added_sink
    return calls


def measure(lengths: list[int], window: int | None) -> dict[str, dict[str, float]]:
    """Return milliseconds by direction ("forward", "backward") and backend."""
    inputs = random_inputs(lengths)
    calls = attention_calls(inputs, max(lengths), window)
    forward = time_interleaved({name: torch.no_grad()(call) for name, call in calls.items()})

    # A backward pass can be captured only if its forward pass was not on the default stream.
    stream = torch.cuda.Stream()
    outputs = {}
    for name, call in calls.items():
        with torch.cuda.stream(stream):
            outputs[name] = call()
    torch.cuda.synchronize()

    def gradients(output: torch.Tensor) -> object:
        return torch.autograd.grad(output, inputs.leaves, inputs.grad_o, retain_graph=True)

    backward = time_interleaved(
        {name: partial(gradients, output) for name, output in outputs.items()},
    )
    return {"forward": forward, "backward": backward}


def host_overhead(calls: int = 2000) -> float:
    """Return the microseconds that argument checks and the choice of a backend take per call."""
    inputs = random_inputs([512] * 4)
    for _ in range(2):  # the first pass warms the caches
        started = time.perf_counter()
        for _ in range(calls):
            layout = check_arguments(*inputs.leaves, inputs.cu_seqlens, 512, 128, None)
            shape = ShapeClass(inputs.q.device, inputs.q.dtype, HEADS, KV_HEADS, HEAD_SIZE, 128)
            choose_backend(shape, short=layout.mean_length <= SHORT_MEAN)
        seconds = time.perf_counter() - started
    return seconds / calls * 1e6


def first_use() -> float:
    """Return the seconds of the first forward and backward pass, which compile their kernels."""
    started = time.perf_counter()
    inputs = random_inputs([256])
    out = sink_attention(*inputs.leaves, cu_seqlens=inputs.cu_seqlens, max_seqlen=256, window=128)
    torch.autograd.grad(out, inputs.leaves, inputs.grad_o)
    torch.cuda.synchronize()
    return time.perf_counter() - started


def describe_row(milliseconds: dict[str, float]) -> str:
    """Return the times of one cell, with the speed-up of other backends over flash-attn-4."""
    flash4 = milliseconds.get("flash4")
    columns = []
    for name, value in milliseconds.items():
        column = f"{name} {value:.3f}"
        if flash4 is not None and name != "flash4":
            column += f" ({flash4 / value:.2f}x)"
        columns.append(column)
    return "  ".join(columns)


def build_cases(window: int | None, equal: bool) -> dict[str, list[int]]:
    """Return the sequence lengths of every case, by its name."""
    cases = {"1x32k": [TOKENS], "8x4k": [TOKENS // 8] * 8, "short": short_mix(TOKENS)}
    if equal and window is None:
        for length in (128, 256, 512, 1024, 2048):
            cases[f"{TOKENS // length}x{length}"] = [length] * (TOKENS // length)
    return cases


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", help="write the figures as JSON")
    parser.add_argument("--only", choices=("window", "full"))
    parser.add_argument(
        "--equal",
        action="store_true",
        help="full attention over packs of equal lengths, too",
    )
    options = parser.parse_args()

    first_use_seconds = first_use()
    bandwidth = copy_bandwidth()
    floor = floor_milliseconds(bandwidth)
    overhead = host_overhead()
    print(
        f"{torch.cuda.get_device_name()}, copy {bandwidth / 1e12:.2f} TB/s, first use {first_use_seconds:.1f} s, "
        f"dispatcher {overhead:.1f} us per call"
    )

    cells = []
    for kind, window in (("window", 128), ("full", None)):
        if options.only not in (None, kind):
            continue
        title = "window 128" if window else "full"
        for case, lengths in build_cases(window, options.equal).items():
            for direction, row in measure(lengths, window).items():
                label = f"{title} {direction} {case}"
                print(f"{label:28s} floor {floor[direction]:.3f}  {describe_row(row)}", flush=True)
                cells.append(
                    {
                        "window": window,
                        "direction": direction,
                        "case": case,
                        "sequences": len(lengths),
                        "ms": row,
                    }
                )

    if options.out:
        result = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "copy_bytes_per_second": bandwidth,
            "floor_ms": floor,
            "first_use_seconds": first_use_seconds,
            "host_overhead_us": overhead,
            "cells": cells,
        }
        with open(options.out, "w") as file:
            json.dump(result, file, indent=1)
