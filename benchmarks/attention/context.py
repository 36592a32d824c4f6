"""Context-parallel attention on 4 GPUs of one machine: correctness, time and memory.

    torchrun --nproc_per_node 4 -m benchmarks.attention context [--only SECTION ...] [--out FILE]

Measures one attention layer in GPT-OSS's shapes (bf16, 64 query heads, 8 kv heads, head size 64,
sinks), forward and backward, with every scheme. The rows have 32,768 and 131,072 tokens: one
sequence, or a mix of agent episodes.

Prints one line per measurement, with the value of the slowest rank:

- ``graph`` times replay a CUDA graph, so they are the time of the GPUs alone.
- ``eager`` times include host overhead that the GPUs do not hide.

The sections (correctness, bandwidth, window, full, ring, te) are independent. If a section fails,
its error is printed and the other sections still run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness import largest_of_ranks
from gptoss_kernels.sink_attention import sink_attention
from gptoss_kernels.sink_attention.layout import packed_layout
from gptoss_kernels.sink_attention.reference import reference_backward, reference_forward
from megatron_gptoss.context_parallel import (
    balanced_layout,
    candidates,
)
from megatron_gptoss.context_parallel.attention import context_parallel_attention
from megatron_gptoss.context_parallel.cost_model import H200, AttentionShape
from megatron_gptoss.context_parallel.token_order import rank_tokens

HEADS, KV_HEADS, HEAD_SIZE = 64, 8, 64
SCALE = HEAD_SIZE**-0.5
SHAPE = AttentionShape(HEADS, KV_HEADS, HEAD_SIZE)
UNEVEN = [3001, 127, 1, 128, 2047, 64, 2, 700, 1500, 622]


def episodes(tokens: int, seed: int = 1) -> list[int]:
    """Return lengths of agent episodes with a total of ``tokens``: mostly short, some very long."""
    draw = random.Random(seed)
    lengths = []
    while tokens:
        length = min(int(draw.lognormvariate(8, 1)) + 60, tokens)
        lengths.append(length)
        tokens -= length
    return lengths


@dataclass(frozen=True)
class Split:
    """Distribution of a row over ranks."""

    size: int
    """Number of context-parallel ranks."""
    scheme: str
    """Scheme of ``context_parallel_attention``; empty for one rank."""
    group: Any
    """Process group of this rank's row; None for one rank."""

    def __str__(self) -> str:
        return f"CP {self.size} {self.scheme:10s}"


def list_splits(window: int | None, groups: dict[int, Any]) -> list[Split]:
    """Return the split for one rank, then every scheme over 2 and over 4 ranks.

    Args:
        window: size of the attention window; None for full attention.
        groups: process group of this rank, by size.
    """
    splits = [Split(1, "", None)]
    for size in (2, 4):
        for scheme in ("halo" if window else "all_gather", "all_to_all"):
            splits.append(Split(size, scheme, groups[size]))
    return splits


class Layer:
    """One rank's part of an attention layer. The random row is the same for every split."""

    def __init__(self, lengths: list[int], window: int | None, split: Split) -> None:
        self.window = window
        self.split = split
        self.layout = balanced_layout((0, *accumulate(lengths)), split.size)
        self.cu_seqlens = torch.tensor(self.layout.offsets, dtype=torch.int32, device="cuda")
        self.rank_tokens = rank_tokens(self.layout, dist.get_rank() % split.size).cuda()

        generator = torch.Generator("cuda").manual_seed(0)
        q = self._random_rows(HEADS, generator)
        k = self._random_rows(KV_HEADS, generator)
        v = self._random_rows(KV_HEADS, generator)
        sinks = torch.randn(HEADS, device="cuda", generator=generator) * 1.5 + 1
        self.leaves = [leaf.requires_grad_() for leaf in (q, k, v, sinks)]
        self.grad_o = self._random_rows(HEADS, generator)

    def _random_rows(self, heads: int, generator: torch.Generator) -> torch.Tensor:
        """Return this rank's tokens of a random row, bf16 [tokens, heads, HEAD_SIZE]."""
        tokens = self.layout.offsets[-1]
        rows = torch.empty(
            len(self.rank_tokens),
            heads,
            HEAD_SIZE,
            dtype=torch.bfloat16,
            device="cuda",
        )
        # One head at a time, because the row of all ranks would count as memory of this layer.
        for head in range(heads):
            row = torch.randn(tokens, HEAD_SIZE, device="cuda", generator=generator)
            rows[:, head] = row.bfloat16()[self.rank_tokens]
        return rows

    def forward(self) -> torch.Tensor:
        if self.split.size == 1:
            return sink_attention(
                *self.leaves,
                cu_seqlens=self.cu_seqlens,
                max_seqlen=self.layout.longest,
                window=self.window,
                scale=SCALE,
            )
        return context_parallel_attention(
            *self.leaves,
            self.layout,
            self.split.group,
            self.window,
            SCALE,
            scheme=self.split.scheme,
        )

    def __call__(self) -> tuple[torch.Tensor, ...]:
        """Return the output and the gradients of q, k, v and sinks."""
        out = self.forward()
        return out.detach(), *torch.autograd.grad(out, self.leaves, self.grad_o)


