"""A custom attention kernel for a decoding step in layers with a sliding window.

SGLang 0.5.17 calls FlashAttention 3, whose tiles have 192 query rows. A decoding step of GPT-OSS
fills 8 of them: one token, and 8 query heads per key/value head. With 256 requests on an H200 it
took 69 us in each of the 12 layers with a window of 128 tokens. Reading their keys and values takes
about 16 us. This kernel takes 23 us (docs/design/sglang.md).

A program computes one key/value head of one request. It reads the slots of the last tokens from the
page table, then their keys and values. Triton's pipeline starts the loads of the whole window into
shared memory before the first chunk is multiplied. Programs are small, so that some of them read
while others multiply.

Products have the inputs' dtype and are summed in fp32. The softmax is fp32. Its weights are rounded
to the dtype of the values before the second product, as in FlashAttention.

All other calls go to FlashAttention.
"""

# Triton interprets parameter annotations, so its kernels have none.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 64
"""Keys that a program multiplies at a time. A power of two."""
WARPS = 2
STAGES = 5
"""Stages of Triton's pipeline.

The slots of a chunk are read first, and two chunks fit in shared memory. With heads of size 64,
compiled for a Hopper GPU, 6 programs of 37 KB fit on a multiprocessor.
"""
MAX_WINDOW = 256
"""Largest supported window, in tokens.

For longer ones FlashAttention is efficient: it fills its tiles with keys and uses several programs
per head.
"""
MIN_HEAD_SIZE = 16
"""Smallest head size that a matrix instruction multiplies."""
MAX_HEAD_SIZE = 128
"""Largest head size: with more, two chunks do not fit into shared memory with other programs."""
MIN_ROWS = 16
"""Minimum query heads of a program: rows of a matrix instruction. GPT-OSS fills half of them."""
LOWEST = tl.constexpr(-1.0e30)
"""Initial value of the largest score. Not -inf, because -inf - -inf is NaN."""
LOG2_E = tl.constexpr(1.4426950408889634)


def attend_to_window(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    outputs: Tensor,
    *,
    window: int,
    scale: float,
    sinks: Tensor | None,
) -> None:
    """Compute softmax(queries @ keys * scale) @ values over the last tokens of each request.

    The function does not wait for the GPU, and the grid depends only on shapes, so it can be
    captured in a CUDA graph. Outputs of a request without tokens are 0.

    Args:
        queries: [requests, query heads, head size], contiguous. The head size is a power of two.
        keys: [slots, key/value heads, head size] with a stride of 1 in the last dimension.
        values: same shape and strides as ``keys``.
        page_table: int32 [requests, at least the longest length] with a stride of 1 in the last
            dimension: slots of a request's tokens. Entries outside the window are not read.
        lengths: int32 [requests], contiguous: tokens of each request, including the query's.
        outputs: same shape as ``queries``, is written.
        window: maximum number of tokens that a query sees, including its own.
        scale: factor of the scores.
        sinks: [query heads], contiguous: additional logits of the softmax without a value. None for
            none.
    """
    requests, heads, head_size = queries.shape
    group = heads // keys.shape[1]
    # A matrix instruction needs at least 16 keys.
    chunk = max(16, min(CHUNK, triton.next_power_of_2(window)))

    # The heads of a request are adjacent in the grid, because they read the same slots, whose data
    # is adjacent.
    grid = (keys.shape[1], requests)
    _attend_to_window_kernel[grid](
        queries,
        keys,
        values,
        *keys.stride()[:2],
        *values.stride()[:2],
        page_table,
        page_table.stride(0),
        lengths,
        sinks,
        outputs,
        scale,
        WINDOW=window,
        CHUNK=chunk,
        CHUNKS=triton.cdiv(window, chunk),
        GROUP=group,
        ROWS=max(MIN_ROWS, triton.next_power_of_2(group)),
        HEAD_SIZE=head_size,
        STAGES=STAGES,
        num_warps=WARPS,
    )


