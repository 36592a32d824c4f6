"""Context-parallel attention on several GPUs of one machine: correctness, time and memory of every scheme, in one run.

    torchrun --nproc_per_node 4 benchmarks/context_parallel.py [--only SECTION ...] [--out FILE]

One attention layer in GPT-OSS shapes (bf16, 64 query heads, 8 kv heads, head size 64, sinks), forward and backward,
rows of 32,768 and 131,072 tokens: one sequence, and a mix of agent episodes. ``graph`` times replay a CUDA graph, so
they are what the GPUs need; ``eager`` times include what the host does not hide. Every figure is the slowest rank's.
Sections are independent: one that fails prints why and the others still run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import traceback
from collections.abc import Callable
from datetime import timedelta
from itertools import accumulate
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from gptoss_kernels.sink_attention import sink_attention
from gptoss_kernels.sink_attention.layout import packed_layout
from gptoss_kernels.sink_attention.reference import reference_backward, reference_forward
from megatron_gptoss.context_parallel import balanced_layout, candidates, context_parallel_attention
from megatron_gptoss.context_parallel.cost_model import H200, AttentionShape

HEADS, KV_HEADS, HEAD_SIZE = 64, 8, 64
SCALE = HEAD_SIZE**-0.5
SHAPE = AttentionShape(HEADS, KV_HEADS, HEAD_SIZE)
UNEVEN = [3001, 127, 1, 128, 2047, 64, 2, 700, 1500, 622]


def episodes(tokens: int, seed: int = 1) -> list[int]:
    """Lengths of agent episodes: most short, some very long, in all ``tokens``."""
    draw, lengths = random.Random(seed), []
    while tokens:
        lengths.append(min(int(draw.lognormvariate(8, 1)) + 60, tokens))
        tokens -= lengths[-1]
    return lengths


def slowest(value: float) -> float:
    box = torch.tensor(value, device="cuda", dtype=torch.float64)
    dist.all_reduce(box, op=dist.ReduceOp.MAX)
    return float(box)


class Layer:
    """One rank's part of an attention layer over ``size`` ranks, with random inputs that do not depend on ``size``."""

    def __init__(self, lengths: list[int], window: int | None, size: int, group: Any, scheme: str) -> None:
        self.lengths, self.window, self.size, self.group, self.scheme = lengths, window, size, group, scheme
        self.layout = balanced_layout((0, *accumulate(lengths)), size)
        self.cu_seqlens = torch.tensor(self.layout.offsets, dtype=torch.int32, device="cuda")
        generator = torch.Generator("cuda").manual_seed(0)
        part = self.layout.rank_tokens(dist.get_rank() % size).cuda()

        def normal(heads: int) -> torch.Tensor:
            row = torch.empty(part.numel(), heads, HEAD_SIZE, dtype=torch.bfloat16, device="cuda")
            for head in range(heads):  # one head at a time: the whole row would count as this layer's memory
                whole = torch.randn(sum(lengths), HEAD_SIZE, device="cuda", generator=generator).bfloat16()
                row[:, head] = whole[part]
            return row

        self.leaves = [normal(HEADS), normal(KV_HEADS), normal(KV_HEADS)]
        self.leaves.append(torch.randn(HEADS, device="cuda", generator=generator) * 1.5 + 1)
        self.leaves = [leaf.requires_grad_() for leaf in self.leaves]
        self.grad_o = normal(HEADS)

    def forward(self) -> Any:
        if self.size == 1:
            packing = {"cu_seqlens": self.cu_seqlens, "max_seqlen": self.layout.longest}
            return sink_attention(*self.leaves, **packing, window=self.window, scale=SCALE)
        return context_parallel_attention(*self.leaves, self.layout, self.group, self.window, SCALE, scheme=self.scheme)

    def __call__(self) -> tuple[torch.Tensor, ...]:
        out = self.forward()
        return out.detach(), *torch.autograd.grad(out, self.leaves, self.grad_o)


def eager_ms(call: Callable[[], Any], rounds: int, calls: int) -> float:
    """Milliseconds per call of ``calls`` in a row, the median of ``rounds``, on the slowest rank."""
    times = []
    for _ in range(rounds + 1):
        dist.barrier()
        torch.cuda.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(calls):
            call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / calls)
    return slowest(median(times[1:]))


def graph_ms(call: Callable[[], Any], rounds: int, calls: int) -> float:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):  # NCCL's watchdog asks its events
        for _ in range(calls):
            call()
    result = eager_ms(graph.replay, rounds, 1) / calls
    del graph
    return result


