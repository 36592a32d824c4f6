"""Products of few tokens with MXFP4 experts, as in a decoding step or a short prefill, in a kernel of ours.

triton_kernels 3.6 cuts the tokens of each expert into blocks of one size, about twice their mean, so that no
matrix is read and taken apart twice. With 256 tokens for 32 experts, four of which each token has, a block
has 64 rows for 32 tokens: half of what the tensor cores do is thrown away. It also compiles its kernel two
or four times for each of these sizes, as numbers of tokens with other divisors come, in the middle of a rollout.

Here a program looks how many tokens its block has and multiplies with 16, 32, 48 or 64 rows of them. Sums
are made in the same order, 16 inputs at a time, so that the output is the same to the last bit. It is
compiled twice for each of a layer's products, whatever the number of tokens.

Matrices lie as ``gptoss_hopper_layout`` keeps them. A program has 128 columns of outputs and steps through
128 inputs at a time, of which ``gptoss_expert_values`` makes numbers, in two products of 64: of one of 128 the
compiler makes eight groups of matrix instructions, each with a wait and registers of its own, of two it
makes two groups, and a step has a sixth fewer instructions. Where a processor holds four programs
(few rows) or three (many) without spilling much, both products of a layer were the fastest on an H200
(docs/design/mxfp4_kernels.md).

Larger prefills, and products of any other kind, are left to triton_kernels.
"""

# Triton reads parameter annotations as its own
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import triton
import triton.language as tl
from gptoss_expert_products import is_laid_out_by_us, scales_of_program
from gptoss_expert_routing import sum_experts
from gptoss_expert_values import scaled_values
from torch import Tensor

MOST_TOKENS = 64
"""Of an expert, on average. With more, triton_kernels takes blocks of 128 rows."""
COLUMNS = 128
INPUTS = 128
WARPS = 4


@dataclass(frozen=True)
class Program:
    """How the kernel is compiled."""

    rows: int
    """Of tokens in a block."""
    stages: int
    """Steps for which a program has room in shared memory."""
    registers: int
    """Of a thread, at most."""


FEW_ROWS = Program(rows=16, stages=4, registers=128)
MANY_ROWS = Program(rows=64, stages=3, registers=168)


def program_for(entries: int, experts: int) -> Program:
    """Choose a program for ``entries`` of tokens, those of a token with each of its experts."""
    # An expert with twice the mean has its matrix read once more.
    return FEW_ROWS if 2 * entries <= FEW_ROWS.rows * experts else MANY_ROWS


@dataclass(frozen=True)
class Swiglu:
    """The activation of GPT-OSS, as ``compute_swiglu`` of triton_kernels computes it."""

    alpha: float
    limit: float


def multiply(
    x: Tensor,
    values: Tensor,
    scales: Tensor,
    bias: Tensor,
    routes: Any,
    entries: Tensor,
    out: Tensor,
    *,
    swiglu: Swiglu | None = None,
    gates: Tensor | None = None,
) -> None:
    """Multiply tokens with the matrices of their experts.

    Either the first product of a layer, which gathers tokens and ends with the activation, or the second one,
    which scatters what it computes, times the gates.

    Args:
        x: bf16, contiguous: [tokens, inputs] of the first product, [entries, inputs] by expert of the second.
        values: uint8 [experts, *value_storage_shape].
        scales: uint8 [experts, *scale_storage_shape].
        bias: fp32 [experts, outputs], contiguous.
        routes: ``RoutingData`` of triton_kernels.
        entries: int32 [entries], by expert: number ``token * top_k + slot`` of each.
        out: bf16, contiguous, is written: [entries, outputs / 2] by expert of the first product, [entries,
            outputs] in the tokens' order of the second.
        swiglu: makes it the first product. Rows of gate and up take turns in its matrices.
        gates: [entries] by expert, makes it the second.
    """
    assert (swiglu is None) != (gates is None)
    outputs = bias.shape[1]
    columns = triton.cdiv(outputs, COLUMNS)
    program = program_for(len(entries), routes.n_expts_tot)
    grid = (routes.n_blocks(len(entries), program.rows) * columns,)
    ragged = routes.expt_data

    _multiply_kernel[grid](
        x,
        values,
        scales,
        bias,
        out,
        entries,
        gates,
        ragged.slice_sizes,
        ragged.slice_offs,
        ragged.block_offs(program.rows),
        ragged.block_schedule(program.rows),
        routes.n_expts_tot,
        outputs,
        columns,
        values.shape[1],
        values.shape[2],
        scales.shape[1],
        scales.shape[2],
        0.0 if swiglu is None else swiglu.alpha,
        0.0 if swiglu is None else swiglu.limit,
        SIZE=x.shape[1],
        TOP_K=routes.n_expts_act,
        BLOCK_ROWS=program.rows,
        COLUMNS=COLUMNS,
        INPUTS=INPUTS,
        num_warps=WARPS,
        num_stages=program.stages,
        maxnreg=program.registers,
    )


