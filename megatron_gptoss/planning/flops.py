"""How much arithmetic a training step is, and how much the GPU can do: behind every TFLOP/s and MFU reported."""

import functools
from collections.abc import Iterable
from statistics import median

import torch

from megatron_gptoss.config import ModelConfig

MATMUL_CEILING = 780e12
"""Of a large bf16 matrix product on an H200, as ``matmul_ceiling`` measures it: what MFU is a share of."""


def attended_pairs(length: int, window: int | None = None) -> int:
    """(query, key) pairs of one causal sequence; with a window each query sees that many keys, itself included."""
    full = min(length, window or length)
    return full * (full + 1) // 2 + (length - full) * full


def forward_flops(model: ModelConfig, lengths: Iterable[int]) -> int:
    """Floating-point operations of a forward pass over packed sequences: 2 per multiply-add of every matrix product.

    Counted: attention projections, query-key and probability-value products of the pairs that causality and window
    leave, router, the chosen experts, output layer. Not counted: norms, softmax, activations, embedding look-up, and
    anything that is computed again. Training is three times this."""
    lengths = list(lengths)
    queries = model.num_attention_heads * model.head_size
    keys = model.num_key_value_heads * model.head_size
    per_token = model.num_layers * (
        model.hidden_size * (2 * queries + 2 * keys)
        + model.hidden_size * model.num_experts
        + model.experts_per_token * 3 * model.hidden_size * model.intermediate_size
    )
    per_token += model.hidden_size * model.vocab_size
    windows = [model.sliding_window if kind == "sliding_attention" else None for kind in model.layer_types]
    pairs = sum(attended_pairs(length, window) for window in windows for length in lengths)
    return 2 * per_token * sum(lengths) + 4 * queries * pairs


@functools.cache
def matmul_ceiling(size: int = 8192, rounds: int = 10) -> float:
    """TFLOP/s of a bf16 product of two random size x size matrices on the current GPU, measured once (0.05 s)."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    times = []
    for _ in range(rounds + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        a @ b
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return 2 * size**3 / median(times[2:]) / 1e9
