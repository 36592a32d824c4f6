"""Two programs of the expert products at a time on each of a Hopper GPU's processors.

A product of triton_kernels, bf16 rows with MXFP4 matrices, runs in programs of 256 threads. Compiled
by Triton 3.6 for SGLang 0.5.17's layouts a thread takes 129 registers (16 rows, down projections), 150
(32 rows) or 175 (64 rows). A processor has 65,536 registers, so that it holds one such program, and
waits whenever that one waits for memory: gate and up projections with 16 rows, which take 128, read
their matrices a third faster on an H200 than down projections, of which one runs at a time.

None of them needs so many. With at most 128 the compiler spills nothing to memory, and a processor
holds two. With 64 rows two have room in shared memory if they load three blocks ahead instead of four.
Neither changes what is computed, to the last bit. It has a price with 64 rows: the compiler finds too
few registers to have several matrix instructions under way, and a program waits for each of them
(``benchmarks/expert_products.py --compile-only`` shows it, and times shapes that do without).

Programs of 128 rows, those of a large prefill, keep what they have: they hold twice as many sums.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from importlib import import_module
from typing import Any

REGISTERS = 128
"""Of a thread, at most."""
LARGEST_ROWS = 64
"""Of a program that does with so many."""
STAGES = 3
"""Blocks that a program of ``LARGEST_ROWS`` loads ahead."""
THREADS_OF_LAYOUT = 256
"""For which the scales are laid out."""


def install() -> None:
    """Let triton_kernels' products of MXFP4 experts run two at a time."""
    # The module, not the function in it that has its name.
    matmul_ogs: Any = import_module("triton_kernels.matmul_ogs")
    matmul_ogs.make_opt_flags = two_at_a_time(matmul_ogs.make_opt_flags)


def two_at_a_time(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``make_opt_flags`` for triton_kernels, whose own is called by it."""

    @wraps(original)
    def make_opt_flags(
        out_dtype: Any,
        lhs_dtype: Any,
        rhs_dtype: Any,
        precision_config: Any,
        *arguments: Any,
        **options: Any,
    ) -> Any:
        flags = original(out_dtype, lhs_dtype, rhs_dtype, precision_config, *arguments, **options)
        if not _is_laid_out_for_hopper(precision_config) or flags.block_m > LARGEST_ROWS:
            return flags

        stages = flags.num_stages
        if flags.block_m == LARGEST_ROWS:
            stages = min(stages, STAGES)
        # What a kernel is started with besides its own arguments.
        launch = flags.target_kernel_kwargs | {"maxnreg": REGISTERS}
        return replace(flags, num_stages=stages, target_kernel_kwargs=launch)

    return make_opt_flags


def _is_laid_out_for_hopper(precision_config: Any) -> bool:
    scales = precision_config.weight_scale
    if scales is None:
        return False
    layout = scales.storage.layout
    return (
        type(layout).__name__ == "HopperMXScaleLayout"
        and 32 * layout.num_warps == THREADS_OF_LAYOUT
    )
