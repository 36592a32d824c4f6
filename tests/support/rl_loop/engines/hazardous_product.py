"""Compiles a GEMM for a Hopper GPU whose machine code writes registers too early.

This happens with Triton's own assembler and with that of CUDA 13.5:

python -m tests.support.rl_loop.engines.hazardous_product
"""

# Triton reads parameter annotations as its own
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import torch
import triton
import triton.language as tl

from tests.support.rl_loop.engines.compiled_for_hopper import compile_kernel

SIZE = 2880


@triton.jit
def hazardous_kernel(matrix, tokens, out, SIZE: tl.constexpr, INPUTS: tl.constexpr):
    """Multiply int8 [128, SIZE] with bf16 tokens [16, SIZE] into fp32 [128, 16].

    The integers are converted in registers, and only their conversion separates two steps.
    """
    column = tl.arange(0, 128)
    row = tl.arange(0, 16)
    step = tl.arange(0, INPUTS)
    sums = tl.zeros((128, 16), dtype=tl.float32)
    for done in range(0, SIZE, INPUTS):
        integers = tl.load(matrix + column[:, None] * SIZE + done + step[None, :])
        of_tokens = tl.load(tokens + row[None, :] * SIZE + done + step[:, None])
        sums = tl.dot(integers.to(tl.bfloat16), of_tokens, sums)
    tl.store(out + column[:, None] * 16 + row[None, :], sums)


def main() -> None:
    compile_kernel(
        hazardous_kernel,
        torch.empty(1, dtype=torch.int8),
        torch.empty(1, dtype=torch.bfloat16),
        torch.empty(1),
        SIZE=SIZE,
        INPUTS=64,
        num_stages=3,
    )


if __name__ == "__main__":
    main()
