"""Attention of a decoding step in layers with a sliding window, in a kernel of ours.

SGLang 0.5.17 calls FlashAttention 3 for it. Its tiles have room for 192 queries, of which a decoding
step of GPT-OSS fills 8: one token, and 8 query heads to a key/value head. With 256 requests on an H200
it took 69 us in each of the 12 layers with a window of 128 tokens, whose keys and values can be read
in about 16; this kernel takes 23 (docs/sglang.md).

Here a program has one key/value head of one request. It reads the slots of the last tokens from the
page table, then their keys and values. Triton's pipeline has those of the whole window on their way to
shared memory before the first chunk of them is multiplied, and programs are small, so that some of them
read while others multiply.

Products take the inputs' dtype and are summed in fp32, and so is the softmax; weights are rounded to
the dtype of the values before they meet them, as FlashAttention does.

What else SGLang asks of FlashAttention, it still gets from there.
"""

# Triton reads parameter annotations as its own
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 64
"""Keys that a program multiplies at a time; a power of two."""
WARPS = 2
STAGES = 5
"""Of Triton's pipeline. A chunk's slots are read first, and two chunks have room in shared memory: with
heads of 64, compiled for a Hopper GPU, six programs of 37 KB fit on a processor."""
LARGEST_WINDOW = 256
"""Tokens. FlashAttention fills its tiles with keys where there are many, and goes through them with
several programs for each head."""
SMALLEST_HEAD = 16
"""Numbers of a head that a matrix instruction multiplies."""
LARGEST_HEAD = 128
"""With more, two chunks do not fit into shared memory beside those of other programs."""
FEWEST_ROWS = 16
"""Query heads of a program: the rows of a matrix instruction, of which GPT-OSS fills half."""
LOWEST = tl.constexpr(-1.0e30)
"""A largest score before any is known. Not -inf, from which -inf cannot be subtracted."""
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

    Nothing waits for the GPU, and the grid goes by shapes alone, so it can be captured in a CUDA graph.
    Of a request without tokens all outputs are 0.

    Args:
        queries: [requests, query heads, head size], contiguous. Head size: a power of two.
        keys: [slots, key/value heads, head size] with a stride of 1 in the last dimension.
        values: the same.
        page_table: int32 [requests, at least the longest length], with a stride of 1 in the last
            dimension: slots of a request's tokens. Entries outside of the window are not read.
        lengths: int32 [requests], contiguous: tokens of each request, the query's own among them.
        outputs: as the queries; is written.
        window: tokens that a query sees at most, its own among them.
        scale: of scores.
        sinks: [query heads], contiguous: logits that take part in the softmax, beside the scaled
            scores, and have no value.
    """
    requests, heads, head_size = queries.shape
    group = heads // keys.shape[1]
    chunk = max(16, min(CHUNK, triton.next_power_of_2(window)))

    # Heads of a request come after one another: they read the same slots, which lie side by side.
    grid = (keys.shape[1], requests)
    _attend_to_window_kernel[grid](
        queries,
        keys,
        values,
        keys.stride(0),
        keys.stride(1),
        values.stride(0),
        values.stride(1),
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
        ROWS=max(FEWEST_ROWS, triton.next_power_of_2(group)),
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
    # One program has one key/value head of one request, and the query heads that share it as rows.
    head = tl.program_id(0)
    request = tl.program_id(1).to(tl.int64)  # times the stride it would not fit 32 bits
    length = tl.load(lengths + request)
    first = tl.maximum(length - WINDOW, 0)

    row = tl.arange(0, ROWS)
    is_head = row < GROUP
    column = tl.arange(0, HEAD_SIZE)[None, :]
    query_head = head * GROUP + row
    place = (request * tl.num_programs(0) * GROUP + query_head[:, None]) * HEAD_SIZE + column
    query = tl.load(queries + place, mask=is_head[:, None], other=0.0)

    # Scores and sinks are logarithms to the base of 2, which is the exponential that GPUs have.
    if sinks is None:
        largest = tl.full((ROWS,), LOWEST, dtype=tl.float32)
        total = tl.zeros((ROWS,), dtype=tl.float32)
    else:
        sink = tl.load(sinks + query_head, mask=is_head, other=0.0).to(tl.float32) * LOG2_E
        largest = tl.maximum(sink, LOWEST)
        total = tl.exp2(sink - largest)
    sums = tl.zeros((ROWS, HEAD_SIZE), dtype=tl.float32)

    key_head = keys + head * key_head_stride + column
    value_head = values + head * value_head_stride + column
    for number in tl.range(0, CHUNKS, num_stages=STAGES):
        # Behind the last token the table has what earlier requests have left there, and a slot that
        # is not of this request may hold anything: zeros stand in, as a NaN stays one with weight 0.
        position = first + number * CHUNK + tl.arange(0, CHUNK)
        in_window = position < length
        entry = page_table + request * page_table_stride + position
        slot = tl.load(entry, mask=in_window, other=0).to(tl.int64)[:, None]
        key = tl.load(key_head + slot * key_slot_stride, mask=in_window[:, None], other=0.0)
        value = tl.load(value_head + slot * value_slot_stride, mask=in_window[:, None], other=0.0)

        score = tl.dot(query, key.trans(), input_precision="ieee") * (scale * LOG2_E)
        score = tl.where(in_window[None, :], score, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(score, 1))
        weight = tl.exp2(score - new_largest[:, None])

        shrinking = tl.exp2(largest - new_largest)
        total = total * shrinking + tl.sum(weight, 1)
        sums = sums * shrinking[:, None]
        sums = tl.dot(weight.to(value.dtype), value, sums, input_precision="ieee")
        largest = new_largest

    # A request without tokens, and without sinks, has weighed nothing.
    output = sums / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(outputs + place, output.to(outputs.dtype.element_ty), mask=is_head[:, None])


# -- SGLang's calls of FlashAttention ---------------------------------------------------------------


def install() -> None:
    """Let SGLang's FlashAttention backend decode windows with this kernel."""
    from sglang.srt.layers.attention import flashattention_backend

    flashattention_backend.flash_attn_with_kvcache = windows_at_once(
        flashattention_backend.flash_attn_with_kvcache
    )


