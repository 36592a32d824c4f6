"""Compiles the unpacking of a block of an expert's matrix for a Hopper GPU:

PYTHONPATH=rl_loop/engines/sglang/plugin python -m tests.support.rl_loop.engines.expert_values_compiled
"""

# Triton reads parameter annotations as its own
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import gptoss_expert_values as values
import torch
import triton
import triton.language as tl

from tests.support.rl_loop.engines.compiled_for_hopper import compile_kernel

BLOCKS = {(256, 128): 8, (256, 64): 4, (128, 128): 4}
"""Rows and inputs of the blocks that GEMMs read at a time, and the warps of their programs."""


@triton.jit
def take_apart(storage, scales, out, ROWS: tl.constexpr, INPUTS: tl.constexpr):
    quarter = tl.arange(0, ROWS // 4)[:, None] * (2 * INPUTS)
    x = tl.load(storage + quarter + tl.arange(0, 2 * INPUTS)[None, :])
    row = tl.arange(0, ROWS)[:, None]
    scale = tl.load(scales + row * (INPUTS // 32) + tl.arange(0, INPUTS // 32)[None, :])
    scaled = values.scaled_values(x, scale, 1)
    tl.store(out + row * INPUTS + tl.arange(0, INPUTS)[None, :], scaled)


if __name__ == "__main__":
    for (rows, inputs), warps in BLOCKS.items():
        codes = torch.empty(rows // 4, 2 * inputs, dtype=torch.uint8)
        scales = torch.empty(rows, inputs // 32, dtype=torch.uint8)
        out = torch.empty(rows, inputs, dtype=torch.bfloat16)
        sizes = {"ROWS": rows, "INPUTS": inputs}
        used = compile_kernel(take_apart, codes, scales, out, **sizes, num_warps=warps)
        assert used.spilled == 0, (rows, inputs, used)
    print("compiled")