@triton.jit(do_not_specialize=["page_table_stride"])
def _attend_to_window_kernel(
    queries,
    keys,
    values,
    key_slot_stride,
    key_head_stride,
    value_slot_stride,
    value_head_stride,
    page_table,
    page_table_stride,
    lengths,
    sinks,
    outputs,
    scale,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    STAGES: tl.constexpr,
):
    # Grid: key/value heads, requests. The query heads of the key/value head are the rows.
    head = tl.program_id(0)
    request = tl.program_id(1).to(tl.int64)  # its product with the stride exceeds 32 bits
    length = tl.load(lengths + request)
    first = tl.maximum(length - WINDOW, 0)

    row = tl.arange(0, ROWS)
    is_head = row < GROUP
    column = tl.arange(0, HEAD_SIZE)[None, :]
    query_head = head * GROUP + row
    place = (request * tl.num_programs(0) * GROUP + query_head[:, None]) * HEAD_SIZE + column
    # Rows without a head only fill the matrix instruction. They are not stored.
    query = tl.load(queries + place, mask=is_head[:, None], other=0.0)

    largest, total = _initial_softmax(sinks, query_head, is_head, ROWS)
    sums = tl.zeros((ROWS, HEAD_SIZE), dtype=tl.float32)

    key_head = keys + head * key_head_stride + column
    value_head = values + head * value_head_stride + column
    for number in tl.range(0, CHUNKS, num_stages=STAGES):
        # After the last token, the table contains slots of earlier requests, with arbitrary data.
        # Zeros replace it, because NaN times a weight of 0 is NaN.
        position = first + number * CHUNK + tl.arange(0, CHUNK)
        in_window = position < length
        entry = page_table + request * page_table_stride + position
        slot = tl.load(entry, mask=in_window, other=0).to(tl.int64)[:, None]
        key = tl.load(key_head + slot * key_slot_stride, mask=in_window[:, None], other=0.0)
        value = tl.load(value_head + slot * value_slot_stride, mask=in_window[:, None], other=0.0)

        # "ieee", because Triton would otherwise multiply fp32 inputs in TF32.
        score = tl.dot(query, key.trans(), input_precision="ieee") * (scale * LOG2_E)
        score = tl.where(in_window[None, :], score, float("-inf"))
        weight, shrinking, largest, total = _update_softmax(score, largest, total)
        # Earlier weights are relative to an earlier largest score.
        sums = sums * shrinking[:, None]
        sums = tl.dot(weight.to(value.dtype), value, sums, input_precision="ieee")

    # The total is 0 for a request without tokens and without sinks.
    output = sums / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(outputs + place, output.to(outputs.dtype.element_ty), mask=is_head[:, None])


@triton.jit
def _initial_softmax(sinks, query_head, is_head, ROWS: tl.constexpr):
    """Return the largest score and the sum of exponentials [ROWS] before the first key.

    Scores and sinks are base-2 logarithms.
    """
    if sinks is None:
        largest = tl.full((ROWS,), LOWEST, dtype=tl.float32)
        total = tl.zeros((ROWS,), dtype=tl.float32)
    else:
        # GPUs have an instruction for exp2, but none for exp.
        sink = tl.load(sinks + query_head, mask=is_head, other=0.0).to(tl.float32) * LOG2_E
        largest = tl.maximum(sink, LOWEST)
        total = tl.exp2(sink - largest)
    return largest, total


@triton.jit
def _update_softmax(score, largest, total):
    """Add the scores [ROWS, CHUNK] of a chunk to the online softmax.

    Returns:
        Weights [ROWS, CHUNK], the factor [ROWS] of sums over earlier chunks, the largest score and
        the sum of exponentials.
    """
    new_largest = tl.maximum(largest, tl.max(score, 1))
    weight = tl.exp2(score - new_largest[:, None])
    shrinking = tl.exp2(largest - new_largest)
    return weight, shrinking, new_largest, total * shrinking + tl.sum(weight, 1)


# -- SGLang's calls of FlashAttention --------------------------------------------------------------


