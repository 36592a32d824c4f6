"""A custom GEMM kernel for MXFP4 experts with few tokens, as in decoding or in a short prefill.

triton_kernels 3.6 uses blocks of one size for all experts: about twice the mean number of tokens
per expert. The tokens of most experts then fit into one block, so their matrices are read and
decoded once. But many rows are empty. With 256 tokens, 4 experts per token and 32 experts, a block
has 64 rows for 32 tokens on average, so half of the tensor cores' work is wasted. The library also
compiles its kernel 2 or 4 times for each block size, whenever a rollout has a number of tokens with
other divisors.

In this kernel a program reads the number of tokens in its block and multiplies 16, 32, 48 or 64
rows. It adds in the order of triton_kernels, 16 inputs at a time, so that the outputs have the same
bits. The kernel is compiled twice for each GEMM of a layer, for all numbers of tokens.

Matrices are in the layout of ``gptoss_hopper_layout``. A program computes 128 columns of outputs
and loops over the inputs. A step decodes 128 inputs (``gptoss_expert_values``) and multiplies them
in two halves of 64. For one product of 128 inputs the compiler would emit 8 groups of matrix
instructions, each with a wait and separate registers. For two products it emits 2 groups, and a
step has 1/6 fewer instructions. A multiprocessor holds 4 programs with few rows or 3 with many,
with little register spilling. This was the fastest variant for both GEMMs of a layer on an H200
(docs/design/mxfp4_kernels.md).

triton_kernels computes larger prefills and all other GEMMs. It cannot add an adapter's product
before the activation. Matrices with unmerged adapters (``gptoss_adapted_moe``) therefore use this
kernel for any number of tokens.
"""

# Triton interprets parameter annotations, so its kernels have none.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import triton
import triton.language as tl
from gptoss_adapted_moe import ADAPTER, FACTORS, ServedAdapter, project, start_sums, to_bf16
from gptoss_expert_values import scaled_values
from gptoss_moe_occupancy import has_plugin_layout, scales_of_program
from gptoss_routing_kernels import sum_experts
from torch import Tensor

MAX_TOKENS_PER_EXPERT = 64
"""Maximum mean number of tokens per expert. With more, triton_kernels uses blocks of 128 rows."""
COLUMNS = 128
INPUTS = 128
WARPS = 4


@dataclass(frozen=True)
class KernelOptions:
    """Compile-time options of the kernel."""

    rows: int
    """Token rows per block."""
    stages: int
    """Number of steps that fit in a program's shared memory."""
    registers: int
    """Maximum registers per thread."""

    @property
    def options(self) -> dict[str, int]:
        """Launch options by the names of the kernel and of Triton."""
        return {
            "BLOCK_ROWS": self.rows,
            "num_warps": WARPS,
            "num_stages": self.stages,
            "maxnreg": self.registers,
        }


FEW_ROWS = KernelOptions(rows=16, stages=4, registers=128)
MANY_ROWS = KernelOptions(rows=64, stages=3, registers=168)


def program_for(entries: int, experts: int) -> KernelOptions:
    """Return the program for ``entries`` pairs of a token and one of its experts."""
    # The few rows suffice for twice the mean. The matrix of a fuller expert is read once more.
    return FEW_ROWS if 2 * entries <= FEW_ROWS.rows * experts else MANY_ROWS