# What is cut out of larger tensors begins anywhere: one kernel does for all.
@triton.jit(
    do_not_specialize_on_alignment=["entries", "gates", "sizes", "starts", "blocks", "schedule"]
)
def _multiply_kernel(
    x,
    values,
    scales,
    bias,
    out,
    entries,
    gates,
    sizes,
    starts,
    blocks,
    schedule,
    experts,
    outputs,
    columns,
    value_rows,
    value_bytes,
    scale_rows,
    scale_bytes,
    alpha,
    limit,
    SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    # Grid: blocks of tokens, as many as there can be, and for each its columns of outputs.
    program = tl.program_id(0)
    if program >= tl.load(blocks + experts) * columns:
        return
    column = program % columns
    planned = tl.load(schedule + program // columns)
    expert = (planned & 0xFFFF).to(tl.int64)
    first = (planned >> 16) * BLOCK_ROWS
    start = tl.load(starts + expert)
    size = tl.load(sizes + expert)

    # Where things lie is counted in 32 bits without a sign from an address that all threads share, and only
    # that address moves with the loop's steps: an addition less for each of a thread's loads.
    #
    # Storage has a quarter of the rows, and as many as fill 64. The last program's rows begin again at the
    # first, and what comes of these is not stored.
    value_row = (column * (COLUMNS // 4) + tl.arange(0, COLUMNS // 4)) % value_rows
    value_row = tl.max_contiguous(tl.multiple_of(value_row, COLUMNS // 4), COLUMNS // 4)
    value_at = value_row[:, None] * value_bytes + tl.arange(0, INPUTS)[None, :]
    value_at = value_at.to(tl.uint32)
    values += expert * value_rows * value_bytes
    scale_row = column * (COLUMNS // 32) + tl.arange(0, COLUMNS // 32)
    scale_at = scale_row[:, None] * scale_bytes + tl.arange(0, INPUTS)[None, :]
    scale_at = scale_at.to(tl.uint32)
    scales += expert * scale_rows * scale_bytes
    bias += expert * outputs

    # fmt: off
    rest = (x, values, value_at, scales, scale_at, bias, out, entries, gates, start, first, size, outputs,
            scale_bytes, column * COLUMNS, alpha, limit)
    # fmt: on
    if BLOCK_ROWS == 16:
        _multiply_rows(rest, 16, 0, COLUMNS, SIZE, INPUTS, TOP_K)
    else:
        left = size - first
        if left <= 16:
            _multiply_rows(rest, 16, 0, COLUMNS, SIZE, INPUTS, TOP_K)
        elif left <= 32:
            _multiply_rows(rest, 32, 0, COLUMNS, SIZE, INPUTS, TOP_K)
        elif left <= 48:
            _multiply_rows(rest, 32, 16, COLUMNS, SIZE, INPUTS, TOP_K)
        else:
            _multiply_rows(rest, 64, 0, COLUMNS, SIZE, INPUTS, TOP_K)


@triton.jit
def _multiply_rows(
    rest,
    ROWS: tl.constexpr,
    MORE_ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SIZE: tl.constexpr,
    INPUTS: tl.constexpr,
    TOP_K: tl.constexpr,
):
    """Multiply ROWS and MORE_ROWS tokens of an expert, from ``first`` on, with some columns' matrix.

    Sizes of Triton's tensors are powers of two: 48 rows are 32 and 16, for which the matrix is taken apart
    once."""
    # fmt: off
    (x, values, value_at, scales, scale_at, bias, out, entries, gates, start, first, size, outputs,
     scale_bytes, first_column, alpha, limit) = rest
    # fmt: on
    HALF: tl.constexpr = INPUTS // 2
    row = first + tl.arange(0, ROWS)
    x_at = _places_of(entries, gates, start + row % size, SIZE, HALF, TOP_K)
    sums = tl.zeros((COLUMNS, ROWS), dtype=tl.float32)
    # Without further rows nothing reads these.
    further_at = x_at
    further_sums = sums
    if MORE_ROWS:
        further = first + ROWS + tl.arange(0, MORE_ROWS)
        further_at = _places_of(entries, gates, start + further % size, SIZE, HALF, TOP_K)
        further_sums = tl.zeros((COLUMNS, MORE_ROWS), dtype=tl.float32)

    at = (value_at, x_at, further_at)
    place = tl.arange(0, INPUTS)
    for done in range(0, SIZE, INPUTS):
        scale = tl.load(scales + scale_at, mask=(done + place < scale_bytes)[None, :], other=0)
        scale = scales_of_program(scale, 1, 4).reshape(COLUMNS, 2, HALF // 32)
        scale, next_scale = tl.split(scale.trans(0, 2, 1))
        left = SIZE - done
        # fmt: off
        sums, further_sums = _add_half(
            sums, further_sums, values, scale, x, at, left, MORE_ROWS
        )
        sums, further_sums = _add_half(
            sums, further_sums, values + INPUTS, next_scale, x + HALF, at, left - HALF, MORE_ROWS
        )
        # fmt: on
        x += INPUTS
        values += 2 * INPUTS
        scales += INPUTS

    # fmt: off
    _store(sums, bias, out, entries, gates, start + row, row < size, outputs, first_column, alpha, limit)
    if MORE_ROWS:
        _store(further_sums, bias, out, entries, gates, start + further, further < size, outputs, first_column,
               alpha, limit)
    # fmt: on


@triton.jit
def _add_half(sums, further_sums, values, scale, x, at, left, MORE_ROWS: tl.constexpr):
    """Add what half of a step's inputs make to both sums.

    ``values`` and ``x``: addresses of its first input, from which ``at`` counts; ``scale``: [columns, blocks];
    ``left``: inputs from there to the last one."""
    value_at, x_at, further_at = at
    is_input = (tl.arange(0, x_at.shape[1]) < left)[None, :]
    # Values behind the last input are zeros in storage; tokens and scales have to be finite there.
    matrix = scaled_values(tl.load(values + value_at), scale, 1)
    tokens = tl.load(x + x_at, mask=is_input, other=0.0)
    sums = tl.dot(matrix, tokens.trans(), sums)
    if MORE_ROWS:
        tokens = tl.load(x + further_at, mask=is_input, other=0.0)
        further_sums = tl.dot(matrix, tokens.trans(), further_sums)
    return sums, further_sums


@triton.jit
def _places_of(
    entries, gates, entry, SIZE: tl.constexpr, INPUTS: tl.constexpr, TOP_K: tl.constexpr
):
    """Return where in the tokens the first inputs of entries lie, numbers by expert: [entries, INPUTS]."""
    row = entry
    if gates is None:
        row = tl.load(entries + entry) // TOP_K
    return (row[:, None] * SIZE + tl.arange(0, INPUTS)[None, :]).to(tl.uint32)


@triton.jit
def _store(sums, bias, out, entries, gates, entry, is_entry, outputs, first_column, alpha, limit):
    """Finish and store sums [columns, entries], of entries by expert."""
    columns: tl.constexpr = sums.shape[0]
    column = first_column + tl.arange(0, columns)
    of_column = tl.load(bias + column, mask=column < outputs, other=0.0)
    result = sums.trans() + of_column[None, :]

    if gates is None:
        gate, up = tl.split(result.reshape(result.shape[0], columns // 2, 2))
        gate = tl.minimum(gate, limit)
        up = tl.clamp(up, -limit, limit)
        raised = gate / (1 + tl.exp(-alpha * gate))
        result = tl.fma(raised, up, raised)
        width = outputs // 2
        column = first_column // 2 + tl.arange(0, columns // 2)
        row = entry
    else:
        width = outputs
        result *= tl.load(gates + entry, mask=is_entry, other=0.0)[:, None]
        row = tl.load(entries + entry, mask=is_entry, other=0)

    is_inside = is_entry[:, None] & (column < width)[None, :]
    tl.store(out + row[:, None] * width + column[None, :], result.to(tl.bfloat16), mask=is_inside)


# -- SGLang's call ----------------------------------------------------------------------------------


def install() -> None:
    """Let SGLang's layers of MXFP4 experts multiply few tokens with this kernel."""
    from sglang.srt.layers.moe.fused_moe_triton import triton_kernels_moe

    triton_kernels_moe.matmul_ogs = few_tokens_at_once(triton_kernels_moe.matmul_ogs)


def few_tokens_at_once(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``matmul_ogs`` for SGLang's layers, which calls triton_kernels' own for what is not for us.

    It takes what ``triton_kernel_fused_experts_with_bias`` of SGLang 0.5.17 gives it."""

    @wraps(original)
    def matmul_ogs(
        x: Tensor, w: Any, bias: Tensor, routing_data: Any = None, **options: Any
    ) -> Any:
        config: Any = options.get("precision_config")
        gather: Any = options.get("gather_indx")
        scatter: Any = options.get("scatter_indx")
        gates: Any = options.get("gammas")
        activation: Any = options.get("fused_activation")
        y: Any = options.get("y")
        is_ours = (
            config is not None
            and is_laid_out_by_us(config)
            and y is not None
            and x.is_contiguous()
            and y.is_contiguous()
            and 0 < len(routing_data.gate_scal) <= MOST_TOKENS * routing_data.n_expts_tot
        )
        is_first = gather is not None and activation is not None and gates is None
        is_second = scatter is not None and activation is None and gates is not None
        if not is_ours or not (is_first or is_second):
            return original(x, w, bias, routing_data, **options)

        matrices = (w.storage.data.mT, config.weight_scale.storage.data.mT, bias)
        if gather is not None:
            swiglu = Swiglu(*activation.fn_args)
            multiply(x, *matrices, routing_data, gather.src_indx, y, swiglu=swiglu)
            return y

        entries, width = scatter.dst_indx, y.shape[-1]
        of_experts = y.new_empty(len(entries), width)
        multiply(x, *matrices, routing_data, entries, of_experts, gates=gates)
        sum_experts(of_experts.view(-1, routing_data.n_expts_act, width), y.view(-1, width))
        return y

    return matmul_ogs
