"""Routing of a decoding step in one kernel, and the sum of a token's experts in a quick one.

Before the experts of a layer, SGLang 0.5.17 runs nine kernels of triton_kernels on a handful of
tokens: top-k, the count of every expert's tokens, their order, and the blocks that the products
take. Behind them a sum over each token's experts runs in programs of 64 tokens by 128 values, too few
to fill a GPU. On an H100 both took a tenth of a decoding step of 64 requests
(``benchmarks/sglang.py decode --profile``). Here one program does the first, and one per token the
second. The order of experts and tokens is the same, and so are the sums, to the last bit. Gates are
summed in another order before they are rounded to the logits' dtype.

More tokens than one program can hold, as in a prefill, are routed as before.
"""

# Triton reads parameter annotations as its own
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from importlib import import_module
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

LARGEST_TABLE = 8192
"""Tokens times experts that one program holds in its registers."""
FEWEST_ROWS = 16
"""Of that table. Triton 3.6 does not compile the kernel for one or two."""
SMALLEST_BLOCK_LOG2 = 4
VALUES_OF_A_THREAD = 8
"""Of that table: with more, registers run out and a program waits for itself."""
BLOCK_SIZES = 4
"""Blocks of 16, 32, 64 and 128 tokens: triton_kernels chooses one of these for each product."""
SUMMED_VALUES = 1024
"""Values of a token that a program sums."""
EXPERTS = "gptoss_experts"
"""The attribute of RoutingData that has ``Routes.experts``, for those who record them."""


@dataclass(frozen=True)
class Routes:
    """Which experts take which tokens. An entry is a token and one of its experts: number
    ``token * top_k + slot``, with a token's experts in rising order."""

    experts: Tensor
    """int32 [tokens, top_k]: each token's, rising."""
    gates: Tensor
    """In the logits' dtype, [entries]: softmax over a token's experts, in the order of
    ``by_expert``."""
    by_expert: Tensor
    """int32 [entries]: entries by rising expert, then token."""
    places: Tensor
    """int32 [entries]: where each entry stands in ``by_expert``."""
    sizes: Tensor
    """int32 [experts]: tokens of each expert."""
    starts: Tensor
    """int32 [experts + 1]: where an expert's entries begin in ``by_expert``; last their number."""
    block_starts: Tensor
    """int32 [BLOCK_SIZES, experts + 1]: the number of an expert's first block, if each has whole
    blocks; last the number of blocks."""
    schedule: Tensor
    """int32 [BLOCK_SIZES, most blocks]: of each block, its number within its expert times 65,536
    plus the expert; -1 behind the last."""


def fits(logits: Tensor) -> bool:
    """Tell whether one program can route these logits [tokens, experts]."""
    tokens, experts = logits.shape
    rows, columns = _table(tokens, experts)
    return tokens > 0 and rows * columns <= LARGEST_TABLE and logits.stride(1) == 1


def _table(tokens: int, experts: int) -> tuple[int, int]:
    """Return the rows and columns of a program's table."""
    rows = max(FEWEST_ROWS, triton.next_power_of_2(max(tokens, 1)))
    columns = triton.next_power_of_2(experts)
    return rows, columns


