"""Reads scales from their storage layout like an expert GEMM, in Triton's interpreter:

    TRITON_INTERPRET=1 PYTHONPATH=rl_loop/engines/sglang/plugin \\
        python -m tests.support.rl_loop.engines.expert_scales_interpreted
"""

# Triton reads parameter annotations as its own
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import gptoss_hopper_layout as layout
import gptoss_moe_occupancy as products
import torch
import triton
import triton.language as tl

BLOCKS = 4
"""Number of blocks along the inputs that a program reads at a time."""


@triton.jit
def find(
    storage, found, row_bytes, COLUMNS: tl.constexpr, BLOCKS: tl.constexpr, WARPS: tl.constexpr
):
    # Grid: columns, blocks of inputs.
    rows = tl.program_id(0) * (COLUMNS // 32) + tl.arange(0, COLUMNS // 32)
    places = tl.program_id(1) * BLOCKS * 32 + tl.arange(0, BLOCKS * 32)
    x = tl.load(storage + rows[:, None] * row_bytes + places[None, :])
    scales = products.scales_of_program(x, 1, WARPS)

    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    blocks = tl.num_programs(1) * BLOCKS
    tl.store(found + column[:, None] * blocks + block[None, :], scales)


def main() -> None:
    columns, blocks = 512, 2 * BLOCKS
    generator = torch.Generator().manual_seed(0)
    scales = torch.randint(0, 256, (1, columns, blocks), dtype=torch.uint8, generator=generator)
    storage = scales.new_empty(1, *layout.scale_storage_shape(columns, blocks))
    layout.swizzle_scales(scales, (columns, blocks), storage)

    for of_program, warps in ((256, 8), (256, 4), (128, 4)):
        found = torch.zeros_like(scales[0])
        grid = (columns // of_program, blocks // BLOCKS)
        find[grid](storage, found, storage.shape[2], of_program, BLOCKS, warps)
        assert torch.equal(found, scales[0] + layout.SCALE_BIAS), (of_program, warps)
    print("every scale is where the matrix has it")


if __name__ == "__main__":
    main()
