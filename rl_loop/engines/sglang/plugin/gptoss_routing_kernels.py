"""Triton kernels for routing in a decoding step and for the sum over a token's experts.

Before the experts of a layer, SGLang 0.5.17 runs 9 kernels of triton_kernels on a few tokens:
top-k, the number of tokens per expert, their order, and the blocks of the GEMMs. After the experts,
a sum over each token's experts runs in programs of 64 tokens by 128 values, too few to fill a GPU.
On an H100 both took 10% of a decoding step of 64 requests (``benchmarks.sglang decode --profile``).
This module replaces the 9 kernels by one with a program per expert, and the sum by one with a
program per token. The order of experts and tokens and the sums of outputs are bitwise equal. The
sums of gates have a different order before they are rounded to the logits' dtype.

The offset of an expert's tokens depends on all other experts. Programs do not wait for each other.
Each program reads all logits, chooses the experts of all tokens on a multiprocessor that would
otherwise be idle, and writes only the results of its expert. One program for all experts was
slower: the warps of one multiprocessor counted along both axes of a table, which took almost 3x as
long with 256 tokens as with 64.
"""

# Triton interprets parameter annotations, so its kernels have none.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_TABLE_SIZE = 8192
"""Maximum size, tokens times experts, of the table in a program's registers."""
MIN_ROWS = 8
"""Minimum rows of that table: with 32 experts, a warp has 4 threads for each of 8 tokens."""
MAX_VALUES_PER_THREAD = 32
"""Maximum table entries per thread.

32 are all logits of a token with 32 experts, so that the choice needs no other thread.
"""
MAX_LOAD_BYTES = 16
"""Longest load of a thread, in bytes."""
MIN_BLOCK_LOG2 = 4
BLOCK_SIZES = 4
"""Number of block sizes: 16, 32, 64 and 128 tokens. triton_kernels chooses one for each GEMM."""
SUMMED_VALUES = 1024
"""Values of a token that one program sums."""


@dataclass(frozen=True)
class ExpertAssignment:
    """Assignment of tokens to experts.

    An entry is a pair of a token and one of its experts. Its number is ``token * top_k + slot``,
    where the slots of a token are in ascending order of experts.
    """

    experts: Tensor
    """int32 [tokens, top_k]: experts of each token, ascending."""
    gates: Tensor
    """[entries] in the logits' dtype: softmax over a token's experts, ordered as ``by_expert``."""
    by_expert: Tensor
    """int32 [entries]: numbers of entries, sorted by expert, then by token."""
    places: Tensor
    """int32 [entries]: position of each entry in ``by_expert``."""
    sizes: Tensor
    """int32 [experts]: tokens per expert."""
    starts: Tensor
    """int32 [experts + 1]: first position of each expert in ``by_expert``, then the total."""
    block_starts: Tensor
    """int32 [BLOCK_SIZES, experts + 1]: number of each expert's first block, then the total.

    A block holds tokens of one expert only.
    """
    schedule: Tensor
    """int32 [BLOCK_SIZES, maximum number of blocks]: ``block * 65536 + expert`` of each block.

    ``block`` is its number within the expert. Entries after the last block are -1.
    """


def fits(logits: Tensor) -> bool:
    """Return True if a program can hold these logits [tokens, experts]."""
    tokens, experts = logits.shape
    rows, columns = _table(tokens, experts)
    return tokens > 0 and rows * columns <= MAX_TABLE_SIZE and logits.stride(1) == 1


def _table(tokens: int, experts: int) -> tuple[int, int]:
    """Return rows and columns of a program's table."""
    rows = max(MIN_ROWS, triton.next_power_of_2(max(tokens, 1)))
    columns = triton.next_power_of_2(experts)
    return rows, columns