def eager_ms(call: Callable[[], Any], rounds: int, calls: int) -> float:
    """Return the milliseconds per call on the slowest rank.

    Args:
        call: measured call. It may be collective.
        rounds: number of rounds. The result is their median.
        calls: calls per round.
    """
    times = []
    for _ in range(rounds + 1):
        dist.barrier()
        torch.cuda.synchronize()
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(calls):
            call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / calls)
    return largest_of_ranks(median(times[1:]))  # the first round warms up


def graph_ms(call: Callable[[], Any], rounds: int, calls: int) -> float:
    """Return milliseconds per call like ``eager_ms``, with one graph for the calls of a round."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()

    # NCCL's watchdog thread queries its events during the capture. It would invalidate a capture
    # with the mode "global".
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(calls):
            call()
    return eager_ms(graph.replay, rounds, 1) / calls


def peak_gb(make: Callable[[], Layer]) -> float:
    """Return the peak memory of a forward and backward pass with inputs, on the fullest rank."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    layer = make()
    layer()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    layer()
    torch.cuda.synchronize()
    return largest_of_ranks((torch.cuda.max_memory_allocated() - before) / 1e9)


def correctness(groups: dict[int, Any]) -> list[dict[str, Any]]:
    """Measure ||x - exact|| / ||exact|| against fp64, for one rank and for every split."""
    rows = []
    for window in (128, None):
        exact = exact_results(window)
        for split in list_splits(window, groups):
            errors = relative_errors(Layer(UNEVEN, window, split), exact)
            rows.append({"window": window, "size": split.size, "scheme": split.scheme, **errors})
            report(
                f"window {window} {split} " + "  ".join(f"{error:.2e}" for error in errors.values())
            )
    return rows


def exact_results(window: int | None) -> tuple[torch.Tensor, ...]:
    """Return the output and the gradients of the uneven row in fp64."""
    layer = Layer(UNEVEN, window, Split(1, "", None))
    inputs = [leaf.detach().double() for leaf in layer.leaves]
    packing = packed_layout(layer.cu_seqlens)
    o, lse = reference_forward(*inputs, packing, window, SCALE)
    gradients = reference_backward(
        (*inputs, o, lse),
        layer.grad_o.double(),
        packing,
        window,
        SCALE,
    )
    return o, *gradients


def relative_errors(layer: Layer, exact: tuple[torch.Tensor, ...]) -> dict[str, float]:
    """Return the errors of o, dq, dk, dv and dsinks on the worst rank."""
    *results, dsinks = layer()
    if layer.split.size > 1:
        dist.all_reduce(dsinks, group=layer.split.group)
    expected = [tensor[layer.rank_tokens] for tensor in exact[:-1]]

    errors = {}
    names = ("o", "dq", "dk", "dv", "dsinks")
    for name, result, reference in zip(
        names,
        [*results, dsinks],
        [*expected, exact[-1]],
        strict=True,
    ):
        difference = (result.double() - reference).norm() / reference.norm()
        errors[name] = largest_of_ranks(float(difference))
    return errors