@dataclass(frozen=True)
class Swiglu:
    """Activation of GPT-OSS, as in ``compute_swiglu`` of triton_kernels."""

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
    adapter: ServedAdapter | None = None,
) -> None:
    """Multiply tokens with the matrices of their experts.

    The first GEMM of a layer gathers tokens and applies the activation. The second GEMM multiplies
    with the gates and scatters its outputs. Give either ``swiglu`` or ``gates``.

    Args:
        x: bf16, contiguous. First GEMM: [tokens, inputs]. Second GEMM: [entries, inputs], sorted by
            expert.
        values: uint8 [experts, *value_storage_shape].
        scales: uint8 [experts, *scale_storage_shape].
        bias: fp32 [experts, outputs], contiguous.
        routes: ``RoutingData`` of triton_kernels.
        entries: int32 [entries], sorted by expert: ``token * top_k + slot`` of each entry.
        out: bf16, contiguous, is written. First GEMM: [entries, outputs / 2], sorted by expert.
            Second GEMM: [entries, outputs], in the order of the tokens.
        swiglu: activation of the first GEMM. Rows of gate and up alternate in its matrices.
        gates: [entries], sorted by expert. Gates of the second GEMM.
        adapter: unmerged adapters of the matrices.
    """
    assert (swiglu is None) != (gates is None)
    outputs = bias.shape[1]
    columns = triton.cdiv(outputs, COLUMNS)
    program = program_for(len(entries), routes.n_expts_tot)
    grid = (routes.n_blocks(len(entries), program.rows) * columns,)
    placement = _placement(routes.expt_data, program.rows)

    # Without adapters, None removes the code that reads these arguments.
    parts = factors = None
    scale = 0.0
    if adapter is not None:
        rows, gathers = program.rows, gates is None
        low = project(x, adapter, routes, entries, placement, rows=rows, gathers=gathers)
        parts, factors, scale = low.parts, adapter.b, adapter.scale

    _multiply_kernel[grid](
        x,
        values,
        scales,
        bias,
        out,
        entries,
        gates,
        *placement,
        parts,
        factors,
        scale,
        len(entries),
        routes.n_expts_tot,
        outputs,
        columns,
        *values.shape[1:],
        *scales.shape[1:],
        # Not read without an activation, but a kernel's arguments cannot be left out.
        0.0 if swiglu is None else swiglu.alpha,
        0.0 if swiglu is None else swiglu.limit,
        SIZE=x.shape[1],
        TOP_K=routes.n_expts_act,
        PARTS=0 if parts is None else len(parts),
        COLUMNS=COLUMNS,
        INPUTS=INPUTS,
        **program.options,
    )