def install() -> None:
    """Let SGLang's FlashAttention backend decode windows with this kernel."""
    from sglang.srt.layers.attention import flashattention_backend

    flashattention_backend.flash_attn_with_kvcache = with_fused_windows(
        flashattention_backend.flash_attn_with_kvcache
    )


def with_fused_windows(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement of ``flash_attn_with_kvcache`` for SGLang's backend.

    It calls ``original`` for all calls that the kernel does not support. Before the call, SGLang's
    backend has stored the new keys and values, and has chosen the buffers and the page table of the
    pool of windowed layers.
    """

    @wraps(original)
    def flash_attn_with_kvcache(*arguments: Any, **options: Any) -> Any:
        if arguments or not is_decoding_of_window(options):
            return original(*arguments, **options)

        queries = options["q"]
        outputs = options["out"]
        if outputs is None:
            outputs = torch.empty_like(queries)
        attend_to_window(
            queries,
            options["k_cache"][:, 0],
            options["v_cache"][:, 0],
            options["page_table"],
            options["cache_seqlens"],
            outputs,
            window=options["window_size"][0] + 1,  # SGLang does not count the query's own token
            scale=options["softmax_scale"],
            sinks=options.get("sinks"),
        )
        return outputs

    return flash_attn_with_kvcache


DECODING_OPTIONS = {
    "q",
    "k_cache",
    "v_cache",
    "page_table",
    "cache_seqlens",
    "cu_seqlens_q",
    "max_seqlen_q",
    "softmax_scale",
    "causal",
    "window_size",
    "softcap",
    "return_softmax_lse",
    "num_splits",
    "out",
    "ver",
    "scheduler_metadata",
}
"""Options that ``FlashAttentionBackend.forward_decode`` of SGLang 0.5.17 passes in its plain case.

Prefill and other kinds of decoding omit some or pass others.
"""


def is_decoding_of_window(options: dict[str, Any]) -> bool:
    """Return True if the kernel supports a call of ``flash_attn_with_kvcache``.

    The check reads no data from the GPU. In CUDA graphs it runs when they are captured.
    """
    # An option that is not known here could change the result.
    if options.keys() - {"sinks"} != DECODING_OPTIONS:
        return False

    asks_for_more = (
        options["ver"] != 3
        or not options["causal"]
        or options["softcap"]
        or options["return_softmax_lse"]
        or options["scheduler_metadata"] is not None
    )
    # -1 tokens before the query mean that there is no window.
    before, behind = options["window_size"]
    if asks_for_more or behind != 0 or not 0 <= before < MAX_WINDOW:
        return False

    # One token per request. Speculative decoding verifies several and needs more than this kernel.
    requests, heads, head_size = options["q"].shape
    if options["max_seqlen_q"] != 1 or not 0 < requests == len(options["cache_seqlens"]):
        return False

    pages, _, key_heads, _ = options["k_cache"].shape
    # Pages have one token.
    expected_pool = (pages, 1, key_heads, head_size)
    return (
        options["k_cache"].shape == options["v_cache"].shape == expected_pool
        and heads % key_heads == 0
        and MIN_HEAD_SIZE <= head_size <= MAX_HEAD_SIZE
        and head_size == triton.next_power_of_2(head_size)
        and has_plain_layout(options)
    )


def has_plain_layout(options: dict[str, Any]) -> bool:
    """Return True if the tensors of a call have the dtypes and strides that the kernel reads."""
    pools = (options["k_cache"], options["v_cache"])
    integers = (options["page_table"], options["cache_seqlens"])
    whole = [options["q"], options["cache_seqlens"]]
    for name in ("out", "sinks"):
        if options.get(name) is not None:
            whole.append(options[name])

    outputs = options["out"]
    return (
        all(pool.dtype == torch.bfloat16 and pool.stride(-1) == 1 for pool in pools)
        and options["q"].dtype == torch.bfloat16
        and (
            outputs is None
            or (outputs.dtype, outputs.shape) == (torch.bfloat16, options["q"].shape)
        )
        and all(tensor.dtype == torch.int32 and tensor.stride(-1) == 1 for tensor in integers)
        and all(tensor.is_contiguous() for tensor in whole)
    )