def bandwidth() -> dict[str, float]:
    """Measure the collectives of the schemes.

    Returns:
        Bytes per second that a rank sends to the others, with 256 MB per rank, and the seconds of a
        small message (``small_all_to_all``).
    """
    size = dist.get_world_size()
    send = torch.randn(64 << 20, device="cuda")
    gathered = torch.empty(size * send.numel(), device="cuda")
    tiny = torch.zeros(size, device="cuda")
    share_of_others = (size - 1) / size

    result = {}
    for name, call, sent in (
        (
            "all_to_all",
            lambda: dist.all_to_all_single(gathered[: send.numel()], send),
            send.nbytes * share_of_others,
        ),
        (
            "all_gather",
            lambda: dist.all_gather_into_tensor(gathered, send),
            gathered.nbytes * share_of_others,
        ),
    ):
        seconds = eager_ms(call, 5, 10) / 1e3
        result[name] = sent / seconds
        report(f"{name}: {sent / seconds / 1e9:.0f} GB/s")

    seconds = eager_ms(lambda: dist.all_to_all_single(torch.empty_like(tiny), tiny), 5, 10) / 1e3
    result["small_all_to_all"] = seconds
    report(f"small_all_to_all: {seconds * 1e6:.0f} us")
    return result


def timing(window: int | None, groups: dict[int, Any]) -> list[dict[str, Any]]:
    """Measure time and memory of every split for every row."""
    rows: list[dict[str, Any]] = []
    for tokens in (32_768, 131_072):
        for case, lengths in {"one sequence": [tokens], "episodes": episodes(tokens)}.items():
            alone: dict[str, Any] | None = None
            for split in list_splits(window, groups):
                row = {"window": window, "tokens": tokens, "case": case, "sequences": len(lengths)}
                row |= {"size": split.size, "scheme": split.scheme}
                row |= measure_layer(lengths, window, split)
                alone = alone or row
                row |= compare_with_one_rank(row, alone)
                rows.append(row)
                report(
                    f"window {window!s:5} {tokens:6d} {case:12s} {split} eager {row['eager_ms']:8.3f} ms  "
                    f"graph {row['graph_ms'] or 0:8.3f} ms  scaling {row['efficiency']:.3f}  "
                    f"peak {row['peak_gb']:.2f} GB (x CP {row['memory_ratio']:.3f})  "
                    f"model {row['model_ms'] or 0:.3f} ms"
                )
    return rows


def measure_layer(lengths: list[int], window: int | None, split: Split) -> dict[str, Any]:
    """Return eager_ms, graph_ms, peak_gb and model_ms (predicted by the cost model) of a split."""
    gigabytes = peak_gb(lambda: Layer(lengths, window, split))
    layer = Layer(lengths, window, split)

    # Full attention over the long row takes so long that a graph would not hide any overhead.
    is_long = window is None and sum(lengths) > 40_000
    eager = eager_ms(layer, 3, 1 if is_long else 10)
    graph = None if is_long else graph_ms(layer, 5, 3)

    predicted = None
    if split.size > 1:
        costs = {cost.scheme: cost for cost in candidates(layer.layout, SHAPE, window, H200)}
        predicted = costs[split.scheme].seconds * 1e3

    del layer
    torch.cuda.empty_cache()
    return {"eager_ms": eager, "graph_ms": graph, "peak_gb": gigabytes, "model_ms": predicted}


def compare_with_one_rank(row: dict[str, Any], alone: dict[str, Any]) -> dict[str, float]:
    """Return the parallel efficiency, and the memory of all ranks relative to one rank."""
    milliseconds = row["graph_ms"] or row["eager_ms"]
    milliseconds_alone = alone["graph_ms"] or alone["eager_ms"]
    return {
        "efficiency": milliseconds_alone / milliseconds / row["size"],
        "memory_ratio": row["peak_gb"] * row["size"] / alone["peak_gb"],
    }