def _placement(ragged: Any, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the sizes and starts of experts, and the starts and schedule of blocks of rows.

    Args:
        ragged: metadata of triton_kernels about the experts' tokens.
        rows: token rows per block.
    """
    blocks = ragged.block_offs(rows)
    schedule = ragged.block_schedule(rows)
    return ragged.slice_sizes, ragged.slice_offs, blocks, schedule


# These arguments are slices of larger tensors with any alignment. Without specialization one kernel
# serves all alignments.
@triton.jit(
    do_not_specialize=["total"],
    do_not_specialize_on_alignment=["entries", "gates", "sizes", "starts", "blocks", "schedule"],
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
    parts,
    factors,
    scale,
    total,
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
    PARTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    # Grid: the maximum number of token blocks, times the column blocks of the outputs.
    program = tl.program_id(0)
    if program >= tl.load(blocks + experts) * columns:
        return
    column = program % columns
    planned = tl.load(schedule + program // columns)
    expert = (planned & 0xFFFF).to(tl.int64)
    first = (planned >> 16) * BLOCK_ROWS
    start = tl.load(starts + expert)
    size = tl.load(sizes + expert)

    # Offsets are unsigned 32-bit numbers relative to an address that all threads share. Only that
    # address advances in the loop, which saves an addition per thread and load.
    value_at = _value_offsets(column, value_rows, value_bytes, COLUMNS, INPUTS)
    values += expert * value_rows * value_bytes
    scale_row = column * (COLUMNS // 32) + tl.arange(0, COLUMNS // 32)
    scale_at = scale_row[:, None] * scale_bytes + tl.arange(0, INPUTS)[None, :]
    scale_at = scale_at.to(tl.uint32)
    scales += expert * scale_rows * scale_bytes
    bias += expert * outputs
    if factors is not None:
        factors += expert * outputs * FACTORS

    # fmt: off
    rest = (x, values, value_at, scales, scale_at, bias, out, entries, gates, start, first, size, outputs,
            scale_bytes, column * COLUMNS, alpha, limit, (parts, factors, scale, total))
    # fmt: on
    if BLOCK_ROWS == 16:
        _multiply_rows(rest, 16, 0, COLUMNS, SIZE, INPUTS, TOP_K, PARTS)
    else:
        _multiply_left_rows(rest, size - first, COLUMNS, SIZE, INPUTS, TOP_K, PARTS)


@triton.jit
def _value_offsets(column, value_rows, value_bytes, COLUMNS: tl.constexpr, INPUTS: tl.constexpr):
    """Return uint32 offsets [COLUMNS / 4, INPUTS] of a column block in an expert's values."""
    # The storage of values has 1/4 of the matrix's rows, padded to 64 matrix rows. Storage rows of
    # the last program wrap around to the first ones, and their results are not stored.
    value_row = (column * (COLUMNS // 4) + tl.arange(0, COLUMNS // 4)) % value_rows
    # Because of the modulo, Triton does not see that the rows are adjacent.
    value_row = tl.max_contiguous(tl.multiple_of(value_row, COLUMNS // 4), COLUMNS // 4)
    value_at = value_row[:, None] * value_bytes + tl.arange(0, INPUTS)[None, :]
    return value_at.to(tl.uint32)


@triton.jit
def _multiply_left_rows(
    rest,
    left,
    COLUMNS: tl.constexpr,
    SIZE: tl.constexpr,
    INPUTS: tl.constexpr,
    TOP_K: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Multiply up to 64 of the ``left`` (remaining) tokens of an expert, in steps of 16 rows."""
    if left <= 16:
        _multiply_rows(rest, 16, 0, COLUMNS, SIZE, INPUTS, TOP_K, PARTS)
    elif left <= 32:
        _multiply_rows(rest, 32, 0, COLUMNS, SIZE, INPUTS, TOP_K, PARTS)
    elif left <= 48:
        _multiply_rows(rest, 32, 16, COLUMNS, SIZE, INPUTS, TOP_K, PARTS)
    else:
        _multiply_rows(rest, 64, 0, COLUMNS, SIZE, INPUTS, TOP_K, PARTS)


@triton.jit
def _multiply_rows(
    rest,
    ROWS: tl.constexpr,
    MORE_ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SIZE: tl.constexpr,
    INPUTS: tl.constexpr,
    TOP_K: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Multiply ROWS + MORE_ROWS tokens of an expert, from ``first`` on, with a block of columns."""
    # fmt: off
    (x, values, value_at, scales, scale_at, bias, out, entries, gates, start, first, size, outputs,
     scale_bytes, first_column, alpha, limit, adapter) = rest
    # fmt: on
    HALF: tl.constexpr = INPUTS // 2
    # Sizes of Triton's tensors are powers of two. Therefore 48 rows are two tensors of 32 and 16
    # rows. Both use the matrix that was decoded once.
    row = first + tl.arange(0, ROWS)
    # Rows after the expert's last token repeat its first ones, so that every address is valid. They
    # are not stored.
    x_at = _compute_offsets(entries, gates, start + row % size, SIZE, HALF, TOP_K)
    sums = _first_sums(adapter, start + row % size, first_column, outputs, COLUMNS, PARTS)
    # Placeholders that are not used if MORE_ROWS is 0.
    further_at = x_at
    further_sums = sums
    if MORE_ROWS:
        further = first + ROWS + tl.arange(0, MORE_ROWS)
        further_at = _compute_offsets(entries, gates, start + further % size, SIZE, HALF, TOP_K)
        further_sums = _first_sums(
            adapter, start + further % size, first_column, outputs, COLUMNS, PARTS
        )

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
def _first_sums(adapter, entry, first_column, outputs, COLUMNS: tl.constexpr, PARTS: tl.constexpr):
    """Return the sums before the first input: fp32 [COLUMNS, entries], the update or zeros."""
    parts, factors, scale, total = adapter
    if factors is None:
        return tl.zeros((COLUMNS, entry.shape[0]), dtype=tl.float32)
    else:
        return start_sums(
            parts, factors, scale, entry, total, first_column, outputs, PARTS, COLUMNS
        )


@triton.jit
def _add_half(sums, further_sums, values, scale, x, at, left, MORE_ROWS: tl.constexpr):
    """Add the products of half a step's inputs to both sums.

    Args:
        sums: fp32 [columns, rows].
        further_sums: fp32 [columns, further rows].
        values: address of the first input's values.
        scale: uint8 [columns, blocks].
        x: address of the first input in the tokens.
        at: offsets of values, tokens and further tokens from these addresses.
        left: number of inputs from there to the end.
        MORE_ROWS: number of further rows, 0 for none.

    Returns:
        The new sums and further sums.
    """
    value_at, x_at, further_at = at
    is_input = (tl.arange(0, x_at.shape[1]) < left)[None, :]
    # Values after the last input are zeros in storage. Tokens and scales must be finite there.
    matrix = scaled_values(tl.load(values + value_at), scale, 1)
    tokens = tl.load(x + x_at, mask=is_input, other=0.0)
    sums = tl.dot(matrix, tokens.trans(), sums)
    if MORE_ROWS:
        tokens = tl.load(x + further_at, mask=is_input, other=0.0)
        further_sums = tl.dot(matrix, tokens.trans(), further_sums)
    return sums, further_sums


@triton.jit
def _compute_offsets(
    entries, gates, entry, SIZE: tl.constexpr, INPUTS: tl.constexpr, TOP_K: tl.constexpr
):
    """Return the first input's offset for entries (sorted by expert): [entries, INPUTS]."""
    row = entry
    if gates is None:
        # The first GEMM reads tokens, of which each has TOP_K entries.
        row = tl.load(entries + entry) // TOP_K
    return (row[:, None] * SIZE + tl.arange(0, INPUTS)[None, :]).to(tl.uint32)


@triton.jit
def _store(sums, bias, out, entries, gates, entry, is_entry, outputs, first_column, alpha, limit):
    """Add the bias to sums [columns, entries], apply the activation or the gates, and store them.

    Entries are sorted by expert.
    """
    columns: tl.constexpr = sums.shape[0]
    column = first_column + tl.arange(0, columns)
    column_bias = tl.load(bias + column, mask=column < outputs, other=0.0)
    result = sums.trans() + column_bias[None, :]

    if gates is None:
        gate, up = tl.split(result.reshape(result.shape[0], columns // 2, 2))
        gate = tl.minimum(gate, limit)
        up = tl.clamp(up, -limit, limit)
        raised = gate / (1 + tl.exp(-alpha * gate))
        # raised * (up + 1), with one rounding as in triton_kernels.
        result = tl.fma(raised, up, raised)
        width = outputs // 2
        column = first_column // 2 + tl.arange(0, columns // 2)
        row = entry
    else:
        width = outputs
        result *= tl.load(gates + entry, mask=is_entry, other=0.0)[:, None]
        row = tl.load(entries + entry, mask=is_entry, other=0)

    is_inside = is_entry[:, None] & (column < width)[None, :]
    tl.store(out + row[:, None] * width + column[None, :], to_bf16(result), mask=is_inside)


# -- calls by SGLang -------------------------------------------------------------------------------


def install() -> None:
    """Let SGLang's layers with MXFP4 experts use this kernel if there are few tokens."""
    from sglang.srt.layers.moe.fused_moe_triton import triton_kernels_moe

    triton_kernels_moe.matmul_ogs = with_small_batch_kernel(triton_kernels_moe.matmul_ogs)


def with_small_batch_kernel(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement of ``matmul_ogs`` for SGLang's layers.

    It accepts the arguments of SGLang 0.5.17's ``triton_kernel_fused_experts_with_bias``, and
    calls the original for all other GEMMs.
    """

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
        adapter: ServedAdapter | None = getattr(config, ADAPTER, None)
        is_ours = (
            config is not None
            and has_plugin_layout(config)
            and y is not None
            and x.is_contiguous()
            and y.is_contiguous()
            and len(routing_data.gate_scal) > 0
            and (adapter is not None or _has_few_tokens(routing_data))
        )
        is_first = gather is not None and activation is not None and gates is None
        is_second = scatter is not None and activation is None and gates is not None
        if not is_ours or not (is_first or is_second):
            if adapter is not None and len(routing_data.gate_scal) > 0:
                raise RuntimeError("a product of MXFP4 experts would leave out their adapters")
            return original(x, w, bias, routing_data, **options)

        matrices = (w.storage.data.mT, config.weight_scale.storage.data.mT, bias)
        if gather is not None:
            swiglu = Swiglu(*activation.fn_args)
            matrices_and_routes = (*matrices, routing_data, gather.src_indx)
            multiply(x, *matrices_and_routes, y, swiglu=swiglu, adapter=adapter)
            return y

        entries, width = scatter.dst_indx, y.shape[-1]
        expert_outputs = y.new_empty(len(entries), width)
        matrices_and_routes = (*matrices, routing_data, entries)
        multiply(x, *matrices_and_routes, expert_outputs, gates=gates, adapter=adapter)
        sum_experts(expert_outputs.view(-1, routing_data.n_expts_act, width), y.view(-1, width))
        return y

    return matmul_ogs


def _has_few_tokens(routes: Any) -> bool:
    """Return True if this kernel is faster than triton_kernels for a ``RoutingData``."""
    return len(routes.gate_scal) <= MAX_TOKENS_PER_EXPERT * routes.n_expts_tot
