"""Launch shapes of triton_kernels' MXFP4 expert GEMMs on Hopper GPUs.

A GEMM of triton_kernels multiplies bf16 rows with an MXFP4 matrix. Each of its programs computes a
block of rows (tokens) and columns (outputs) in a loop over the inputs. For the shapes of SGLang
0.5.17, 256 columns and 8 warps, Triton 3.6 compiles most programs to more than 128 registers per
thread. A multiprocessor has 65,536 registers. It then holds one program and idles whenever this
program waits for memory. With a limit of 128 registers it holds two. But a program of 64 rows then
waits for each of its matrix instructions, because it has too few registers for several in flight.

Programs of 4 warps are faster: two to four fit, none waits, none spills registers, and decoding a
value takes fewer instructions. ``SHAPES`` are the fastest shapes that
``benchmarks/experts/gemms.py`` found on an H200 (docs/quantization.md). Results are identical in
every bit, because the sums keep their order, 16 inputs at a time.

Scales are laid out for 4 warps (``gptoss_hopper_layout``). Large prefills are faster in programs of
8 warps, which SGLang uses. triton_kernels assumes that the layout is for the program's number of
warps. ``scales_of_program`` removes this assumption, so that 8 warps read the layout, too.
"""

# Triton interprets parameter annotations, so its kernels have none.
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
class LaunchShape:
    """Launch shape of a program."""

    columns: int
    """Outputs per program."""
    inputs: int
    """Inputs per step of the program's loop."""
    warps: int
    stages: int
    """Number of steps that fit in a program's shared memory."""
    registers: int | None = None
    """Maximum registers per thread. None: the compiler decides."""


WIDE = LaunchShape(columns=256, inputs=64, warps=4, stages=4)
NARROW = LaunchShape(columns=128, inputs=128, warps=4, stages=4)
LARGE_PREFILL = LaunchShape(columns=256, inputs=128, warps=8, stages=4)
"""Shape for 128 rows, the maximum of triton_kernels. Equal to its choice for SGLang's layout."""
SHAPES = {
    16: (replace(WIDE, registers=128), replace(NARROW, registers=128)),
    32: (WIDE, replace(NARROW, registers=168)),
    64: (WIDE, NARROW),
    128: (LARGE_PREFILL, LARGE_PREFILL),
}
"""Shapes by rows of a program: (for many outputs, for few outputs).

The gate and up projections of a whole layer have many outputs, the down projections few.
"""
MANY_OUTPUTS = 4096
"""Number of outputs from which wide programs are not slower.

With 2,880 outputs the last wave of wide programs leaves multiprocessors idle.
"""


def install() -> None:
    """Let triton_kernels compute GEMMs of MXFP4 experts with ``SHAPES``.

    Must run before a kernel is compiled, because Triton caches a kernel with the functions that it
    called at that time.
    """
    # import_module returns the module. The package also has a function of this name.
    matmul_ogs: Any = import_module("triton_kernels.matmul_ogs")
    matmul_ogs.make_opt_flags = with_shapes(matmul_ogs.make_opt_flags)

    products: Any = import_module("triton_kernels.matmul_ogs_details._matmul_ogs")
    products.unswizzle_mxfp4_scale_hopper = scales_of_program


def with_shapes(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement of triton_kernels' ``make_opt_flags`` that applies ``SHAPES``."""

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
        # triton_kernels chooses the rows of a block and all flags that are not replaced below.
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
        # ``SHAPES`` are for the plugin's layout of scales only.
        if not has_plugin_layout(precision_config) or flags.block_m not in SHAPES:
            return flags

        for_many, for_few = SHAPES[flags.block_m]
        shape = for_many if outputs >= MANY_OUTPUTS else for_few
        # Launch options of the kernel, in addition to its arguments.
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


def has_plugin_layout(precision_config: Any) -> bool:
    """Return True if a ``PrecisionConfig`` has scales in the layout of ``gptoss_hopper_layout``."""
    scales = precision_config.weight_scale
    if scales is None:
        return False
    layout = scales.storage.layout
    return type(layout).__name__ == "HopperMXScaleLayout" and layout.num_warps == SCALE_WARPS


@triton.jit
def scales_of_program(x, mx_axis: tl.constexpr, num_warps: tl.constexpr):
    """Reorder scales, in place of triton_kernels' ``unswizzle_mxfp4_scale_hopper``.

    Unlike the original, it serves programs with any number of warps.

    Args:
        x: uint8 [columns / 32, 32 * blocks], a program's part of a matrix's storage.
        mx_axis: dimension of the inputs, 1.
        num_warps: warps of the program. Ignored.

    Returns:
        uint8 [columns, blocks], the stored bytes.
    """
    tl.static_assert(mx_axis == 1)
    rows: tl.constexpr = x.shape[0]
    blocks: tl.constexpr = x.shape[1] // 32
    tl.static_assert(rows % WARPS == 0)
    # [a, w, e, b, d, f, c] -> [a, b, w, c, d, e, f], the digits of ``gptoss_hopper_layout``
    x = x.reshape(rows // WARPS, WARPS, blocks // 2, 2, 8, 2, 2)
    x = x.trans(0, 3, 1, 6, 4, 2, 5)
    return x.reshape(rows * 32, blocks)
