"""Compares the plugin's window attention with float64, in Triton's interpreter:

TRITON_INTERPRET=1 PYTHONPATH=rl_loop/engines/sglang/plugin:. python THIS_FILE
"""

from dataclasses import dataclass

import gptoss_window_attention as attention
import torch
from torch import Tensor

from tests.support.tolerances import assert_within, attention_error

LENGTHS = [128, 1, 500, 2, 100, 127, 129, 0]
INFINITY = float("inf")
SCALE = 0.3
SHAPES = [
    # query heads, key/value heads, head size, window
    (16, 2, 64, 128),
    (2, 2, 32, 100),
    (12, 2, 16, 16),
    (3, 1, 64, 5),
    (17, 1, 16, 65),
]


@dataclass
class Pool:
    """Keys and values of requests with ``LENGTHS``, and their slots."""

    keys: Tensor
    """[slots, key/value heads, head size]."""
    values: Tensor
    """[slots, key/value heads, head size]."""
    table: Tensor
    """Slot of each token, int32 [requests, more than the longest length]."""


def fill_pool(heads: int, head_size: int, window: int) -> Pool:
    """Return a pool in which the visible slots are shuffled.

    All other slots are NaN, and the table entries of all other tokens are invalid slots.
    """
    seen = [min(length, window) for length in LENGTHS]
    slots = 3 * sum(seen)
    free = torch.randperm(slots, dtype=torch.int32)
    table = torch.full((len(LENGTHS), max(LENGTHS) + 7), 2**31 - 1, dtype=torch.int32)
    table[::2] = -(2**31)
    keys = torch.full((slots, heads, head_size), float("nan"))
    values = torch.full((slots, heads, head_size), float("nan"))
    for request, (length, count) in enumerate(zip(LENGTHS, seen, strict=True)):
        taken, free = free[:count], free[count:]
        table[request, length - count : length] = taken
        keys[taken.long()] = torch.randn(count, heads, head_size)
        values[taken.long()] = torch.randn(count, heads, head_size)
    return Pool(keys, values, table)


def compare(queries: Tensor, pool: Pool, window: int, sinks: Tensor | None) -> None:
    """Compare every query head of every request."""
    outputs = torch.full_like(queries, float("nan"))
    attention.attend_to_window(
        queries,
        pool.keys,
        pool.values,
        pool.table,
        torch.tensor(LENGTHS, dtype=torch.int32),
        outputs,
        window=window,
        scale=SCALE,
        sinks=sinks,
    )

    group = queries.shape[1] // pool.keys.shape[1]
    for request, length in enumerate(LENGTHS):
        slots = pool.table[request, max(0, length - window) : length].long()
        for head in range(queries.shape[1]):
            values = pool.values[slots, head // group]
            operands = (queries[request, head], pool.keys[slots, head // group], values)
            sink = None if sinks is None else float(sinks[head])
            expected = attend_in_float64(*operands, sink)
            bound = attention_error(
                *operands,
                SCALE,
                sink,
                weight_dtype=None if values.dtype == torch.float32 else values.dtype,
            )
            name = (queries.shape, window, length, head)
            assert_within(outputs[request, head], expected, bound, name)


def attend_in_float64(query: Tensor, keys: Tensor, values: Tensor, sink: float | None) -> Tensor:
    """Return the output of one query head, whose sink is an additional key with value 0."""
    if len(keys) == 0:
        return torch.zeros(len(query), dtype=torch.float64)
    logits = keys.double() @ query.double() * SCALE
    if sink is not None:
        logits = torch.cat([logits, torch.tensor([sink], dtype=torch.float64)])
    return logits.softmax(0)[: len(keys)] @ values.double()


def compare_with_float64(heads: int, key_heads: int, head_size: int, window: int) -> None:
    """Compare without sinks, with negligible sinks, and with sinks that take all the weight."""
    pool = fill_pool(key_heads, head_size, window)
    queries = 2 * torch.randn(len(LENGTHS), heads, head_size)
    compare(queries, pool, window, None)

    sinks = torch.randn(heads)
    sinks[0] = -INFINITY
    sinks[-1] = 300.0
    compare(queries, pool, window, sinks)


def compare_16_bits(window: int) -> None:
    """Compare keys and values that are slices of wider pools, with 16-bit weights.

    The dtype is fp16, because the interpreter multiplies bf16 bits as integers.
    """
    wider = fill_pool(3, 32, window)
    pool = Pool(wider.keys.half()[:, 1:], wider.values.half()[:, :2], wider.table)
    queries = torch.randn(len(LENGTHS), 6, 32).half()
    compare(queries, pool, window, torch.randn(6).half())


if __name__ == "__main__":
    torch.manual_seed(0)
    for shape in SHAPES:
        compare_with_float64(*shape)
    compare_16_bits(window=128)
    for attention.CHUNK in (16, 128):
        compare_with_float64(2, 1, 16, 100)
    print(f"{len(SHAPES)} shapes")
