"""Unpacks a matrix from its storage layout like an expert GEMM, in Triton's interpreter:

    TRITON_INTERPRET=1 PYTHONPATH=rl_loop/engines/sglang/plugin \\
        python -m tests.support.rl_loop.engines.expert_values_interpreted
"""

# Triton reads parameter annotations as its own
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import gptoss_expert_values as values
import gptoss_hopper_layout as layout
import torch
import triton
import triton.language as tl

from tests.support.rl_loop.engines.ptx_emulated import as_bf16, run_assembly

ROWS, ROW_BYTES = 256, 64
CODES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


@triton.jit
def order(source, target, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    stored = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    ordered = values._in_order(tl.load(source + stored))
    place = tl.arange(0, 4 * ROWS)[:, None] * (COLUMNS // 4)
    tl.store(target + place + tl.arange(0, COLUMNS // 4)[None, :], ordered)


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    packed = torch.randint(0, 256, (1, ROWS, ROW_BYTES), dtype=torch.uint8, generator=generator)
    storage = packed.new_empty(1, *layout.value_storage_shape(ROWS, ROW_BYTES))
    layout.swizzle_values(packed, storage)

    words = storage[0].view(torch.int32).long() & 0xFFFFFFFF
    pairs = [as_bf16(pair) for pair in run_assembly(values.UNPACK.value, 4, [words])]
    # bf16 numbers with the smallest exponents. A factor of 2^126 gives their values.
    numbers = torch.stack(pairs, -2).double() * 2.0**126
    stored = numbers.flatten(1).float().contiguous()

    ordered = stored.new_empty(ROWS, 2 * ROW_BYTES)
    order[(1,)](stored, ordered, ROWS=stored.shape[0], COLUMNS=stored.shape[1])
    codes = torch.stack([packed[0] & 15, packed[0] >> 4], -1).flatten(1).long()
    assert torch.equal(ordered, CODES[codes]), (ordered != CODES[codes]).nonzero()[:5]
    print("every value is where the matrix has it")


if __name__ == "__main__":
    main()
