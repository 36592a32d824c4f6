"""Compiles what takes a block of an expert's matrix apart for a Hopper GPU:

PYTHONPATH=rl_loop/engines/sglang/plugin python -m tests.rl_loop.engines.expert_values_compiled
"""

# Triton reads parameter annotations as its own
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import gptoss_expert_values as values
import torch
import triton
import triton.language as tl

from tests.rl_loop.engines.compiled_for_hopper import compile_kernel

ROWS, INPUTS = 256, 128
"""Of the block that a product reads at a time."""


@triton.jit
def take_apart(storage, scales, out, ROWS: tl.constexpr, INPUTS: tl.constexpr):
    quarter = tl.arange(0, ROWS // 4)[:, None] * (2 * INPUTS)
    x = tl.load(storage + quarter + tl.arange(0, 2 * INPUTS)[None, :])
    row = tl.arange(0, ROWS)[:, None]
    scale = tl.load(scales + row * (INPUTS // 32) + tl.arange(0, INPUTS // 32)[None, :])
    scaled = values.scaled_values(x, scale, 1)
    tl.store(out + row * INPUTS + tl.arange(0, INPUTS)[None, :], scaled)


if __name__ == "__main__":
    codes = torch.empty(ROWS // 4, 2 * INPUTS, dtype=torch.uint8)
    scales = torch.empty(ROWS, INPUTS // 32, dtype=torch.uint8)
    out = torch.empty(ROWS, INPUTS, dtype=torch.bfloat16)
    used = compile_kernel(take_apart, codes, scales, out, ROWS=ROWS, INPUTS=INPUTS, num_warps=8)
    assert used.spilled == 0, used
    print("compiled")
