"""Compiles the plugin's small-batch expert GEMMs for a Hopper GPU, at the size of GPT-OSS's layers:

PYTHONPATH=rl_loop/engines/sglang/plugin python -m tests.support.rl_loop.engines.expert_matmul_compiled [all]
"""

from __future__ import annotations

import sys
from itertools import product
from types import SimpleNamespace
from typing import Any

import gptoss_adapted_moe as adapted
import gptoss_hopper_layout as layout
import gptoss_small_batch_moe as matmul
import torch

from tests.support.rl_loop.engines.compiled_for_hopper import Compiling

EXPERTS, TOP_K, WIDTH = 32, 4, 2880
REGISTERS = {64: 128, 256: 168}
"""Limit of registers per thread, by number of tokens."""
SAME_KERNEL = {64: (1, 7, 63), 256: (65, 300)}
"""Numbers of tokens that use the kernel of another number of tokens."""
ALL_CALLS = [*product(REGISTERS, (True, False), (False, True))]
"""Number of tokens, whether the GEMM is the first, and whether it has an adapter."""
CALLS = [(64, True, True), (256, False, False)]
"""A quarter of the calls, with every value."""
SPILLED = 16
"""Limit of spilled memory per thread in bytes: a few values that the loop does not need."""


def multiply(tokens: int, *, is_first: bool, has_adapter: bool = False) -> None:
    """Call a GEMM on the CPU. It reads only the shapes of its tensors."""
    entries = tokens * TOP_K
    outputs = 2 * WIDTH if is_first else WIDTH
    integers = torch.zeros(entries, dtype=torch.int32)
    ragged = SimpleNamespace(
        slice_sizes=integers,
        slice_offs=integers,
        block_offs=lambda rows: integers,
        block_schedule=lambda rows: integers,
    )
    routes = SimpleNamespace(
        expt_data=ragged, n_expts_tot=EXPERTS, n_expts_act=TOP_K, n_blocks=lambda *sizes: 1
    )
    bytes_of = {"dtype": torch.uint8}
    kind: dict[str, Any] = {"gates": torch.empty(entries, dtype=torch.bfloat16)}
    if is_first:
        kind = {"swiglu": matmul.Swiglu(1.702, 7.0)}
    if has_adapter:
        factors = {"dtype": torch.bfloat16}
        a = torch.empty(EXPERTS, adapted.RANK, WIDTH, **factors)
        b = torch.empty(EXPERTS, outputs, adapted.RANK, **factors)
        kind["adapter"] = adapted.ServedAdapter(a, b, scale=4.0)
    matmul.multiply(
        torch.empty(tokens if is_first else entries, WIDTH, dtype=torch.bfloat16),
        torch.empty(EXPERTS, *layout.value_storage_shape(outputs, WIDTH // 2), **bytes_of),
        torch.empty(EXPERTS, *layout.scale_storage_shape(outputs, WIDTH // 32), **bytes_of),
        torch.empty(EXPERTS, outputs),
        routes,
        integers,
        torch.empty(entries, WIDTH, dtype=torch.bfloat16),
        **kind,
    )


def main() -> None:
    kernel = Compiling(matmul._multiply_kernel)
    matmul._multiply_kernel = kernel
    projection = Compiling(adapted._project_kernel)
    adapted._project_kernel = projection
    calls = ALL_CALLS if "all" in sys.argv else CALLS
    for tokens, is_first, has_adapter in calls:
        multiply(tokens, is_first=is_first, has_adapter=has_adapter)
        used = kernel.resources[-1]
        call = (tokens, is_first, has_adapter, used)
        assert used.registers <= REGISTERS[tokens] and used.spilled <= SPILLED, call
        # Holds for either assembler (docs/quantization.md).
        assert used.loops and not any(loop.hazards for loop in used.loops), call
        if has_adapter:
            used = projection.resources[-1]
            assert used.spilled == 0 and not any(loop.hazards for loop in used.loops), used

    # Numbers of tokens with other divisors use the same kernels.
    variants = lambda: {used.variant for used in (*kernel.resources, *projection.resources)}  # noqa: E731
    known = variants()
    assert len({used.variant for used in kernel.resources}) == len(calls)
    with_adapter = sum(has_adapter for _, _, has_adapter in calls)
    assert len({used.variant for used in projection.resources}) == with_adapter
    for tokens, is_first, has_adapter in calls:
        for other in SAME_KERNEL[tokens]:
            multiply(other, is_first=is_first, has_adapter=has_adapter)
    assert variants() == known
    print(f"compiled {len(calls)} variants")


if __name__ == "__main__":
    main()