def windows_at_once(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``flash_attn_with_kvcache`` for SGLang's backend, which calls ``original`` for what is
    not for us.

    By then the backend has saved the new keys and values, and chosen the buffers and the page table of
    the pool that windowed layers have."""

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
            window=options["window_size"][0] + 1,  # SGLang leaves the query's own token out
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
"""What ``FlashAttentionBackend.forward_decode`` of SGLang 0.5.17 gives in its plain case. Prefill, and
the decoding that is no plain one, leave some out or give others."""


def is_decoding_of_window(options: dict[str, Any]) -> bool:
    """Tell whether a call of ``flash_attn_with_kvcache`` asks for what the kernel computes.

    It looks at nothing that is on the GPU. In CUDA graphs it runs when they are captured.
    """
    if options.keys() - {"sinks"} != DECODING_OPTIONS:
        return False

    asks_for_more = (
        options["ver"] != 3
        or not options["causal"]
        or options["softcap"]
        or options["return_softmax_lse"]
        or options["scheduler_metadata"] is not None
    )
    before, behind = options["window_size"]
    if asks_for_more or behind != 0 or not 0 <= before < LARGEST_WINDOW:
        return False

    # One token of each request. Where speculative decoding verifies several, more is asked for.
    requests, heads, head_size = options["q"].shape
    if options["max_seqlen_q"] != 1 or not 0 < requests == len(options["cache_seqlens"]):
        return False

    pages, _, key_heads, _ = options["k_cache"].shape
    # With pages of one token.
    expected_pool = (pages, 1, key_heads, head_size)
    return (
        options["k_cache"].shape == options["v_cache"].shape == expected_pool
        and heads % key_heads == 0
        and SMALLEST_HEAD <= head_size <= LARGEST_HEAD
        and head_size == triton.next_power_of_2(head_size)
        and has_plain_layout(options)
    )


def has_plain_layout(options: dict[str, Any]) -> bool:
    """Tell whether the tensors of a call have the dtypes and strides that the kernel reads."""
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