def ring_floor(tokens: int, size: int = 4) -> dict[str, float]:
    """Measure the attention calls of a ring with flash-attn-4.

    Communication, merging of partial results and sinks are left out. With head-tail chunks, a rank
    attends to its own tokens causally. For each other rank, it attends either with all of its
    queries to half of the other rank's keys, or with half of its queries to all of these keys.
    """
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

    local = tokens // size
    q = torch.randn(local, HEADS, HEAD_SIZE, device="cuda").bfloat16()
    k = torch.randn(local, KV_HEADS, HEAD_SIZE, device="cuda").bfloat16()
    v = torch.randn(local, KV_HEADS, HEAD_SIZE, device="cuda").bfloat16()

    def attend(queries: int, keys: int, causal: bool) -> None:
        packing = {
            "cu_seqlens_q": torch.tensor([0, queries], dtype=torch.int32, device="cuda"),
            "cu_seqlens_k": torch.tensor([0, keys], dtype=torch.int32, device="cuda"),
            "max_seqlen_q": queries,
            "max_seqlen_k": keys,
            "causal": causal,
            "softmax_scale": SCALE,
        }
        o, lse = _flash_attn_fwd(q[:queries], k[:keys], v[:keys], return_lse=True, **packing)[:2]
        _flash_attn_bwd(q[:queries], k[:keys], v[:keys], o, o, lse, **packing)

    return {
        "own": eager_ms(lambda: attend(local, local, True), 3, 3),
        "half_keys": eager_ms(lambda: attend(local, local // 2, False), 3, 3),
        "half_queries": eager_ms(lambda: attend(local // 2, local, False), 3, 3),
    }


def ring() -> dict[str, Any]:
    """Return the milliseconds of the attention calls of a ring of 4 ranks, by number of tokens."""
    result = {}
    for tokens in (32_768, 131_072):
        calls = ring_floor(tokens)

        # Rank r attends to half the keys of r other ranks. For the remaining 3 - r ranks, it uses
        # half of its queries.
        totals = [
            calls["own"] + r * calls["half_keys"] + (3 - r) * calls["half_queries"]
            for r in range(4)
        ]
        result[str(tokens)] = calls | {"slowest_rank": max(totals)}
        report(
            f"ring, attention calls alone, {tokens} tokens, CP 4: {max(totals):.3f} ms  {calls}",
        )
    return result


def transformer_engine(groups: dict[int, Any]) -> list[dict[str, Any]]:
    """Measure Transformer Engine's all-to-all with learnable softmax.

    Rows have one unpacked sequence. The packed format needs cuDNN 9.26 for the gradient of the
    sink. It is not fused with older versions.
    """
    rows = []
    for window in (128, None):
        for tokens in (32_768, 131_072):
            for size in (1, 4):
                ms = transformer_engine_ms(window, tokens, size, groups[4])
                rows.append({"window": window, "tokens": tokens, "size": size, "eager_ms": ms})
                report(
                    f"Transformer Engine a2a, window {window}, {tokens} tokens, CP {size}: {ms:.3f} ms",
                )
                torch.cuda.empty_cache()
    return rows


def transformer_engine_ms(window: int | None, tokens: int, size: int, group: Any) -> float:
    """Return the milliseconds of a forward and backward pass over ``size`` ranks."""
    from transformer_engine.pytorch import DotProductAttention

    module = DotProductAttention(
        HEADS,
        HEAD_SIZE,
        num_gqa_groups=KV_HEADS,
        attention_dropout=0.0,
        qkv_format="bshd",
        attn_mask_type="causal",
        window_size=(-1, 0) if window is None else (window - 1, 0),
        softmax_type="learnable",
    ).cuda()
    if size > 1:
        module.set_context_parallel_group(group, list(range(size)), torch.cuda.Stream(), "a2a")

    def random_input(heads: int) -> torch.Tensor:
        shape = (1, tokens // size, heads, HEAD_SIZE)
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    inputs = [random_input(HEADS), random_input(KV_HEADS), random_input(KV_HEADS)]

    def call() -> None:
        out = module(*inputs)
        torch.autograd.grad(out, [*inputs, *module.parameters()], out.detach())

    call()
    return eager_ms(call, 3, 2)


def report(line: str) -> None:
    """Print a line, on rank 0 only."""
    if dist.get_rank() == 0:
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", nargs="*", help="sections to run, all without it")
    parser.add_argument("--out", help="write the figures as JSON")
    options = parser.parse_args()

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("nccl", timeout=timedelta(seconds=60), device_id=device)
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    groups = {2: pairs[dist.get_rank() // 2], 4: dist.group.WORLD}

    sections: dict[str, Callable[[], Any]] = {
        "correctness": lambda: correctness(groups),
        "bandwidth": bandwidth,
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

        # Write the file after every section, because a later section may hang.
        if options.out and dist.get_rank() == 0:
            with open(options.out, "w") as file:
                json.dump(result, file, indent=1)
    dist.destroy_process_group()