def _sequential_sum_size(tokens: int, experts: int, bytes_of_logit: int) -> int:
    """Return the number of adjacent experts whose gates are summed sequentially.

    The sums of these groups are then summed pairwise, group i with group i + n / 2 of n groups,
    until one sum is left.
    """
    # The number is that of a kernel with one program for all tokens, so that gates have equal bits
    # in both. It does not depend on the number of logits per thread of this kernel.
    rows = max(16, triton.next_power_of_2(tokens))
    columns = triton.next_power_of_2(experts)
    per_thread = min(8, max(1, rows * columns // 256))
    return min(per_thread, MAX_LOAD_BYTES // bytes_of_logit, columns)


def max_blocks(entries: int, experts: int) -> int:
    """Return the largest number of blocks of 16 that all experts' entries can occupy."""
    if entries <= experts:
        return entries
    return experts - 1 - ((experts - entries - 1) // (1 << MIN_BLOCK_LOG2))


def route(logits: Tensor, top_k: int) -> ExpertAssignment:
    """Choose the ``top_k`` experts with the largest logits for each token.

    Experts with lower numbers win ties.

    Args:
        logits: [tokens, experts], for which ``fits`` is true.
        top_k: experts per token.
    """
    tokens, experts = logits.shape
    entries = tokens * top_k
    blocks = max_blocks(entries, experts)
    rows, columns = _table(tokens, experts)

    chosen = logits.new_empty(tokens, top_k, dtype=torch.int32)
    routes = ExpertAssignment(
        experts=chosen,
        gates=logits.new_empty(entries),
        by_expert=chosen.new_empty(entries),
        places=chosen.new_empty(entries),
        sizes=chosen.new_empty(experts),
        starts=chosen.new_empty(experts + 1),
        block_starts=chosen.new_empty(BLOCK_SIZES, experts + 1),
        schedule=chosen.new_empty(BLOCK_SIZES, blocks),
    )
    warps = max(1, rows * columns // (32 * MAX_VALUES_PER_THREAD))
    threads_of_token = max(1, 32 * warps // rows)
    # One more program than experts. It writes the totals after the last expert.
    _route_kernel[(experts + 1,)](
        logits,
        logits.stride(0),
        tokens,
        blocks,
        routes.experts,
        routes.gates,
        routes.by_expert,
        routes.places,
        routes.sizes,
        routes.starts,
        routes.block_starts,
        routes.schedule,
        EXPERTS=experts,
        TOP_K=top_k,
        TOKENS=rows,
        COLUMNS=columns,
        WIDTH=min(columns, threads_of_token * MAX_LOAD_BYTES // logits.element_size()),
        CHOICES=triton.next_power_of_2(top_k),
        ADDED_IN_TURN=_sequential_sum_size(tokens, experts, logits.element_size()),
        # Both are computed from the padded number of rows, because a server sees every number of
        # tokens and compiling a program takes at least 1 s.
        BLOCKS=triton.next_power_of_2(max_blocks(rows * top_k, experts)),
        BLOCKS_OF_EXPERT=triton.cdiv(rows, 1 << MIN_BLOCK_LOG2),  # an expert has a token once
        MIN_BLOCK_LOG2=MIN_BLOCK_LOG2,
        BLOCK_SIZES=BLOCK_SIZES,
        num_warps=warps,
    )
    return routes


# Each program writes the entries of one expert, ``own``. The last program has none: its sums over
# all experts before it are the totals.
@triton.jit(do_not_specialize=["tokens", "blocks"])
def _route_kernel(
    logits,
    logits_stride,
    tokens,
    blocks,
    chosen_out,
    gates_out,
    by_expert_out,
    places_out,
    sizes_out,
    starts_out,
    block_starts_out,
    schedule_out,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    CHOICES: tl.constexpr,
    ADDED_IN_TURN: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCKS_OF_EXPERT: tl.constexpr,
    MIN_BLOCK_LOG2: tl.constexpr,
    BLOCK_SIZES: tl.constexpr,
):
    own = tl.program_id(0)
    token = tl.arange(0, TOKENS)
    is_token = token < tokens

    rows = logits + token * logits_stride
    value, column, inside = _load_table(rows, is_token, EXPERTS, COLUMNS, WIDTH)
    own_value = tl.load(rows + own, mask=is_token & (own < EXPERTS), other=0.0).to(tl.float32)

    number = _sortable(value, column, logits.dtype.element_ty == tl.bfloat16, COLUMNS)
    if EXPERTS < COLUMNS:
        # Columns without an expert get the smallest number, so that they are never chosen.
        number = tl.where(inside, number, 0)
    chosen, best = _choose(number, TOP_K, TOKENS, COLUMNS, CHOICES)
    is_choice = (tl.arange(0, CHOICES)[:, None] < TOP_K) & is_token[None, :]
    takes, slot = _own_entries(chosen, is_choice, own)
    gate = _gate(value, own_value, number, best, TOKENS, COLUMNS, ADDED_IN_TURN)

    size = tl.histogram(tl.ravel(chosen), COLUMNS, mask=tl.ravel(is_choice))
    expert = tl.arange(0, COLUMNS)
    is_before = expert < own
    start = tl.sum(tl.where(is_before, size, 0), 0)
    own_size = tl.sum(tl.where(expert == own, size, 0), 0)

    by_entry = (chosen_out, places_out)
    by_place = (by_expert_out, gates_out)
    _store_entries(by_entry, by_place, takes, slot, own, start, token * TOP_K, gate)
    tl.store(starts_out + own, start)
    tl.store(sizes_out + own, own_size, mask=own < EXPERTS)
    for number_of_size in tl.static_range(BLOCK_SIZES):
        log2 = MIN_BLOCK_LOG2 + number_of_size
        first = tl.sum(tl.where(is_before, _blocks(size, log2), 0), 0)
        own_blocks = _blocks(own_size, log2)
        tl.store(block_starts_out + number_of_size * (EXPERTS + 1) + own, first)
        schedule = schedule_out + number_of_size * blocks
        _store_schedule(schedule, own, first, own_blocks, blocks, EXPERTS, BLOCKS, BLOCKS_OF_EXPERT)


@triton.jit
def _load_table(rows, is_token, EXPERTS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    """Load all logits as a table [tokens, chunks, experts of a chunk].

    Returns:
        fp32 logits, -inf outside; the expert of each column; and True where there is a logit.
    """
    # A chunk is the load of adjacent threads. Triton assigns the chunks of different tokens to a
    # warp first, then further chunks of the same tokens. With enough tokens a thread therefore
    # holds all logits of one token and finds their maximum alone.
    chunk = tl.arange(0, COLUMNS // WIDTH)[None, :, None]
    column = chunk * WIDTH + tl.arange(0, WIDTH)[None, None, :]
    inside = is_token[:, None, None]
    if EXPERTS < COLUMNS:
        inside = inside & (column < EXPERTS)
    value = tl.load(rows[:, None, None] + column, mask=inside, other=float("-inf"))
    return value.to(tl.float32), column, inside


@triton.jit
def _gate(
    value,
    own_value,
    number,
    best,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ADDED_IN_TURN: tl.constexpr,
):
    """Return exp(own_value) divided by the sum of exponentials over a token's experts [tokens]."""
    largest = tl.max(tl.max(value, 2), 1)
    raised = tl.exp(value - largest[:, None, None])
    raised = tl.where(number >= best[:, None, None], raised, 0.0)
    total = _add_groups(raised, TOKENS, COLUMNS, ADDED_IN_TURN)
    # The sum contains a 1 for the largest logit. In rows after the last token it is NaN, and these
    # rows are not stored.
    return tl.exp(own_value - largest) / tl.maximum(total, 1.0)


@triton.jit
def _own_entries(chosen, is_choice, own):
    """Return for each token whether expert ``own`` takes it (1 or 0), and the slot of the entry."""
    # A token has an expert at most once, and its entries are in ascending order of experts.
    takes = tl.sum((is_choice & (chosen == own)).to(tl.int32), 0)
    slot = tl.sum((is_choice & (chosen < own)).to(tl.int32), 0)
    return takes, slot


@triton.jit
def _store_entries(by_entry, by_place, takes, slot, own, start, first_entry, gate):
    """Store the entries of this program's expert.

    Args:
        by_entry: outputs that entries index: experts and places.
        by_place: outputs that places index: entries and gates.
        takes: int32 [TOKENS], 1 where the expert takes the token.
        slot: int32 [TOKENS] slot of the token's entry.
        own: the expert.
        start: first place of the expert.
        first_entry: [TOKENS] first entry of each token.
        gate: [TOKENS] the expert's gate for each token.
    """
    chosen_out, places_out = by_entry
    by_expert_out, gates_out = by_place
    is_taken = takes > 0
    place = start + tl.cumsum(takes, 0) - takes
    entry = first_entry + slot
    tl.store(chosen_out + entry, tl.zeros_like(entry) + own, mask=is_taken)
    tl.store(places_out + entry, place, mask=is_taken)
    tl.store(by_expert_out + place, entry, mask=is_taken)
    tl.store(gates_out + place, gate.to(gates_out.dtype.element_ty), mask=is_taken)


@triton.jit
def _blocks(size, log2: tl.constexpr):
    """Return the number of blocks of 2 ** log2 tokens that hold ``size`` tokens."""
    return (size + ((1 << log2) - 1)) >> log2


@triton.jit
def _sortable(value, column, IS_BF16: tl.constexpr, COLUMNS: tl.constexpr):
    """Return unsigned integers in the order of the fp32 logits. The lower 16 bits hold the expert.

    If logits are equal, the lower expert number gives the larger integer.
    """
    # The upper bits are those of the float: all inverted if it is negative, otherwise only the
    # sign. A bf16 occupies the upper half of 32 bits, so the lower half can hold the expert.
    bits = value.to(tl.int32, bitcast=True)
    rising = (bits ^ ((bits >> 31) | -0x80000000)).to(tl.uint32, bitcast=True)
    first_is_larger = (COLUMNS - column).to(tl.uint32)
    if IS_BF16:
        number = (rising & 0xFFFF0000) | first_is_larger
    else:
        # An fp32 logit fills 32 bits, so the expert needs a wider number.
        number = (rising.to(tl.uint64) << 16) | first_is_larger.to(tl.uint64)
    return number


@triton.jit
def _choose(
    number,
    TOP_K: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHOICES: tl.constexpr,
):
    """Choose the experts with the TOP_K largest numbers of each token.

    Args:
        number: [TOKENS, chunks, experts of a chunk] of ``_sortable``. Numbers of a token differ.
        TOP_K: experts per token.
        TOKENS: rows of the table.
        COLUMNS: columns of the table.
        CHOICES: rows of the result, at least TOP_K. Further rows repeat the first one.

    Returns:
        int32 [CHOICES, TOKENS]: experts by decreasing logit, and the last of the numbers [TOKENS].
    """
    # Subtract the best: equal and larger numbers become small, and smaller numbers wrap around to
    # the largest numbers, of which the next best is the maximum. Chosen experts need no removal.
    best = tl.max(tl.max(number, 2), 1)
    choice = tl.arange(0, CHOICES)[:, None]
    bests = tl.zeros((CHOICES, TOKENS), dtype=number.dtype) + best[None, :]
    for position in tl.static_range(1, TOP_K):
        best += tl.max(tl.max(number - best[:, None, None], 2), 1)
        bests = tl.where(choice == position, best[None, :], bests)
    chosen = COLUMNS - (bests & 0xFFFF).to(tl.int32)
    return chosen, best


@triton.jit
def _store_schedule(
    schedule,
    own,
    first,
    own_blocks,
    blocks,
    EXPERTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCKS_OF_EXPERT: tl.constexpr,
):
    """Store the blocks of an expert, or -1 after all blocks in the program without an expert."""
    if own < EXPERTS:
        block_of_expert = tl.arange(0, BLOCKS_OF_EXPERT)
        planned = (block_of_expert << 16) + own
        tl.store(schedule + first + block_of_expert, planned, mask=block_of_expert < own_blocks)
    else:
        block = tl.arange(0, BLOCKS)
        tl.store(schedule + block, -1, mask=(block >= first) & (block < blocks))


@triton.jit
def _add_groups(table, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ADDED_IN_TURN: tl.constexpr):
    """Sum each row of a table in the order of ``_sequential_sum_size``. Returns [rows]."""
    GROUPS: tl.constexpr = COLUMNS // ADDED_IN_TURN
    sums = tl.sum(tl.reshape(table, (ROWS, GROUPS, ADDED_IN_TURN)), 2)
    for halving in tl.static_range(1, GROUPS.bit_length()):
        sums = tl.sum(tl.reshape(sums, (ROWS, 2, GROUPS >> halving)), 1)
    return tl.reshape(sums, (ROWS,))


def sum_experts(outputs: Tensor, sums: Tensor) -> None:
    """Sum the outputs of a token's experts in fp32, sequentially.

    Args:
        outputs: [tokens, top_k, width], contiguous.
        sums: [tokens, width], contiguous, is written. Rounded to its dtype.
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