def most_blocks(entries: int, experts: int) -> int:
    """Return into how many blocks of 16 the entries can fall at most."""
    if entries <= experts:
        return entries
    return experts - 1 - ((experts - entries - 1) // (1 << SMALLEST_BLOCK_LOG2))


def route(logits: Tensor, top_k: int) -> Routes:
    """Choose the ``top_k`` experts of each token with the largest logits, of equal ones the first.

    Args:
        logits: [tokens, experts], which ``fits``.
    """
    tokens, experts = logits.shape
    entries = tokens * top_k
    blocks = most_blocks(entries, experts)
    rows, columns = _table(tokens, experts)

    chosen = logits.new_empty(tokens, top_k, dtype=torch.int32)
    routes = Routes(
        experts=chosen,
        gates=logits.new_empty(entries),
        by_expert=chosen.new_empty(entries),
        places=chosen.new_empty(entries),
        sizes=chosen.new_empty(experts),
        starts=chosen.new_empty(experts + 1),
        block_starts=chosen.new_empty(BLOCK_SIZES, experts + 1),
        schedule=chosen.new_empty(BLOCK_SIZES, blocks),
    )
    _route_kernel[(1,)](
        logits,
        logits.stride(0),
        tokens,
        experts,
        blocks,
        routes.experts,
        routes.gates,
        routes.by_expert,
        routes.places,
        routes.sizes,
        routes.starts,
        routes.block_starts,
        routes.schedule,
        TOKENS=rows,
        EXPERTS=columns,
        # Both follow from the rows: a server meets all numbers of tokens, and a program is compiled
        # for a second or more.
        BLOCKS=triton.next_power_of_2(most_blocks(rows * top_k, experts)),
        BLOCKS_OF_EXPERT=rows >> SMALLEST_BLOCK_LOG2,  # an expert has a token once
        TOP_K=top_k,
        SMALLEST_BLOCK_LOG2=SMALLEST_BLOCK_LOG2,
        BLOCK_SIZES=BLOCK_SIZES,
        num_warps=max(8, rows * columns // (32 * VALUES_OF_A_THREAD)),
    )
    return routes


@triton.jit(do_not_specialize=["tokens", "blocks"])
def _route_kernel(
    logits,
    logits_stride,
    tokens,
    experts,
    blocks,
    chosen_out,
    gates_out,
    by_expert_out,
    places_out,
    sizes_out,
    starts_out,
    block_starts_out,
    schedule_out,
    TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCKS_OF_EXPERT: tl.constexpr,
    TOP_K: tl.constexpr,
    SMALLEST_BLOCK_LOG2: tl.constexpr,
    BLOCK_SIZES: tl.constexpr,
):
    token = tl.arange(0, TOKENS)[:, None]
    expert = tl.arange(0, EXPERTS)
    column = expert[None, :]
    inside = (token < tokens) & (column < experts)
    logit = tl.load(logits + token * logits_stride + column, mask=inside, other=0.0)
    value = logit.to(tl.float32)

    # Numbers that rise as the logits do, and of equal ones with the first expert: bits of a float,
    # all of them turned over if it is negative, otherwise its sign alone. Those of a bf16 are the
    # upper half of a register, which has room for the expert.
    bits = value.to(tl.uint32, bitcast=True)
    rising = tl.where(bits >> 31 != 0, bits ^ 0xFFFFFFFF, bits ^ 0x80000000)
    first_is_larger = (EXPERTS - column).to(tl.uint32)
    if logits.dtype.element_ty == tl.bfloat16:
        left = (rising & 0xFFFF0000) | first_is_larger
    else:
        left = (rising.to(tl.uint64) << 16) | first_is_larger.to(tl.uint64)
    left = tl.where(inside, left, 0)
    is_chosen = inside & (token < 0)
    for _ in tl.static_range(TOP_K):
        best = tl.max(left, 1)[:, None]
        is_best = inside & (left == best)
        is_chosen = is_chosen | is_best
        left = tl.where(is_best, 0, left)

    largest = tl.max(tl.where(is_chosen, value, float("-inf")), 1)[:, None]
    # Rows behind the last token have chosen nothing: their largest is -inf, and nothing is stored.
    raised = tl.where(is_chosen, tl.exp(value - largest), 0.0)
    gate = raised / tl.maximum(tl.sum(raised, 1)[:, None], 1.0)

    # No expert has a token twice, so counting down a column numbers its tokens.
    count = is_chosen.to(tl.int32)
    size = tl.sum(count, 0)
    start = tl.cumsum(size, 0) - size
    place = start[None, :] + tl.cumsum(count, 0) - count
    entry = token * TOP_K + tl.cumsum(count, 1) - count
    tl.store(chosen_out + entry, tl.zeros_like(entry) + column, mask=is_chosen)
    tl.store(places_out + entry, place, mask=is_chosen)
    tl.store(by_expert_out + place, entry, mask=is_chosen)
    tl.store(gates_out + place, gate.to(gates_out.dtype.element_ty), mask=is_chosen)

    is_expert = expert < experts
    tl.store(sizes_out + expert, size, mask=is_expert)
    tl.store(starts_out + expert, start, mask=is_expert)
    tl.store(starts_out + experts, tokens * TOP_K)

    block = tl.arange(0, BLOCKS)
    of_expert = tl.arange(0, BLOCKS_OF_EXPERT)[None, :]
    for number in tl.static_range(BLOCK_SIZES):
        log2 = SMALLEST_BLOCK_LOG2 + number
        its_blocks = (size + ((1 << log2) - 1)) >> log2
        first = tl.cumsum(its_blocks, 0) - its_blocks
        total = tl.sum(its_blocks, 0)
        of_size = block_starts_out + number * (experts + 1)
        tl.store(of_size + expert, first, mask=is_expert)
        tl.store(of_size + experts, total)

        schedule = schedule_out + number * blocks
        planned = (of_expert << 16) + expert[:, None]
        tl.store(
            schedule + first[:, None] + of_expert, planned, mask=of_expert < its_blocks[:, None]
        )
        tl.store(schedule + block, -1, mask=(block >= total) & (block < blocks))


def sum_experts(outputs: Tensor, sums: Tensor) -> None:
    """Add up what a token's experts have computed, in fp32, one after the other.

    Args:
        outputs: [tokens, top_k, width], contiguous.
        sums: [tokens, width], contiguous; is written, rounded to its dtype.
    """
    tokens, top_k, width = outputs.shape
    grid = (tokens, triton.cdiv(width, SUMMED_VALUES))
    _sum_kernel[grid](outputs, sums, width, TOP_K=top_k, VALUES=SUMMED_VALUES)


@triton.jit
def _sum_kernel(outputs, sums, width, TOP_K: tl.constexpr, VALUES: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    value = tl.program_id(1) * VALUES + tl.arange(0, VALUES)
    inside = value < width
    total = tl.zeros((VALUES,), dtype=tl.float32)
    for number in tl.static_range(TOP_K):
        source = outputs + (token * TOP_K + number) * width + value
        total += tl.load(source, mask=inside, other=0.0).to(tl.float32)
    tl.store(sums + token * width + value, total.to(sums.dtype.element_ty), mask=inside)


# -- SGLang's and triton_kernels' functions ---------------------------------------------------------


def install() -> None:
    """Let SGLang's layers route and sum with these kernels."""
    from sglang.srt.layers.moe import topk

    # The module, not the function in it that has its name.
    matmul_ogs: Any = import_module("triton_kernels.matmul_ogs")

    topk.routing = quick_routing(topk)
    matmul_ogs.reduce = quick_reduce(matmul_ogs.reduce)


def quick_routing(topk: Any) -> Callable[..., Any]:
    """Return a ``routing`` for SGLang's module ``topk``, whose own is called where it has to."""
    original = topk.routing

    @wraps(original)
    def routing(logits: Tensor, n_expts_act: int, **options: Any) -> Any:
        # Gates that are a softmax over all experts, and routes from elsewhere, are not for here.
        is_plain = not options.get("sm_first") and options.keys() <= {"sm_first"}
        if not is_plain or not fits(logits):
            return original(logits, n_expts_act, **options)
        return as_routing_data(topk, route(logits, n_expts_act), n_expts_act)

    return routing


def as_routing_data(topk: Any, routes: Routes, top_k: int) -> tuple[Any, Any, Any]:
    """Return what triton_kernels' products take."""
    from triton_kernels.tensor import RaggedTensorMetadata

    metadata = RaggedTensorMetadata(
        routes.sizes, routes.starts, routes.block_starts, routes.schedule
    )
    data = topk.RoutingData(routes.gates, routes.sizes, len(routes.sizes), top_k, metadata)
    setattr(data, EXPERTS, routes.experts)
    gather = topk.GatherIndx(routes.by_expert, routes.places)
    scatter = topk.ScatterIndx(routes.places, routes.by_expert)
    return data, gather, scatter


def quick_reduce(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``reduce`` for triton_kernels' products, whose own is called for what is no plain sum."""

    @wraps(original)
    def reduce(x: Tensor, dim: int, **options: Any) -> Any:
        sums: Any = options.get("y")
        is_plain = (
            x.ndim == 3
            and dim == 1
            and x.is_contiguous()
            and sums is not None
            and sums.is_contiguous()
            and x.dtype == sums.dtype == torch.bfloat16
            # Of bf16 nothing is scaled; and the mask hides entries of tokens that are not there,
            # which SGLang has none of.
            and options.get("scale") is None
            and options.get("x_mxscale") is None
            and not options.get("y_has_mx")
        )
        if not is_plain:
            return original(x, dim, **options)
        sum_experts(x, sums)
        return sums, None

    return reduce