def peak_gb(make: Callable[[], Layer]) -> float:
    """Peak of one forward and backward pass, inputs and gradients included, on the fullest rank."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    layer = make()
    layer()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    layer()
    torch.cuda.synchronize()
    return slowest((torch.cuda.max_memory_allocated() - before) / 1e9)


def correctness(groups: dict[int, Any]) -> list[dict[str, Any]]:
    """Errors against fp64 of what all ranks computed, beside those of one GPU: ||x - exact|| / ||exact||."""
    rows = []
    for window in (128, None):
        one = Layer(UNEVEN, window, 1, None, "")
        exact_inputs = [x.detach().double() for x in one.leaves]
        packing = packed_layout(one.cu_seqlens)
        o, lse = reference_forward(*exact_inputs, packing, window, SCALE)
        exact = (o, *reference_backward((*exact_inputs, o, lse), one.grad_o.double(), packing, window, SCALE))
        for size in (1, 2, 4):
            for scheme in ("",) if size == 1 else ("all_to_all", "halo" if window else "all_gather"):
                layer = Layer(UNEVEN, window, size, groups[size], scheme)
                part = layer.layout.rank_tokens(dist.get_rank() % size).cuda()
                *local, dsinks = layer()
                if size > 1:
                    dist.all_reduce(dsinks, group=groups[size])
                pairs = [(x, y[part]) for x, y in zip(local, exact, strict=False)] + [(dsinks, exact[-1])]
                errors = [slowest(float((x.double() - y).norm() / y.norm())) for x, y in pairs]
                names = ("o", "dq", "dk", "dv", "dsinks")
                rows.append({"window": window, "size": size, "scheme": scheme, **dict(zip(names, errors, strict=True))})
                report(f"window {window} CP {size} {scheme:10s} " + "  ".join(f"{e:.2e}" for e in errors))
    return rows


def bandwidth(group: Any) -> dict[str, float]:
    """Bytes per second that a rank sends to the others, 256 MB per rank."""
    send = torch.randn(64 << 20, device="cuda")
    wide = torch.empty(dist.get_world_size() * send.numel(), device="cuda")
    share = (dist.get_world_size() - 1) / dist.get_world_size()
    tiny = torch.zeros(dist.get_world_size(), device="cuda")
    calls = {
        "all_to_all": (lambda: dist.all_to_all_single(wide[: send.numel()], send), send.numel() * 4 * share),
        "all_gather": (lambda: dist.all_gather_into_tensor(wide, send), wide.numel() * 4 * share),
        "small_all_to_all": (lambda: dist.all_to_all_single(torch.empty_like(tiny), tiny), 0),
    }
    result = {}
    for name, (call, size) in calls.items():
        ms = eager_ms(call, 5, 10)
        result[name] = size / ms * 1e3 if size else ms / 1e3
        report(f"{name}: {size / ms / 1e6:.0f} GB/s" if size else f"{name}: {ms * 1e3:.0f} us")
    return result


def timing(window: int | None, groups: dict[int, Any]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for tokens in (32_768, 131_072):
        for case, lengths in {"one sequence": [tokens], "episodes": episodes(tokens)}.items():
            single: dict[str, Any] = {}
            for size in (1, 2, 4):
                for scheme in ("",) if size == 1 else ("halo" if window else "all_gather", "all_to_all"):

                    def make(size: int = size, scheme: str = scheme, lengths: list[int] = lengths) -> Layer:
                        return Layer(lengths, window, size, groups[size], scheme)

                    gigabytes = peak_gb(make)
                    layer = make()
                    long = window is None and tokens > 40_000
                    eager = eager_ms(layer, 3, 1 if long else 10)
                    graph = None if long else graph_ms(layer, 5, 3)
                    row = {"window": window, "tokens": tokens, "case": case, "sequences": len(lengths), "size": size}
                    row |= {"scheme": scheme, "eager_ms": eager, "graph_ms": graph, "peak_gb": gigabytes}
                    single = single or row
                    ms, whole = (graph or eager), (single["graph_ms"] or single["eager_ms"])
                    row |= {"efficiency": whole / ms / size, "memory_ratio": gigabytes * size / single["peak_gb"]}
                    costs = {c.scheme: c for c in candidates(layer.layout, SHAPE, window, H200)}
                    row["model_ms"] = costs[scheme].seconds * 1e3 if size > 1 else None
                    rows.append(row)
                    report(
                        f"window {window!s:5} {tokens:6d} {case:12s} CP {size} {scheme:10s} eager {eager:8.3f} ms  "
                        f"graph {graph or 0:8.3f} ms  scaling {row['efficiency']:.3f}  peak {gigabytes:.2f} GB "
                        f"(x CP {row['memory_ratio']:.3f})  model {row['model_ms'] or 0:.3f} ms"
                    )
                    del layer
                    torch.cuda.empty_cache()
    return rows


def ring_floor(tokens: int, size: int = 4) -> dict[str, float]:
    """What a ring's attention calls alone would cost: no communication, no merging, no sink (flash-attn-4).

    With head-tail chunks a rank attends to its own tokens causally and then, for each other rank, either with all of
    its queries to half of that rank's keys or with half of its queries to all of them.
    """
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

    local = tokens // size
    q = torch.randn(local, HEADS, HEAD_SIZE, device="cuda").bfloat16()
    k, v = (torch.randn(local, KV_HEADS, HEAD_SIZE, device="cuda").bfloat16() for _ in range(2))

    def step(queries: int, keys: int, causal: bool) -> None:
        offsets = [torch.tensor([0, n], dtype=torch.int32, device="cuda") for n in (queries, keys)]
        packing = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), offsets, strict=True))
        packing |= {"max_seqlen_q": queries, "max_seqlen_k": keys, "causal": causal, "softmax_scale": SCALE}
        o, lse = _flash_attn_fwd(q[:queries], k[:keys], v[:keys], return_lse=True, **packing)[:2]
        _flash_attn_bwd(q[:queries], k[:keys], v[:keys], o, o, lse, **packing)

    return {
        "own": eager_ms(lambda: step(local, local, True), 3, 3),
        "half_keys": eager_ms(lambda: step(local, local // 2, False), 3, 3),
        "half_queries": eager_ms(lambda: step(local // 2, local, False), 3, 3),
    }


def ring() -> dict[str, Any]:
    result = {}
    for tokens in (32_768, 131_072):
        parts = ring_floor(tokens)
        totals = {r: parts["own"] + r * parts["half_keys"] + (3 - r) * parts["half_queries"] for r in range(4)}
        result[str(tokens)] = parts | {"slowest_rank": max(totals.values())}
        report(f"ring, attention calls alone, {tokens} tokens, CP 4: {max(totals.values()):.3f} ms  {parts}")
    return result


def transformer_engine(groups: dict[int, Any]) -> list[dict[str, Any]]:
    """Transformer Engine's all-to-all with its learnable softmax, one sequence per row, unpacked (its packed form needs
    cuDNN 9.26 for the sink's gradient and is not fused below that)."""
    from transformer_engine.pytorch import DotProductAttention

    group, rows = groups[4], []
    stream = torch.cuda.Stream()
    for window in (128, None):
        for tokens in (32_768, 131_072):
            for size in (1, 4):
                module = DotProductAttention(
                    HEADS, HEAD_SIZE, num_gqa_groups=KV_HEADS, attention_dropout=0.0, qkv_format="bshd",
                    attn_mask_type="causal", window_size=(127, 0) if window else (-1, 0), softmax_type="learnable",
                ).cuda()  # fmt: skip
                if size > 1:
                    module.set_context_parallel_group(group, list(range(4)), stream, "a2a")
                local = tokens // size
                q = torch.randn(1, local, HEADS, HEAD_SIZE, device="cuda", dtype=torch.bfloat16, requires_grad=True)
                k, v = (
                    torch.randn(1, local, KV_HEADS, HEAD_SIZE, device="cuda", dtype=torch.bfloat16, requires_grad=True)
                    for _ in range(2)
                )

                def call(module: Any = module, inputs: tuple[torch.Tensor, ...] = (q, k, v)) -> None:
                    out = module(*inputs)
                    torch.autograd.grad(out, [*inputs, *module.parameters()], out.detach())

                call()
                ms = eager_ms(call, 3, 2)
                rows.append({"window": window, "tokens": tokens, "size": size, "eager_ms": ms})
                report(f"Transformer Engine a2a, window {window}, {tokens} tokens, CP {size}: {ms:.3f} ms")
                del module, q, k, v, call
                torch.cuda.empty_cache()
    return rows


def report(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="sections to run, all without it")
    parser.add_argument("--out", help="write the figures as JSON")
    options = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("nccl", timeout=timedelta(seconds=60), device_id=device)
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    groups = {1: None, 2: pairs[dist.get_rank() // 2], 4: dist.group.WORLD}
    sections: dict[str, Callable[[], Any]] = {
        "correctness": lambda: correctness(groups),
        "bandwidth": lambda: bandwidth(dist.group.WORLD),
        "window": lambda: timing(128, groups),
        "full": lambda: timing(None, groups),
        "ring": ring,
        "te": lambda: transformer_engine(groups),
    }
    result: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    for name, section in sections.items():
        if options.only and name not in options.only:
            continue
        try:
            result[name] = section()
        except Exception as error:
            result[name] = f"{type(error).__name__}: {error}"
            report(f"{name} did not run: {traceback.format_exc()}")
        torch.cuda.empty_cache()
        if options.out and dist.get_rank() == 0:
            with open(options.out, "w") as file:
                json.dump(result, file, indent=1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
