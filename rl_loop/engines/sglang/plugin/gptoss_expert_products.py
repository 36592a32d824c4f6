"""Shapes of the programs that multiply tokens with MXFP4 experts on a Hopper GPU.

A product of triton_kernels, bf16 rows with an MXFP4 matrix, is cut into programs, each of some rows of
tokens and columns of outputs, which step through the inputs. Compiled by Triton 3.6 for the shapes that
SGLang 0.5.17 has, 256 columns and 8 warps, most take more than 128 of a thread's registers. A processor
has 65,536 registers, so that it holds one such program, and waits whenever that one waits for memory.
With a limit of 128 it holds two, but a program of 64 rows then waits for each of its matrix instructions,
as the compiler finds too few registers to have several under way.

Programs of 4 warps do better: two to four fit, none waits, nothing is spilled, and fewer instructions make
a value of a code. ``SHAPES`` are the fastest of those that ``benchmarks/experts/products.py`` tried on an
H200 (docs/quantization.md). What is computed stays the same to the last bit: sums of a product are made in
the same order, 16 inputs at a time.

Scales lie where 4 warps look for them (``gptoss_hopper_layout``). Large prefills are faster in programs of
8 warps, as SGLang has them. These find the scales, too, once they know of the layout: triton_kernels takes
it for granted that a layout is for as many warps as a program has.
"""

# Triton reads parameter annotations as its own
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from importlib import import_module
from typing import Any

import triton
import triton.language as tl
from gptoss_hopper_layout import SCALE_WARPS

WARPS = tl.constexpr(SCALE_WARPS)


@dataclass(frozen=True)
class Shape:
    """Of a program."""

    columns: int
    """Outputs."""
    inputs: int
    """Of one step of the program's loop."""
    warps: int
    stages: int
    """Steps for which a program has room in shared memory."""
    registers: int | None = None
    """Of a thread, at most; None leaves it to the compiler."""


WIDE = Shape(columns=256, inputs=64, warps=4, stages=4)
NARROW = Shape(columns=128, inputs=128, warps=4, stages=4)
LARGE_PREFILL = Shape(columns=256, inputs=128, warps=8, stages=4)
"""Of 128 rows, the most that triton_kernels takes: what it chooses for SGLang's own layout."""
SHAPES = {
    16: (replace(WIDE, registers=128), replace(NARROW, registers=128)),
    32: (WIDE, replace(NARROW, registers=168)),
    64: (WIDE, NARROW),
    128: (LARGE_PREFILL, LARGE_PREFILL),
}
"""By the rows of a program, those for many outputs, such as gate and up projections of a whole layer, and for
few, such as the down projections."""
MANY_OUTPUTS = 4096
"""From so many on wide programs are as fast or faster. With 2,880 the processors' last round has too few."""


def install() -> None:
    """Let triton_kernels' products of MXFP4 experts run in these shapes.

    Before any is compiled: Triton keeps what it compiles by what a kernel calls then."""
    # The module, not the function in it that has its name.
    matmul_ogs: Any = import_module("triton_kernels.matmul_ogs")
    matmul_ogs.make_opt_flags = with_shapes(matmul_ogs.make_opt_flags)

    products: Any = import_module("triton_kernels.matmul_ogs_details._matmul_ogs")
    products.unswizzle_mxfp4_scale_hopper = scales_of_program


def with_shapes(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``make_opt_flags`` for triton_kernels, whose own is called by it."""

    @wraps(original)
    def make_opt_flags(
        out_dtype: Any,
        lhs_dtype: Any,
        rhs_dtype: Any,
        precision_config: Any,
        batch_size: int,
        rows: int,
        outputs: int,
        *arguments: Any,
        **options: Any,
    ) -> Any:
        flags = original(
            out_dtype,
            lhs_dtype,
            rhs_dtype,
            precision_config,
            batch_size,
            rows,
            outputs,
            *arguments,
            **options,
        )
        if not is_laid_out_by_us(precision_config) or flags.block_m not in SHAPES:
            return flags

        for_many, for_few = SHAPES[flags.block_m]
        shape = for_many if outputs >= MANY_OUTPUTS else for_few
        # What a kernel is started with besides its own arguments.
        launch = {} if shape.registers is None else {"maxnreg": shape.registers}
        return replace(
            flags,
            block_n=shape.columns,
            block_k=shape.inputs,
            num_warps=shape.warps,
            num_stages=shape.stages,
            target_kernel_kwargs=flags.target_kernel_kwargs | launch,
        )

    return make_opt_flags


def is_laid_out_by_us(precision_config: Any) -> bool:
    """Tell whether a ``PrecisionConfig`` of triton_kernels has scales as ``gptoss_hopper_layout`` keeps them."""
    scales = precision_config.weight_scale
    if scales is None:
        return False
    layout = scales.storage.layout
    return type(layout).__name__ == "HopperMXScaleLayout" and layout.num_warps == SCALE_WARPS


@triton.jit
def scales_of_program(x, mx_axis: tl.constexpr, num_warps: tl.constexpr):
    """Return what ``unswizzle_mxfp4_scale_hopper`` of triton_kernels does, in its place, for a program of
    any number of warps.

    Args:
        x: uint8 [columns / 32, 32 * blocks], a program's part of a matrix' storage.
        mx_axis: of the inputs, 1.
        num_warps: of the program, which does not matter here.

    Returns:
        uint8 [columns, blocks], as they are stored.
    """
    tl.static_assert(mx_axis == 1)
    rows: tl.constexpr = x.shape[0]
    blocks: tl.constexpr = x.shape[1] // 32
    tl.static_assert(rows % WARPS == 0)
    # [a, w, e, b, d, f, c] -> [a, b, w, c, d, e, f], the digits of ``gptoss_hopper_layout``
    x = x.reshape(rows // WARPS, WARPS, blocks // 2, 2, 8, 2, 2)
    x = x.trans(0, 3, 1, 6, 4, 2, 5)
    return x.reshape(rows * 32, blocks)
