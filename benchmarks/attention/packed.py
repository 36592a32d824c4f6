"""Attention with learnable softmax in Transformer Engine and in this project, packed and unpacked.

    python -m benchmarks.attention packed --lengths 4096 4096

Needs one GPU and Transformer Engine. Inputs have GPT-OSS's shapes in bf16: 64 query heads, 8 kv
heads, head size 64. Prints the version of cuDNN and a Markdown table with these columns:

- kernels that Transformer Engine chose,
- milliseconds of the forward and backward pass (medians, measured interleaved),
- peak memory without inputs and gradients,
- relative difference of the output from this project's kernel.

If a variant cannot run, its row shows the reason.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch

from benchmarks.attention.chosen import chosen_attention
from benchmarks.harness import time_call
from gptoss_kernels.sink_attention import sink_attention

HEADS, KV_HEADS, HEAD_SIZE = 64, 8, 64
WINDOW = 128


@dataclass
class Variant:
    """One implementation of the attention of a row."""

    name: str
    forward: Callable[[], torch.Tensor]
    """Forward pass. It returns [tokens, HEADS, HEAD_SIZE]."""
    times: list[float] = field(default_factory=list)
    """Milliseconds of the forward and backward pass, one value per round."""
    gigabytes: float = 0.0
    """Peak memory beyond the memory allocated before, in GB (1e9)."""
    error: float = 0.0
    """Relative difference of the output from this project's kernel."""
    attention: str | None = None
    """Kernels that Transformer Engine chose; None for this project's kernel."""
    failure: str | None = None
    """Reason why the variant cannot run; None if it runs."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 4096])
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()

    version = torch.backends.cudnn.version()
    print(f"{torch.cuda.get_device_name()}, cuDNN {version}, sequences {options.lengths}\n")
    print("| layer | variant | kernels | ms | GB | error |")
    print("|---" * 6 + "|")
    for window in (WINDOW, None):
        for variant in measure(options.lengths, window, options.rounds):
            print(row(variant, window), flush=True)


def measure(lengths: list[int], window: int | None, rounds: int) -> list[Variant]:
    """Check and time all variants of one layer on the same inputs."""
    inputs = make_inputs(lengths)
    offsets = compute_offsets(lengths)
    ours = partial(sink_attention_output, inputs, offsets, max(lengths), window)
    variants = [
        Variant("ours, packed", ours),
        Variant(
            "Transformer Engine, packed", transformer_engine_call(inputs, lengths, window, "thd")
        ),
    ]
    if len(set(lengths)) == 1:
        unpacked = transformer_engine_call(inputs, lengths, window, "bshd")
        variants.append(Variant("Transformer Engine, unpacked", unpacked))

    expected = ours().detach()
    for variant in variants:
        check(variant, inputs, expected)
    for _ in range(rounds):
        for variant in variants:
            if variant.failure is None:
                call = partial(forward_and_backward, variant, inputs)
                variant.times.append(time_call(call))
    return variants


def make_inputs(lengths: list[int]) -> dict[str, torch.Tensor]:
    """Return q, k, v and sinks with gradients, and a gradient of the output."""
    torch.manual_seed(0)
    tokens = sum(lengths)
    shapes = {"q": (tokens, HEADS), "k": (tokens, KV_HEADS), "v": (tokens, KV_HEADS)}
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    inputs = {}
    for name, shape in shapes.items():
        inputs[name] = torch.randn(*shape, HEAD_SIZE, **options).requires_grad_()
    inputs["sinks"] = torch.randn(HEADS, device="cuda").requires_grad_()
    inputs["gradient"] = torch.randn(tokens, HEADS, HEAD_SIZE, **options)
    return inputs


def compute_offsets(lengths: list[int]) -> torch.Tensor:
    """Return the starts of the sequences and the end of the last one: int32 [sequences + 1]."""
    ends = torch.tensor([0, *lengths]).cumsum(0)
    return ends.to(device="cuda", dtype=torch.int32)


def sink_attention_output(
    inputs: dict[str, torch.Tensor], offsets: torch.Tensor, longest: int, window: int | None
) -> torch.Tensor:
    """Compute attention as the trainer does."""
    out = sink_attention(
        inputs["q"],
        inputs["k"],
        inputs["v"],
        inputs["sinks"],
        cu_seqlens=offsets,
        max_seqlen=longest,
        window=window,
    )
    assert isinstance(out, torch.Tensor)
    return out


def transformer_engine_call(
    inputs: dict[str, torch.Tensor], lengths: list[int], window: int | None, layout: str
) -> Callable[[], torch.Tensor]:
    """Return a call of Transformer Engine's attention with the sinks of ``inputs``.

    Args:
        inputs: tensors of ``make_inputs``.
        lengths: tokens of each sequence.
        window: size of the attention window; None for full attention.
        layout: "thd" (packed) or "bshd" (unpacked).
    """
    from transformer_engine.pytorch import DotProductAttention

    is_packed = layout == "thd"
    module = DotProductAttention(
        num_attention_heads=HEADS,
        kv_channels=HEAD_SIZE,
        num_gqa_groups=KV_HEADS,
        qkv_format=layout,
        attn_mask_type="padding_causal" if is_packed else "causal",
        window_size=(-1, 0) if window is None else (window - 1, 0),
        softmax_type="learnable",
    ).cuda()
    offset = module.softmax_offset
    with torch.no_grad():
        offset.copy_(inputs["sinks"].reshape(offset.shape))
    offsets = compute_offsets(lengths)

    def call() -> torch.Tensor:
        q, k, v = inputs["q"], inputs["k"], inputs["v"]
        if not is_packed:
            rows = [x.unflatten(0, (len(lengths), -1)) for x in (q, k, v)]
            return module(*rows).reshape(q.shape)
        out = module(
            q,
            k,
            v,
            cu_seqlens_q=offsets,
            cu_seqlens_kv=offsets,
            max_seqlen_q=max(lengths),
            max_seqlen_kv=max(lengths),
        )
        return out.reshape(q.shape)

    return call


def check(variant: Variant, inputs: dict[str, torch.Tensor], expected: torch.Tensor) -> None:
    """Run a variant once and set its memory, error, kernels, or the reason of its failure."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    try:
        out = forward_and_backward(variant, inputs)
        torch.cuda.synchronize()
    except torch.cuda.OutOfMemoryError:
        variant.failure = "out of memory"
    except (ValueError, RuntimeError, AssertionError) as error:
        variant.failure = (str(error).splitlines() or [type(error).__name__])[0]
    else:
        distance = (out.float() - expected.float()).norm() / expected.float().norm()
        variant.error = float(distance)

    variant.gigabytes = (torch.cuda.max_memory_allocated() - before) / 1e9
    if variant.name.startswith("Transformer"):
        variant.attention = chosen_attention()
    torch.cuda.empty_cache()


def forward_and_backward(variant: Variant, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Run both passes and return the output."""
    for tensor in inputs.values():
        tensor.grad = None
    out = variant.forward()
    out.backward(inputs["gradient"])
    return out.detach()


def row(variant: Variant, window: int | None) -> str:
    """Return a row of the table."""
    layer = "full" if window is None else f"window {window}"
    cells = [layer, variant.name, variant.attention or "-"]
    if variant.failure is not None:
        cells += [variant.failure, f"{variant.gigabytes:.2f}", "-"]
    else:
        time = f"{median(variant.times):.3f}"
        cells += [time, f"{variant.gigabytes:.2f}", f"{variant.error:.1e}"]
    return "| " + " | ".join(cells) + " |"
